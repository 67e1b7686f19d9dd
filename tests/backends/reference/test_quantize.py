"""Quantization of the reference, its edges, and amaxes apart from their cast.

Edges: NaN, inf, -0, zero, empty, dtypes, strides, caps and rounding. Amaxes are held against numpy,
by orientation, and the cast by given amaxes.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from fp8core import formats
from fp8core.backend_api import (
    AmaxDesc,
    OpDesc,
    OperandError,
    OperandSpec,
    QuantizeByAmaxDesc,
    Quantized,
    QuantizeDesc,
    hadamard16,
)
from fp8core_backends.reference.backend import ReferenceBackend

CPU = torch.device("cpu")
INF = math.inf

TENSORWISE = OperandSpec("e4m3", (0, 0), 448.0)
ROWWISE = OperandSpec("e4m3", (1, 0), 448.0)
BLOCK_1D = OperandSpec("e4m3", (1, 128), 448.0)
BLOCK_2D = OperandSpec("e4m3", (128, 128), 448.0, power_of_two=True)
E5M2 = OperandSpec("e5m2", (0, 0), 57344.0)
DELAYED = OperandSpec("e4m3", (0, 0), 448.0, delayed=True)
MXFP8 = OperandSpec("e4m3", (1, 32), 448.0, scale_format="e8m0")
MXFP4 = OperandSpec("e2m1", (1, 32), 6.0, scale_format="e8m0")
NVFP4 = OperandSpec("e2m1", (1, 16), 6.0, scale_format="e4m3")
NVFP4_2D = replace(NVFP4, block=(16, 16))
NVFP4_RHT = replace(NVFP4, transform="hadamard16")

EIGHT_BITS = (TENSORWISE, ROWWISE, BLOCK_1D, BLOCK_2D, E5M2, MXFP8)
FOUR_BITS = (MXFP4, NVFP4, NVFP4_2D)
EVERY = (*EIGHT_BITS, *FOUR_BITS, NVFP4_RHT)

each_with_nan = pytest.mark.parametrize("spec", EIGHT_BITS, ids=str)
each_without_nan = pytest.mark.parametrize("spec", FOUR_BITS, ids=str)


def run(spec: OperandSpec, x: torch.Tensor, **given: torch.Tensor | None) -> Quantized:
    desc = QuantizeDesc(x.dtype, spec, spec)
    return ReferenceBackend().bind(desc, CPU)(x, **given)


def codes(spec: OperandSpec, made: Quantized) -> torch.Tensor:
    """One code an element, of the rowwise operand."""
    data = made.rowwise.data
    if spec.format != "e2m1":
        return data
    return torch.stack((data & 15, data >> 4), -1).flatten(1)  # element 2 i is in the low half


def assert_equal(made: Quantized, expected: Quantized) -> None:
    for operand, wanted in zip(made, expected, strict=True):
        for part, value in zip(operand, wanted, strict=True):
            assert part is value or torch.equal(part, value), (made, expected)


@each_without_nan
def test_nan_becomes_the_largest_value(spec: OperandSpec) -> None:
    x = torch.randn(32, 32)
    x[3, 5] = math.nan
    assert codes(spec, run(spec, x))[3, 5] == 7


@each_with_nan
def test_nan_keeps_its_place_and_leaves_the_others_as_zero_would(spec: OperandSpec) -> None:
    x = torch.randn(64, 160)
    is_nan = torch.rand(x.shape) < 0.1
    is_nan[0, 0] = is_nan[-1, -1] = True
    with_nan, with_zero = (run(spec, x.masked_fill(is_nan, value)) for value in (math.nan, 0.0))
    for one, other, mask in zip(with_nan, with_zero, (is_nan, is_nan.t()), strict=True):
        assert torch.equal(formats.by_name(spec.format).decode(one.data).isnan(), mask)
        assert torch.equal(one.data[~mask], other.data[~mask])
        assert torch.equal(one.scale_inv, other.scale_inv)


@pytest.mark.parametrize(
    ("spec", "scale_inv"),
    [(TENSORWISE, 1.0), (ROWWISE, 1.0), (BLOCK_1D, 1.0), (BLOCK_2D, 1.0), (MXFP8, 0), (NVFP4, 0)],
    ids=str,
)
def test_block_without_magnitude_has_the_neutral_scale(spec: OperandSpec, scale_inv: float) -> None:
    for value in (0.0, math.nan):
        row, column = run(spec, torch.full((48, 160), value))
        assert row.scale_inv.unique().tolist() == [scale_inv]
        assert column.scale_inv.unique().tolist() == [scale_inv]
        if row.global_scale_inv is not None:
            assert row.global_scale_inv.tolist() == column.global_scale_inv.tolist() == [[1.0]]


def test_all_zero_has_zero_codes() -> None:
    made = {str(spec): run(spec, torch.zeros(32, 160)) for spec in EVERY}
    assert [
        name for name, (row, column) in made.items() if row.data.any() or column.data.any()
    ] == []


def test_zero_block_leaves_its_neighbours_alone() -> None:
    x = torch.randn(3, 64)
    x[:, 32:] = 0
    with_zeros, alone = run(MXFP8, x).rowwise, run(MXFP8, x[:, :32]).rowwise
    assert torch.equal(with_zeros.data[:, :32], alone.data)
    assert torch.equal(with_zeros.scale_inv[:, :1], alone.scale_inv)


@pytest.mark.parametrize("spec", [*EIGHT_BITS, *FOUR_BITS], ids=str)
def test_minus_zero_keeps_its_sign_and_inf_saturates(spec: OperandSpec) -> None:
    x = torch.ones(2, 32)
    x[0, 3] = -0.0
    assert codes(spec, run(spec, x))[0, 3] == (8 if spec.format == "e2m1" else 0x80)
    x[0, 3], x[1, 4] = INF, -INF
    largest = formats.by_name(spec.format)
    made = largest.decode(codes(spec, run(spec, x)))
    assert [made[0, 3].item(), made[1, 4].item()] == [largest.max, -largest.max]


def test_inf_gives_scale_1() -> None:
    for spec in (TENSORWISE, ROWWISE, BLOCK_1D, BLOCK_2D, E5M2):
        assert run(spec, torch.tensor([[INF, 3.0]])).rowwise.scale_inv.tolist() == [[1.0]], spec


def test_inf_gives_the_largest_e8m0_scale() -> None:
    assert run(MXFP8, torch.tensor([[INF, 3.0]])).rowwise.scale_inv.tolist() == [[0xFE]]


def test_inf_gives_global_scale_1() -> None:
    made = run(NVFP4, torch.tensor([[INF, 3.0], [6.0, 0.0]])).rowwise
    assert made.global_scale_inv.tolist() == [[1.0]]
    # numerics.md 3.5 with S = 1: e4m3(inf / 6) saturates to 448 = 0x7e, e4m3(6 / 6) = 1 = 0x38
    assert made.scale_inv.tolist() == [[0x7E], [0x38]]


def test_empty_has_empty_data() -> None:
    for spec, (rows, cols) in itertools.product(EVERY, ((0, 160), (32, 0), (0, 0))):
        per_byte = 2 if spec.format == "e2m1" else 1
        row, column = run(spec, torch.zeros(rows, cols))
        assert row.data.shape == (rows, cols // per_byte)
        assert column.data.shape == (cols, rows // per_byte)


def test_empty_tensor_keeps_its_tensorwise_scale() -> None:
    row, column = run(TENSORWISE, torch.zeros(0, 3))
    assert row.scale_inv.tolist() == column.scale_inv.tolist() == [[1.0]]


def test_dtype_of_the_input_does_not_matter_in_range() -> None:
    for spec, dtype in itertools.product(EVERY, (torch.bfloat16, torch.float16)):
        x = torch.randn(32, 160).to(dtype)
        assert_equal(run(spec, x), run(spec, x.float()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_overflowing_block_scale_is_the_largest_of_the_dtype(
    dtype: torch.dtype, power_of_two: bool
) -> None:
    # 448 / 2^-126 is over 2^127. numerics.md 3.4: value_for_inf is the maximum of the dtype, and
    # clearing its mantissa leaves 2^127.
    spec = replace(BLOCK_1D, power_of_two=power_of_two)
    scale = 2.0**127 if power_of_two else torch.finfo(dtype).max
    made = run(spec, torch.full((1, 4), 2.0**-126, dtype=dtype)).rowwise
    assert made.scale_inv.item() == np.float32(1) / np.float32(scale)


@pytest.mark.parametrize("spec", [TENSORWISE, ROWWISE], ids=str)
def test_overflowing_scale_without_blocks_is_the_largest_float32(spec: OperandSpec) -> None:
    made = run(spec, torch.full((1, 4), 2.0**-126, dtype=torch.bfloat16)).rowwise
    assert made.scale_inv.item() == np.float32(1) / np.finfo(np.float32).max


def test_overflowing_global_scale_is_the_largest_float32() -> None:
    # 448 * 6 / 2^-126 is over 2^127.
    made = run(NVFP4, torch.full((1, 16), 2.0**-126)).rowwise
    assert made.global_scale_inv.item() == np.float32(1) / np.finfo(np.float32).max


@pytest.mark.parametrize(("amax", "divisor"), [(1e-4, 1e-3), (1e-3, 1e-3), (0.5, 0.5), (0, 1e-3)])
def test_amax_epsilon_bounds_the_amax_from_below(amax: float, divisor: float) -> None:
    made = run(replace(TENSORWISE, amax_epsilon=1e-3), torch.full((2, 2), amax)).rowwise
    scale = np.float32(448) / np.float32(divisor)
    assert made.scale_inv.item() == np.float32(1) / scale


def test_amax_maps_to_the_target() -> None:
    made = run(replace(TENSORWISE, target=224.0), torch.tensor([[3.0, -1.5]]))
    assert formats.by_name("e4m3").decode(made.rowwise.data).tolist() == [[224.0, -112.0]]


@pytest.mark.parametrize("spec", [ROWWISE, BLOCK_1D], ids=str)
def test_scale_and_its_inverse_are_correctly_rounded_quotients(spec: OperandSpec) -> None:
    x = torch.rand(5000, 1) + 0.5
    scale = np.float32(448) / x.numpy()  # numpy divides float32 as IEEE 754 says
    assert np.array_equal(run(spec, x).rowwise.scale_inv.numpy(), np.float32(1) / scale)


def test_power_of_two_scale_is_rounded_down() -> None:
    x = torch.tensor([[448.0], [448.0001], [447.9999], [300.0], [224.0], [224.0001]])
    made = run(replace(ROWWISE, power_of_two=True), x).rowwise
    # scale = 448 / amax, down: 1, 1/2, 1, 1, 2, 1
    assert made.scale_inv[:, 0].tolist() == [1, 2, 1, 1, 0.5, 1]


def test_e8m0_scale_is_rounded_up() -> None:
    above = torch.nextafter(torch.tensor(448.0), torch.tensor(INF)).item()
    x = torch.tensor([[448.0], [above], [447.0], [224.0], [2.0**-118], [2.0**-149]])
    # 448 * float32(1 / 448) is 1 exactly: 2^(byte - 127) is 1, 2, 1, 1/2; then 2^-118 / 448 is
    # over 2^-127, and what is below 2^-127 takes the smallest scale.
    assert run(MXFP8, x).rowwise.scale_inv[:, 0].tolist() == [127, 128, 127, 126, 1, 0]


@pytest.mark.parametrize("before", [0.0, 5.0])
def test_delayed_amax_is_the_larger_of_old_and_new(before: float) -> None:
    amax = torch.tensor([before])
    run(DELAYED, torch.tensor([[1.0, -3.0, math.nan]]), scale=torch.ones(1), amax_out=amax)
    assert amax.tolist() == [max(before, 3.0)]


def test_delayed_without_amax_out_records_nothing() -> None:
    made = run(DELAYED, torch.tensor([[1.0, 7.0]]), scale=torch.tensor([64.0]), amax_out=None)
    assert formats.by_name("e4m3").decode(made.rowwise.data).tolist() == [[64.0, 448.0]]
    assert made.rowwise.scale_inv.tolist() == [[2.0**-6]]


def test_element_2i_of_a_packed_pair_is_the_low_half() -> None:
    x = torch.tensor([[6.0, 0.5], [-1.0, 4.0]])  # codes 7 1, 10 6: amax 6 gives MX scale 1
    row, column = run(MXFP4, x)
    assert row.data.tolist() == [[0x17], [0x6A]]
    assert column.data.shape == (2, 1)
    # columnwise is made from x.T: amax 6 and 4, both scale 1: codes 7 10, 1 6
    assert column.data.tolist() == [[0xA7], [0x61]]


def test_groups_have_a_scale_and_an_amax_of_their_own() -> None:
    desc = QuantizeDesc(torch.float32, DELAYED, DELAYED, grouped=True)
    amax, scale = torch.zeros(3), torch.tensor([1.0, 2.0, 4.0])
    offsets = torch.tensor([0, 1, 1, 3])
    x = torch.tensor([[1.0], [-2.0], [3.0]])
    made = ReferenceBackend().bind(desc, CPU)(x, offsets, scale=scale, amax_out=amax)
    assert formats.by_name("e4m3").decode(made.rowwise.data).tolist() == [[1.0], [-8.0], [12.0]]
    assert made.rowwise.scale_inv.tolist() == [[1.0], [0.5], [0.25]]
    assert made.columnwise.scale_inv.tolist() == [[1.0, 0.5, 0.25]]
    assert amax.tolist() == [1.0, 0.0, 3.0]


DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NAN = math.nan


def amax(x: torch.Tensor) -> torch.Tensor:
    tensorwise = OperandSpec("e4m3", (0, 0), 448.0)
    desc = AmaxDesc(QuantizeDesc(x.dtype, tensorwise, tensorwise))
    made = ReferenceBackend().bind(desc, x.device)(x)
    assert (made.dtype, made.shape) == (torch.float32, (1,))
    return made


def slow_amax(values: np.ndarray) -> float:
    return max((abs(v) for v in values.ravel().tolist() if not math.isnan(v)), default=0.0)


@given(
    values=arrays.arrays(
        np.float32,
        arrays.array_shapes(min_dims=2, max_dims=2, min_side=0, max_side=9),
        elements=st.floats(width=32),  # NaN, infinities, zeros of both signs, subnormals
    ),
    dtype=st.sampled_from(DTYPES),
)
def test_is_the_largest_magnitude_that_is_not_nan(values: np.ndarray, dtype: torch.dtype) -> None:
    x = torch.from_numpy(values).to(dtype)
    assert amax(x).item() == slow_amax(x.float().numpy())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_of_special_values(dtype: torch.dtype) -> None:
    cases: tuple[tuple[list[float], float], ...] = (
        *(([], 0.0), ([NAN, NAN], 0.0), ([-0.0], 0.0)),
        *(([1.0, -INF, NAN], INF), ([NAN, -3.0, 2.0], 3.0)),
    )
    for values, expected in cases:
        made = amax(torch.tensor(values, dtype=dtype)[None]).item()
        assert made == expected, values
        assert not math.copysign(1.0, made) < 0


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)], ids=str)
def test_of_an_empty_shape_is_zero(shape: tuple[int, ...]) -> None:
    assert amax(torch.zeros(shape)).item() == 0.0


BF16 = torch.bfloat16
TENSOR = OperandSpec("e4m3", (0, 0), 448.0)
ROW = OperandSpec("e4m3", (1, 0), 448.0)
FP4 = OperandSpec("e2m1", (1, 16), 6.0, "e4m3")
HADAMARD = OperandSpec("e2m1", (1, 16), 6.0, "e4m3", transform="hadamard16")
MX = OperandSpec("e4m3", (1, 32), 448.0, "e8m0")
VALUES = torch.tensor([[1.0, -2.0], [NAN, 3.0], [-0.5, 0.25]])


def entries(desc: QuantizeDesc, x: torch.Tensor, *groups: torch.Tensor) -> list[float]:
    made = ReferenceBackend().bind(AmaxDesc(desc), x.device)(x, *groups)
    return [float(value) for value in made]


def test_rows_then_columns() -> None:
    assert entries(QuantizeDesc(torch.float32, ROW, ROW), VALUES) == [2.0, 3.0, 0.5, 1.0, 3.0]


def test_one_of_the_tensor_beside_those_of_columns() -> None:
    assert entries(QuantizeDesc(torch.float32, TENSOR, ROW), VALUES) == [3.0, 1.0, 3.0]


def test_groups_have_an_entry_each_and_an_empty_one_has_zero() -> None:
    desc = QuantizeDesc(torch.float32, TENSOR, TENSOR, grouped=True)
    assert entries(desc, VALUES, torch.tensor([0, 1, 1, 3])) == [2.0, 0.0, 3.0]


def test_columns_of_groups_come_group_by_group() -> None:
    desc = QuantizeDesc(torch.float32, None, ROW, grouped=True)
    assert entries(desc, VALUES, torch.tensor([0, 1, 3])) == [1.0, 2.0, 0.5, 3.0]


def test_rows_behind_the_last_group_have_zero() -> None:
    desc = QuantizeDesc(torch.float32, ROW, TENSOR, grouped=True, offsets_on_device=True)
    assert entries(desc, VALUES, torch.tensor([0, 1, 2])) == [2.0, 3.0, 0.0, 2.0, 3.0]


def test_transformed_orientation_has_the_amax_of_the_transformed() -> None:
    x = torch.randn(32, 16).to(BF16)
    rowwise, columnwise = entries(QuantizeDesc(BF16, FP4, HADAMARD), x)
    assert rowwise == x.abs().max().item()
    assert columnwise == hadamard16(x, 0).abs().max().item()


def refusal(desc: OpDesc) -> str:
    return ReferenceBackend().unsupported(desc, torch.device("cpu")) or ""


def test_scales_of_blocks_have_no_amax_to_give() -> None:
    plain = QuantizeDesc(BF16, MX, MX)
    for desc in (AmaxDesc(plain), QuantizeByAmaxDesc.of(plain)):
        assert refusal(desc) == "scales follow from their blocks alone: there is no amax"


def test_a_delayed_scale_follows_from_no_amax() -> None:
    assert "a delayed scale is given" in refusal(QuantizeByAmaxDesc(BF16, DELAYED, DELAYED))
    assert refusal(AmaxDesc(QuantizeDesc(BF16, DELAYED, DELAYED))) == ""


def test_an_amax_of_a_cast_by_amaxes_is_refused() -> None:
    assert refusal(AmaxDesc(QuantizeByAmaxDesc(BF16, ROW, ROW))) == "no amax of QuantizeByAmaxDesc"


def by(amax: list[float], desc: QuantizeDesc, x: torch.Tensor, *groups: torch.Tensor) -> Quantized:
    run = ReferenceBackend().bind(QuantizeByAmaxDesc.of(desc), x.device)
    made: Quantized = run(x, *groups, amax=torch.tensor(amax))
    return made


def test_the_scale_follows_from_the_given_amax() -> None:
    made = by([56.0], QuantizeDesc(torch.float32, TENSOR, None), torch.tensor([[1.0, 2.0]]))
    assert made.rowwise is not None
    assert made.rowwise.scale_inv is not None
    assert made.rowwise.scale_inv.tolist() == [[0.125]]


def test_elements_beyond_the_given_amax_saturate() -> None:
    made = by([1.0], QuantizeDesc(torch.float32, TENSOR, None), torch.tensor([[1.0, 2.0, -9.0]]))
    assert made.rowwise is not None
    assert made.rowwise.data.tolist() == [[0x7E, 0x7E, 0xFE]]


@pytest.mark.parametrize("amax", [0.0, INF])
def test_a_given_amax_of_zero_or_inf_has_scale_1(amax: float) -> None:
    made = by([amax], QuantizeDesc(torch.float32, TENSOR, None), torch.tensor([[1.0, 2.0]]))
    assert made.rowwise is not None
    assert made.rowwise.scale_inv is not None
    assert made.rowwise.scale_inv.item() == 1.0


def test_each_group_has_its_given_amax() -> None:
    desc = QuantizeDesc(torch.float32, TENSOR, ROW, grouped=True)
    amax = [56.0, 28.0, 56.0, 7.0, 28.0, 14.0]
    made = by(amax, desc, VALUES, torch.tensor([0, 1, 3]))
    assert made.rowwise is not None
    assert made.columnwise is not None
    assert made.rowwise.scale_inv is not None
    assert made.columnwise.scale_inv is not None
    assert made.rowwise.scale_inv.tolist() == [[0.125], [0.0625]]
    assert made.columnwise.scale_inv.tolist() == [[0.125, 0.0625], [0.015625, 0.03125]]


def test_another_number_of_amaxes_is_refused() -> None:
    with pytest.raises(OperandError, match=r"amax is torch.float32 \[2\]"):
        by([1.0, 1.0], QuantizeDesc(torch.float32, TENSOR, TENSOR), VALUES)
