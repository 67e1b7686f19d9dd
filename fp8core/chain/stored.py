"""An input or a gradient that comes quantized, as the operands that a GEMM reads."""

from __future__ import annotations

import dataclasses

import torch

from fp8core.recipe.plan import TensorPlan
from fp8core.tensors.quantized_tensor import QuantizedTensor
from fp8core.tensors.quantizer import Orientations
from fp8core.tensors.storage import storage_plan


def is_stored_as(
    x: torch.Tensor,
    plan: TensorPlan | None,
    *,
    rowwise: bool = True,
    columnwise: bool = True,
) -> bool:
    """Say whether ``x`` is stored quantized, and holds the operands that a cast by ``plan`` makes.

    It has to hold the orientations asked for. Its scale is its own, also under delayed scaling, and
    its elements may be rounded to the nearest where the cast rounds stochastically.
    """
    if plan is None or not isinstance(x, QuantizedTensor):
        return False
    asked = (rowwise, columnwise)
    pairs = zip(asked, _nearest(x.plan), _nearest(storage_plan(plan)), strict=True)
    return all(held == wanted for is_asked, held, wanted in pairs if is_asked)


def _nearest(plan: TensorPlan) -> TensorPlan:
    row, column = (
        spec if spec is None or not spec.stochastic else dataclasses.replace(spec, stochastic=False)
        for spec in plan
    )
    return TensorPlan(row, column)


def take_operands(x: QuantizedTensor, rowwise: bool, columnwise: bool) -> Orientations:
    """Return the orientations asked for."""
    row, column = x.operands
    return Orientations(row if rowwise else None, column if columnwise else None)
