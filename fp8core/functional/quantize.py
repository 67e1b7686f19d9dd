"""Quantized tensors of plain ones and back: by casts, from codes and scales, and as torch's."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import torch

from fp8core import formats
from fp8core.backend_api import OperandSpec
from fp8core.errors import OperandError
from fp8core.functional.quantizers.base import PlannedQuantizer, Quantizer, quantize_in_graph
from fp8core.tensors.checks import bytes_of, format_of_dtype, tensor_plan
from fp8core.tensors.quantized_tensor import QuantizedTensor
from fp8core.tensors.storage import entries
from fp8core.torch_ops.capture import constant_in_graph, taking_dataclasses


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
) -> PlannedQuantizer:
    plan = tensor_plan(by, tensor, dtype)
    used = (rowwise and plan.rowwise is not None, columnwise and plan.columnwise is not None)
    return PlannedQuantizer(plan, rowwise=used[0], columnwise=used[1])


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


class TorchTensor(NamedTuple):
    """A quantized tensor as torch holds one: ``value = data * scale_inv * global_scale_inv``.

    ``data [..., k]`` has one of torch's 8-bit dtypes, or ``[..., k / 2]`` of
    ``torch.float4_e2m1fn_x2``. ``scale_inv [rows, k]``, one for each block, is float32,
    ``torch.float8_e8m0fnu`` or ``torch.float8_e4m3fn``; ``global_scale_inv`` is None but for the
    last.
    """

    data: torch.Tensor
    scale_inv: torch.Tensor
    global_scale_inv: torch.Tensor | None = None


from_codes = QuantizedTensor.from_codes


def from_torch(
    data: Any,
    scale_inv: torch.Tensor | None = None,
    *,
    global_scale_inv: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> QuantizedTensor:
    """Return torch's ``data`` with its scales, or a tensor of torchao, as a QuantizedTensor.

    The blocks follow from the number of scales: one, one a row, or one for every 128 elements or
    128 x 128 in float32; one for every 32 elements or 32 x 32 in ``torch.float8_e8m0fnu``; one for
    every 16 elements or 16 x 16 in ``torch.float8_e4m3fn``, below ``global_scale_inv``, which is
    one number or one a row.

    Args:
        data: in one of torch's FP8 dtypes or ``torch.float4_e2m1fn_x2``; or, without scales, a
            Float8Tensor, Float8TrainingTensor or MXTensor of torchao.
        scale_inv: the factors of the elements, as torch's scaled products take them.
        global_scale_inv: as in ``from_codes``.
        dtype: the nominal dtype; None takes that of torchao's tensor, else bfloat16.

    Raises:
        OperandError: the blocks are none of these, or the codes are no format of the library.
    """
    if scale_inv is None:
        data, scale_inv, nominal = _of_torchao(data)
        dtype = dtype or nominal
    name = format_of_dtype(data.dtype)
    if name is None:
        raise OperandError(
            f"from_torch of {data.dtype}: expected one of torch's FP8 dtypes or float4_e2m1fn_x2. "
            f"from_codes() takes uint8."
        )
    scales = bytes_of(scale_inv, "scale_inv")
    spec = _spec_by_scales(name, bytes_of(data, "data"), scales, scale_inv.dtype)
    if global_scale_inv is not None and global_scale_inv.numel() > 1 and spec.block[0] == 1:
        spec = dataclasses.replace(spec, row_scaled=True)
    return from_codes(
        data, scale_inv, spec, global_scale_inv=global_scale_inv, dtype=dtype or torch.bfloat16
    )


def to_torch(x: QuantizedTensor) -> TorchTensor:
    """Return the rowwise operand of ``x`` in torch's dtypes, as views of the same memory.

    Raises:
        OperandError: it holds no rowwise operand, or torch has no dtype for its format.
    """
    if not isinstance(x, QuantizedTensor):
        raise OperandError(f"to_torch takes a QuantizedTensor, found {type(x).__name__}.")
    row, spec = x.operands.rowwise, x.plan.rowwise
    if row is None or spec is None:
        raise OperandError(f"to_torch of {x}: it holds no rowwise operand.")
    dtype = formats.by_name(spec.format).stored_dtype
    if dtype is None:
        raise OperandError(f"to_torch of {x}: torch has no dtype for {spec.format}.")
    scale_inv = row.scale_inv
    if spec.scale_format != "float32":
        scale_inv = scale_inv.view(formats.by_name(spec.scale_format).torch_dtype)
    data = row.data.view(*x.shape[:-1], row.data.shape[1]).view(dtype)
    return TorchTensor(data, scale_inv, row.global_scale_inv)


def _spec_by_scales(
    name: str, data: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype
) -> OperandSpec:
    """Return the spec whose scales these are."""
    element = formats.by_name(name)
    rows, k = math.prod(data.shape[:-1]), data.shape[-1] * (8 // element.bits)
    blocks = {
        "float32": ((0, 0), (1, 0), (1, 128), (128, 128)),
        "e8m0": ((1, 32), (32, 32)),
        "e4m3": ((1, 16), (16, 16)),
    }
    kinds = {torch.float32: "float32", torch.float8_e8m0fnu: "e8m0", torch.float8_e4m3fn: "e4m3"}
    kind = kinds.get(dtype)
    for block in blocks.get(kind or "", ()):
        counts = [*map(entries, (rows, k), block)]
        if counts == [math.prod(scales.shape[:-1]), scales.shape[-1] if scales.dim() else 1]:
            return OperandSpec(name, block, element.max, kind or "")
    raise OperandError(
        f"from_torch of {list(data.shape)} with scales {dtype} {list(scales.shape)}: expected one "
        f"scale, one a row [rows, 1], [rows, k / 128] or [rows / 128, k / 128] in float32, [rows, "
        f"k / 32] or [rows / 32, k / 32] in float8_e8m0fnu, or [rows, k / 16] or [rows / 16, "
        f"k / 16] in float8_e4m3fn."
    )


def _of_torchao(x: Any) -> tuple[torch.Tensor, torch.Tensor, torch.dtype]:
    """Return codes, the factors of elements, and the nominal dtype of a tensor of torchao.

    torchao's Float8Tensor and MXTensor hold factors, Float8TrainingTensor their reciprocals.
    """
    data, scale = getattr(x, "qdata", None), getattr(x, "scale", None)
    if isinstance(data, torch.Tensor) and isinstance(scale, torch.Tensor):
        return data, scale, x.dtype
    parts = [getattr(x, name, None) for name in ("_data", "_scale", "_orig_dtype")]
    if isinstance(parts[0], torch.Tensor) and isinstance(parts[1], torch.Tensor):
        return parts[0], torch.ones_like(parts[1]) / parts[1], parts[2] or torch.bfloat16
    raise OperandError(
        f"from_torch({type(x).__name__}) without scales: expected a Float8Tensor, "
        f"Float8TrainingTensor or MXTensor of torchao. Give torch's data its scale_inv."
    )
