"""Codes and scales that the caller brings, fitted to a plan."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from fp8core import formats
from fp8core.backend_api import Operand, OperandSpec
from fp8core.errors import OperandError, RecipeError
from fp8core.recipe import Recipe
from fp8core.recipe.base import plan_of
from fp8core.recipe.choice import recipe_from
from fp8core.recipe.plan import LayerRole, LinearPlan, TensorPlan
from fp8core.tensors.checks import check_stored
from fp8core.tensors.storage import PARTS, per_byte, storage_plan

_TENSORS = ("input", "weight", "grad_output")


def tensor_plan(by: Any, tensor: str, dtype: torch.dtype) -> TensorPlan:
    """Return how ``by``, a recipe, its name, an OperandSpec or a TensorPlan, quantizes ``tensor``.

    Raises:
        RecipeError: it is none of these, or leaves the tensor in high precision.
    """
    if tensor not in _TENSORS:
        raise RecipeError(
            f"quantize or from_codes of {tensor!r}: expected one of {', '.join(_TENSORS)}."
        )
    plan: Any = by
    if isinstance(by, OperandSpec):
        plan = TensorPlan(by, by)
    elif isinstance(by, Recipe | str):
        recipe = recipe_from(by, "quantize")
        chosen = plan_of(LinearPlan, recipe, LayerRole(), dtype)
        assert isinstance(chosen, LinearPlan)
        plan = chosen.tensors[tensor]
    if not isinstance(plan, TensorPlan):
        raise RecipeError(
            f"{by!r} says not how to store a tensor: expected a quantizer, a recipe or its name, "
            f"an OperandSpec or a TensorPlan."
        )
    if plan == (None, None):
        raise RecipeError(
            f"quantize or from_codes by {by!r}: it leaves {tensor} in high precision."
        )
    return plan


def fit_codes(
    codes: torch.Tensor,
    scale_inv: torch.Tensor,
    recipe: Any,
    global_scale_inv: torch.Tensor | None,
    tensor: str | None,
    dtype: torch.dtype,
) -> tuple[Operand, TensorPlan, list[int]]:
    """Return the operand of ``codes`` and scales, how it is stored, and the tensor's shape.

    The arguments are those of :meth:`fp8core.QuantizedTensor.from_codes`.

    Raises:
        RecipeError: ``recipe`` is none, or leaves the tensor in high precision.
        OperandError: codes and scales do not fit it, or hold what no cast writes.
    """
    data = bytes_of(codes, "codes")
    name = format_of_dtype(codes.dtype)
    scales, outer = bytes_of(scale_inv, "scale_inv"), global_scale_inv
    reasons = []
    for spec in _candidates(recipe, tensor, dtype):
        if name is not None and spec.format != name:
            reasons.append(f"{spec} has no codes in {codes.dtype}")
            continue
        fitted = _fitted(data, scales, outer, spec)
        if fitted is None:
            reasons.append(f"{spec} has no scales {scale_inv.dtype} {list(scale_inv.shape)}")
            continue
        is_both = spec.block[0] == spec.block[1] and per_byte(spec) == 1
        plan = TensorPlan(spec, spec if is_both else None)
        check_stored([*fitted, *[None] * (len(PARTS) - 3)], plan, dtype)
        return fitted, plan, [*data.shape[:-1], data.shape[-1] * per_byte(spec)]
    raise OperandError(
        f"from_codes of codes {codes.dtype} {list(codes.shape)}: {'; '.join(reasons)}."
    )


def bytes_of(x: Any, role: str) -> torch.Tensor:
    """Return ``x``, a plain tensor, as uint8 if its dtype is one of a byte.

    Raises:
        OperandError: it is none.
    """
    if type(x) not in (torch.Tensor, torch.nn.Parameter):
        raise OperandError(f"{role} is {type(x).__name__}; expected a plain tensor.")
    value: torch.Tensor = x.detach()
    return value.view(torch.uint8) if value.element_size() == 1 else value


def format_of_dtype(dtype: torch.dtype) -> str | None:
    """Return the format of one of torch's FP8 and FP4 dtypes, None for another dtype."""
    if dtype == torch.float4_e2m1fn_x2:
        return "e2m1"
    names = {formats.by_name(name).torch_dtype: name for name in ("e4m3", "e5m2")}
    return names.get(dtype)


def _candidates(recipe: Any, tensor: str | None, dtype: torch.dtype) -> Iterator[OperandSpec]:
    """Yield the rowwise specs that a tensor may be stored by."""
    by_recipe = isinstance(recipe, Recipe | str) and tensor is None
    for name in ("input", "weight", "grad_output") if by_recipe else (tensor or "input",):
        spec = storage_plan(tensor_plan(recipe, name, dtype)).rowwise
        if spec is not None:
            yield spec


def _fitted(
    data: torch.Tensor, scales: torch.Tensor, outer: torch.Tensor | None, spec: OperandSpec
) -> Operand | None:
    """Return the operand of matrices; None if the scales are not those of ``spec``."""
    rows, packed = math.prod(data.shape[:-1]), data.shape[-1] if data.dim() else 0
    k = packed * per_byte(spec)
    counts = [
        -(-size // block) if block else 1 for size, block in zip((rows, k), spec.block, strict=True)
    ]
    scale_dtype = torch.float32 if spec.scale_format == "float32" else torch.uint8
    if scales.dtype != scale_dtype or scales.numel() != math.prod(counts) or not data.dim():
        return None
    if (spec.scale_format == "e4m3") != (outer is not None):
        return None
    if outer is not None:
        size = (rows if spec.row_scaled else 1, 1)
        if outer.numel() != size[0]:
            return None
        outer = outer.detach().reshape(size)
    return Operand(data.reshape(rows, packed), scales.reshape(counts), outer)
