"""An input or a gradient that comes quantized, as the operands that a GEMM reads."""

from __future__ import annotations

import torch

from fp8core.recipe.plan import TensorPlan
from fp8core.tensors.quantized_tensor import QuantizedTensor
from fp8core.tensors.quantizer import Orientations
from fp8core.tensors.storage import storage_plan

__all__ = ["is_stored_as", "take_operands"]


def is_stored_as(x: torch.Tensor, plan: TensorPlan | None) -> bool:
    """Say whether ``x`` is stored quantized, and holds the operands that a cast by ``plan`` makes.

    But for the scale, which is that of ``x`` itself, also under delayed scaling.
    """
    if plan is None or not isinstance(x, QuantizedTensor):
        return False
    return x.plan == storage_plan(plan)


def take_operands(x: QuantizedTensor, rowwise: bool, columnwise: bool) -> Orientations:
    """Return the orientations asked for."""
    row, column = x.operands
    return Orientations(row if rowwise else None, column if columnwise else None)
