"""The records of a step on all ranks, combined into one."""

from __future__ import annotations

import dataclasses
import hashlib
import math

import torch
import torch.distributed as dist

from fp8core.errors import OperandError
from fp8core.inspection.monitoring.record import CastKey, GemmKey, StepRecord
from fp8core.inspection.monitoring.statistics import EXPONENTS, SUMS, Tally

__all__ = ["over_ranks"]


def over_ranks(
    record: StepRecord, group: dist.ProcessGroup | None, device: torch.device
) -> StepRecord:
    """Return the combined record of all ranks of ``group``; None stands for the default group.

    Counts and energies add up, the amax is the largest, the worst row the least, and the scales are
    those of all blocks. Every rank has to call it; ``device`` is one that the group communicates
    on.

    Raises:
        OperandError: the ranks have recorded different operands; raised on every rank.
    """
    casts, gemms = sorted(record.tallies), sorted(record.gemms)
    _check_equal((casts, gemms), group, device)
    tallies = [record.tallies[key] for key in casts]
    counted = [record.gemms[key] for key in gemms]

    def reduce(values: object, op: dist.ReduceOp.RedOpType, columns: int) -> list[list[float]]:
        tensor = torch.tensor(values, dtype=torch.float64, device=device).reshape(-1, columns)
        dist.all_reduce(tensor, op=op, group=group)
        return tensor.tolist()

    sums = reduce(
        [[getattr(t, name) for name in SUMS] for t in tallies], dist.ReduceOp.SUM, len(SUMS)
    )
    largest = reduce([t.amax for t in tallies], dist.ReduceOp.MAX, 1)
    rows = [[math.inf if math.isnan(t.worst_row) else t.worst_row, t.is_compared] for t in tallies]
    least = reduce(rows, dist.ReduceOp.MIN, 2)
    has_row = reduce([not math.isnan(t.worst_row) for t in tallies], dist.ReduceOp.MAX, 1)
    numbers = reduce([[c.quantized, c.high_precision] for c in counted], dist.ReduceOp.SUM, 2)
    exponents = [
        torch.zeros(len(EXPONENTS)) if t.exponents is None else t.exponents for t in tallies
    ]
    counts = [one.tolist() for one in exponents]
    histograms = reduce(counts, dist.ReduceOp.SUM, len(EXPONENTS))
    scales = _all_scales(tallies, group, device)
    total = StepRecord(formats=dict(record.formats))
    for at, key in enumerate(casts):
        tally = Tally(amax=largest[at][0], scales=[scales[at]], is_compared=bool(least[at][1]))
        for name, value in zip(SUMS, sums[at], strict=True):
            setattr(tally, name, value if name in ("signal", "noise") else int(value))
        tally.worst_row = least[at][0] if has_row[at][0] else math.nan
        tally.exponents = torch.tensor(histograms[at], dtype=torch.int64)
        total.tallies[key] = tally
    for gemm, count, (low, high) in zip(gemms, counted, numbers, strict=True):
        total.gemms[gemm] = dataclasses.replace(count, quantized=int(low), high_precision=int(high))
    return total


def _check_equal(
    keys: tuple[list[CastKey], list[GemmKey]], group: dist.ProcessGroup | None, device: torch.device
) -> None:
    hashed = hashlib.sha256(repr(keys).encode()).digest()[:7]
    digest = torch.tensor([int.from_bytes(hashed, "big"), len(keys[0])], device=device)
    others = [torch.empty_like(digest) for _ in range(dist.get_world_size(group))]
    dist.all_gather(others, digest, group=group)
    if any(not torch.equal(digest, other) for other in others):
        counts = [int(other[1]) for other in others]
        raise OperandError(
            f"the ranks observed different operands, {counts} of them by rank. Reduce over the "
            f"ranks that run the same layers, and pass their group."
        )


def _all_scales(
    tallies: list[Tally], group: dist.ProcessGroup | None, device: torch.device
) -> list[torch.Tensor]:
    """Return the scales of each operand's nonzero blocks on all ranks, float64 on the CPU."""
    by_operand = [torch.cat(t.scales) if t.scales else torch.empty(0) for t in tallies]
    sizes = torch.tensor([part.numel() for part in by_operand], device=device)
    ranks = range(dist.get_world_size(group))
    all_sizes = [torch.empty_like(sizes) for _ in ranks]
    dist.all_gather(all_sizes, sizes, group=group)
    longest = max(int(one.sum()) for one in all_sizes)
    flat = torch.cat([*by_operand, torch.empty(0)]).to(device, torch.float64)
    flat = torch.nn.functional.pad(flat, (0, longest - flat.numel()))
    gathered = [torch.empty_like(flat) for _ in ranks]
    dist.all_gather(gathered, flat, group=group)
    parts = [
        torch.split(values[: int(size.sum())].cpu(), size.tolist())
        for values, size in zip(gathered, all_sizes, strict=True)
    ]
    return [torch.cat(list(of_ranks)) for of_ranks in zip(*parts, strict=True)]
