"""A question to a device, and the comparison of what it gives with exact values."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch


class Question(NamedTuple):
    """A point that no document settles: the assumption, and how the device answers."""

    name: str
    assumption: str
    ask: Callable[[torch.device], tuple[object, object]]
    """Return what is assumed and what the device gives; the assumption holds if they are equal."""


def worst_row_snr(result: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the smallest ratio of signal to error of a row, dB; -inf for NaN."""
    error = (result.cpu().double() - exact).square().sum(-1)
    ratios = 10 * torch.log10(exact.square().sum(-1) / error.clamp(min=1e-300))
    return float(ratios.nan_to_num(nan=-torch.inf).min())
