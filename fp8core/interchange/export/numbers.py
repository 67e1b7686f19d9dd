"""Arithmetic that ONNX lacks, from operations that it has, exact in float32.

ONNX reads no bits of a float, and its runtimes approximate powers and logarithms, so powers of two
are found by comparisons and rounding to a format by dividing, rounding and multiplying.
"""

from __future__ import annotations

import torch

__all__ = ["largest_power_of_two", "reciprocal", "round_to_e2m1", "smallest_power_of_two"]

_SMALLEST_NORMAL = 2.0**-126


def largest_power_of_two(x: torch.Tensor) -> torch.Tensor:
    """Return the largest power of two up to each ``x`` (float32, not negative, finite), and 0 where
    ``x`` is below 2^-126: the float32 without the bits of its mantissa."""
    power = torch.full_like(x, _SMALLEST_NORMAL)
    # The exponent above -126 is found bit by bit: 2^128 is no float32, so it takes two factors.
    for factors in ((2.0**64, 2.0**64), *((2.0**bit,) for bit in (64, 32, 16, 8, 4, 2, 1))):
        larger = power
        for factor in factors:
            larger = larger * factor
        power = torch.where(larger <= x, larger, power)
    return torch.where(x < _SMALLEST_NORMAL, 0.0, power)


def smallest_power_of_two(x: torch.Tensor) -> torch.Tensor:
    """Return the smallest power of two from each ``x`` (float32, not negative) on, between 2^-127
    and 2^127: the value of an e8m0 code that is rounded up."""
    low = largest_power_of_two(x.clamp(max=2.0**127))
    power = torch.where(low < x, low * 2, low).clamp(max=2.0**127)
    return torch.where(x <= 2.0**-127, 2.0**-127, power.clamp(min=_SMALLEST_NORMAL))


def reciprocal(x: torch.Tensor) -> torch.Tensor:
    """Return ``1 / x`` by a division: runtimes approximate ONNX's Reciprocal."""
    return torch.ones_like(x) / x


def round_to_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Return float32 ``x`` rounded to the values of e2m1, ties to even; saturates, and NaN is 6."""
    # 0 0.5 1 1.5 2 | 3 4 | 6: the step is 0.5 below 2, 1 below 4, 2 above.
    magnitude = x.abs()
    step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    rounded = (torch.round(magnitude / step) * step).clamp(max=6.0)
    rounded = torch.where(x.isnan(), 6.0, rounded)
    return torch.where(x < 0, -rounded, rounded)
