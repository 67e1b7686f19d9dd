"""Where the rows of a call go whose experts are on several ranks.

Rank r of p has experts ``r * n`` to ``(r + 1) * n - 1`` of ``p * n``. A call begins with rows in
the order of all experts; after the exchange a rank has the rows of its experts: those of its first
expert, from rank 0, from rank 1 and so on, then those of its second one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

__all__ = ["Routes"]


@dataclass(frozen=True, slots=True, eq=False)
class Routes:
    """The rows that each rank sends to each expert, ``counts[rank][expert]``, seen from ``rank``.

    ``sent`` and ``received`` are how many rows go to each rank and come from each. ``chunks`` are
    the sizes in which rows are cast before they leave: one an expert. ``splits`` are the rows of
    this rank's experts. ``unit``: a number that divides the rows of every rank for every expert, 0
    if there are none.
    """

    counts: tuple[tuple[int, ...], ...]
    rank: int
    sent: tuple[int, ...]
    received: tuple[int, ...]
    splits: tuple[int, ...]
    unit: int

    @classmethod
    def of(cls, counts: Sequence[Sequence[int]], rank: int) -> Routes:
        """Return the routes of ``rank``."""
        size, each = len(counts), len(counts[0]) // len(counts)
        mine = slice(rank * each, (rank + 1) * each)
        sent = tuple(sum(counts[rank][to * each : (to + 1) * each]) for to in range(size))
        received = tuple(sum(row[mine]) for row in counts)
        splits = tuple(
            sum(row[expert] for row in counts) for expert in range(mine.start, mine.stop)
        )
        unit = math.gcd(*itertools.chain(*counts))
        return cls(tuple(map(tuple, counts)), rank, sent, received, splits, unit)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.counts)

    @property
    def experts(self) -> slice:
        """This rank's experts."""
        each = len(self.splits)
        return slice(self.rank * each, (self.rank + 1) * each)

    @property
    def chunks(self) -> tuple[int, ...]:
        """The rows of this rank for each expert."""
        return self.counts[self.rank]

    def order(self, device: torch.device, step: int = 1) -> torch.Tensor:
        """Return which of the rows that have come, from rank 0, from rank 1 and so on, follow one
        another in the order of experts, int64; of rows of ``step`` rows each, where that divides
        :attr:`unit`."""
        mine = self.experts
        counts = torch.tensor([row[mine] for row in self.counts], device="cpu") // step
        starts = torch.cat((counts.new_zeros(1), counts.flatten().cumsum(0)[:-1]))
        by_expert = starts.view_as(counts).t().flatten()
        lengths = counts.t().flatten()
        ends = lengths.cumsum(0)
        shift = torch.repeat_interleave(by_expert - (ends - lengths), lengths)
        return (torch.arange(len(shift), device="cpu") + shift).to(device)
