"""Law 4 for grouped products: the product of each group is within the bound."""

from __future__ import annotations

import math
from typing import Any

import torch

from fp8core.backend_api import GroupedGemmDesc, split_groups
from fp8core.conformance import inputs
from fp8core.conformance.checks import law
from fp8core.conformance.compare import require, same_bits
from fp8core.conformance.laws.gemm import has_nan, product_within
from fp8core.conformance.operands import Groups, grouped_operands, step_of
from fp8core.conformance.subject import Subject, on_cpu


def each_within(
    subject: Subject,
    desc: GroupedGemmDesc,
    groups: Groups,
    results: Any,
    terms: list[torch.Tensor] | None = None,
) -> float:
    """Require every group's product, plus its entry of ``terms``, to be within the bound."""
    a, b, offsets = on_cpu(groups.arguments)
    bounds = offsets.tolist()
    firsts = split_groups(desc.a, a, bounds, int(desc.contract_groups), step_of(desc))
    if desc.contract_groups:
        seconds, parts = split_groups(desc.b, b, bounds, 1, step_of(desc)), list(results)
    else:
        seconds, parts = b, list(torch.split(results, groups.sizes))
    require(len(parts) == len(groups.sizes), f"{len(parts)} results for {len(groups.sizes)} groups")
    worst = 0.0
    for group, operands in enumerate(zip(firsts, seconds, strict=True)):
        term = None if terms is None else terms[group]
        name = f"group {group} of sizes {groups.sizes}"
        worst = max(worst, product_within(subject, desc, name, parts[group], operands, term))
    return worst


@law(4, "grouped_gemm", applies=lambda desc: not desc.accumulate, is_core=True)
def grouped_gemm_product_of_each_group_is_within_the_bound(
    subject: Subject, desc: GroupedGemmDesc
) -> float:
    """Groups that are empty, one step long, or end in the middle of a block give their products."""
    groups = grouped_operands(subject, desc)
    return each_within(subject, desc, groups, subject.run(desc, *groups.arguments))


@law(4, "grouped_gemm", applies=lambda desc: not desc.accumulate and not desc.contract_groups)
def grouped_gemm_adds_the_bias_of_each_group(subject: Subject, desc: GroupedGemmDesc) -> float:
    """Each group's bias is added to the product of that group."""
    groups = grouped_operands(subject, desc)
    biases = subject.here(
        list(inputs.moderate(len(groups.sizes), groups.n, desc.out_dtype, 2) * 10)
    )
    results = subject.run(desc, *groups.arguments, bias=biases)
    return each_within(subject, desc, groups, results, biases)


def _out(subject: Subject, desc: GroupedGemmDesc, groups: Groups, fill: float | None) -> Any:
    """Return ``out`` in the descriptor's form, full of ``fill``, or of moderate values if None."""
    shape = (groups.m, groups.n)
    count = len(groups.sizes) if desc.contract_groups else 1
    outs = [
        torch.full(shape, fill, dtype=desc.out_dtype, device=subject.device)
        if fill is not None
        else subject.here(inputs.moderate(*shape, desc.out_dtype, 3 + at) * 10)
        for at in range(count)
    ]
    return outs if desc.contract_groups else outs[0]


@law(4, "grouped_gemm", applies=lambda desc: not desc.accumulate)
def grouped_gemm_writes_into_out(subject: Subject, desc: GroupedGemmDesc) -> float:
    """The products replace the values of out; a sum over an empty group gives zeros."""
    groups = grouped_operands(subject, desc)
    out = _out(subject, desc, groups, math.nan)
    subject.run(desc, *groups.arguments, out=out)
    return each_within(subject, desc, groups, out)


@law(4, "grouped_gemm", applies=lambda desc: desc.accumulate)
def grouped_gemm_accumulates_into_out(subject: Subject, desc: GroupedGemmDesc) -> float:
    """With accumulate each product is added to out; an empty group leaves out unchanged."""
    groups = grouped_operands(subject, desc)
    out = _out(subject, desc, groups, None)
    if desc.contract_groups:
        before = [product.clone() for product in out]
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
    """Without a row the result is empty, or zeros for every group."""
    groups = grouped_operands(subject, desc, (0, 0, 0))
    results = subject.run(desc, *groups.arguments)
    if desc.contract_groups:
        require(len(results) == 3, f"{len(results)} results for 3 groups")
        require(not any(bool(part.any()) for part in results), "an empty sum is not zero")
    else:
        require(results.shape == (0, groups.n), f"no rows give {list(results.shape)}")


@law(4, "grouped_gemm", applies=lambda desc: desc.offsets_on_device and not desc.contract_groups)
def grouped_gemm_of_rows_of_no_group_is_zero(subject: Subject, desc: GroupedGemmDesc) -> float:
    """Rows behind the last group are zeros, also in out, or stay where the product is added."""
    groups = grouped_operands(subject, desc, behind=32)
    used = sum(groups.sizes)
    out = _out(subject, desc, groups, None if desc.accumulate else math.nan)
    before = out.clone()
    subject.run(desc, *groups.arguments, out=out)
    rest = before[used:] if desc.accumulate else torch.zeros_like(before[used:])
    same_bits("out behind the last group", out[used:] + 0.0, rest + 0.0)  # +0 for -0
    terms = list(torch.split(before[:used], groups.sizes)) if desc.accumulate else None
    worst = each_within(subject, desc, groups, out[:used], terms)
    if not desc.accumulate:
        result = subject.run(desc, *groups.arguments)
        require(not bool(result[used:].any()), "a row behind the last group is not zero")
    return worst


def _keeps_nan(desc: GroupedGemmDesc) -> bool:
    specs = [spec for spec in (desc.a, desc.b) if spec is not None]
    return not desc.accumulate and all(
        has_nan(spec.format) and not spec.transform for spec in specs
    )


@law(4, "grouped_gemm", applies=_keeps_nan)
def grouped_gemm_keeps_nan_in_its_group(subject: Subject, desc: GroupedGemmDesc) -> None:
    """NaN and inf of a group reach the products of that group alone."""

    def spoil(x: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        spoilt = x.clone()
        spoilt[sizes[0] : sizes[0] + sizes[1]] = math.nan
        spoilt[sizes[0] + sizes[1] // 2] = math.inf
        return spoilt

    groups = grouped_operands(subject, desc, (37, 20, 71), change=spoil)
    results = subject.run(desc, *groups.arguments)
    parts = results if desc.contract_groups else torch.split(results, groups.sizes)
    finite = [bool(part.isfinite().all()) for part in parts]
    require(finite == [True, False, True], f"groups without NaN: {finite}, expected all but 1")
