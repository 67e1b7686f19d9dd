"""The delayed-scaling update, for every slot of every module in one pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fp8core.backend_api import ScaleUpdateDesc

__all__ = ["scale_update"]

FLOAT32_MAX = torch.finfo(torch.float32).max


def scale_update(
    desc: ScaleUpdateDesc,
    histories: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    targets: Sequence[torch.Tensor],
) -> None:
    """Advance histories ``[length, slots]`` and scales ``[slots]`` in place; see the backend API.

    Source: docs/numerics.md 3.1. A non-finite newest amax is not recorded.
    """
    for history, scale, target in zip(histories, scales, targets, strict=True):
        newest = history[0]
        recorded = torch.isfinite(newest) & (newest > 0)  # [slots]
        window = torch.cat((history[1:], newest[None]))  # oldest first
        amax = window.amax(0) if desc.algorithm == "max" else newest
        updated = (target / amax).clamp(max=FLOAT32_MAX)
        scale.copy_(torch.where(recorded & torch.isfinite(amax), updated, scale))
        # h[i] = h[i + 1], h[L - 1] = newest, then h[0] = 0: L - 1 values stay stored
        history.copy_(torch.where(recorded, window, history))
        history[0] = 0
