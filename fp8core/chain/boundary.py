"""Where values leave a chain as a QuantizedTensor, which a later layer takes as it is."""

from __future__ import annotations

import dataclasses

import torch

from fp8core.backend_api import DequantizeDesc, OperandSpec
from fp8core.chain.shape import BindContext
from fp8core.errors import UnsupportedError
from fp8core.recipe.plan import TensorPlan
from fp8core.reporting import log_once
from fp8core.tensors.quantized_tensor import QuantizedTensor
from fp8core.tensors.quantizer import Orientations
from fp8core.tensors.quantizer_binding import bind_quantizer
from fp8core.tensors.storage import check, per_byte, stored_operands
from fp8core.torch_ops.shapes import is_captured

__all__ = ["Boundary"]


class Boundary:
    """Quantizes a tensor as the recipe casts it, by a scale of its own and to the nearest.

    ``plan`` is the recipe's for the tensor, of which an orientation may be in high precision.
    """

    __slots__ = ("_both", "_dequantize", "_owner", "_plan", "_row")

    def __init__(self, step: str, plan: TensorPlan, context: BindContext) -> None:
        self._plan = TensorPlan(_nearest(plan.rowwise), _nearest(plan.columnwise))
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
        for one in (plan, TensorPlan(self._row, None)):
            try:
                check(one, rows, cols)
            except UnsupportedError as error:
                refused = error
                continue
            made = self._both(x, columnwise=one.columnwise is not None)
            return QuantizedTensor(*stored_operands(made, one), one, x.dtype)
        log_once(f"{self._owner}: its result stays a plain tensor of rounded values: {refused}")
        return self.rounded(x)

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x [rows, cols]`` rounded to the format and back, a plain tensor."""
        columns = x.shape[1]
        missing = -columns % per_byte(self._row)
        wide = torch.nn.functional.pad(x, (0, missing)) if missing else x
        made: Orientations = self._both(wide, columnwise=False)
        values: torch.Tensor = self._dequantize(made.rowwise)
        return values[:, :columns].contiguous() if missing else values


def _nearest(spec: OperandSpec | None) -> OperandSpec | None:
    """Return ``spec`` with a scale from the tensor, rounded to the nearest."""
    if spec is None:
        return None
    return dataclasses.replace(
        spec, format=str(spec.format), delayed=False, stochastic=False, cast_first=True
    )
