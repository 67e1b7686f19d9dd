"""The statistics equal closed forms on tensors made for it."""

from __future__ import annotations

import math

import pytest
import torch

from fp8core.backend_api import DequantizeDesc, OperandSpec, QuantizeDesc, scale_inverses
from fp8core.inspection.monitoring.record import EXPONENTS, ObservedCast, Tally, measure
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


def test_underflow_counts_nonzero_values_that_became_zero() -> None:
    # At scale 1 the least e4m3 is 2^-9; half of it is a tie to 0, a little more is not.
    x = torch.tensor([[0.0, 0.0, 1.0, 2.0**-9, 2.0**-10, -(2.0**-10), 2.0**-11, 1.01 * 2.0**-10]])
    tally = cast(x, DELAYED, scale=1.0)
    assert (tally.elements, tally.nonzero, tally.underflow) == (8, 6, 3)
    assert tally.share(tally.underflow) == 0.5


def test_saturation_counts_what_rounding_alone_would_take_beyond_the_maximum() -> None:
    # e4m3: 448 is the largest, the next would be 480. 464 is the tie, and rounds to 448.
    x = torch.tensor([[1.0, 448.0, 460.0, 464.0, 465.0, -500.0, 1e6, 0.0]])
    tally = cast(x, DELAYED, scale=1.0)
    assert tally.saturated == 3
    assert tally.share(tally.saturated) == 3 / 7


def test_saturation_follows_the_scale() -> None:
    x = torch.tensor([[1.0, 224.0, 232.0, 233.0, -300.0]])
    assert cast(x, DELAYED, scale=2.0).saturated == 2
    assert cast(x, DELAYED, scale=0.5).saturated == 0


def test_a_value_that_became_zero_is_not_saturated() -> None:
    value, decoded = torch.tensor([[1.0, 2.0]]), torch.zeros(1, 2)
    tally = measure(ObservedCast(value, decoded, TENSORWISE, torch.zeros(1, 1)))
    assert (tally.underflow, tally.saturated) == (2, 0)


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


def test_worst_row_shows_what_the_whole_hides() -> None:
    x = torch.tensor([[448.0] * 4, [2.0**-10] * 4])
    tally = cast(x, TENSORWISE)
    assert tally.worst_row == 0.0  # all of it lost: the noise is the signal
    assert tally.sqnr_db > 100
    assert cast(x, ROWWISE).worst_row == math.inf


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


def test_nan_and_inf_are_counted_and_left_out() -> None:
    x = torch.tensor([[math.nan, math.inf, -math.inf, 17.0], [16.0, 0.0, 0.0, math.nan]])
    tally = cast(x, DELAYED, scale=1.0)
    assert (tally.nan, tally.inf, tally.nonzero, tally.saturated) == (2, 2, 2, 0)
    assert (tally.amax, tally.signal, tally.noise) == (17.0, 289.0 + 256.0, 1.0)


def test_a_finite_value_that_became_nan_is_the_worst_error() -> None:
    value, decoded = torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, math.nan]])
    tally = measure(ObservedCast(value, decoded, None, None))
    assert tally.sqnr_db == tally.worst_row == -math.inf


def test_scales_and_zero_blocks() -> None:
    # Blocks of 4 with amaxes 448, 224, 0, 112: scales 1, 2, none, 4.
    x = torch.zeros(2, 8)
    x[0, 0], x[0, 5], x[1, 6] = 448.0, -224.0, 112.0
    tally = cast(x, BLOCKS)
    assert (tally.blocks, tally.zero_blocks, tally.zero_block_share) == (4, 1, 0.25)
    least, median, largest, deviation = tally.scale_spread()
    assert (least, median, largest) == (1.0, 2.0, 4.0)
    assert deviation == pytest.approx(math.sqrt(2 / 3), abs=1e-15)  # of log2: 0, 1, 2
    assert tally.grid is not None
    assert tally.grid.nan_to_num(-1.0).tolist() == [[0.0, 1.0], [-1.0, 2.0]]


def test_median_of_an_even_number_is_the_lower() -> None:
    tally = cast(torch.tensor([[448.0, 0.0, 0.0, 0.0, 112.0, 0.0, 0.0, 0.0]]), BLOCKS)
    assert tally.scale_spread()[:3] == (1.0, 1.0, 4.0)
    assert tally.scale_spread()[3] == 1.0


def test_partial_blocks_at_the_end() -> None:
    x = torch.zeros(1, 6)
    x[0, 5] = 448.0
    tally = cast(x, BLOCKS)
    assert (tally.blocks, tally.zero_blocks) == (2, 1)
    assert tally.scale_spread()[1] == 1.0


def test_square_blocks_larger_than_the_tensor() -> None:
    spec = OperandSpec("e4m3", (128, 128), 448.0)
    tally = cast(torch.full((3, 5), 448.0), spec)
    assert (tally.blocks, tally.zero_blocks, tally.sqnr_db) == (1, 0, math.inf)


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
