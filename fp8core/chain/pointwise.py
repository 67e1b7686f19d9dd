"""Links without a GEMM or a norm: bias, dropout, residual add, quantize-and-back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fp8core.backend_api import ColumnSumsDesc
from fp8core.chain.boundary import Boundary
from fp8core.chain.call import Call
from fp8core.chain.link_defaults import LinkDefaults
from fp8core.chain.once import OnlyOnce, in_low_precision
from fp8core.chain.protocol import (
    Backward,
    Forward,
    Held,
    Out,
    Params,
    Saved,
    TensorProgram,
    Unadded,
)
from fp8core.chain.request import QuantizeRequest
from fp8core.chain.shape import BindContext, CallInputs, LinkShape
from fp8core.chain.unwrap import unwrap
from fp8core.errors import OperandError
from fp8core.torch_ops import fused
from fp8core.torch_ops.recorded import called_in_repeats

__all__ = [
    "AddLink",
    "AddShape",
    "BiasLink",
    "BiasShape",
    "DropoutLink",
    "DropoutShape",
    "OutputLink",
    "OutputShape",
    "QuantizeLink",
    "QuantizeShape",
]


@dataclass(frozen=True, slots=True)
class BiasShape(LinkShape):
    """A bias ``[size]``."""

    size: int
    dtype: torch.dtype

    @property
    def num_params(self) -> int:
        """The bias."""
        return 1

    def columns(self, columns: int) -> int:
        """Return the size."""
        return self.size

    def input_columns(self, columns: int | None) -> int:
        """Return the size."""
        return self.size

    def expected_columns(self, columns: int) -> str | None:
        """Return the size unless it is ``columns``."""
        return None if columns == self.size else str(self.size)

    def bind(self, context: BindContext) -> BiasLink:
        """Return the link."""
        sums = context.resolve("bias gradient", ColumnSumsDesc(context.dtype))
        return BiasLink(self, sums.run)


@dataclass(frozen=True, slots=True)
class DropoutShape(LinkShape):
    """Dropout with probability ``p``."""

    p: float

    def bind(self, context: BindContext) -> DropoutLink:
        """Return the link, which draws other numbers than others of the chain."""
        return DropoutLink(self, context.position, needs_rng=self.p > 0)


@dataclass(frozen=True, slots=True)
class AddShape(LinkShape):
    """Adds a second tensor, which comes as its parameter."""

    @property
    def num_params(self) -> int:
        """The second tensor."""
        return 1

    def example(self, x: torch.Tensor) -> CallInputs:
        """Return the second tensor, which has the shape of ``x``."""
        return CallInputs((x.new_empty(x.shape).requires_grad_(),))

    @property
    def leaves_sum(self) -> bool:
        """It hands over both tensors to a link that adds them."""
        return True

    def bind(self, context: BindContext) -> AddLink:
        """Return the link, which adds unless the next one does."""
        link = None if context.after is None else context.after.link
        return AddLink(self, is_left_to_next=link is not None and link.adds_residual)


@dataclass(frozen=True, slots=True)
class QuantizeShape(LinkShape):
    """Quantizes values by the recipe's input format, gradients by that of gradients, or both.

    At the end of a chain the value leaves as a QuantizedTensor, and at its beginning so does the
    gradient; in between both are rounded.
    """

    forward: bool = True
    backward: bool = False

    def bind(self, context: BindContext) -> QuantizeLink:
        """Return the link; both directions need a backend that casts and decodes."""
        plan, is_observing = context.plan, context.binding.is_observing
        plans = {"input": plan.input, "grad_output": plan.grad_output}
        is_high = is_observing or not any(one.rowwise for one in plans.values())
        forward, backward = (
            None if is_observing or one.rowwise is None else Boundary(step, one, context)
            for step, one in plans.items()
        )
        only_once = None if is_high else in_low_precision(context.owner)
        return QuantizeLink(
            self,
            forward if self.forward else None,
            backward if self.backward else None,
            context.after is None,
            context.before is None,
            only_once,
        )


@dataclass(frozen=True, slots=True)
class OutputShape(LinkShape):
    """The value leaves the chain here, in the activation dtype, and comes back in."""

    @property
    def leaves_chain(self) -> bool:
        """It does nothing else."""
        return True

    def bind(self, context: BindContext) -> OutputLink:
        """Return the link."""
        return OutputLink()


def _hand(y: torch.Tensor, out: QuantizeRequest | None) -> Any:
    return y if out is None else out(y)


@dataclass(frozen=True, slots=True, eq=False)
class OutputLink(LinkDefaults):
    """Passes everything on; where a layer returns the value, it runs the two sides apart."""

    def program(self, rows: int, needs_grad: Sequence[bool], call: Call) -> OutputProgram:
        """Return the program, which is the same for any number of rows."""
        return OutputProgram(self, needs_grad)


class OutputProgram(TensorProgram[OutputLink]):
    """Passes the value and its gradient on."""

    __slots__ = ()

    def forward(self, x: Any, params: Params, call: Call, out: Out = None) -> Forward:
        """Return ``x``."""
        return _hand(x, out), (), None

    def backward(
        self, grad: Any, saved: Saved, context: Any, call: Call, out: Out = None
    ) -> Backward:
        """Return ``grad``."""
        return (_hand(grad, out) if self._needs_grad[0] else None,)


@dataclass(frozen=True, slots=True, eq=False)
class BiasLink(LinkDefaults):
    """``y = x + bias``; ``column_sums`` computes the gradient of the bias."""

    shape: BiasShape
    column_sums: Callable[[torch.Tensor], torch.Tensor]
    num_params: int = 1

    def in_torch(self, bind: Callable[[Any], Any]) -> BiasLink:
        """Return the link whose sums torch differentiates."""
        link: BiasLink = bind(self.shape)
        return link

    def program(self, rows: int, needs_grad: Sequence[bool], call: Call) -> BiasProgram:
        """Return the program, which is the same for any number of rows."""
        return BiasProgram(self, needs_grad)


def _biased(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return (x + bias).to(x.dtype)


class BiasProgram(TensorProgram[BiasLink]):
    """Adds the bias; nothing is saved."""

    __slots__ = ()

    held = Held(calls_functions=True)

    def forward(self, x: Any, params: Params, call: Call, out: Out = None) -> Forward:
        """Add the bias."""
        return _hand(called_in_repeats(_biased, x, params[0]), out), (), None

    def backward(
        self, grad: Any, saved: Saved, context: Any, call: Call, out: Out = None
    ) -> Backward:
        """Pass the gradient on; sum it in float32 for the bias."""
        needs_input, needs_bias = self._needs_grad
        link = self._link
        grad_bias = link.column_sums(grad).to(link.shape.dtype) if needs_bias else None
        return _hand(grad, out) if needs_input else None, grad_bias


@dataclass(frozen=True, slots=True, eq=False)
class DropoutLink(LinkDefaults):
    """Zeroes elements with probability ``p``, scales the rest by ``1 / (1 - p)``."""

    shape: DropoutShape
    index: int
    needs_rng: bool = field()  # which has no default, unlike in LinkDefaults

    def program(self, rows: int, needs_grad: Sequence[bool], call: Call) -> DropoutProgram:
        """Return the program, which is the same for any number of rows."""
        return DropoutProgram(self, needs_grad)


class DropoutProgram(TensorProgram[DropoutLink]):
    """Drops; backward computes the mask again from the call's seed and offset."""

    __slots__ = ()

    def forward(self, x: Any, params: Params, call: Call, out: Out = None) -> Forward:
        """Drop."""
        return _hand(self._drop(x, call), out), (), None

    def backward(
        self, grad: Any, saved: Saved, context: Any, call: Call, out: Out = None
    ) -> Backward:
        """Drop the same elements of the gradient."""
        return (_hand(self._drop(grad, call), out) if self._needs_grad[0] else None,)

    def _drop(self, x: torch.Tensor, call: Call) -> torch.Tensor:
        link = self._link
        if not link.needs_rng:
            return x
        if call.rng is None:  # under a transform, which decides how examples draw
            return torch.nn.functional.dropout(x, link.shape.p)
        return fused.drop(x, call.rng, link.index, link.shape.p)


@dataclass(frozen=True, slots=True, eq=False)
class AddLink(LinkDefaults):
    """``y = x + residual``, rounded once to the dtype of ``x``; left to the next link if it can."""

    shape: AddShape
    is_left_to_next: bool = False
    num_params: int = 1

    def in_torch(self, bind: Callable[[Any], Any]) -> AddLink:
        """Return a link that adds."""
        return AddLink(self.shape)

    def program(self, rows: int, needs_grad: Sequence[bool], call: Call) -> AddProgram:
        """Return the program, which is the same for any number of rows."""
        return AddProgram(self, needs_grad)


class AddProgram(TensorProgram[AddLink]):
    """Adds; backward is told the residual's shape."""

    __slots__ = ()

    def forward(self, x: Any, params: Params, call: Call, out: Out = None) -> Forward:
        """Add, or hand both on.

        Raises:
            OperandError: the residual does not have the shape of the chain's input.
        """
        shape = params[0].shape
        if params[0].numel() != x.numel() or shape[-1:] != x.shape[-1:]:
            raise OperandError(
                f"residual add: the extra input is {list(shape)}; expected {list(x.shape)} with "
                f"the leading dimensions of the chain's input."
            )
        residual = unwrap(params[0], "residual add: the extra input").reshape(x.shape)
        if self._link.is_left_to_next and residual.dtype == x.dtype:
            return Unadded(x, residual), (), shape
        return _hand((x + residual).to(x.dtype), out), (), shape

    def backward(
        self, grad: Any, saved: Saved, context: Any, call: Call, out: Out = None
    ) -> Backward:
        """Both inputs get the gradient."""
        needs_input, needs_residual = self._needs_grad
        residual = grad.reshape(context) if needs_residual else None
        return _hand(grad, out) if needs_input else None, residual


@dataclass(frozen=True, slots=True, eq=False)
class QuantizeLink(LinkDefaults):
    """Quantizes values by ``forward`` and gradients by ``backward``, if there is one.

    ``is_last``, ``is_first``: of the chain, whose caller is given quantized tensors. ``only_once``:
    rounding has no derivative other than the one that backward uses.
    """

    shape: QuantizeShape
    forward: Boundary | None
    backward: Boundary | None
    is_last: bool
    is_first: bool
    only_once: OnlyOnce | None = None

    def program(self, rows: int, needs_grad: Sequence[bool], call: Call) -> QuantizeProgram:
        """Return the program, which is the same for any number of rows."""
        return QuantizeProgram(self, needs_grad)


class QuantizeProgram(TensorProgram[QuantizeLink]):
    """Quantizes values, gradients, or both."""

    __slots__ = ()

    def forward(self, x: Any, params: Params, call: Call, out: Out = None) -> Forward:
        """Quantize the value, for both products of a later layer where one may be trained."""
        boundary = self._link.forward
        if boundary is None:
            return _hand(x, out), (), None
        if not self._link.is_last:
            return _hand(boundary.rounded(x), out), (), None
        trains = self._needs_grad[0] or torch.is_grad_enabled()
        return boundary.quantize(x, columnwise=trains), (), None

    def backward(
        self, grad: Any, saved: Saved, context: Any, call: Call, out: Out = None
    ) -> Backward:
        """Pass the gradient straight through, quantized if there is a boundary for it."""
        if not self._needs_grad[0]:
            return (None,)
        boundary = self._link.backward
        if boundary is None:
            return (_hand(grad, out),)
        if not self._link.is_first:
            return (_hand(boundary.rounded(grad), out),)
        return (boundary.quantize(grad, columnwise=True),)
