"""Law 6: a fused operation equals its unfused pair bit for bit."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from fp8core.backend_api import GATED, AddNormDesc, FusedDesc, Quantized
from fp8core.conformance import inputs
from fp8core.conformance.calls import (
    ORDINARY,
    POINTWISE,
    Case,
    OpCall,
    arguments,
    calls_of,
    example,
)
from fp8core.conformance.checks import FUSED, law
from fp8core.conformance.compare import column_sums_within, require, same_tensors
from fp8core.conformance.judged import LARGE, has_both
from fp8core.conformance.laws.quantize import ReadOnce, joined
from fp8core.conformance.operands import SEED, quantize_keywords, up
from fp8core.conformance.subject import Subject, on_cpu, storage_step

SIZES = (ORDINARY.size, (136, 144))
"""Rows of no whole vectors, and of whole ones: kernels may be written for these alone."""


@example(FusedDesc)
def _fused(subject: Subject, desc: FusedDesc, case: Case) -> OpCall:
    """Return a call of a fused op, in a size that operands of its cast can have."""
    step = storage_step(subject, desc.quantize.rowwise, desc.quantize.columnwise)
    rows, cols = case.size or POINTWISE
    stored = case._replace(size=(up(rows, step), up(cols, step)))
    call = arguments(subject, desc.producer, stored)
    keywords = quantize_keywords(subject, desc.quantize, seed=SEED + case.seed)
    return OpCall(desc, call.arguments, keywords, frozenset({"amax_out"}))


@example(AddNormDesc)
def _add_norm(subject: Subject, desc: AddNormDesc, case: Case) -> OpCall:
    x, *parameters = arguments(subject, desc.norm, case).arguments
    residual = subject.here(inputs.moderate(*x.shape, desc.norm.dtype, case.seed_of(7)))
    return OpCall(desc, (x, residual, *parameters), {})


def pair(run: Callable[..., Any], call: OpCall) -> tuple[Any, ...]:
    """Return the results that a fused operation must have: ``run`` runs its two parts."""
    desc = call.desc
    assert isinstance(desc, FusedDesc)
    produced = run(desc.producer, *call.arguments)
    first, *rest = produced if isinstance(produced, tuple) else (produced,)
    sums = (first.sum(0, dtype=torch.float32),) if desc.quantize.sums else ()
    cast = replace(desc.quantize, sums=False, split=False)
    if not desc.quantize.split:
        return (run(cast, first, **call.keywords), *rest, *sums)
    names, pairs = call.keywords.keys(), zip(*call.keywords.values(), strict=True)
    slots = [dict(zip(names, values, strict=True)) for values in pairs] or [{}, {}]
    halves = [
        run(cast, half, **each) for half, each in zip(first.chunk(2, dim=1), slots, strict=True)
    ]
    return (tuple(halves), *rest, *sums)


def add_pair(run: Callable[..., Any], call: OpCall) -> tuple[Any, ...]:
    """Return the results that ``add_norm`` must have: the sum, and ``run`` runs its norm."""
    desc = call.desc
    assert isinstance(desc, AddNormDesc)
    x, residual, *parameters = call.arguments
    total = x + residual
    return (total, *run(desc.norm, total, *parameters))


@law(6, *FUSED, is_core=True)
def fused_equals_its_unfused_pair(subject: Subject, desc: FusedDesc) -> float | None:
    """The producer and the cast in one call give the bits of two calls; column sums are float32."""
    worst = [_fused_equals_pair(subject, call) for call in calls_of(subject, desc, *SIZES)]
    return max(worst) if desc.quantize.sums else None


@law(6, *FUSED, applies=lambda desc: not desc.quantize.offsets_on_device)
def fused_padded_equals_its_pair(subject: Subject, desc: FusedDesc) -> float | None:
    """With zeros behind the rows of the columnwise operand, too."""
    worst = 0.0
    for step, (rows, cols) in itertools.product((16, 32), (POINTWISE, (5, 144), SIZES[1])):
        if subject.variant(desc, padded=step) is None:
            continue
        columns = up(cols, storage_step(subject, desc.quantize.rowwise))
        call = arguments(subject, desc.producer, ORDINARY._replace(size=(rows, columns)))
        keywords = quantize_keywords(subject, desc.quantize)
        padded = replace(desc, quantize=replace(desc.quantize, padded=step))
        again = OpCall(padded, call.arguments, keywords, frozenset({"amax_out"}))
        worst = max(worst, _fused_equals_pair(subject, again))
    return worst if desc.quantize.sums else None


@law(
    6,
    "activation_backward_quantize",
    applies=lambda desc: desc.producer.name in GATED and not desc.quantize.grouped,
)
def fused_halves_equal_two_casts(subject: Subject, desc: FusedDesc) -> float | None:
    """Halves that are tensors of their own have the bits of two casts, each by its slots."""
    if subject.variant(desc, split=True) is None:
        return None
    split = replace(desc, quantize=replace(desc.quantize, split=True))
    worst = 0.0
    for call in calls_of(subject, desc, *SIZES, LARGE):
        seeds = (SEED, 2 * SEED)
        both = [quantize_keywords(subject, desc.quantize, seed=seed) for seed in seeds]
        keywords = {name: (value, both[1][name]) for name, value in both[0].items()}
        again = OpCall(split, call.arguments, keywords, frozenset({"amax_out"}))
        worst = max(worst, _fused_equals_pair(subject, again))
    return worst if desc.quantize.sums else None


def _fused_equals_pair(subject: Subject, call: OpCall) -> float:
    desc, again = call.desc, call.again()
    assert isinstance(desc, FusedDesc)
    results, expected = list(call.run(subject)), list(pair(subject.run, again))
    worst = 0.0
    if desc.quantize.sums:
        first = subject.run(desc.producer, *call.arguments)
        value = on_cpu(first[0] if isinstance(first, tuple) else first)
        worst = column_sums_within("column sums", results.pop(), value)
        expected.pop()
    same_tensors("result", (results, call.keywords), (expected, again.keywords))
    return worst


@law(
    6,
    "activation_backward_quantize",
    applies=lambda desc: has_both(desc.quantize) and not desc.quantize.grouped,
)
def fused_chunks_equal_the_call(subject: Subject, desc: FusedDesc) -> float | None:
    """In chunks, of a gradient that is there or is computed while it is read, nothing changes."""
    run_chunked, worst = subject.variant(desc, chunked=True), 0.0
    if run_chunked is None:
        return None
    for call in calls_of(subject, desc, *SIZES, LARGE):
        for is_computed in (False, True):
            again = call.again()
            worst = max(worst, _chunks_equal_call(subject, run_chunked, again, is_computed))
    return worst if desc.quantize.sums else None


def _chunks_equal_call(
    subject: Subject, run_chunked: Callable[..., Any], call: OpCall, is_computed: bool
) -> float:
    desc, again = call.desc, call.again()
    assert isinstance(desc, FusedDesc)
    grad, x = call.arguments
    quantized, *sums = run_chunked(ReadOnce(grad) if is_computed else grad, x, **call.keywords)
    rowwise = joined(desc.quantize.rowwise, quantized.rowwise, len(x))
    quantized = Quantized(rowwise, quantized.columnwise)
    expected, *totals = again.run(subject)
    same_tensors("in chunks", (quantized, call.keywords), (expected, again.keywords))
    if not desc.quantize.sums:
        return 0.0
    require(len(sums) == len(totals) == 1, f"{len(sums)} column sums")
    return column_sums_within("column sums", sums[0], on_cpu(subject.run(desc.producer, grad, x)))


@law(6, "add_norm", is_core=True)
def add_norm_equals_its_unfused_pair(subject: Subject, desc: AddNormDesc) -> None:
    """The residual's sum is rounded to the norm's dtype before it is normalized."""
    for call in calls_of(subject, desc, *SIZES):
        same_tensors("result", call.run(subject), add_pair(subject.run, call))
