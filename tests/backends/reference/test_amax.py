"""The amax op against numpy: NaN is ignored, an empty tensor has amax 0."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from fp8core.backend_api import AmaxDesc, OperandSpec, QuantizeDesc
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
@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], 0.0),
        ([NAN, NAN], 0.0),
        ([-0.0], 0.0),
        ([1.0, -INF, NAN], INF),
        ([NAN, -3.0, 2.0], 3.0),
    ],
    ids=str,
)
def test_of_special_values(values: list[float], expected: float, dtype: torch.dtype) -> None:
    made = amax(torch.tensor(values, dtype=dtype)[None]).item()
    assert made == expected
    assert not math.copysign(1.0, made) < 0


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)], ids=str)
def test_of_an_empty_shape_is_zero(shape: tuple[int, ...]) -> None:
    assert amax(torch.zeros(shape)).item() == 0.0


def test_of_strided_and_expanded_views() -> None:
    x = torch.arange(24.0).reshape(4, 6)
    assert amax(x.t()).item() == 23.0
    assert amax(x[:2, ::5]).item() == 11.0
    assert amax(x[1:2, 2:3].expand(3, 7)).item() == 8.0


def test_writes_no_input() -> None:
    x = torch.tensor([[1.0, NAN, -2.0]])
    before = x.clone()
    amax(x).fill_(9.0)
    assert torch.equal(x.view(torch.int32), before.view(torch.int32))
