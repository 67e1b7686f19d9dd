"""Casts made of casts: one an orientation where their specs differ, one a group of rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

from fp8core.backend_api import Operand, Quantized

__all__ = ["Cast", "apart", "in_groups"]

Cast: TypeAlias = "Callable[..., Quantized]"


def apart(rowwise: Cast, columnwise: Cast) -> Cast:
    """Return the cast whose orientations come from two."""

    def run(
        x: torch.Tensor,
        *groups: torch.Tensor,
        nonfinite_out: torch.Tensor | None = None,
        **given: torch.Tensor | None,
    ) -> Quantized:
        row = rowwise(x, *groups, nonfinite_out=nonfinite_out, **given).rowwise  # which counts
        return Quantized(row, columnwise(x, *groups, **given).columnwise)

    return run


def in_groups(dense: Cast) -> Cast:
    """Return the cast of each group as a tensor of its own, laid side by side.

    The offset of a group's ``rng`` is larger by the group's number.
    """

    def run(
        x: torch.Tensor,
        group_offsets: torch.Tensor,
        *,
        rng: torch.Tensor | None = None,
        nonfinite_out: torch.Tensor | None = None,
        **slots: torch.Tensor | None,
    ) -> Quantized:
        parts = []
        for group, (start, end) in enumerate(itertools.pairwise(group_offsets.tolist())):
            given = {
                name: slot[group : group + 1] for name, slot in slots.items() if slot is not None
            }
            if rng is not None:
                given["rng"] = rng + torch.tensor((0, group), device="cpu")
            parts.append(dense(x[start:end], nonfinite_out=nonfinite_out, **given))
        return Quantized(
            _join([part.rowwise for part in parts], 0),
            _join([part.columnwise for part in parts], 1),
        )

    return run


def _join(operands: Sequence[Operand | None], dim: int) -> Operand | None:
    present = [operand for operand in operands if operand is not None]
    if not present:
        return None
    data, scale_inv, whole = zip(*present, strict=True)
    joined = None if whole[0] is None else torch.cat(whole, dim)
    return Operand(torch.cat(data, dim), torch.cat(scale_inv, dim), joined)
