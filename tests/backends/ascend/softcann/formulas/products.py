"""Products of quantized matrices, of one and of groups."""

from __future__ import annotations

from typing import Any

import torch

from tests.backends.ascend.softcann.device import Described, formula
from tests.backends.ascend.softcann.formulas.casts import spread
from tests.backends.ascend.softcann.formulas.values import (
    Optional,
    T,
    decode,
    store,
)


def product(x1: T, x2: T, scale1: Optional, scale2: T, groups: int) -> torch.Tensor:
    """x1 [m, k] times x2 [k, n], each times its scales."""
    a, b = decode(x1), decode(x2)
    if scale2.dtype == "float8_e8m0":
        assert scale1 is not None
        rows = decode(scale1).flatten(-2)  # [m, k / 32]
        cols = decode(scale2).movedim(-1, -2).flatten(0, 1)  # [k / 32, n]
        return (a * spread(rows, (1, 32), a.shape)) @ (b * spread(cols, (32, 1), b.shape))
    if scale2.values.dim() == 2 and groups:
        assert scale1 is not None
        m, n, k = (groups >> 32) & 0xFFFF, (groups >> 16) & 0xFFFF, groups & 0xFFFF
        scaled = a * spread(scale1.values, (m, k), a.shape)
        return scaled @ (b * spread(scale2.values, (k, n), b.shape))
    result = (a @ b) * scale2.values
    if scale1 is None:
        return result
    return result * (scale1.values if scale1.values.numel() == 1 else scale1.values[:, None])


@formula("aclnnQuantMatmulV5")
def quant_matmul(*arguments: Any) -> None:
    x1, x2, scale1, scale2, *_, bias, _transposed1, _transposed2, groups, out = arguments
    result = product(x1, x2, scale1, scale2, groups)
    store(out, result if bias is None else result + decode(bias))


@formula("aclnnQuantBatchMatmulInplaceAdd")
def quant_matmul_inplace_add(*arguments: Any) -> None:
    x1, x2, scale1, scale2, to, _transposed1, _transposed2, groups = arguments
    to.values.add_(product(x1, x2, scale1, scale2, groups))


def parts_of(bounds: T, step: int) -> list[tuple[slice, slice]]:
    """For each group that ends at ``bounds``, where it lies along k, and where its scales of
    blocks of ``step`` do: group ``i`` from ``start // step + i`` on."""
    parts, start = [], 0
    for group, end in enumerate(bounds.values.tolist()):
        assert end >= start
        first = start // step + group if step else group
        count = -(-(end - start) // step) if step else 1
        parts.append((slice(start, end), slice(first, first + count)))
        start = end
    return parts


def narrowed(x: T, at: slice) -> T:
    return Described(x.values[at], x.dtype)


def one_of(scale: T, at: int) -> torch.Tensor:
    """The scale, or the scales of the rows, of a group."""
    return scale.values[at].reshape(-1)


def product_of_rows(x: T, weight: T, scales: tuple[T, T], group: int, rows: slice) -> torch.Tensor:
    """x [m, k] of a group times its weight [k, n]."""
    first, second = scales
    part, matrix = narrowed(x, rows), Described(weight.values[group], weight.dtype)
    if second.dtype == "float8_e8m0":
        of_matrix = Described(second.values[group], second.dtype)
        return product(part, matrix, narrowed(first, rows), of_matrix, 0)
    if second.values.dim() == 3:  # blocks of 128
        a = decode(part) * spread(first.values[rows], (1, 128), part.shape)
        return a @ (decode(matrix) * spread(second.values[group], (128, 128), matrix.shape))
    is_per_row = first.shape == (x.shape[0],)
    factor = first.values[rows, None] if is_per_row else one_of(first, group)
    return (decode(part) @ decode(matrix)) * one_of(second, group) * factor


def product_of_terms(
    x: T, weight: T, scales: tuple[T, T], group: int, at: tuple[slice, slice]
) -> torch.Tensor:
    """x [m, k of a group] times weight [k of a group, n]; x is a transposed view."""
    first, second = scales
    a, b = decode(x)[:, at[0]], decode(weight)[at[0]]
    if second.dtype == "float8_e8m0":
        rows, cols = (decode(narrowed(scale, at[1])) for scale in scales)  # [k / 64, size, 2]
        left = rows.permute(1, 0, 2).flatten(1)
        right = cols.permute(0, 2, 1).flatten(0, 1)
        return (a * spread(left, (1, 32), a.shape)) @ (b * spread(right, (32, 1), b.shape))
    return (a @ b) * one_of(first, group)[:, None] * one_of(second, group)


@formula("aclnnGroupedMatmulV4")
def grouped_matmul(*arguments: Any) -> None:
    """Quantized: one tensor each. Rows, or for group type 2 terms, belong to groups."""
    (x,), (weight,), bias, (scale,), *_, (x_scale,), bounds = arguments[:9]
    _split, kind, list_type, activation, (out,), *_ = arguments[12:]
    assert (list_type, activation, bias or None) == (0, 0, None)
    scales = (x_scale, scale)
    if kind == 0:
        assert weight.values.dim() == 3
        for group, (rows, _) in enumerate(parts_of(bounds, 0)):
            result = product_of_rows(x, weight, scales, group, rows)
            store(narrowed(out, rows), result)
        return
    assert kind == 2
    assert x.is_transposed or 1 in x.shape
    step = 64 if scale.dtype == "float8_e8m0" else 0
    for group, at in enumerate(parts_of(bounds, step)):
        if at[0].start != at[0].stop:  # whether an empty group is written is not documented
            store(narrowed(out, group), product_of_terms(x, weight, scales, group, at))


@formula("aclnnQuantGroupedMatmulInplaceAdd")
def grouped_matmul_inplace_add(*arguments: Any) -> None:
    x1, x2, scale1, scale2, bounds, to, list_type, groups = arguments
    assert (list_type, groups) == (0, 0)
    step = 64 if scale2.dtype == "float8_e8m0" else 0
    x = Described(x1.values, x1.dtype)
    for group, at in enumerate(parts_of(bounds, step)):
        to.values[group] += product_of_terms(x, x2, (scale1, scale2), group, at)
