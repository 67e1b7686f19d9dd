"""Errors of results, as shares of the allowed error."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from fp8core.backend_api import Operand

__all__ = ["EQUAL", "UNEQUAL", "Error", "equals", "operands_equal", "share"]

EQUAL, UNEQUAL = 0.0, math.inf
"""The errors of a result that must be equal bit for bit: it is equal, or it is not."""


class Error(NamedTuple):
    """An error as a share of its bound, which fails above 1; and the words for the bound."""

    share: float
    judged_by: str


def share(result: torch.Tensor, expected: torch.Tensor, bound: torch.Tensor) -> float:
    """Return the worst ``|result - expected| / bound``, inf for a NaN or for another shape.

    ``result`` may be of any dtype and device; the others are float64 on the CPU.
    """
    if result.shape != expected.shape:
        return UNEQUAL
    apart = (result.double().cpu() - expected).abs()
    shares = torch.where(apart == 0, 0.0, apart / bound)
    worst = shares.nan_to_num(nan=math.inf).amax() if shares.numel() else torch.zeros(())
    return float(worst)


def equals(ours: torch.Tensor | None, theirs: torch.Tensor | None) -> bool:
    """Return whether two tensors of any device and strides are equal, or both are None."""
    if ours is None or theirs is None:
        return ours is theirs
    return torch.equal(ours.cpu().contiguous(), theirs.cpu().contiguous())


def operands_equal(ours: Operand | None, theirs: Operand | None) -> bool:
    """Return whether two operands hold the same codes and scales, or both are None."""
    if ours is None or theirs is None:
        return ours is theirs
    return all(map(equals, ours, theirs))
