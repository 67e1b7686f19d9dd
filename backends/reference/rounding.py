"""What NVFP4 adds to a cast: packing and stochastic rounding; the transform is the contract's."""

from __future__ import annotations

import torch

from fp8core import formats
from fp8core.backend_api import hadamard16

__all__ = ["hadamard16", "pack", "stochastic_e2m1", "unpack"]


def pack(codes: torch.Tensor, dim: int) -> torch.Tensor:
    """Pack pairs of 4-bit codes along ``dim``: ``hhhhllll``, the even element is the low half."""
    if dim == 0:
        return codes[0::2] | (codes[1::2] << 4)
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def unpack(data: torch.Tensor) -> torch.Tensor:
    """Undo :func:`pack` along the last dimension: ``[rows, k / 2]`` -> ``[rows, k]``."""
    return torch.stack((data & 0x0F, data >> 4), dim=-1).flatten(-2)


def stochastic_e2m1(x: torch.Tensor, rng: torch.Tensor | None, dim: int) -> torch.Tensor:
    """Encode ``x`` as e2m1, up or down with probabilities that keep the mean; saturates.

    ``rng`` int64 ``[2]`` on the CPU is seed and offset; ``dim`` keeps the two orientations of one
    tensor apart. NaN becomes +6, as in the cast to the nearest.
    """
    noise = _noise(x, rng, dim)
    magnitude = x.abs()
    # e2m1 is 0 0.5 1 1.5 2 | 3 4 | 6: the step is 0.5 below 2, 1 below 4, 2 above.
    # That is half the power of two at or below the magnitude, if 1 at least; what saturates
    # anyway is cut first, as inf has no such power: s eeeeeeee mmm...m -> s eeeeeeee 000...0.
    power = magnitude.clamp(1.0, 8.0).view(torch.int32).bitwise_and_(0x7F800000)
    step = power.view(torch.float32).mul_(0.5)
    position = magnitude / step
    low = torch.floor(position)
    # The distance to low is exact. position + noise would not be: 3 + (1 - 2^-24) is 4 in float32,
    # and a value on the grid would move.
    rounded = (low + (noise < position - low)) * step
    return formats.by_name("e2m1").encode(torch.copysign(rounded, x))


def _noise(x: torch.Tensor, rng: torch.Tensor | None, dim: int) -> torch.Tensor:
    """Return float32 in [0, 1) of the shape of ``x``, multiples of 2^-24."""
    assert rng is not None
    if x.is_meta:  # there is no generator of this device
        return torch.empty_like(x, dtype=torch.float32)
    seed, offset = (int(value) for value in rng)
    generator = torch.Generator(device=x.device)
    generator.manual_seed((seed * 0x9E3779B97F4A7C15 + 2 * offset + dim) & 0x7FFFFFFFFFFFFFFF)
    return torch.rand(x.shape, generator=generator, dtype=torch.float32, device=x.device)
