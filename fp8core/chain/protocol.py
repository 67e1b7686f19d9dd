"""The parts of a chain: links, and the program that each gives for a call.

A link holds bound callables of backends, no tensors and no sizes. Asked for a number of
rows, for whose gradients are needed and for a call, it gives a program, which computes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import torch

from fp8core.backend_api import Recorder
from fp8core.chain.call import Call
from fp8core.chain.request import Handover, QuantizeRequest
from fp8core.dispatch.select import Choice
from fp8core.errors import UnsupportedError
from fp8core.tensors.delayed_state import DelayedState
from fp8core.torch_ops.repeats import called_in_repeats

Saved: TypeAlias = "Sequence[torch.Tensor | None]"
"""Plain tensors, so that checkpointing, offload hooks and compilers see them."""

SavedList: TypeAlias = "list[torch.Tensor | None]"
"""Saved tensors as backward is given them: it may empty the list to free memory early."""

Params: TypeAlias = Sequence[Any]
"""A link's parameters: tensors, or ``(weights, biases)`` where a wrapper sorts them by kind."""

Out: TypeAlias = QuantizeRequest | None
"""The request of the neighbour that is given the result; None hands over the tensor."""

Forward: TypeAlias = "tuple[Any, Saved, object]"
"""The output, the tensors that backward needs, and any other value that it needs, or None."""

Backward: TypeAlias = "Sequence[Any]"
"""The gradient of the input, then those of the parameters; None where none is needed."""


class Unadded(NamedTuple):
    """``x [rows, n]`` and a residual, for a program that adds the two itself."""

    x: torch.Tensor
    residual: torch.Tensor

    @property
    def rows(self) -> int:
        """The rows of the sum."""
        return self.x.shape[0]


class GradientSum(NamedTuple):
    """Stands for a request of a gradient: it is added to ``added [rows, n]``, another gradient of
    the same tensor. A link that :attr:`Link.adds_gradient` may add it itself."""

    added: torch.Tensor

    def __call__(self, grad: torch.Tensor) -> torch.Tensor:
        """Return the sum."""
        return called_in_repeats(torch.add, self.added, grad)


class Recordable(NamedTuple):
    """The references of a program besides the tensors of a call, if it does nothing but operations
    of backends with them, and collectives.

    ``constants`` are tensors that the operations read and write. ``backward_states`` are those in
    which backward records. Functions that no backend has bound are called by
    :func:`~fp8core.torch_ops.repeats.called_in_repeats`.
    """

    constants: tuple[torch.Tensor, ...] = ()
    backward_states: tuple[DelayedState, ...] = ()


class Program:
    """A link ready to compute one kind of call, forward and backward.

    The base takes tensors and gradients as they are, keeps the rows, saves neither input nor
    parameters and is not recorded; a program overrides what differs. A tensor that it takes by a
    request may come as the request's handover, or as it is.
    """

    __slots__ = ()

    # Whether saved tensors are freed as backward reads them; it cannot be repeated then.
    frees_early: bool = True

    # Whether it saves copies in the place of its input and parameters, which have no history.
    saves_copies: bool = False

    # How it wants its input from the program before it; None: as a tensor.
    input_request: QuantizeRequest | None = None

    @property
    def recordable(self) -> Recordable | None:
        """The references of it; None if a dense call is more than operations of backends and
        collectives, as where it looks at a version or draws random numbers. They are the same ones
        for tensors alike."""
        return None

    def request_input(self, out: Out) -> Out:
        """Return how it wants its input if the next program wants the output by ``out``: one that
        only moves a tensor hands that on."""
        return self.input_request

    def request_grad(self, call: Call) -> QuantizeRequest | None:
        """Return how it wants the gradient of its output, which is about to be computed."""
        return None

    def takes_grad(self, grad_output: torch.Tensor) -> bool:
        """Whether ``grad_output`` is stored quantized as it wants it; else it is dequantized."""
        return False

    def num_rows(self, rows: int) -> int:
        """Return how many rows the output has if the input has ``rows``."""
        return rows

    def remade(self, saved: Saved, call: Call, out: QuantizeRequest) -> Handover:
        """Return the result of the forward that ``saved`` these tensors, as ``out`` requests it; of
        a link with a :attr:`Link.result`, if a gradient is due."""
        raise NotImplementedError

    def remake(self, saved: SavedList, source: Program, source_saved: Saved, call: Call) -> None:
        """Put the operand of the result of ``source``, which saved ``source_saved``, to ``saved``,
        the program's own; of one that :meth:`Link.remaking` returned."""
        raise NotImplementedError

    def forward(self, x: Any, params: Params, call: Call, out: Out = None) -> Forward:
        """Compute from ``x [rows, k]``, a tensor or the result of ``input_request``.

        The output goes through ``out``, the request of the next program, if there is one.
        """
        raise NotImplementedError

    def backward(
        self, grad: Any, saved: SavedList, context: Any, call: Call, out: Out = None
    ) -> Backward:
        """Compute the gradients from ``grad [rows, n]``, a tensor or as it was requested.

        ``saved`` and ``context`` come from forward; ``saved`` may be emptied to free memory early.
        The gradient of the input goes through ``out``, the request of the program before.
        """
        raise NotImplementedError


class OnlyOnce(NamedTuple):
    """Why a link has first derivatives only: no transform and no second derivative.

    ``owner`` names its layer in messages, ``state`` says in which state of the layer this holds,
    ``remedy`` what the user can do.
    """

    owner: str
    state: str
    remedy: str

    def error(self, name: str) -> UnsupportedError:
        """Return the error about the transform or derivative called ``name``."""
        return UnsupportedError(f"{self.owner}: {name} is not offered {self.state}. {self.remedy}")


def in_low_precision(owner: str) -> OnlyOnce:
    """Return the reason of a link whose recipe rounds: rounding has no useful derivative."""
    inside = "Call it inside fp8core.autocast(enabled=False)"
    return OnlyOnce(
        owner, "in low precision", f"{inside}, where it computes with torch's operators."
    )


def over_ranks(owner: str) -> OnlyOnce:
    """Return the reason of a link in a chain with collectives, which have no second derivative."""
    remedy = "Compute that derivative with a layer of one rank (tp_size=1)."
    return OnlyOnce(owner, "over several ranks", remedy)


COMPUTED_TOGETHER = OnlyOnce(
    "a layer in high precision",
    "where its backend pads, or adds and normalizes at once",
    'Choose one that does neither: fp8core.use_backend("reference").',
)
"""The saved tensors are copies that the backend returned, without a history."""


class Link:
    """A link of a chain. Holds bound callables only; tensors and sizes come with the call.

    The base answers for a link that quantizes nothing, has no parameters, draws no random numbers
    and computes with torch's operators; a link overrides what differs.
    """

    __slots__ = ()

    # How many of the chain's parameters are this link's, and how many of those, the first, are
    # weights.
    num_params: int = 0
    num_weights: int = 0

    # Whether it takes ``call.rng``.
    needs_rng: bool = False

    # What records its calls, where it is not the chain that does.
    recorder: Recorder | None = None

    # Whether it saves its input if any gradient is due, so that the links behind it run again from
    # it where torch differentiates their backward.
    keeps_input: bool = False

    # Whether a parameter is an activation, which backward does not need.
    takes_activation: bool = False

    # Whether its program takes a :class:`GradientSum` for the gradient of its input.
    adds_gradient: bool = False

    # Whether it may hand over an :class:`Unadded`, which the next link adds.
    is_left_to_next: bool = False

    # The name of its result, if backward may have it made again from what forward saved wherever a
    # gradient is due; and the results of links before it that backward makes again as its input.
    result: str = ""
    remade: Sequence[str] = ()

    @property
    def only_once(self) -> OnlyOnce | None:
        """Why torch's operators may not replace it; None in high precision, where they may."""
        return None

    def compare(self, shape: Sequence[int], needs_grad: Sequence[bool]) -> None:
        """Compare a call of its chain, for an input of ``shape``, with that of other ranks, if the
        link moves something between them.

        ``needs_grad`` says whose gradient is due: the input's, then the parameters' of the chain.
        """

    @property
    def choices(self) -> Mapping[str, Choice]:
        """Who computes its GEMMs and casts, by step; empty for a link without GEMMs."""
        return {}

    @property
    def input_consumer(self) -> QuantizeRequest | None:
        """How it quantizes its input, in any call; None if it takes the tensor as it is."""
        return None

    @property
    def grad_consumer(self) -> QuantizeRequest | None:
        """How it quantizes the gradient of its output, summed along its rows where a bias is
        trained; None if it takes the tensor as it is."""
        return None

    @property
    def adds_residual(self) -> bool:
        """Whether it also takes an :class:`Unadded`, and adds the two tensors itself."""
        return False

    def in_torch(self, bind: Callable[[Any], Any]) -> Link:
        """Return the link made of torch's operators alone; ``bind(shape)`` makes that of a
        shape."""
        link: Link = bind(self.shape)  # type: ignore[attr-defined]  # a field of most links
        return link

    def program(self, rows: int, needs_grad: Sequence[bool], call: Call) -> Program:
        """Return the program that computes ``call`` for an input of ``rows`` rows.

        ``needs_grad`` says whose gradient backward has to return: the input's, then each
        parameter's.
        """
        raise NotImplementedError

    def remaking(self, program: Program) -> Program | None:
        """Return ``program``, one of this link, without the codes of its input, which its
        :meth:`Program.remake` makes before backward; None if it holds none."""
        return None


_Link = TypeVar("_Link")


def backward_with(
    added: GradientSum,
    program: Program,
    grad: Any,
    saved: SavedList,
    context: object,
    call: Call,
    *,
    first: Link,
) -> Backward:
    """Return what the backward of ``program`` does, with the sum in the place of the gradient of
    its input; ``first`` is the link that computes that one, and adds if it can."""
    if first.adds_gradient:
        request: Any = added
        return program.backward(grad, saved, context, call, request)
    grad_x, *grads = program.backward(grad, saved, context, call)
    return (None if grad_x is None else added(grad_x), *grads)


class TensorProgram(Program, Generic[_Link]):
    """Base of the programs of ``link``; ``needs_grad`` says whose gradients are due."""

    __slots__ = ("_link", "_needs_grad")

    def __init__(self, link: _Link, needs_grad: Sequence[bool]) -> None:
        self._link = link
        self._needs_grad = needs_grad


class Wrapper(Program):
    """Base of the programs around another one, which change its inputs and its results.

    The inner program always gets the handover that results from the wrapper's requests.
    """

    __slots__ = ("_inner", "frees_early", "input_request", "saves_copies")

    def __init__(self, inner: Program, input_request: QuantizeRequest | None) -> None:
        self._inner = inner
        self.input_request = input_request
        self.frees_early = inner.frees_early
        self.saves_copies = inner.saves_copies

    def request_grad(self, call: Call) -> QuantizeRequest | None:
        """Return the inner program's request."""
        return self._inner.request_grad(call)

    def takes_grad(self, grad_output: torch.Tensor) -> bool:
        """As the inner program."""
        return self._inner.takes_grad(grad_output)

    def num_rows(self, rows: int) -> int:
        """As the inner program."""
        return self._inner.num_rows(rows)

    def forward(self, x: Any, params: Params, call: Call, out: Out = None) -> Forward:
        """Run the inner program on the handover that results from ``x``."""
        return self._inner.forward(self._input(x), params, call, out)

    def backward(
        self, grad: Any, saved: SavedList, context: Any, call: Call, out: Out = None
    ) -> Backward:
        """Run the inner program's backward on the handover that results from ``grad``."""
        return self._inner.backward(self._grad(grad, call), saved, context, call, out)

    def _input(self, x: Any) -> Any:
        request = self.input_request
        return x if request is None or isinstance(x, Handover) else request(x)

    def _grad(self, grad: Any, call: Call) -> Any:
        if isinstance(grad, Handover):
            return grad
        request = self.request_grad(call)
        return grad if request is None else request(grad)
