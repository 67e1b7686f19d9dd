"""The delayed-scaling update, for every slot of every module in one pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fp8core.backend_api import ScaleUpdateDesc
from fp8core_backends.reference.operations import computes
from fp8core_backends.reference.private import copy_all

FLOAT32_MAX = torch.finfo(torch.float32).max


def _problem(desc: ScaleUpdateDesc) -> str | None:
    algorithms = ("max", "most_recent")
    return None if desc.algorithm in algorithms else f"no algorithm {desc.algorithm!r}"


@computes(ScaleUpdateDesc, refuses=_problem)
def scale_update(
    desc: ScaleUpdateDesc,
    histories: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    targets: Sequence[torch.Tensor],
    nonfinite: Sequence[torch.Tensor] = (),
) -> None:
    """Advance histories ``[length, slots]`` and scales ``[slots]`` in place; see the backend API.

    Source: docs/numerics.md 3.1. A non-finite newest amax is not recorded.
    """
    bad = [(~torch.isfinite(history[0])).sum() for history in histories] if nonfinite else []
    by_length: dict[int, list[int]] = {}
    for index, history in enumerate(histories):
        by_length.setdefault(history.shape[0], []).append(index)
    current: list[torch.Tensor] = []
    updated: list[torch.Tensor] = []
    for members in by_length.values():
        of_length = [histories[i] for i in members], [scales[i] for i in members]
        current += [*of_length[0], *of_length[1]]
        target = torch.cat([targets[i] for i in members])
        updated += _updated(desc.algorithm == "max", *of_length, target)
    for count, more in zip(nonfinite, bad, strict=True):
        count += more
    if current:  # in one call, after every allocation: the update takes place as a whole or not
        copy_all(current, updated)


def _updated(
    is_max: bool, histories: list[torch.Tensor], scales: list[torch.Tensor], target: torch.Tensor
) -> list[torch.Tensor]:
    """Return the new histories, then the scales, of states whose histories have one length: all
    their slots side by side."""
    history = torch.cat(histories, dim=1)  # [length, slots]
    scale = torch.cat(scales)
    newest = history[0]
    recorded = torch.isfinite(newest) & (newest > 0)
    window = torch.cat((history[1:], newest[None]))  # oldest first
    amax = window.amax(0) if is_max else newest
    updated = (target / amax).clamp_(max=FLOAT32_MAX)
    scale = torch.where(recorded & torch.isfinite(amax), updated, scale)
    # h[i] = h[i + 1], h[L - 1] = newest, then h[0] = 0: L - 1 values stay stored
    history = torch.where(recorded, window, history)
    history[0] = 0
    sizes = [entries.numel() for entries in scales]
    return [*torch.split(history, sizes, dim=1), *torch.split(scale, sizes)]
