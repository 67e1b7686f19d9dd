"""Law 4 for grouped products: each group is a product of its own."""

from __future__ import annotations

import math
from typing import Any

import torch

from fp8core.backend_api import GroupedGemmDesc, split_groups
from fp8core.testing import inputs
from fp8core.testing.calls import Groups, grouped_operands, step_of
from fp8core.testing.checks import law
from fp8core.testing.compare import require, same_bits
from fp8core.testing.laws.gemm import product_within
from fp8core.testing.subject import Subject, on_cpu


def each_within(
    subject: Subject,
    desc: GroupedGemmDesc,
    groups: Groups,
    made: Any,
    terms: list[torch.Tensor] | None = None,
) -> float:
    """Require every group's product within the bound; ``terms`` are added, one a group."""
    a, b, offsets = on_cpu(groups.arguments)
    bounds = offsets.tolist()
    firsts = split_groups(desc.a, a, bounds, int(desc.contract_groups), step_of(desc))
    if desc.contract_groups:
        seconds, parts = split_groups(desc.b, b, bounds, 1, step_of(desc)), list(made)
    else:
        seconds, parts = b, list(torch.split(made, groups.sizes))
    require(len(parts) == len(groups.sizes), f"{len(parts)} results for {len(groups.sizes)} groups")
    worst = 0.0
    for group, own in enumerate(zip(firsts, seconds, strict=True)):
        term = None if terms is None else terms[group]
        what = f"group {group} of sizes {groups.sizes}"
        worst = max(worst, product_within(subject, desc, what, parts[group], own, term))
    return worst


@law(4, "grouped_gemm", applies=lambda desc: not desc.accumulate)
def grouped_gemm_product_of_each_group_is_within_the_bound(
    subject: Subject, desc: GroupedGemmDesc
) -> float:
    """Groups that are empty, one step long, or end in the middle of a block."""
    groups = grouped_operands(subject, desc)
    return each_within(subject, desc, groups, subject.run(desc, *groups.arguments))


@law(4, "grouped_gemm", applies=lambda desc: not desc.accumulate and not desc.contract_groups)
def grouped_gemm_adds_the_bias_of_each_group(subject: Subject, desc: GroupedGemmDesc) -> float:
    """Each group's own bias, and no other's."""
    groups = grouped_operands(subject, desc)
    biases = subject.here(
        list(inputs.moderate(len(groups.sizes), groups.n, desc.out_dtype, 2) * 10)
    )
    made = subject.run(desc, *groups.arguments, bias=biases)
    return each_within(subject, desc, groups, made, biases)


def _out(subject: Subject, desc: GroupedGemmDesc, groups: Groups, fill: float | None) -> Any:
    """Return ``out`` as the descriptor takes it, of ordinary values or of ``fill``."""
    shape = (groups.m, groups.n)
    count = len(groups.sizes) if desc.contract_groups else 1
    made = [
        torch.full(shape, fill, dtype=desc.out_dtype, device=subject.device)
        if fill is not None
        else subject.here(inputs.moderate(*shape, desc.out_dtype, 3 + at) * 10)
        for at in range(count)
    ]
    return made if desc.contract_groups else made[0]


@law(4, "grouped_gemm", applies=lambda desc: not desc.accumulate)
def grouped_gemm_writes_into_out(subject: Subject, desc: GroupedGemmDesc) -> float:
    """With out the results are there, whatever was; an empty group of a sum gives zeros."""
    groups = grouped_operands(subject, desc)
    out = _out(subject, desc, groups, math.nan)
    subject.run(desc, *groups.arguments, out=out)
    return each_within(subject, desc, groups, out)


@law(4, "grouped_gemm", applies=lambda desc: desc.accumulate)
def grouped_gemm_accumulates_into_out(subject: Subject, desc: GroupedGemmDesc) -> float:
    """With accumulate each product is added to what out holds; an empty group leaves it."""
    groups = grouped_operands(subject, desc)
    out = _out(subject, desc, groups, None)
    if desc.contract_groups:
        before = [own.clone() for own in out]
    else:
        before = list(torch.split(out.clone(), groups.sizes))
    subject.run(desc, *groups.arguments, out=out)
    if desc.contract_groups:
        for group, size in enumerate(groups.sizes):
            if size == 0:
                same_bits(f"out of the empty group {group}", out[group], before[group])
    return each_within(subject, desc, groups, out, before)


@law(4, "grouped_gemm", applies=lambda desc: not desc.accumulate)
def grouped_gemm_takes_groups_that_are_all_empty(subject: Subject, desc: GroupedGemmDesc) -> None:
    """No row at all: an empty result, or zeros for every group."""
    groups = grouped_operands(subject, desc, (0, 0, 0))
    made = subject.run(desc, *groups.arguments)
    if desc.contract_groups:
        require(len(made) == 3, f"{len(made)} results for 3 groups")
        require(not any(bool(part.any()) for part in made), "an empty sum is not zero")
    else:
        require(made.shape == (0, groups.n), f"no rows give {list(made.shape)}")
