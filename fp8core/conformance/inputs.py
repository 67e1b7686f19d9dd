"""Matrices that find faults: many decades, outliers, zeros, subnormals, inf and NaN, odd strides.

All matrices are drawn on the CPU from a fixed seed, so that a failure repeats on every machine.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch


def _normal(rows: int, cols: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, cols, generator=generator)


def _uniform(rows: int, cols: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(rows, cols, generator=generator)


def _decades(rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
    reach = 2 if dtype == torch.float16 else 6
    return _normal(rows, cols, 1) * 10.0 ** (reach * (2 * _uniform(rows, cols, 2) - 1))


def _outlier(rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
    x = _normal(rows, cols, 3)
    x[rows // 2, cols // 3] = -6e4 if dtype == torch.float16 else -1e6
    return x


def _holes(rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
    """Zero rows, columns and blocks, and -0."""
    x = _normal(rows, cols, 4)
    x[::3] = 0.0
    x[:, 32:64] = 0.0
    x[1::3, 1::5] = -0.0
    x[:, cols // 2] = -0.0
    return x


def _tiny(rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
    """Subnormals of the dtype in every second row, and small normals in the other rows."""
    limits = torch.finfo(dtype)
    steps = (_uniform(rows, cols, 5) * 64).round() * _normal(rows, cols, 6).sign()
    x = steps.double() * limits.tiny * limits.eps
    x[1::2] *= 2.0**12
    return x


def _huge(rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
    return (_uniform(rows, cols, 7) * 2 - 1).double() * torch.finfo(dtype).max


def _nonfinite(rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
    """NaN and inf scattered over the matrix, a row of NaN, and an inf in another row."""
    x = _normal(rows, cols, 8)
    draw = _uniform(rows, cols, 9)
    for at, value in enumerate((math.nan, math.inf, -math.inf)):
        x[(draw > 0.9 + 0.03 * at) & (draw < 0.91 + 0.03 * at)] = value
    x[rows // 2] = math.nan
    x[rows // 3, cols // 2] = math.inf
    return x


KINDS: dict[str, Callable[[int, int, torch.dtype], torch.Tensor]] = {
    "decades": _decades,
    "outlier": _outlier,
    "holes": _holes,
    "subnormals": _tiny,
    "huge": _huge,
    "nonfinite": _nonfinite,
}


@functools.lru_cache(maxsize=512)
def matrix(kind: str, rows: int, cols: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Return ``x [rows, cols]`` of ``dtype`` on the CPU, from a cache: callers must not write to
    ``x``.

    Seeds from 0 to 7 give different values of the same kind.
    """
    if rows == 0 or cols == 0:
        return torch.empty(rows, cols, dtype=dtype)
    x = KINDS[kind](rows, cols, dtype)
    return (x.roll((seed, 5 * seed), (0, 1)) * (1 - seed / 8)).to(dtype)


@functools.lru_cache(maxsize=512)
def moderate(rows: int, cols: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Return ``x [rows, cols]`` within +-8 whose rows differ by up to a factor 100."""
    spread = 10.0 ** (2 * _uniform(rows, 1, seed + 1) - 1)
    return (_normal(rows, cols, seed) * spread).clamp(-8, 8).to(dtype)


@functools.lru_cache(maxsize=512)
def normal(size: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Return a tensor of ``size``, normally distributed with standard deviation 1."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, generator=generator).to(dtype)


@functools.lru_cache(maxsize=64)
def late(rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
    """Return ``x [rows, cols]`` over some decades, the largest magnitude at the very end."""
    x = (_normal(rows, cols, 10) * 10.0 ** (2 * _uniform(rows, cols, 11) - 1)).clamp(-90, 90)
    x[-1, -1] = -100.0
    return x.to(dtype)


@functools.lru_cache(maxsize=64)
def far_from_zero(rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
    """Return ``x [rows, cols]`` whose rows hold two values each: a base and a value just above.

    The first element of a row, and one in twenty of the rest, has the value above.
    """
    base = 1 + _uniform(rows, 1, 12)
    steps = (_uniform(rows, cols, 13) < 0.05).float()
    steps[:, 0] = 1
    return (base.to(dtype).float() * (1 + steps * 1.5 * torch.finfo(dtype).eps) * 64).to(dtype)


def shifted(x: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy of ``x``, one element behind the start of its memory: the address is
    aligned to an element and to nothing larger."""
    buffer = torch.full((x.numel() + 1,), 77, dtype=x.dtype, device=x.device)
    view = buffer[1:].view(x.shape)
    view.copy_(x)
    return view


def strided(x: torch.Tensor) -> torch.Tensor:
    """Return a copy of ``x`` with the first dimension innermost and a gap behind each element."""
    backwards = range(x.ndim - 1, -1, -1)
    *outer, last = x.permute(*backwards).shape
    buffer = torch.full((*outer, 2 * last + 1), 77, dtype=x.dtype, device=x.device)
    view = (buffer[..., 1 : 2 * last : 2] if last else buffer[..., :0]).permute(*backwards)
    view.copy_(x)
    return view


def spaced(x: torch.Tensor) -> torch.Tensor:
    """Return a copy of the matrix ``x`` with a gap between the rows."""
    rows, cols = x.shape
    buffer = torch.full((rows, cols + 3), 77, dtype=x.dtype, device=x.device)
    view = buffer[:, 1 : cols + 1]
    view.copy_(x)
    return view


def aligned(x: torch.Tensor) -> torch.Tensor:
    """Return a copy of ``x`` with gaps between the rows that leave whole vectors of 16 elements at
    aligned addresses."""
    *outer, last = x.shape
    buffer = torch.full((*outer, last + 32), 77, dtype=x.dtype, device=x.device)
    view = buffer[..., 16 : 16 + last]
    view.copy_(x)
    return view


def transposed(x: torch.Tensor) -> torch.Tensor:
    """Return a copy of ``x`` with the first dimension innermost in memory."""
    backwards = range(x.ndim - 1, -1, -1)
    return x.permute(*backwards).contiguous().permute(*backwards)


def expanded(x: torch.Tensor) -> torch.Tensor:
    """Return the middle row of ``x`` in the place of every row, with stride 0, as in the gradient
    of a sum."""
    return x[len(x) // 2 :][:1].expand(*x.shape)
