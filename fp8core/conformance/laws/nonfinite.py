"""Laws 1, 3 and 6: a cast counts the NaN and inf that it quantizes away."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch

from fp8core.backend_api import FusedDesc, Operand, QuantizeDesc
from fp8core.conformance import inputs
from fp8core.conformance.calls import OpCall, arguments
from fp8core.conformance.checks import law
from fp8core.conformance.compare import require
from fp8core.conformance.judged import group_sizes
from fp8core.conformance.laws.fused import FUSED, cases, pair
from fp8core.conformance.operands import (
    group_offsets,
    offsets_for,
    quantize_keywords,
    quantize_size,
)
from fp8core.conformance.subject import Subject, on_cpu, storage_step

SHAPES = ((5, 7), (130, 200), (260, 1030), (0, 5), (5, 0))
BEFORE = 7
"""The count before the call, to which the call adds."""


def _count(subject: Subject) -> torch.Tensor:
    count: torch.Tensor = subject.here(torch.tensor([BEFORE]))
    return count


def _require_count(name: str, count: torch.Tensor, x: torch.Tensor) -> None:
    """Require ``count`` to have grown by the NaN and inf of ``x``, which is on the CPU."""
    counted, expected = int(on_cpu(count)) - BEFORE, int((~x.isfinite()).sum())
    require(counted == expected, f"{name}: counted {counted} NaN and inf, there are {expected}")


def _with(x: torch.Tensor, value: float, *positions: tuple[int, int]) -> torch.Tensor:
    for position in positions:
        x[position] = value
    return x


def _dense_inputs(subject: Subject, desc: QuantizeDesc) -> list[tuple[str, torch.Tensor]]:
    """Return matrices with many NaN and inf, with a single one at either end, and with none."""
    named = []
    for shape in SHAPES:
        size = quantize_size(subject, desc, *shape)
        named.append((f"nonfinite {list(size)}", inputs.matrix("nonfinite", *size, desc.dtype)))
    size = quantize_size(subject, desc, *SHAPES[1])
    plain = inputs.matrix("huge", *size, desc.dtype)
    named.append(("the largest finite values", plain))
    values = ((math.inf, (0, 0)), (-math.inf, (-1, -1)), (math.nan, (size[0] // 2, -1)))
    for value, position in values:
        named.append((f"{value} at {position}", _with(plain.clone(), value, position)))
    return named


@law(1, "quantize", applies=lambda desc: not desc.grouped)
def quantize_counts_nan_and_inf(subject: Subject, desc: QuantizeDesc) -> None:
    """nonfinite_out grows by the NaN and inf of x, each counted once in either orientation."""
    every = _dense_inputs(subject, desc)
    halves = desc.halves() if desc.rowwise and desc.columnwise else ()
    for cast, named in ((desc, every), *((half, every[1:2]) for half in halves)):
        for name, x in named:
            count = _count(subject)
            keywords = quantize_keywords(subject, cast)
            subject.run(cast, subject.here(x), **keywords, nonfinite_out=count)
            _require_count(name, count, x)


@law(1, "quantize", applies=lambda desc: desc.grouped)
def quantize_counts_nan_and_inf_of_groups(subject: Subject, desc: QuantizeDesc) -> None:
    """nonfinite_out grows by the NaN and inf of all groups, without the rows behind the last."""
    step = storage_step(subject, desc.columnwise)
    sizes = group_sizes(subject, desc)
    behind = 2 * step if desc.offsets_on_device else 0
    rows, cols = quantize_size(subject, desc, sum(sizes) + behind, 70)
    x = inputs.matrix("nonfinite", rows, cols, desc.dtype)
    if behind:
        x[-1] = math.nan
    bounds = group_offsets(sizes)
    for cast in (desc, *(desc.halves() if desc.rowwise and desc.columnwise else ())):
        count, keywords = _count(subject), quantize_keywords(subject, cast, len(sizes))
        groups = offsets_for(subject, desc, sizes)
        subject.run(cast, subject.here(x), groups, **keywords, nonfinite_out=count)
        _require_count(f"groups of {list(sizes)}", count, x[: int(bounds[-1])])


def _has_methods(desc: QuantizeDesc) -> bool:
    return desc.rowwise is not None and desc.columnwise is not None and not desc.grouped


@law(3, "quantize", applies=_has_methods)
def quantize_pair_counts_for_each(subject: Subject, desc: QuantizeDesc) -> None:
    """Two tensors quantized in one call are counted apart, either of them or both."""
    bind_pair = subject.offers(desc).bind_pair
    two: Any = None if bind_pair is None else bind_pair(subject.bound(desc))
    if two is None:
        return
    xs = [
        inputs.matrix(kind, *quantize_size(subject, desc, *shape), desc.dtype)
        for kind, shape in (("nonfinite", (33, 70)), ("nonfinite", SHAPES[2]))
    ]
    for is_counted in ((True, True), (True, False), (False, True)):
        counts = [_count(subject) if needed else None for needed in is_counted]
        keywords = [quantize_keywords(subject, desc, seed=seed) for seed in (11, 12)]
        both: dict[str, Any] = {
            name: (keywords[0][name], keywords[1][name]) for name in keywords[0]
        }
        two(*map(subject.here, xs), **both, nonfinite_out=tuple(counts))
        for x, count in zip(xs, counts, strict=True):
            if count is not None:
                _require_count(f"{list(x.shape)} of a pair", count, x)


@law(3, "quantize", applies=_has_methods)
def quantize_chunked_counts_the_whole(subject: Subject, desc: QuantizeDesc) -> None:
    """After the last chunk, each NaN and inf of x is counted once."""
    quantize_chunked = subject.offers(desc).quantize_chunked
    if quantize_chunked is None:
        return
    for shape in ((5, 7), SHAPES[2]):
        x = inputs.matrix("nonfinite", *quantize_size(subject, desc, *shape), desc.dtype)
        count, keywords = _count(subject), quantize_keywords(subject, desc)
        rowwise, _ = quantize_chunked(subject.here(x), **keywords, nonfinite_out=count)
        if not isinstance(rowwise, Operand | None):
            for _ in rowwise:
                pass
        _require_count(f"{list(x.shape)} in chunks", count, x)


@law(6, *FUSED)
def fused_counts_what_its_pair_counts(subject: Subject, desc: FusedDesc) -> None:
    """nonfinite_out grows by the NaN and inf of the producer's result, which the cast reads."""
    for value, case in itertools.product((math.inf, math.nan), cases(subject, desc)):
        call = arguments(subject, desc, case)
        _with(call.arguments[0], value, (1, 3))
        counted, expected = (_counted(subject, call.again(), run) for run in (_fused, _paired))
        require(counted == expected, f"counted {counted} of {value}, the pair counts {expected}")


def _counted(subject: Subject, call: OpCall, run: Callable[[Subject, OpCall], Any]) -> int:
    count = _count(subject)
    run(subject, call._replace(keywords={**call.keywords, "nonfinite_out": count}))
    return int(on_cpu(count)) - BEFORE


def _fused(subject: Subject, call: OpCall) -> Any:
    return call.run(subject)


def _paired(subject: Subject, call: OpCall) -> Any:
    return pair(subject.run, call)
