"""``quantize`` and ``dequantize`` as functions."""

from __future__ import annotations

import functools
from typing import Any

import torch
from typing_extensions import override

from fp8core.errors import OperandError
from fp8core.functional.quantizers.base import Quantizer, quantize_in_graph
from fp8core.recipe.plan import TensorPlan
from fp8core.tensors.coded import tensor_plan
from fp8core.tensors.quantized_tensor import QuantizedTensor
from fp8core.torch_ops.operators import constant_in_graph, taking_dataclasses


class _PlannedQuantizer(Quantizer):
    """A quantizer of any plan."""

    def __init__(self, plan: TensorPlan, *, rowwise: bool = True, columnwise: bool = True) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self._plan = plan

    @property
    @override
    def plan(self) -> TensorPlan:
        return self._plan


def quantize(
    x: torch.Tensor,
    by: Any,
    *,
    tensor: str = "input",
    rowwise: bool = True,
    columnwise: bool = True,
) -> QuantizedTensor:
    """Return ``x [..., k]`` quantized, in the orientations asked for.

    The gradient passes unchanged.

    Args:
        x: a floating-point tensor.
        by: a quantizer, whose own usages count; a recipe or its name, which is asked how a linear
            layer quantizes ``tensor``; an OperandSpec, or a TensorPlan.
        tensor: ``"input"``, ``"weight"`` or ``"grad_output"``.
        rowwise, columnwise: which orientations are made. An orientation that the plan leaves in
            high precision is left out.

    Raises:
        RecipeError: ``by`` is something else, or a recipe that leaves the tensor in high precision.
        OperandError, UnsupportedError: as ``Quantizer.quantize``.
    """
    if isinstance(by, Quantizer) or (callable(by) and not isinstance(by, type)):
        quantized: QuantizedTensor = by(x)
        return quantized
    dtype = x.dtype if isinstance(x, torch.Tensor) else torch.float32
    options = (by, tensor, dtype, rowwise, columnwise)
    if torch.compiler.is_compiling():
        number_of = _number_of if isinstance(by, str) else _number_of_object
        number, is_row, is_column = number_of(*options).split()
        return quantize_in_graph(number, x, bool(int(is_row)), bool(int(is_column)))
    return _planned(*options)(x)


def _planned(
    by: Any, tensor: str, dtype: torch.dtype, rowwise: bool, columnwise: bool
) -> _PlannedQuantizer:
    plan = tensor_plan(by, tensor, dtype)
    used = (rowwise and plan.rowwise is not None, columnwise and plan.columnwise is not None)
    return _PlannedQuantizer(plan, rowwise=used[0], columnwise=used[1])


_of_graphs = functools.lru_cache(_planned)  # graphs name their quantizers, and do not hold them


def _number_of(*options: Any) -> str:
    """Return the number of a quantizer and both its usages."""
    quantizer = _of_graphs(*options)
    return f"{quantizer.number} {quantizer.rowwise_usage:d} {quantizer.columnwise_usage:d}"


_number_of_object = taking_dataclasses(_number_of)
constant_in_graph(_number_of)


def dequantize(x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return the values of ``x`` as a plain tensor in ``dtype``, its own if None.

    A plain tensor is converted, so that code may take either. The gradient passes unchanged.

    Raises:
        OperandError: ``x`` is no tensor.
    """
    if not isinstance(x, torch.Tensor):
        raise OperandError(f"dequantize takes a tensor, found {type(x).__name__}.")
    if isinstance(x, QuantizedTensor):
        return x.dequantize(dtype)
    return x if dtype is None else x.to(dtype)
