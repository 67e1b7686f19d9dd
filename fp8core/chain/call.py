"""The call of a layer: groups, seeds, lengths and routes besides its tensors."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from fp8core.chain.delayed_wgrad import DelayedCall
from fp8core.tensors.quantizer import Groups
from fp8core.tensors.weights import Keeping


@dataclass(frozen=True, slots=True, eq=False)
class Routes:
    """The rows that each rank sends to each expert, ``counts[rank][expert]``, seen from ``rank``.

    Rank r of p has experts ``r * n`` to ``(r + 1) * n - 1`` of ``p * n``. A call begins with rows
    in the order of all experts; after the exchange a rank has the rows of its experts: those of its
    first expert, from rank 0, from rank 1 and so on, then those of its second one.

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
        """The experts of this rank."""
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


class Call(NamedTuple):
    """The arguments of one call of a layer besides its tensors.

    ``groups`` is ``(group_offsets,)``, int64 ``[groups + 1]`` on the CPU, or ``()`` if dense;
    ``splits`` are the same sizes as integers, ``()`` if only the device knows them, in which case
    the offsets are there as well. ``rng`` int64 ``[2]`` is the seed and offset of dropout and
    stochastic rounding; on the CPU, but for attention in a graph of its device.
    ``first_microbatch`` is the caller's argument, ``keeping`` what follows from it for weights;
    None quantizes them. ``backward_pass`` is set in a recompute: the pass that it is part of, at
    whose end backward scales are updated. ``tensors`` and ``sizes`` are what the link of the chain
    that takes them says, as :class:`~fp8core.chain.attention.spec.AttentionTensors` does;
    nothing in them is differentiated. ``delayed_wgrads`` takes the weight gradients that are not
    computed in backward. ``output [rows, n]`` and ``grad_input [rows, k]`` are memory for the
    results of a lone linear; ``grad_sum [rows, k]`` is a sum to which backward of a linear adds its
    gradient of the input, and which it returns. ``routes`` says where rows go whose experts are on
    several ranks.
    ``buffers`` are those of the layer's delayed state, in a graph that torch captures;
    ``phase`` is that of the step, as of :func:`fp8core.context.scopes.phase_in_graph`. ``stored``
    says of each parameter of a graph how it is taken apart, as of
    :func:`fp8core.chain.unwrap.stored_in_graph`; none is where there are none.
    """

    groups: Groups = ()
    splits: Sequence[int] = ()
    rng: torch.Tensor | None = None
    first_microbatch: bool | None = None
    keeping: Keeping | None = None
    backward_pass: int | None = None
    tensors: Sequence[torch.Tensor | None] = ()
    sizes: Sequence[int] = ()
    delayed_wgrads: DelayedCall | None = None
    output: torch.Tensor | None = None
    grad_input: torch.Tensor | None = None
    grad_sum: torch.Tensor | None = None
    routes: Routes | None = None
    buffers: Sequence[torch.Tensor] = ()
    phase: str = "forward"
    stored: Sequence[tuple[int, tuple[str, ...]]] = ()

    @property
    def has_device_groups(self) -> bool:
        """Whether only the device knows the sizes of the groups."""
        return bool(self.groups) and not self.splits


DENSE = Call()
