"""Simple links: an output from tensors, and gradients from tensors, by two functions.

A shape writes the two down, as methods, or binds them to operations of a backend. The base does the
rest: it hands results over as neighbours request them, and saves nothing where no gradient is due.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch

from fp8core.backend_api import ColumnSumsDesc, PackedRotaryDesc, RotaryDesc
from fp8core.chain.call import Call
from fp8core.chain.protocol import (
    Backward,
    Forward,
    Link,
    Out,
    Params,
    Recordable,
    Saved,
    SavedList,
    TensorProgram,
)
from fp8core.chain.shape import BindContext, LinkShape
from fp8core.errors import OperandError
from fp8core.torch_ops import operators
from fp8core.torch_ops.repeats import called_in_repeats


class SimpleShape(LinkShape):
    """Base of the shapes whose link is :meth:`forward` and :meth:`backward`, and keeps the rows."""

    __slots__ = ()

    # What the functions refer to besides the tensors of a call; None: no recorder repeats them.
    recordable: ClassVar[Recordable | None] = None

    def bind(self, context: BindContext) -> SimpleLink:
        """Return the link."""
        return SimpleLink(self, self.forward, self.backward)

    def forward(self, x: torch.Tensor, params: Params, call: Call) -> tuple[torch.Tensor, Saved]:
        """Return the output of ``x [rows, k]``, and what backward needs if a gradient is due."""
        raise NotImplementedError

    def backward(
        self, grad: torch.Tensor, saved: Saved, call: Call, needs_grad: Sequence[bool]
    ) -> Backward:
        """Return the gradient of the input and those of the parameters, where ``needs_grad`` says
        that they are due; that of the input may come unasked."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, eq=False)
class SimpleLink(Link):
    """A link that is two functions.

    ``rounds_to``: forward returns more digits than the activations have, and a neighbour that
    quantizes takes so many; None: it rounds itself.
    """

    shape: SimpleShape
    forward: Callable[[torch.Tensor, Params, Call], tuple[torch.Tensor, Saved]]
    backward: Callable[[torch.Tensor, Saved, Call, Sequence[bool]], Backward]
    num_params: int = 0
    needs_rng: bool = False
    rounds_to: torch.dtype | None = None

    def in_torch(self, bind: Callable[[Any], Any]) -> SimpleLink:
        """Return the link by torch's operators: this one, if it draws numbers by its place in the
        chain, as no backend does."""
        link: SimpleLink = self if self.needs_rng else bind(self.shape)
        return link

    def program(self, rows: int, needs_grad: Sequence[bool], call: Call) -> SimpleProgram:
        """Return the program, which is the same for any number of rows."""
        return SimpleProgram(self, needs_grad)


class SimpleProgram(TensorProgram[SimpleLink]):
    """Runs the two functions."""

    __slots__ = ()

    @property
    def recordable(self) -> Recordable | None:
        """As the shape says."""
        return self._link.shape.recordable

    def forward(self, x: Any, params: Params, call: Call, out: Out = None) -> Forward:
        """Compute the output."""
        y: Any
        y, saved = self._link.forward(x, params, call)
        if self._link.rounds_to is not None:
            y = y.to(x.dtype if out is None else self._link.rounds_to)
        return y if out is None else out(y), saved if True in self._needs_grad else (), None

    def backward(
        self, grad: Any, saved: SavedList, context: Any, call: Call, out: Out = None
    ) -> Backward:
        """Compute the gradients that are due."""
        needs = self._needs_grad
        if True not in needs:
            return (None,) * len(needs)
        grad_x, *grads = self._link.backward(grad, saved, call, needs)
        if not needs[0]:
            return (None, *grads)
        return (grad_x if out is None else out(grad_x), *grads)


@dataclass(frozen=True, slots=True)
class OutputShape(SimpleShape):
    """The value leaves the chain here, in the activation dtype, and comes back in; where a layer
    returns the value, it runs the two sides apart."""

    leaves_chain = True

    def forward(self, x: torch.Tensor, params: Params, call: Call) -> tuple[torch.Tensor, Saved]:
        """Return ``x``."""
        return x, ()

    def backward(
        self, grad: torch.Tensor, saved: Saved, call: Call, needs_grad: Sequence[bool]
    ) -> Backward:
        """Return ``grad``."""
        return (grad,)


@dataclass(frozen=True, slots=True)
class ScaleShape(SimpleShape):
    """``y = scale x``, rounded once to the dtype of ``x``."""

    scale: float

    def forward(self, x: torch.Tensor, params: Params, call: Call) -> tuple[torch.Tensor, Saved]:
        """Return ``scale x``."""
        return x * self.scale, ()

    def backward(
        self, grad: torch.Tensor, saved: Saved, call: Call, needs_grad: Sequence[bool]
    ) -> Backward:
        """Return ``scale grad``."""
        return (grad * self.scale,)


@dataclass(frozen=True, slots=True)
class DeinterleaveShape(SimpleShape):
    """Puts the two halves of a gated activation together, which come in blocks of ``size``.

    ``[a1 b1 a2 b2]`` of blocks becomes ``[a1 a2 b1 b2]``.
    """

    size: int

    def expected_columns(self, columns: int) -> str | None:
        """Return None for whole pairs of blocks."""
        return f"a multiple of {2 * self.size}" if columns % (2 * self.size) else None

    def forward(self, x: torch.Tensor, params: Params, call: Call) -> tuple[torch.Tensor, Saved]:
        """Return the columns of the first half, then those of the second.

        Raises:
            OperandError: the columns are no pairs of blocks.
        """
        rows, columns = x.shape
        if columns % (2 * self.size):
            raise OperandError(
                f"glu_interleave_size={self.size}: input {list(x.shape)}; expected a multiple of "
                f"{2 * self.size} columns."
            )
        blocks = x.reshape(rows, columns // (2 * self.size), 2, self.size)
        return blocks.transpose(1, 2).reshape(rows, columns), ()

    def backward(
        self, grad: torch.Tensor, saved: Saved, call: Call, needs_grad: Sequence[bool]
    ) -> Backward:
        """Return the gradient with its blocks where those of the input were."""
        rows, columns = grad.shape
        blocks = grad.reshape(rows, 2, columns // (2 * self.size), self.size)
        return (blocks.transpose(1, 2).reshape(rows, columns),)


# Below and above, squares of a row may underflow, or overflow, in float32. The scale takes elements
# from 2^-149 to 2^-50 to 2^-53 to 2^46, or those below 2^128 to less than 2^48.
_FEW, _ENLARGED = 2.0**-100, 2.0**96
_MANY, _REDUCED = 2.0**126, 2.0**-80


@dataclass(frozen=True, slots=True)
class L2NormShape(SimpleShape):
    """Scales each row to a length of 1: ``y = x / sqrt(sum(x^2) + eps)`` in float32, rounded once;
    saves the input."""

    eps: float

    def forward(self, x: torch.Tensor, params: Params, call: Call) -> tuple[torch.Tensor, Saved]:
        """Normalize each row."""
        values, inverse, _ = self._scaled(x)
        return (values * inverse).to(x.dtype), (x,)

    def backward(
        self, grad: torch.Tensor, saved: Saved, call: Call, needs_grad: Sequence[bool]
    ) -> Backward:
        """Return ``r (dy - y sum(y dy))``, where ``r`` is 1 over the length and ``y = r x``."""
        x = saved[0]
        assert x is not None  # forward saved it
        values, inverse, scale = self._scaled(x)
        dy = grad.to(values.dtype)
        y = values * inverse
        grad_x = inverse * (dy - y * (y * dy).sum(-1, keepdim=True)) * scale
        return (grad_x.to(x.dtype),)

    def _scaled(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return ``x`` in float32, or float64 as it is, times a scale, 1 over the length of each
        row of that, and the scale ``[rows, 1]``.

        It is a power of two, and 1 unless float32 lacks squares of the length.
        """
        values = x if x.dtype == torch.float64 else x.to(torch.float32)
        squares = values.square().sum(-1, keepdim=True) + self.eps
        scale = torch.where(squares < _FEW, _ENLARGED, torch.ones_like(squares))
        scale = torch.where(squares > _MANY, _REDUCED, scale)
        values = values * scale
        squares = values.square().sum(-1, keepdim=True) + self.eps * scale * scale
        return values, squares.rsqrt(), scale


@dataclass(frozen=True, slots=True)
class BiasShape(SimpleShape):
    """A bias ``[size]``: ``y = x + bias``; its gradient is summed in float32."""

    size: int
    dtype: torch.dtype
    recordable: ClassVar[Recordable | None] = Recordable()

    @property
    def num_params(self) -> int:
        """The bias."""
        return 1

    @property
    def widths(self) -> tuple[int, int]:
        """The size of the bias."""
        return self.size, self.size

    def bind(self, context: BindContext) -> SimpleLink:
        """Return the link, whose backward sums columns by a backend."""
        sums = context.resolve("bias gradient", ColumnSumsDesc(context.dtype)).run

        def backward(
            grad: torch.Tensor, saved: Saved, call: Call, needs_grad: Sequence[bool]
        ) -> Backward:
            return grad, sums(grad).to(self.dtype) if needs_grad[1] else None

        return SimpleLink(self, self.forward, backward, num_params=1)

    def forward(self, x: torch.Tensor, params: Params, call: Call) -> tuple[torch.Tensor, Saved]:
        """Add the bias."""
        return called_in_repeats(_biased, x, params[0]), ()


def _biased(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return (x + bias).to(x.dtype)


@dataclass(frozen=True, slots=True)
class DropoutShape(SimpleShape):
    """Zeroes elements with probability ``p``, scales the rest by ``1 / (1 - p)``; backward computes
    the mask again from the call's seed and offset."""

    p: float

    def bind(self, context: BindContext) -> SimpleLink:
        """Return the link, which draws other numbers than others of the chain."""
        index = context.position

        def drop(x: torch.Tensor, call: Call) -> torch.Tensor:
            if not self.p:
                return x
            if call.rng is None:  # under a transform, which decides how examples draw
                return torch.nn.functional.dropout(x, self.p)
            return operators.drop(x, call.rng, index, self.p)

        return SimpleLink(
            self,
            lambda x, params, call: (drop(x, call), ()),
            lambda grad, saved, call, needs_grad: (drop(grad, call),),
            needs_rng=self.p > 0,
        )


@dataclass(frozen=True, slots=True)
class RotaryShape(SimpleShape):
    """Rotates heads. The rows are tokens in the order of ``layout``, one of
    :data:`fp8core.backend_api.ATTENTION_LAYOUTS`; ``interleaved`` is as in :class:`RotaryDesc`.

    ``call.sizes`` are the sizes of the layout's dimensions, ``call.tensors`` the first positions of
    the sequences and where these lie among the tokens, either of them None as the operation has it.
    """

    layout: str
    interleaved: bool = False

    @property
    def num_params(self) -> int:
        """The angles, which have no gradient."""
        return 1

    def bind(self, context: BindContext) -> RotaryLink:
        """Return the link, which saves the angles and the positions."""
        desc = RotaryDesc(context.dtype, self.layout, self.interleaved)
        inverse = dataclasses.replace(desc, inverse=True)
        alone = context.resolve("rotary", desc)
        back = context.resolve("rotary backward", inverse)
        rotate, turn_back = partial(_rotated, alone.run), partial(_rotated, back.run)
        parts = [
            context.resolve_optional(name, PackedRotaryDesc.of(each), resolved.choice.backend)
            for name, each, resolved in (
                ("rotary", desc, alone),
                ("rotary backward", inverse, back),
            )
        ]

        def forward(x: torch.Tensor, params: Params, call: Call) -> tuple[torch.Tensor, Saved]:
            angles = (*params, *call.tensors)
            return rotate(x.reshape(call.sizes), *angles).reshape(x.shape), angles

        def backward(
            grad: torch.Tensor, saved: Saved, call: Call, needs_grad: Sequence[bool]
        ) -> Backward:
            return turn_back(grad.reshape(call.sizes), *saved).reshape(grad.shape), None

        rotate_parts, turn_parts_back = (
            None if each is None else partial(_rotated_parts, each.run) for each in parts
        )
        return RotaryLink(
            *(self, forward, backward, 1),
            rotate=rotate,
            turn_back=turn_back,
            rotate_parts=rotate_parts,
            turn_parts_back=turn_parts_back,
        )


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RotaryLink(SimpleLink):
    """The rotation of rows; ``rotate(x, angles, starts=None, cu_seqlens=None)`` takes ``x`` in the
    sizes of the layout, and so does ``turn_back``, which returns its gradient. ``rotate_parts(q, k,
    v, angles, starts=None, cu_seqlens=None)`` returns ``[.., heads of all, head size]``, queries
    and keys rotated and values copied, where a backend does, and ``turn_parts_back`` the same of
    their gradients."""

    rotate: Callable[..., torch.Tensor]
    turn_back: Callable[..., torch.Tensor]
    rotate_parts: Callable[..., torch.Tensor] | None = None
    turn_parts_back: Callable[..., torch.Tensor] | None = None


def _rotated_parts(
    run: Callable[..., Any],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *angles: torch.Tensor | None,
) -> torch.Tensor:
    return _rotated(partial(run, k=k, v=v), q, *angles)


def _rotated(
    run: Callable[..., Any],
    x: torch.Tensor,
    freqs: torch.Tensor | None,
    starts: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> torch.Tensor:
    keywords = {}
    if starts is not None:
        keywords["start_positions"] = starts
    if cu_seqlens is not None:
        keywords["cu_seqlens"] = cu_seqlens
    y: torch.Tensor = run(x, freqs, **keywords)
    return y
