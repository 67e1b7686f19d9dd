"""Where values leave a chain as a QuantizedTensor, which a later layer takes as it is."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fp8core.backend_api import DequantizeDesc
from fp8core.backend_api.operand_spec import codes_per_byte
from fp8core.chain.call import Call
from fp8core.chain.protocol import (
    Backward,
    Forward,
    Link,
    OnlyOnce,
    Out,
    Params,
    Saved,
    TensorProgram,
    in_low_precision,
)
from fp8core.chain.shape import BindContext, LinkShape
from fp8core.context.scopes import warn_of_layer
from fp8core.errors import UnsupportedError
from fp8core.recipe.plan import TensorPlan
from fp8core.tensors.quantized_tensor import QuantizedTensor
from fp8core.tensors.quantizer import Orientations
from fp8core.tensors.quantizer_binding import bind_quantizer
from fp8core.tensors.storage import check, nearest, storage_plan, stored_operands
from fp8core.torch_ops.capture import is_captured


class Boundary:
    """Quantizes a tensor as the recipe casts it, by a scale of its own and to the nearest.

    ``plan`` is the recipe's for the tensor, of which an orientation may be in high precision.
    """

    __slots__ = ("_both", "_dequantize", "_owner", "_plan", "_row")

    def __init__(self, step: str, plan: TensorPlan, context: BindContext) -> None:
        self._plan = nearest(storage_plan(plan))
        row = self._plan.rowwise or self._plan.columnwise
        assert row is not None
        self._row = dataclasses.replace(row, transform=None)
        both = TensorPlan(self._row, self._plan.columnwise or self._row)
        self._both = bind_quantizer(
            both,
            context.dtype,
            context.binding,
            purpose=context.purpose(step),
            nonfinite=context.nonfinite,
            propagates=context.plan.nonfinite == "propagate",
        )
        self._dequantize = context.resolve(step, DequantizeDesc(self._row, context.dtype)).run
        self._owner = context.owner

    def quantize(self, x: torch.Tensor, *, columnwise: bool) -> torch.Tensor:
        """Return ``x [rows, cols]`` quantized, in both orientations or rowwise alone.

        The columnwise one is left out where blocks do not divide the rows. Where they do not divide
        the columns, the result is a plain tensor of rounded values, which is logged once. In a
        captured graph it always is: torch expects the gradient of a result to have its class.
        """
        if is_captured(x):
            return self.rounded(x)
        rows, cols = x.shape
        plan = TensorPlan(self._row, self._plan.columnwise if columnwise else None)
        for stored in (plan, TensorPlan(self._row, None)):
            try:
                check(stored, rows, cols)
            except UnsupportedError as error:
                refused = error
                continue
            operands = self._both(x, columnwise=stored.columnwise is not None)
            return QuantizedTensor(*stored_operands(operands, stored), stored, x.dtype)
        warn_of_layer(self._owner, f"its result stays a plain tensor of rounded values: {refused}")
        return self.rounded(x)

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x [rows, cols]`` rounded to the format and back, a plain tensor."""
        columns = x.shape[1]
        missing = -columns % codes_per_byte(self._row)
        wide = torch.nn.functional.pad(x, (0, missing)) if missing else x
        operands: Orientations = self._both(wide, columnwise=False)
        values: torch.Tensor = self._dequantize(operands.rowwise)
        return values[:, :columns].contiguous() if missing else values


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
        is_high = is_observing or not any(tensor.rowwise for tensor in plans.values())
        forward, backward = (
            None if is_observing or tensor.rowwise is None else Boundary(step, tensor, context)
            for step, tensor in plans.items()
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


@dataclass(frozen=True, slots=True, eq=False)
class QuantizeLink(Link):
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
            return x if out is None else out(x), (), None
        if not self._link.is_last:
            y: Any = boundary.rounded(x)
            return y if out is None else out(y), (), None
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
            return (grad if out is None else out(grad),)
        if not self._link.is_first:
            grad_x: Any = boundary.rounded(grad)
            return (grad_x if out is None else out(grad_x),)
        return (boundary.quantize(grad, columnwise=True),)
