"""Law 1 for stochastic rounding: compared in distribution, and reproducible."""

from __future__ import annotations

import math

import torch

from fp8core import formats
from fp8core.backend_api import OperandSpec, Quantized, QuantizeDesc
from fp8core.conformance import inputs
from fp8core.conformance.checks import law
from fp8core.conformance.compare import require, same_bits, within
from fp8core.conformance.judged import is_nearest
from fp8core.conformance.operands import offsets_for, quantize_size, up
from fp8core.conformance.subject import Subject, on_cpu, storage_step

REPEATS, SEEDS = 256, 48
CHANCE = 1e-9
"""The chance that one comparison of means fails although the implementation is right."""


def _is_stochastic(desc: QuantizeDesc) -> bool:
    return not is_nearest(desc)


def _is_dense(desc: QuantizeDesc) -> bool:
    return not desc.grouped and _is_stochastic(desc)


def _tensors_of(subject: Subject, desc: QuantizeDesc) -> tuple[torch.Tensor, ...]:
    """Return ``x`` of moderate values; if ``desc`` is grouped, ``x`` twice and the offsets."""
    x = inputs.moderate(*quantize_size(subject, desc, 64, 96), desc.dtype)
    if not desc.grouped:
        return (subject.here(x),)
    return subject.here(torch.cat((x, x))), offsets_for(subject, desc, (len(x), len(x)))


def _run(subject: Subject, desc: QuantizeDesc, seed: int, offset: int) -> Quantized:
    quantized: Quantized = on_cpu(
        subject.run(desc, *_tensors_of(subject, desc), rng=torch.tensor([seed, offset]))
    )
    return quantized


def _codes(desc: QuantizeDesc, quantized: Quantized) -> list[tuple[int, torch.Tensor]]:
    """Return the codes that were rounded stochastically, each with its orientation."""
    specs = (desc.rowwise, desc.columnwise)
    return [
        (at, operand.data)
        for at, (spec, operand) in enumerate(zip(specs, quantized, strict=True))
        if spec is not None and spec.stochastic and operand is not None
    ]


@law(1, "quantize", applies=_is_stochastic)
def stochastic_rounding_repeats_with_the_same_rng(subject: Subject, desc: QuantizeDesc) -> None:
    """The same seed and offset give the same codes, and torch's generator does not advance."""
    state = torch.get_rng_state()
    first, again = (_run(subject, desc, 7, 9) for _ in range(2))
    require(torch.equal(torch.get_rng_state(), state), "torch's generator was advanced")
    for (_, mine), (_, yours) in zip(_codes(desc, first), _codes(desc, again), strict=True):
        same_bits("codes of the second call", yours, mine)


@law(1, "quantize", applies=_is_stochastic)
def stochastic_rounding_follows_seed_and_offset(subject: Subject, desc: QuantizeDesc) -> None:
    """Another seed, and another offset, give other codes."""
    first = _run(subject, desc, 7, 9)
    for seed, offset in ((7, 10), (8, 9)):
        changed = _codes(desc, _run(subject, desc, seed, offset))
        for (_, mine), (_, yours) in zip(_codes(desc, first), changed, strict=True):
            message = f"rng ({seed}, {offset}) gives the codes of (7, 9)"
            require(not torch.equal(mine, yours), message)


@law(1, "quantize", applies=lambda desc: desc.grouped and _is_stochastic(desc))
def stochastic_rounding_differs_between_equal_groups(subject: Subject, desc: QuantizeDesc) -> None:
    """Two groups of the same values are rounded independently."""
    for dim, codes in _codes(desc, _run(subject, desc, 7, 9)):
        first, second = codes.chunk(2, dim)
        require(not torch.equal(first, second), "equal groups have equal codes")


@law(1, "quantize", applies=_is_dense)
def stochastic_rounding_takes_a_neighbour_and_keeps_the_mean(
    subject: Subject, desc: QuantizeDesc
) -> float:
    """Over many draws, the mean of each element is the reference's, whose mean is the value."""
    worst = 0.0
    halves = desc.halves()
    for name, spec, half in zip(
        Quantized._fields, (desc.rowwise, desc.columnwise), halves, strict=True
    ):
        if spec is not None and spec.stochastic:
            worst = max(worst, _compare_means(subject, spec, half, name))
    return worst


def _compare_means(subject: Subject, spec: OperandSpec, half: QuantizeDesc, name: str) -> float:
    """Compare the means of each element over REPEATS equal rows and SEEDS draws.

    A draw is one of two values that lie a step apart, so by Hoeffding's inequality the mean of n
    draws is within ``step sqrt(ln(2 / chance) / (2 n))`` of its expectation, here 3 % of a step.
    The bound is twice that, as both means are drawn.
    """
    step = storage_step(subject, spec)
    x = inputs.moderate(1, up(96, step), half.dtype).expand(REPEATS, -1)
    x = x if name == "rowwise" else x.t()
    grid = torch.tensor(sorted(set(filter(math.isfinite, formats.by_name(spec.format).values))))
    draws: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    for seed in range(SEEDS):
        rng = torch.tensor([seed, 3])
        both = (subject.run(half, subject.here(x), rng=rng), subject.judged(half, x, rng=rng))
        for draws_of_way, quantized in zip(draws, both, strict=True):
            draws_of_way.append(subject.elements(spec, getattr(quantized, name)))
    ours, theirs = (torch.cat(draws_of_way) for draws_of_way in draws)  # [samples, values]
    means = [values.double().mean(0) for values in (ours, theirs)]
    above = torch.bucketize(means[1].float(), grid).clamp(1, len(grid) - 1)
    steps = (grid[above] - grid[above - 1]).double()
    bound = 2 * steps * math.sqrt(math.log(2 * len(steps) / CHANCE) / (2 * len(ours)))
    # A transform before the cast hides the value itself; the mean of the draws is near it.
    low, high = (
        torch.bucketize((means[1] + end * bound).float(), grid).clamp(0, len(grid) - 1)
        for end in (-1, 1)
    )
    require(
        bool(((ours >= grid[(low - 1).clamp(min=0)]) & (ours <= grid[high])).all()),
        f"{name}: an element is neither of its two neighbours",
    )
    return within(f"{name}: mean of the elements", means[0], means[1], bound)
