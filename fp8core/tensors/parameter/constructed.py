"""Tensors by the constructors of Transformer Engine's classes: of codes, scales and a quantizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from fp8core import formats
from fp8core.backend_api import OperandSpec
from fp8core.errors import OperandError, RecipeError, UnsupportedError
from fp8core.formats import DType, format_of
from fp8core.recipe.plan import TensorPlan
from fp8core.tensors.checks import fit_codes, value_from
from fp8core.tensors.layouts import outer_scale, scales_from, shape_of
from fp8core.tensors.quantized_tensor import QuantizedTensor
from fp8core.tensors.quantizer import Orientations
from fp8core.tensors.storage import Casting, is_square, matrix_shape, storage_plan

Ways = tuple[tuple[Any, ...] | None, tuple[Any, ...] | None]
"""Codes, scales and scales above them of the rowwise and of the columnwise operand, as ours."""


def _specs(
    owner: str, spec: OperandSpec, quantizer: Any, blocks: Sequence[tuple[int, int]] = ()
) -> TensorPlan:
    """Return how both orientations are stored: as ``spec``, or as ``quantizer`` stores, in blocks
    as those of ``spec``, or one of ``blocks``.

    Raises:
        OperandError: ``quantizer`` stores something else.
    """
    if quantizer is None:
        return TensorPlan(spec, spec)
    plan = getattr(quantizer, "plan", None)
    row, column = storage_plan(plan) if isinstance(plan, TensorPlan) else (None, None)
    chosen = TensorPlan(row or column, column or row)
    for each in chosen:
        has_format = each is not None and _format(each) == _format(spec)
        if each is None or not has_format or each.block not in (spec.block, *blocks):
            raise OperandError(
                f"{owner}(quantizer={quantizer!r}): expected one that stores {spec}, or None."
            )
    return chosen


def _format(spec: OperandSpec) -> tuple[str, str]:
    return spec.format, spec.scale_format


def _stored(
    owner: str,
    specs: TensorPlan,
    ways: Ways,
    *,
    shape: Sequence[int],
    dtype: torch.dtype | None,
    quantizer: Any,
) -> QuantizedTensor:
    """Return the tensor of the operands of ``ways``, ``[n, k]`` and ``[k, n]``, stored as ``specs``
    say, which ``quantizer`` writes, if there is one.

    Raises:
        OperandError: they do not fit one another, or hold what no cast writes.
        UnsupportedError: blocks do not divide the sizes.
    """
    nominal = torch.float32 if dtype is None else dtype
    try:
        first, second = (
            None if way is None else fit_codes(way[0], way[1], spec, way[2], None, nominal)[0]
            for way, spec in zip(ways, specs, strict=True)
        )
    except OperandError as error:
        raise OperandError(f"{owner}: {error}") from None
    row, column = specs
    assert row is not None
    is_turned = second is None and is_square(row)
    plan = TensorPlan(row if first else None, column if second or is_turned else None)
    QuantizedTensor.check_sizes(shape, plan)
    tensor = QuantizedTensor(first, second, plan, nominal, shape=shape)
    return tensor.bound_to(getattr(quantizer, "slot", None))


def _codes(owner: str, *candidates: torch.Tensor | None) -> torch.Tensor:
    """Return the first of the codes that is there."""
    codes = next((each for each in candidates if each is not None), None)
    if not isinstance(codes, torch.Tensor) or not codes.dim():
        raise OperandError(f"{owner}: found {codes!r} for codes; expected a tensor [..., k].")
    return codes


def of_codes_and_scale(
    dtype: torch.dtype | None,
    *,
    data: torch.Tensor | None = None,
    fp8_scale_inv: torch.Tensor | None = None,
    fp8_dtype: object = "e4m3",
    data_transpose: torch.Tensor | None = None,
    quantizer: Any = None,
) -> QuantizedTensor:
    """Return the tensor of codes ``data [..., k]`` of a byte and one scale.

    ``data_transpose [k, ...]`` are its transposed codes, for one without ``data`` or beside it.

    Raises:
        OperandError: codes, scale and quantizer do not fit, or there are no codes.
    """
    owner = "Float8Tensor"
    name, codes = format_of(fp8_dtype, owner), _codes(owner, data, data_transpose)
    if not isinstance(fp8_scale_inv, torch.Tensor):
        raise OperandError(f"{owner}: fp8_scale_inv is {fp8_scale_inv!r}; expected its scale.")
    shape = shape_of(codes, is_turned=data is None)
    columnwise, matrix = None, matrix_shape(shape)[::-1]
    if data_transpose is not None:
        data_transpose = _codes(owner, data_transpose)
        if tuple(data_transpose.shape) not in (matrix, (shape[-1], *shape[:-1])):
            raise OperandError(
                f"{owner}: data_transpose {list(data_transpose.shape)} beside data {list(shape)}; "
                f"expected {list(matrix)}."
            )
        columnwise = data_transpose.reshape(matrix), fp8_scale_inv, None
    rowwise = None if data is None else (data, fp8_scale_inv, None)
    spec = OperandSpec(name, (0, 0), formats.by_name(name).max)
    specs = _specs(owner, spec, quantizer)
    ways = (rowwise, columnwise)
    return _stored(owner, specs, ways, shape=shape, dtype=dtype, quantizer=quantizer)


def _of_blocks(
    owner: str,
    specs: TensorPlan,
    dtype: torch.dtype | None,
    blocks: tuple[tuple[Any, Any], tuple[Any, Any]],
    quantizer: Any,
    *,
    amaxes: tuple[Any, Any] | None = None,
    per_byte: int = 1,
) -> QuantizedTensor:
    """Return the tensor of rowwise and columnwise codes and scales of blocks, ``per_byte`` codes in
    a byte, in the layout of Transformer Engine's class ``owner``; ``amaxes`` are those above their
    scales, if any are.

    Columnwise codes are ``[k, ...]``, but ``[..., k]`` in MX formats: these are copied, as they are
    stored transposed here.

    Raises:
        OperandError: codes, scales and quantizer do not fit, or there are no codes.
    """
    is_mx = owner == "MXFP8Tensor"
    rows, columns = (data for data, _ in blocks)
    codes = _codes(owner, rows, columns)
    shape = shape_of(codes, is_turned=rows is None and not is_mx, per_byte=per_byte)
    sizes = matrix_shape(shape)
    ways: list[tuple[Any, ...] | None] = []
    pairs = zip(blocks, specs, amaxes or (None, None), strict=True)
    for at, ((data, scales), spec, amax) in enumerate(pairs):
        if data is None:
            ways.append(None)
            continue
        assert spec is not None
        data = _codes(owner, data)
        if at:
            data = _transposed(owner, data, shape, is_mx=is_mx, per_byte=per_byte)
        scales = scales_from(owner, scales, spec, sizes, columnwise=bool(at))
        ways.append((data, scales, None if amaxes is None else _outer(owner, spec, amax)))
    return _stored(owner, specs, (ways[0], ways[1]), shape=shape, dtype=dtype, quantizer=quantizer)


def _transposed(
    owner: str, data: torch.Tensor, shape: Sequence[int], *, is_mx: bool, per_byte: int
) -> torch.Tensor:
    """Return columnwise codes ``data`` of a tensor of ``shape`` as the matrix ``[k, n]``.

    Raises:
        OperandError: they are those of another shape.
    """
    n, k = matrix_shape(shape)
    if matrix_shape(shape_of(data, is_turned=not is_mx, per_byte=per_byte)) != (n, k):
        raise OperandError(
            f"{owner}: columnwise_data {list(data.shape)} beside rowwise_data of {list(shape)}; "
            f"expected one shape{'' if is_mx else ', transposed'}."
        )
    if is_mx:
        return data.reshape(n, k).t().contiguous()
    return data.reshape(k, n // per_byte)


def _outer(owner: str, spec: OperandSpec, amax: Any) -> torch.Tensor:
    """Return the scale above the scales of blocks that follows from ``amax``."""
    if not isinstance(amax, torch.Tensor) or amax.dtype != torch.float32:
        raise OperandError(
            f"{owner}: its amax is {amax!r}; expected a float32 tensor, of one number or, under "
            f"scales of rows, one for each."
        )
    return outer_scale(spec, amax.detach())


def of_mx_blocks(
    dtype: torch.dtype | None,
    *,
    rowwise_data: torch.Tensor | None = None,
    rowwise_scale_inv: torch.Tensor | None = None,
    columnwise_data: torch.Tensor | None = None,
    columnwise_scale_inv: torch.Tensor | None = None,
    fp8_dtype: object = "e4m3",
    quantizer: Any = None,
    with_gemm_swizzled_scales: bool = False,
) -> QuantizedTensor:
    """Return the tensor of codes ``[..., k]`` with a scale in a byte for each 32.

    ``rowwise_scale_inv [n, k / 32]`` and ``columnwise_scale_inv [n / 32, k]`` may be padded.
    Columnwise codes are copied, as they are stored transposed here.

    Raises:
        OperandError: codes, scales and quantizer do not fit, or there are no codes.
        UnsupportedError: the scales are in the order of cuBLAS.
    """
    owner = "MXFP8Tensor"
    name = format_of(fp8_dtype, owner)
    _refuse_swizzled(owner, with_gemm_swizzled_scales)
    spec = OperandSpec(name, (1, 32), formats.by_name(name).max, "e8m0")
    return _of_blocks(
        owner,
        _specs(owner, spec, quantizer, [(32, 32)]),
        dtype,
        ((rowwise_data, rowwise_scale_inv), (columnwise_data, columnwise_scale_inv)),
        quantizer,
    )


def _refuse_swizzled(owner: str, is_swizzled: bool) -> None:
    if is_swizzled:
        raise UnsupportedError(
            f"{owner}(with_gemm_swizzled_scales=True) is not offered: scales are in the order of "
            f"their blocks here, and a product of CUDA orders them by itself."
        )


def of_float32_blocks(
    dtype: torch.dtype | None,
    *,
    rowwise_data: torch.Tensor | None = None,
    rowwise_scale_inv: torch.Tensor | None = None,
    columnwise_data: torch.Tensor | None = None,
    columnwise_scale_inv: torch.Tensor | None = None,
    fp8_dtype: object = "e4m3",
    quantizer: Any = None,
    is_2D_scaled: bool = False,
) -> QuantizedTensor:
    """Return the tensor of codes ``[..., k]`` with a float32 scale for each 128, or for 128 x 128
    if ``is_2D_scaled``.

    ``columnwise_data`` is ``[k, ...]``. Scales are ``[k / 128, n]`` and ``[n / 128, k]``, those of
    squares ``[n / 128, k / 128]`` and ``[k / 128, n / 128]``, and may be padded.

    Raises:
        OperandError: codes, scales and quantizer do not fit, or there are no codes.
    """
    owner = "Float8BlockwiseQTensor"
    name = format_of(fp8_dtype, owner)
    block = (128, 128) if is_2D_scaled else (1, 128)
    spec = OperandSpec(name, block, formats.by_name(name).max, power_of_two=True)
    return _of_blocks(
        owner,
        _specs(owner, spec, quantizer),
        dtype,
        ((rowwise_data, rowwise_scale_inv), (columnwise_data, columnwise_scale_inv)),
        quantizer,
    )


def of_two_levels(
    dtype: torch.dtype | None,
    *,
    rowwise_data: torch.Tensor | None = None,
    rowwise_scale_inv: torch.Tensor | None = None,
    columnwise_data: torch.Tensor | None = None,
    columnwise_scale_inv: torch.Tensor | None = None,
    amax_rowwise: torch.Tensor | None = None,
    amax_columnwise: torch.Tensor | None = None,
    fp4_dtype: object = DType.kFloat4E2M1,
    quantizer: Any = None,
    with_gemm_swizzled_scales: bool = False,
) -> QuantizedTensor:
    """Return the tensor of codes ``[..., k / 2]``, two in a byte, with an e4m3 scale for each 16
    under a float32 scale, which follows from the amax of the tensor or, several, of its rows.

    ``columnwise_data`` is ``[k, n / 2]``. Scales are ``[n, k / 16]`` and ``[k, n / 16]``, and may
    be padded.

    Raises:
        OperandError: codes, scales, amaxes and quantizer do not fit, or there are no codes.
        RecipeError: another format.
        UnsupportedError: the scales are in the order of cuBLAS.
    """
    owner = "NVFP4Tensor"
    name = format_of(fp4_dtype, owner)
    if formats.by_name(name).bits != 4:
        raise RecipeError(f"{owner}(fp4_dtype={fp4_dtype!r}): expected DType.kFloat4E2M1.")
    _refuse_swizzled(owner, with_gemm_swizzled_scales)
    amaxes = (amax_rowwise, amax_columnwise)
    spec = OperandSpec(name, (1, 16), formats.by_name(name).max, "e4m3")
    specs = _specs(owner, spec, quantizer, [(16, 16)])
    if quantizer is None:
        specs = TensorPlan(*(dataclasses.replace(spec, row_scaled=_is_several(a)) for a in amaxes))
    return _of_blocks(
        owner,
        specs,
        dtype,
        ((rowwise_data, rowwise_scale_inv), (columnwise_data, columnwise_scale_inv)),
        quantizer,
        amaxes=amaxes,
        per_byte=2,
    )


def _is_several(amax: Any) -> bool:
    return isinstance(amax, torch.Tensor) and amax.numel() != 1


def of_parts(
    dtype: torch.dtype | None = None,
    *,
    rowwise_storage: torch.Tensor | None = None,
    columnwise_storage: torch.Tensor | None = None,
    quantizer: Any = None,
) -> QuantizedTensor:
    """Return the tensor of the rowwise operand of one part and the columnwise one of the other,
    without a copy; a plain tensor is the value in high precision.

    The parts say how they are stored, ``quantizer`` what later writes make the columns of.

    Raises:
        OperandError: a part lacks its operand, none has one, or they differ in shape or device.
    """
    owner = "HybridQuantizedTensor"
    parts = {"rowwise": rowwise_storage, "columnwise": columnwise_storage}
    plain = {way: part for way, part in parts.items() if type(part) is torch.Tensor}
    for way, part in parts.items():
        is_stored = isinstance(part, QuantizedTensor) and getattr(part.plan, way)
        if part is not None and not (is_stored or (len(plain) == 1 and way in plain)):
            raise OperandError(
                f"{owner}({way}_storage={part!r}): expected a QuantizedTensor that holds {way}."
            )
    storages = [part for part in parts.values() if isinstance(part, QuantizedTensor)]
    places = {(part.shape, part.device) for part in parts.values() if part is not None}
    if len(places) != 1 or not storages:
        raise OperandError(f"{owner} of {parts}: expected a part, or two of one shape and device.")
    none = Orientations(None, None), TensorPlan(None, None)
    (rows, row), (columns, column) = (
        (part.operands, part.plan) if isinstance(part, QuantizedTensor) else none
        for part in parts.values()
    )
    plan = TensorPlan(row.rowwise, column.columnwise)
    nominal, shape = dtype or storages[0].dtype, storages[0].shape
    tensor = QuantizedTensor(rows.rowwise, columns.columnwise, plan, nominal, shape=shape)
    tensor._casting = Casting(columns_of=getattr(quantizer, "columns_of", None))
    tensor._lacks_slot = any(part._casting.slot or part._lacks_slot for part in storages)
    for value in plain.values():
        tensor._value = value_from(value, tensor)
    return tensor
