"""Packing and stochastic rounding of e2m1; the transform is defined by the contract."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fp8core_backends.reference.private import FakeTensor

_MASK = 0xFFFFFFFF


def pack(codes: torch.Tensor, dim: int) -> torch.Tensor:
    """Pack pairs of 4-bit codes along ``dim``: ``hhhhllll``, the even element is the low half."""
    if dim == 0:
        return codes[0::2] | (codes[1::2] << 4)
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def unpack(data: torch.Tensor) -> torch.Tensor:
    """Undo :func:`pack` along the last dimension: ``[rows, k / 2]`` -> ``[rows, k]``."""
    return torch.stack((data & 0x0F, data >> 4), dim=-1).flatten(-2)


def stochastically(x: torch.Tensor, rng: torch.Tensor | None, dim: int) -> torch.Tensor:
    """Round ``x`` to values of e2m1, up or down with probabilities that keep the mean.

    ``rng`` int64 ``[2]`` on the CPU is seed and offset; ``dim`` keeps the two orientations of one
    tensor apart. Magnitudes beyond 6 stay beyond, and NaN stays NaN.
    """
    noise = _noise(x, rng, dim)
    magnitude = x.abs()
    # e2m1 is 0 0.5 1 1.5 2 | 3 4 | 6: the step is 0.5 below 2, 1 below 4, 2 above.
    # The step is half the largest power of two that the magnitude reaches, and half of 1 below 1.
    # Values that saturate are clamped first, because inf has no such power:
    # s eeeeeeee mmm...m -> s eeeeeeee 000...0.
    power = magnitude.clamp(1.0, 8.0).view(torch.int32).bitwise_and_(0x7F800000)
    step = power.view(torch.float32).mul_(0.5)
    position = magnitude / step
    low = torch.floor(position)
    # Both sides are exact; position + noise would be rounded.
    rounded = (low + (position - low >= 1 - noise)) * step
    return torch.copysign(rounded, x)


def seed_of(x: torch.Tensor, rng: torch.Tensor | None) -> tuple[int, int] | None:
    """Return the seed and the offset in ``rng`` for ``x``; None if either has no values."""
    assert rng is not None
    if x.is_meta or isinstance(rng, FakeTensor):
        return None
    seed, offset = (int(value) for value in rng)
    return seed, offset


def _noise(x: torch.Tensor, rng: torch.Tensor | None, dim: int) -> torch.Tensor:
    """Return float32 in (0, 1) of the shape of ``x``: ``(r + 0.5) / 2^16``, r of 16 random bits.

    One Philox block serves 2 rows x 4 elements along k of the operand, so that a kernel computes
    none twice in either orientation: element (row, i) has bits ``16 (i % 2)`` and up of word
    ``2 (row % 2) + i % 4 / 2`` of block ``row / 2 * ceil(k / 4) + i / 4``. The key is the seed, the
    counter's upper half the offset and the orientation.
    """
    drawn = seed_of(x, rng)
    if drawn is None:
        return torch.empty_like(x, dtype=torch.float32)
    seed, offset = drawn
    rows, k = x.shape if dim == 1 else (x.shape[1], x.shape[0])
    pairs, fours = -(-rows // 2), -(-k // 4)
    index = torch.arange(pairs * fours, dtype=torch.int64, device=x.device)
    upper = (offset & _MASK, ((offset >> 32) << 1 | dim) & _MASK)
    words = _philox((index & _MASK, index >> 32, *upper), (seed & _MASK, seed >> 32 & _MASK))
    whole = torch.stack(words, -1).to(torch.int32)
    bits = torch.stack((whole & 0xFFFF, whole >> 16 & 0xFFFF), -1)
    noise = bits.to(torch.float32).add_(0.5).mul_(2.0**-16)
    # [2 rows, 2 words, 2 halves] a block -> [rows, k]
    noise = noise.reshape(pairs, fours, 2, 4).transpose(1, 2).reshape(2 * pairs, 4 * fours)
    noise = noise[:rows, :k]
    return noise if dim == 1 else noise.t()


def _philox(counter: Sequence[Any], key: tuple[int, int]) -> list[torch.Tensor]:
    """Return four words of 32 random bits for each counter of four such words: Philox4x32-10.

    Words are int64, where a product that overflows keeps the bits that are wanted; the first of
    the counter is a tensor, another may be an int for all.

    Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011, sec. 3.3.
    """
    c0, *words = counter
    c1, c2, c3 = (
        word.clone() if isinstance(word, torch.Tensor) else torch.full_like(c0, word)
        for word in words
    )
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0 = c1.bitwise_xor_(p1 >> 32).bitwise_xor_(k0).bitwise_and_(_MASK)
        c2 = c3.bitwise_xor_(p0 >> 32).bitwise_xor_(k1).bitwise_and_(_MASK)
        c1, c3 = p1.bitwise_and_(_MASK), p0.bitwise_and_(_MASK)
        k0, k1 = k0 + 0x9E3779B9 & _MASK, k1 + 0xBB67AE85 & _MASK
    return [c0, c1, c2, c3]
