"""Column sums, the gradients of biases, in float32 (float64 for float64)."""

from __future__ import annotations

import torch

from fp8core.backend_api import ColumnSumsDesc

__all__ = ["column_sums"]


def column_sums(desc: ColumnSumsDesc, x: torch.Tensor) -> torch.Tensor:
    """Return the sum over the rows of ``x [rows, n]``, ``[n]``; see the backend API."""
    return x.sum(0, dtype=torch.float64 if desc.dtype == torch.float64 else torch.float32)
