"""How far a result is from what it should be, as a share of what it may be."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from fp8core.backend_api import Operand

__all__ = ["EQUAL", "UNEQUAL", "Error", "equals", "operands_equal", "share"]

EQUAL, UNEQUAL = 0.0, math.inf
"""The share of a result that must be equal bit for bit, and is, or is not."""


class Error(NamedTuple):
    """An error as a share of its bound (above 1 fails), and what the bound is."""

    share: float
    judged_by: str


def share(found: torch.Tensor, expected: torch.Tensor, bound: torch.Tensor) -> float:
    """Return the worst ``|found - expected| / bound``, inf for a NaN or for another shape.

    ``found`` may be of any dtype and device; the others are float64 on the CPU.
    """
    if found.shape != expected.shape:
        return UNEQUAL
    apart = (found.double().cpu() - expected).abs()
    shares = torch.where(apart == 0, 0.0, apart / bound)
    worst = shares.nan_to_num(nan=math.inf).amax() if shares.numel() else torch.zeros(())
    return float(worst)


def equals(ours: torch.Tensor | None, theirs: torch.Tensor | None) -> bool:
    """Return whether two tensors, perhaps of other devices and strides, or None, are equal."""
    if ours is None or theirs is None:
        return ours is theirs
    return torch.equal(ours.cpu().contiguous(), theirs.cpu().contiguous())


def operands_equal(ours: Operand | None, theirs: Operand | None) -> bool:
    """Return whether two operands, or None, hold the same codes and scales."""
    if ours is None or theirs is None:
        return ours is theirs
    return all(map(equals, ours, theirs))
