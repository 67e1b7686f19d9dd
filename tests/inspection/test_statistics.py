"""The statistics equal closed forms on tensors made for it."""

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
from fp8core.inspection.monitoring.record import (
    EXPONENTS,
    ObservedCast,
    Tally,
    decibels,
    measure,
)
from fp8core_backends.reference.backend import ReferenceBackend

REFERENCE = ReferenceBackend()
TENSORWISE = OperandSpec("e4m3", (0, 0), 448.0)
DELAYED = OperandSpec("e4m3", (0, 0), 448.0, delayed=True)
ROWWISE = OperandSpec("e4m3", (1, 0), 448.0)
BLOCKS = OperandSpec("e4m3", (1, 4), 448.0, power_of_two=True)
MX = OperandSpec("e4m3", (1, 32), 448.0, scale_format="e8m0")


def cast(
    x: torch.Tensor,
    spec: OperandSpec,
    *,
    scale: float | None = None,
    real: torch.Tensor | None = None,
) -> Tally:
    given = None if scale is None else torch.tensor([scale])
    made = REFERENCE.quantize(QuantizeDesc(x.dtype, spec, None), x, scale=given).rowwise
    assert made is not None
    decoded = REFERENCE.dequantize(DequantizeDesc(spec), made)
    return measure(ObservedCast(x, decoded, spec, scale_inverses(spec, made), real))


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "e2m1"])
def test_current_scaling_saturates_nothing(name: str) -> None:
    spec = OperandSpec(name, (0, 0), {"e4m3": 448.0, "e5m2": 57344.0, "e2m1": 6.0}[name])
    for _ in range(20):
        x = torch.randn(16, 32) * torch.rand(()) * 1000
        assert cast(x, spec).saturated == 0


def test_sqnr_of_a_known_error() -> None:
    # 17 lies between 16 and 18 of e4m3 and ties to 16: error 1 of signal 289 in the first row, none
    # in the second, 289 / 256 of signal in the third.
    x = torch.tensor([[17.0, 0.0], [16.0, 0.0], [17.0, 448.0]])
    tally = cast(x, DELAYED, scale=1.0)
    assert tally.signal == 289 + 256 + 289 + 448**2
    assert tally.noise == 2
    assert tally.sqnr_db == 10 * math.log10(tally.signal / 2)
    assert tally.worst_row == pytest.approx(10 * math.log10(289), abs=1e-12)


def test_all_zero_has_no_sqnr_and_lost_nothing() -> None:
    tally = cast(torch.zeros(3, 32), MX)
    assert math.isnan(tally.sqnr_db)
    assert math.isnan(tally.worst_row)
    assert (tally.amax, tally.share(tally.underflow), tally.zero_block_share) == (0.0, 0.0, 1.0)
    assert all(math.isnan(value) for value in tally.scale_spread())


@pytest.mark.parametrize("spec", [TENSORWISE, ROWWISE, BLOCKS, MX], ids=str)
@pytest.mark.parametrize("shape", [(0, 32), (4, 0), (0, 0)])
def test_empty_tensor_is_a_cast_of_nothing(shape: tuple[int, int], spec: OperandSpec) -> None:
    tally = cast(torch.zeros(shape), spec)
    assert (tally.casts, tally.elements, tally.blocks, tally.amax) == (1, 0, 0, 0.0)
    assert math.isnan(tally.sqnr_db)
    assert math.isnan(tally.zero_block_share)
    assert tally.share(tally.saturated) == 0.0


def test_exact_cast_has_infinite_sqnr() -> None:
    tally = cast(torch.tensor([[1.0, -2.0, 448.0]]), DELAYED, scale=1.0)
    assert tally.sqnr_db == tally.worst_row == math.inf


def test_a_finite_value_that_became_nan_is_the_worst_error() -> None:
    value, decoded = torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, math.nan]])
    tally = measure(ObservedCast(value, decoded, None, None))
    assert tally.sqnr_db == tally.worst_row == -math.inf


def test_partial_blocks_at_the_end() -> None:
    x = torch.zeros(1, 6)
    x[0, 5] = 448.0
    tally = cast(x, BLOCKS)
    assert (tally.blocks, tally.zero_blocks) == (2, 1)
    assert tally.scale_spread()[1] == 1.0


def test_padding_and_its_blocks_are_left_out() -> None:
    x = torch.zeros(4, 8)
    x[0, :3] = 448.0
    real = torch.zeros(4, 8, dtype=torch.bool)
    real[:2, :3] = True
    tally = cast(x, BLOCKS, real=real)
    assert (tally.elements, tally.blocks, tally.zero_blocks) == (6, 2, 1)


def test_exponents_are_floors_of_log2() -> None:
    tally = cast(torch.tensor([[1.0, 1.9, 2.0, -0.5, 0.0, 448.0]]), DELAYED, scale=1.0)
    assert tally.exponents is not None
    found = {e: n for e, n in zip(EXPONENTS, tally.exponents.tolist(), strict=True) if n}
    assert found == {0: 2, 1: 1, -1: 1, 8: 1}


def test_tallies_add_up_as_one_tensor_of_all_rows() -> None:
    a, b = torch.randn(4, 32) * 50, torch.randn(6, 32) * 3
    b[0] = 0.0
    both, parts = cast(torch.cat((a, b)), MX), cast(a, MX)
    parts.add(cast(b, MX))
    assert parts.casts == 2
    for name in ("elements", "nonzero", "underflow", "saturated", "blocks", "zero_blocks", "amax"):
        assert getattr(parts, name) == getattr(both, name), name
    assert parts.worst_row == both.worst_row
    assert parts.signal == pytest.approx(both.signal, rel=1e-14)
    assert parts.scale_spread() == both.scale_spread()
    assert torch.equal(parts.exponents, both.exponents)  # type: ignore[arg-type]  # both are there


def test_adding_to_nothing_and_nothing_to_it() -> None:
    made, empty = cast(torch.randn(4, 32), MX), Tally()
    empty.add(made)
    made.add(Tally())
    assert empty.worst_row == made.worst_row
    assert (empty.casts, made.casts) == (1, 1)


def test_what_was_not_compared_is_nan() -> None:
    value = torch.ones(2, 4)
    tally = measure(ObservedCast(value, value, TENSORWISE, torch.ones(1, 1), is_compared=False))
    assert all(math.isnan(n) for n in (tally.sqnr_db, tally.worst_row, tally.share(0)))
    assert (tally.amax, tally.blocks) == (1.0, 1)


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
    assert got.zero_block_share == want.zero_blocks / want.blocks
    assert got.share(got.underflow) == want.underflow / max(want.nonzero, 1)
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
