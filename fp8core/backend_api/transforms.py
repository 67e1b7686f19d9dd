"""The transforms that an operand may take along k before it is quantized."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

__all__ = ["INVERSES", "TRANSFORMS", "hadamard16", "hadamard16_unsigned"]

_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
"""The fixed signs of the transform. Source: docs/numerics.md 3.5, RHT."""


_NO_SIGNS = (1,) * 16


@functools.lru_cache(maxsize=16)
def _signs(device: torch.device, signs: tuple[int, ...]) -> torch.Tensor:
    """Return the signs divided by 16, so that no sum of 16 bfloat16 numbers overflows. Dividing
    changes no rounding: multiples of 2^-133 keep 16 bits down to the last of float32."""
    sixteenths = [sign / 16 for sign in signs]
    return torch.tensor(sixteenths, dtype=torch.float32, device="cpu").to(device)


def hadamard16(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Transform every 16 elements along ``dim`` by ``diag(signs) H / 4``; bf16 in and out.

    The matrix is orthogonal, so a GEMM over two operands transformed along k is unchanged but for
    rounding. Sums are float32, of two at a time in a fixed order, so that every device computes the
    same bits; inf is a result beyond bfloat16 alone. Source: docs/numerics.md, NVFP4BlockScaling.
    """
    return _transformed(x, dim, _SIGNS)


def hadamard16_unsigned(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Transform as :func:`hadamard16` does, by ``H / 4`` alone."""
    return _transformed(x, dim, _NO_SIGNS)


def _transformed(x: torch.Tensor, dim: int, by: tuple[int, ...]) -> torch.Tensor:
    rows, cols = x.shape
    values = x.to(torch.bfloat16).to(torch.float32)
    # A tensor subclass (fake while tracing) must not outlive its mode, so its signs are not cached.
    make = _signs if type(x) is torch.Tensor else _signs.__wrapped__
    shape = (rows // 16, 16, cols) if dim == 0 else (rows, cols // 16, 16)
    along = 1 if dim == 0 else 2
    signs = make(x.device, by)
    signed = values.reshape(shape) * (signs[:, None] if dim == 0 else signs)
    parts = list(signed.unbind(along))
    for half in (1, 2, 4, 8):  # H of 2 h elements is [[H, H], [H, -H]] of h
        for first in range(16):
            if not first & half:
                second = first | half
                one, other = parts[first], parts[second]
                parts[first], parts[second] = one + other, one - other
    transformed = torch.stack(parts, along) * 4
    return transformed.reshape(rows, cols).to(torch.bfloat16)


def _inverse(x: torch.Tensor, by: tuple[int, ...]) -> torch.Tensor:
    """Return ``x [rows, k]``, float32, transformed back: ``H / 4`` is its own inverse."""
    rows, k = x.shape
    parts = list(x.reshape(rows, k // 16, 16).unbind(2))
    for half in (1, 2, 4, 8):
        for first in range(16):
            if not first & half:
                one, other = parts[first], parts[first | half]
                parts[first], parts[first | half] = one + other, one - other
    signed = [part * (sign / 4) for part, sign in zip(parts, by, strict=True)]
    return torch.stack(signed, 2).reshape(rows, k)


TRANSFORMS: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "hadamard16": hadamard16,
    "hadamard16_unsigned": hadamard16_unsigned,
}
"""``f(x [rows, cols], dim) -> [rows, cols]`` by the name that :class:`OperandSpec` has for it."""

INVERSES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "hadamard16": lambda x: _inverse(x, _SIGNS),
    "hadamard16_unsigned": lambda x: _inverse(x, _NO_SIGNS),
}
"""``f(x [rows, k]) -> [rows, k]`` in float32 that undoes the transform of that name along k."""
