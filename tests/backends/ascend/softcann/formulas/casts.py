"""Casts: to one scale a tensor, a row or a block, and to microscaling."""

from __future__ import annotations

from typing import Any

import torch

from tests.backends.ascend.softcann.device import formula
from tests.backends.ascend.softcann.formulas.values import (
    LARGEST,
    T,
    amax,
    decode,
    divide,
    store,
)


def scale_and_divide(x: T, dtype: int, mode: str, y: T, scale: T, *, largest: float = 0.0) -> None:
    """scale = amax * (1 / largest), y = x / scale."""
    values = decode(x)
    dims = {"pertensor": None, "pertoken": -1, "perchannel": -2}
    dim = dims[mode]
    largest = largest if dtype == 34 and largest else LARGEST[dtype]
    factor = amax(values, dim) * (torch.tensor(1.0) / torch.tensor(largest))
    scale.values.copy_(factor.reshape(scale.shape))
    store(y, divide(values, (factor if dim is None else factor.unsqueeze(dim)).expand_as(values)))


@formula("aclnnDynamicQuantV4")
def dynamic_quant_v4(*arguments: Any) -> None:
    x, _smooth, _groups, dtype, _symmetric, mode, largest, y, scale, _offset = arguments
    scale_and_divide(x, dtype, mode, y, scale, largest=largest)


@formula("aclnnDynamicQuantV3")
def dynamic_quant_v3(*arguments: Any) -> None:
    x, _smooth, _groups, dtype, _symmetric, mode, y, scale, _offset = arguments
    scale_and_divide(x, dtype, mode, y, scale)


@formula("aclnnDynamicQuantV2")
def dynamic_quant_v2(*arguments: Any) -> None:
    x, _smooth, _groups, dtype, y, scale, _offset = arguments
    scale_and_divide(x, dtype, "pertoken", y, scale)


@formula("aclnnQuantMax")
def quant_max(x: T, scale: T, rounding: str, dtype: int, y: T, largest: T) -> None:
    """y = x * scale, and the amax of x."""
    assert rounding == ("round" if dtype == 34 else "rint"), "no document gives hybrid rounding"
    values = decode(x)
    store(y, values * scale.values)
    store(largest, amax(values))


@formula("aclnnDynamicBlockQuantV2")
def dynamic_block_quant(*arguments: Any) -> None:
    """scale = amax / largest of each block, y = x / scale."""
    x, _least, _rounding, dtype, rows, cols, largest, y, scale = arguments
    values = decode(x)
    m, k = values.shape
    padded = torch.nn.functional.pad(values, (0, -k % cols, 0, -m % rows))
    blocks = padded.reshape(padded.shape[0] // rows, rows, padded.shape[1] // cols, cols)
    factors = amax(blocks, (1, 3)) / (largest or LARGEST[dtype])
    scale.values.copy_(factors)
    store(y, divide(values, spread(factors, (rows, cols), values.shape)))


def spread(factors: torch.Tensor, block: tuple[int, int], shape: Any) -> torch.Tensor:
    rows = factors.repeat_interleave(block[0], 0)[: shape[0]]
    return rows.repeat_interleave(block[1], 1)[:, : shape[1]]


def mx_quant(x: T, axis: int, dtype: int, algorithm: int, y: T, scale: T) -> None:
    """Blocks of 32 along ``axis``; algorithm 1 rounds the exponent of amax / largest up. A block
    with inf or NaN has the exponent 255, which is NaN, and the codes 0."""
    assert algorithm == 1, "only the rule of rounding up is used"
    values = decode(x).movedim(axis, -1)
    size = values.shape[-1]
    blocks = torch.nn.functional.pad(values, (0, -size % 32)).unflatten(-1, (-1, 32))
    is_bad = ~blocks.isfinite().all(-1)
    blocks = blocks.masked_fill(is_bad[..., None], 0.0)
    mantissa, exponent = torch.frexp(amax(blocks, -1) / LARGEST[dtype])  # mantissa in [1/2, 1)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent).clamp(-127, 127)
    exponent = torch.where(mantissa == 0, -127, exponent)
    exponent = exponent.masked_fill(is_bad, 128)
    factors = torch.exp2(-exponent.float())
    scaled = (blocks * factors[..., None]).flatten(-2)[..., :size]
    store(y, scaled.movedim(-1, axis))
    codes = torch.nn.functional.pad(exponent + 127, (0, exponent.shape[-1] % 2))
    pairs = codes.unflatten(-1, (-1, 2))  # [..., ceil(size / 64), 2]
    scale.values.copy_((pairs if axis == -1 else pairs.movedim(-2, -3)).to(torch.uint8))


@formula("aclnnDynamicMxQuantV3")
def dynamic_mx_quant(*arguments: Any) -> None:
    x, axis, _rounding, dtype, _block, algorithm, _largest, _low, y, scale = arguments
    mx_quant(x, axis if axis < 0 else axis - x.values.dim(), dtype, algorithm, y, scale)


@formula("aclnnDynamicMxQuantWithDualAxisV2")
def dynamic_mx_quant_with_dual_axis(*arguments: Any) -> None:
    x, _rounding, dtype, algorithm, _largest, row, row_scale, column, column_scale = arguments
    mx_quant(x, -1, dtype, algorithm, row, row_scale)
    mx_quant(x, -2, dtype, algorithm, column, column_scale)
