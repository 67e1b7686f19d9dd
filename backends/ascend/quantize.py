"""Casts, and back: one call of torch_npu for both orientations where they share their codes.

A columnwise operand is a transposed view, as products take operands either way; only of blocks of
1 x 128 along columns the tensor is transposed first. Scales of Ascend are what values are divided
by, which is ``scale_inv``.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from fp8core.backend_api import (
    DequantizeDesc,
    Operand,
    OperandSpec,
    Quantized,
    QuantizeDesc,
    scale_inverses,
)
from fp8core_backends.ascend.kinds import Kind, kind_of
from fp8core_backends.ascend.operators import casts


def quantize(
    desc: QuantizeDesc,
    x: torch.Tensor,
    group_offsets: torch.Tensor | None = None,
    *,
    scale: torch.Tensor | None = None,
    amax_out: torch.Tensor | None = None,
) -> Quantized:
    """Quantize ``x [rows, cols]`` in the orientations of ``desc``; see the backend API."""
    if group_offsets is None:
        return _quantize(desc, x.contiguous(), scale, amax_out)
    bounds = group_offsets.tolist()  # on the CPU
    groups = []
    for group, (start, end) in enumerate(itertools.pairwise(bounds)):
        entry = slice(group, group + 1)
        group_scale = None if scale is None else scale[entry]
        group_amax = None if amax_out is None else amax_out[entry]
        groups.append(_quantize(desc, x[start:end].contiguous(), group_scale, group_amax))
    return Quantized(
        _join([group.rowwise for group in groups], 0),
        _join([group.columnwise for group in groups], 1),
    )


def _join(operands: Sequence[Operand | None], dim: int) -> Operand | None:
    present = [operand for operand in operands if operand is not None]
    if not present:
        return None
    scales = [operand.scale_inv for operand in present if operand.scale_inv is not None]
    parts = [operand.data for operand in present]
    if dim and all(part.t().is_contiguous() for part in parts):  # products take the view
        return Operand(torch.cat([part.t() for part in parts]).t(), torch.cat(scales, dim))
    return Operand(torch.cat(parts, dim), torch.cat(scales, dim))


def _quantize(
    desc: QuantizeDesc, x: torch.Tensor, scale: torch.Tensor | None, amax_out: torch.Tensor | None
) -> Quantized:
    row, column = desc.rowwise, desc.columnwise
    if x.numel() == 0:
        return Quantized(
            None if row is None else _empty(row, x, scale),
            None if column is None else _empty(column, x.t(), scale),
        )
    first = row if row is not None else column
    assert first is not None
    if first.delayed:
        assert scale is not None
        operand = _delayed(first, x, scale, amax_out)
    elif row is None or column is None or row != column or kind_of(first) is Kind.ROW:
        return Quantized(
            None if row is None else _rowwise(row, x),
            None if column is None else _columnwise(column, x),
        )
    elif kind_of(first) is Kind.MX:
        codes, exponents, column_codes, column_exponents = casts.mx_quant_both(x, first.format)
        return Quantized(
            Operand(codes, _blocks_of(exponents, x.shape[1])),
            _mx_columnwise(column_codes, column_exponents, x.shape[0]),
        )
    elif kind_of(first) is Kind.BLOCK:
        return Quantized(_rowwise(first, x), _columnwise(first, x))
    else:
        operand = _rowwise(first, x)
    return Quantized(
        None if row is None else operand, None if column is None else _transpose(operand)
    )


def _transpose(operand: Operand) -> Operand:
    assert operand.scale_inv is not None
    return Operand(operand.data.t(), operand.scale_inv.t())


def _empty(spec: OperandSpec, x: torch.Tensor, scale: torch.Tensor | None) -> Operand:
    """Return the operand of an empty ``x [rows, k]``: no codes, the inverse of a given scale, or
    scales of 1."""
    sizes = [
        -(-size // extent) if extent else 1
        for size, extent in zip(x.shape, spec.block, strict=True)
    ]
    data = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    if spec.scale_format == "e8m0":
        return Operand(data, torch.full(sizes, 127, dtype=torch.uint8, device=x.device))
    if scale is not None and spec.delayed:
        return Operand(data, torch.reciprocal(scale).reshape(1, 1))
    return Operand(data, torch.ones(sizes, dtype=torch.float32, device=x.device))


def _delayed(
    spec: OperandSpec, x: torch.Tensor, scale: torch.Tensor, amax_out: torch.Tensor | None
) -> Operand:
    """Return the operand of ``x`` times a given scale, and record the amax.

    No document says whether the amax of values with NaN is NaN, which would stay in the history.
    """
    codes, amax = casts.quant_max(x, scale.reshape(1), spec.format)
    if amax_out is not None:
        seen = amax.to(torch.float32).reshape(amax_out.shape)
        amax_out.copy_(torch.where(seen > amax_out, seen, amax_out))
    return Operand(codes, torch.reciprocal(scale).reshape(1, 1))


def _rowwise(spec: OperandSpec, x: torch.Tensor) -> Operand:
    """Return the operand of ``x`` itself, with scales derived from it."""
    kind = kind_of(spec)
    if kind is Kind.MX:
        codes, exponents = casts.mx_quant(x, spec.format, -1)
        return Operand(codes, _blocks_of(exponents, x.shape[1]))
    if kind is Kind.BLOCK or kind is Kind.SQUARE:
        return Operand(*casts.block_quant(x, spec.format, 1 if kind is Kind.BLOCK else 128))
    if x.dtype == torch.float32:
        return _by_amax(spec, x)
    mode: casts.QuantMode = "pertensor" if kind is Kind.TENSOR else "pertoken"
    codes, scale = casts.dynamic_quant(x, spec.format, spec.target, mode)
    return Operand(codes, scale.reshape(-1, 1))


def _by_amax(spec: OperandSpec, x: torch.Tensor) -> Operand:
    """Return the operand of float32 ``x``, which only the cast by a given scale takes: ``target /
    amax``, or 1 for an amax of 0 or inf. NaN has no part in the amax."""
    magnitudes = x.abs()
    amax = torch.where(magnitudes.isnan(), 0.0, magnitudes).amax().reshape(1)
    scale = (torch.full_like(amax, spec.target) / amax).clamp(max=torch.finfo(torch.float32).max)
    scale = torch.where((amax == 0) | torch.isinf(amax), 1.0, scale)
    codes, _ = casts.quant_max(x, scale, spec.format)
    return Operand(codes, torch.reciprocal(scale).reshape(1, 1))


def _columnwise(spec: OperandSpec, x: torch.Tensor) -> Operand:
    """Return the operand of ``x.T``, with scales derived from ``x``."""
    kind = kind_of(spec)
    if kind is Kind.MX:
        return _mx_columnwise(*casts.mx_quant(x, spec.format, -2), x.shape[0])
    if kind is Kind.ROW:
        codes, scale = casts.dynamic_quant(x, spec.format, spec.target, "perchannel")
        return Operand(codes.t(), scale.reshape(-1, 1))
    if kind is Kind.BLOCK:
        return _rowwise(spec, x.t().contiguous())
    return _transpose(_rowwise(spec, x))


def _blocks_of(exponents: torch.Tensor, k: int) -> torch.Tensor:
    """Return ``[rows, ceil(k / 32)]`` of exponents in pairs, ``[rows, ceil(k / 64), 2]``."""
    return exponents.flatten(1)[:, : -(-k // 32)]


def _mx_columnwise(codes: torch.Tensor, exponents: torch.Tensor, k: int) -> Operand:
    """Return the operand of ``codes [k, rows]`` with ``exponents [ceil(k / 64), rows, 2]``.

    The exponents are copied to ``[rows, ceil(k / 32)]``, which no strides express; they are a 32nd
    of the codes.
    """
    return Operand(codes.t(), _blocks_of(exponents.transpose(0, 1), k))


def dequantize(desc: DequantizeDesc, operand: Operand) -> torch.Tensor:
    """Return the values of ``operand [rows, k]`` in ``desc.dtype``, rounded once."""
    spec = desc.operand
    values = casts.decode(operand.data, spec.format)
    if spec.scale_format == "e8m0":  # torch_npu has no tensors in e8m0
        assert operand.scale_inv is not None
        factors = torch.exp2(operand.scale_inv.to(torch.float32) - 127)
    else:
        factors = scale_inverses(spec, operand)
    for dim, extent in enumerate(spec.block):
        if extent > 1:
            spread = factors.repeat_interleave(extent, dim)
            factors = spread.narrow(dim, 0, operand.data.shape[dim])
    return (values * factors).to(desc.dtype)
