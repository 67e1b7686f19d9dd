"""The amax op against numpy, its entries by orientation, and the cast by given amaxes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

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

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
INF, NAN = math.inf, math.nan


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
DELAYED = OperandSpec("e4m3", (0, 0), 448.0, delayed=True)
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
