"""Links without a GEMM or a norm: bias, dropout, residual add, quantize-and-back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fp8core.backend_api import ColumnSumsDesc, DequantizeDesc, OperandSpec
from fp8core.chain.call import Call
from fp8core.chain.link_defaults import LinkDefaults
from fp8core.chain.once import OnlyOnce, in_low_precision
from fp8core.chain.protocol import Backward, Forward, Out, Params, Saved, TensorProgram, Unadded
from fp8core.chain.request import QuantizeRequest
from fp8core.chain.shape import BindContext, CallInputs, LinkShape
from fp8core.chain.unwrap import unwrap
from fp8core.errors import OperandError
from fp8core.recipe.plan import TensorPlan
from fp8core.tensors.quantizer import bind_quantizer
from fp8core.tensors.storage import per_byte
from fp8core.torch_ops import fused

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
    """Rounds to the recipe's input format and back, forward, backward or both."""

    forward: bool = True
    backward: bool = False

    def bind(self, context: BindContext) -> QuantizeLink:
        """Return the link; both directions need a backend that casts and decodes."""
        plan, is_observing = context.plan, context.binding.is_observing
        specs = {"input": plan.input.rowwise, "grad_output": plan.grad_output.rowwise}
        is_high = is_observing or not any(specs.values())
        forward, backward = (
            _rounding(step, None if is_observing else spec, context) for step, spec in specs.items()
        )
        only_once = None if is_high else in_low_precision(context.owner)
        return QuantizeLink(self, forward, backward, only_once)


def _rounding(
    step: str, spec: OperandSpec | None, context: BindContext
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return what rounds a tensor to ``spec`` and back, by its own scale and to the nearest."""
    if spec is None:
        return lambda x: x
    spec = dataclasses.replace(spec, delayed=False, stochastic=False)
    quantize = bind_quantizer(
        TensorPlan(spec, None),
        context.dtype,
        context.binding,
        purpose=context.purpose(step),
        nonfinite=context.nonfinite,
        propagates=context.plan.nonfinite == "propagate",
    )
    dequantize = context.resolve(step, DequantizeDesc(spec, context.dtype)).run

    def rounded(x: torch.Tensor) -> torch.Tensor:
        values: torch.Tensor = dequantize(quantize(x, columnwise=False).rowwise)
        return values

    packed = per_byte(spec)
    return rounded if packed == 1 else _of_whole_bytes(rounded, packed)


def _of_whole_bytes(
    rounded: Callable[[torch.Tensor], torch.Tensor], packed: int
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return ``rounded``, which takes a multiple of ``packed`` columns, for any number of them."""

    def run(x: torch.Tensor) -> torch.Tensor:
        columns = x.shape[1]
        missing = -columns % packed
        if not missing:
            return rounded(x)
        return rounded(torch.nn.functional.pad(x, (0, missing)))[:, :columns].contiguous()

    return run


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


class BiasProgram(TensorProgram[BiasLink]):
    """Adds the bias; nothing is saved."""

    __slots__ = ()

    def forward(self, x: Any, params: Params, call: Call, out: Out = None) -> Forward:
        """Add the bias."""
        return _hand((x + params[0]).to(x.dtype), out), (), None

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
    """Rounds values to a low-precision format and back, as the next layer would see them.

    ``only_once``: rounding has no derivative other than the one that backward uses.
    """

    shape: QuantizeShape
    round_forward: Callable[[torch.Tensor], torch.Tensor]
    round_backward: Callable[[torch.Tensor], torch.Tensor]
    only_once: OnlyOnce | None = None

    def program(self, rows: int, needs_grad: Sequence[bool], call: Call) -> QuantizeProgram:
        """Return the program, which is the same for any number of rows."""
        return QuantizeProgram(self, needs_grad)


class QuantizeProgram(TensorProgram[QuantizeLink]):
    """Rounds values, gradients, or both."""

    __slots__ = ()

    def forward(self, x: Any, params: Params, call: Call, out: Out = None) -> Forward:
        """Round the value, if the shape says so."""
        link = self._link
        return _hand(link.round_forward(x) if link.shape.forward else x, out), (), None

    def backward(
        self, grad: Any, saved: Saved, context: Any, call: Call, out: Out = None
    ) -> Backward:
        """Pass the gradient straight through, rounded if the shape says so."""
        if not self._needs_grad[0]:
            return (None,)
        link = self._link
        return (_hand(link.round_backward(grad) if link.shape.backward else grad, out),)
