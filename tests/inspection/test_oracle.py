"""The statistics equal those of loops over Python numbers, on tensors with everything in them."""

from __future__ import annotations

import itertools
import math
import statistics as plain
from collections import defaultdict

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from fp8core import formats
from fp8core.backend_api import (
    DequantizeDesc,
    Operand,
    OperandSpec,
    QuantizeDesc,
    scale_inverses,
)
from fp8core.inspection.monitoring.record import ObservedCast, Tally, decibels, measure
from fp8core_backends.reference.backend import ReferenceBackend

REFERENCE = ReferenceBackend()
SPECS = {
    "tensorwise": OperandSpec("e4m3", (0, 0), 448.0),
    "delayed": OperandSpec("e5m2", (0, 0), 57344.0, delayed=True),
    "rowwise": OperandSpec("e4m3", (1, 0), 448.0, power_of_two=True),
    "blocks": OperandSpec("e4m3", (1, 16), 448.0),
    "squares": OperandSpec("e5m2", (4, 4), 57344.0),
    "mx": OperandSpec("e4m3", (1, 32), 448.0, scale_format="e8m0"),
    "two levels": OperandSpec("e2m1", (1, 16), 6.0, scale_format="e4m3"),
}


def by_loops(x: torch.Tensor, q: torch.Tensor, spec: OperandSpec, operand: Operand) -> Tally:
    """Count one element at a time; the block of an element is found by division."""
    values = sorted({abs(v) for v in formats.by_name(spec.format).values if math.isfinite(v)})
    limit = values[-1] + (values[-1] - values[-2]) / 2
    factors = scale_inverses(spec, operand).tolist()
    tally, signal, noise = Tally(casts=1), defaultdict(list), defaultdict(list)
    blocks: dict[tuple[int, int], bool] = {}
    for i, j in itertools.product(*map(range, x.shape)):
        value, made = float(x[i, j]), float(q[i, j])
        block = (
            i // spec.block[0] if spec.block[0] else 0,
            j // spec.block[1] if spec.block[1] else 0,
        )
        blocks.setdefault(block, False)
        tally.elements += 1
        tally.nan += math.isnan(value)
        tally.inf += math.isinf(value)
        if not math.isfinite(value):
            continue
        blocks[block] |= value != 0
        tally.amax = max(tally.amax, abs(value))
        tally.nonzero += value != 0
        tally.underflow += value != 0 and made == 0
        tally.saturated += abs(value) > limit * factors[block[0]][block[1]] and made != 0
        signal[i].append(value * value)
        noise[i].append((value - made) ** 2)
    tally.signal, tally.noise = (
        math.fsum(v for r in e.values() for v in r) for e in (signal, noise)
    )
    rows = [decibels(math.fsum(signal[i]), math.fsum(noise[i])) for i in signal if any(signal[i])]
    tally.worst_row = min(rows, default=math.nan)
    tally.blocks, tally.zero_blocks = len(blocks), sum(not any_ for any_ in blocks.values())
    scales = [1 / factors[r][c] for (r, c), any_ in blocks.items() if any_ and factors[r][c]]
    tally.scales = [torch.tensor(scales, dtype=torch.float64)]
    return tally


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    rows, seed = draw(st.integers(1, 6)), draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)
    spread = 10.0 ** torch.randint(-12, 6, (rows, 64), generator=generator)
    x = torch.randn(rows, 64, generator=generator) * spread
    kind = torch.rand(rows, 64, generator=generator)
    x[kind < draw(st.sampled_from((0.0, 0.3, 0.97)))] = 0.0
    if draw(st.booleans()):
        x[0, 5], x[-1, 40], x[-1, 41] = math.nan, math.inf, -math.inf
    if draw(st.booleans()):
        x[:, 16:32] = 0.0
    return x


@pytest.mark.parametrize("name", SPECS)
@hypothesis.given(x=tensors(), scale=st.sampled_from((1.0, 0.25, 4096.0)))
@hypothesis.settings(max_examples=15)
def test_figures_equal_loops(name: str, x: torch.Tensor, scale: float) -> None:
    spec = SPECS[name]
    given = torch.tensor([scale]) if spec.delayed else None
    made = REFERENCE.quantize(QuantizeDesc(x.dtype, spec, None), x, scale=given).rowwise
    assert made is not None
    q = REFERENCE.dequantize(DequantizeDesc(spec), made)
    got, want = (
        measure(ObservedCast(x, q, spec, scale_inverses(spec, made))),
        by_loops(x, q, spec, made),
    )
    for field in ("elements", "nan", "inf", "nonzero", "underflow", "saturated", "blocks"):
        assert getattr(got, field) == getattr(want, field), field
    assert (got.zero_blocks, got.amax) == (want.zero_blocks, want.amax)
    assert got.signal == pytest.approx(want.signal, rel=1e-12)
    assert got.noise == pytest.approx(want.noise, rel=1e-12)
    assert got.worst_row == pytest.approx(want.worst_row, rel=1e-9, nan_ok=True)
    (scales,) = got.scales
    assert sorted(scales.tolist()) == sorted(want.scales[0].tolist())
    if scales.numel():
        least, median, largest, deviation = got.scale_spread()
        known = sorted(scales.tolist())
        assert (least, median, largest) == (known[0], plain.median_low(known), known[-1])
        logs = [math.log2(own) for own in known]
        assert deviation == pytest.approx(plain.pstdev(logs), rel=1e-9, abs=1e-12)
