"""Casts that give a tensor with NaN or inf scales of NaN."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from fp8core.backend_api import Operand
from fp8core.tensors.low_precision import BoundQuantizer, LowPrecision
from fp8core.tensors.quantizer import Orientations

__all__ = ["Propagating", "propagating"]


_E8M0_NAN = 0xFF
"""Source: OCP MX v1.0 sec. 5.4.1."""


class Propagating(BoundQuantizer):
    """Casts, and makes the scales of a tensor with NaN or inf NaN, and so all results of it.

    It counts for itself, and then adds to the count ``nonfinite`` that others read: three small
    kernels more in each cast, and none of a backend's fusions, pairs and chunks.
    """

    __slots__ = ()

    def __init__(self, inner: LowPrecision, nonfinite: torch.Tensor | None) -> None:
        self.choices = inner.choices
        self._both = propagating(inner.cast_to(rowwise=True, columnwise=True), nonfinite)
        self._rowwise = propagating(inner.cast_to(rowwise=True, columnwise=False), nonfinite)
        self._columnwise = propagating(inner.cast_to(rowwise=False, columnwise=True), nonfinite)


def propagating(
    run: Callable[..., Orientations], nonfinite: torch.Tensor | None
) -> Callable[..., Orientations]:
    """Return the cast ``run`` with scales of NaN for a tensor that is not finite."""

    def cast(x: torch.Tensor, *groups: torch.Tensor, **keywords: Any) -> Orientations:
        count = torch.zeros(1, dtype=torch.int64, device=x.device)
        operands = run(x, *groups, **keywords, nonfinite_out=count)
        if nonfinite is not None:
            nonfinite.add_(count)
        is_nonfinite = count > 0
        for operand in operands:
            if operand is not None:
                _mark(operand, is_nonfinite)
        return operands

    return cast


def _mark(operand: Operand, is_nonfinite: torch.Tensor) -> None:
    """Fill the outer scales of ``operand`` with NaN if ``is_nonfinite``, bool ``[1]``."""
    scales = operand.scale_inv if operand.global_scale_inv is None else operand.global_scale_inv
    assert scales is not None
    scales.masked_fill_(is_nonfinite, math.nan if scales.is_floating_point() else _E8M0_NAN)
