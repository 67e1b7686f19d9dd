"""HiFloat8: its table, and its casts against the foreign library and between torch and numpy."""

from __future__ import annotations

import csv
import itertools
import math
from pathlib import Path
from typing import Any

import en_dtypes
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import fp8core as te
from fp8core import formats, recipe
from fp8core.errors import OperandError, UnsupportedError
from fp8core_backends.ascend import hif8

TABLE = Path(__file__).parent / "hif8_table.csv"
ALL_16_BITS = torch.arange(2**16, dtype=torch.int32).to(torch.uint16)
DTYPES = [torch.float16, torch.bfloat16]


def foreign(x: torch.Tensor) -> torch.Tensor:
    """The codes that en_dtypes gives float32 x; it overflows to inf."""
    with np.errstate(all="ignore"):  # numpy warns of NaN and of overflow
        codes = x.numpy().astype(en_dtypes.hifloat8).view(np.uint8)
    return torch.from_numpy(codes)


def around_midpoints() -> torch.Tensor:
    """Every value and midpoint of two, inf's included, and the float32 next to each."""
    values = sorted({v for v in hif8.HIF8.values if math.isfinite(v)} | {-49152.0, 49152.0})
    exact = torch.tensor([*values, *((a + b) / 2 for a, b in itertools.pairwise(values))])
    up, down = (torch.tensor(sign * math.inf) for sign in (1, -1))
    return torch.cat([exact, exact.nextafter(up), exact.nextafter(down)])


def random_bits(seed: int) -> torch.Tensor:
    """Two million float32 of random bits: every exponent, NaN and inf."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**31), 2**31, (2_000_000,), generator=generator)
    return bits.to(torch.int32).view(torch.float32)


def random_in_range(seed: int) -> torch.Tensor:
    """Two million float32 over the exponents of the format."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.rand(2_000_000, generator=generator) * 42 - 25
    signs = torch.randint(0, 2, exponents.shape, generator=generator) * 2 - 1
    return torch.exp2(exponents) * signs


# --- the table ---


def test_values_are_those_of_the_published_table() -> None:
    rows = list(csv.DictReader(TABLE.read_text(encoding="utf-8").splitlines()))
    assert [int(row["code"]) for row in rows] == list(range(256))
    published = [float(row["value"]) for row in rows]
    np.testing.assert_array_equal(hif8.HIF8.values, published)


def test_values_are_those_of_en_dtypes() -> None:
    codes = np.arange(256, dtype=np.uint8)
    theirs = codes.view(en_dtypes.hifloat8).astype(np.float32)
    np.testing.assert_array_equal(np.array(hif8.HIF8.values, np.float32), theirs)


def test_there_are_253_finite_values() -> None:
    assert len({v for v in hif8.HIF8.values if math.isfinite(v)}) == 253


# --- torch ---


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_16_bit_float_encodes_as_in_en_dtypes(dtype: torch.dtype) -> None:
    x = ALL_16_BITS.view(dtype)
    assert torch.equal(hif8.encode(x, overflow="infinite"), foreign(x.float()))


@pytest.mark.parametrize("make", [random_bits, random_in_range])
@pytest.mark.parametrize("seed", [0, 1])
def test_random_float32_encode_as_in_en_dtypes(make: object, seed: int) -> None:
    assert callable(make)
    x = make(seed)
    assert torch.equal(hif8.encode(x, overflow="infinite"), foreign(x))


def test_midpoints_and_their_neighbours_encode_as_in_en_dtypes() -> None:
    x = around_midpoints()
    assert torch.equal(hif8.encode(x, overflow="infinite"), foreign(x))


def test_every_value_keeps_its_code() -> None:
    codes = torch.arange(256).to(torch.uint8)
    assert torch.equal(hif8.encode(hif8.HIF8.decode(codes), overflow="infinite"), codes)


def test_saturation_changes_only_what_would_be_inf() -> None:
    x = torch.cat([around_midpoints(), torch.tensor([math.inf, -math.inf, math.nan])])
    saturated, infinite = hif8.encode(x), hif8.encode(x, overflow="infinite")
    expected = torch.where(infinite == 0x6F, 0x6E, torch.where(infinite == 0xEF, 0xEE, infinite))
    assert torch.equal(saturated, expected.to(torch.uint8))


def test_recipes_saturate() -> None:
    x = around_midpoints()
    assert torch.equal(formats.by_name("hif8").encode(x), hif8.encode(x))


def test_unknown_overflow_is_refused() -> None:
    with pytest.raises(OperandError, match="expected 'saturate' or 'infinite'"):
        hif8.encode(torch.ones(1), overflow="wrap")  # type: ignore[arg-type]  # wrong on purpose


def test_unknown_rounding_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"'stochastic'; it has \('nearest', 'hybrid'\)"):
        hif8.encode(torch.ones(1), rounding="stochastic")


# --- hybrid rounding ---


def test_hybrid_rounding_leaves_values_of_the_format() -> None:
    codes = torch.arange(256).to(torch.uint8)
    values = hif8.HIF8.decode(codes)
    assert torch.equal(hif8.encode(values, rounding="hybrid", overflow="infinite"), codes)


def test_hybrid_rounding_is_to_the_nearest_where_the_mantissa_has_three_bits() -> None:
    x = random_in_range(2)
    x = x[(x.abs() >= 2.0**-3) & (x.abs() < 16)]
    assert torch.equal(hif8.encode(x, rounding="hybrid"), hif8.encode(x))


def test_hybrid_rounding_gives_one_of_the_two_neighbours_and_keeps_the_mean() -> None:
    generator = torch.Generator().manual_seed(3)
    x = 16 + 4 * torch.rand(1_000_000, generator=generator)  # between the neighbours 16 and 20
    rounded = hif8.HIF8.decode(hif8.encode(x, rounding="hybrid"))
    assert rounded.unique().tolist() == [16.0, 20.0]
    assert abs((rounded - x).mean().item()) < 6 * 2 / 1000  # six deviations of the mean


def test_hybrid_rounding_never_leaves_the_neighbours() -> None:
    x = random_in_range(4)
    x = x[x.abs() < 2.0**15]
    error = (hif8.HIF8.decode(hif8.encode(x, rounding="hybrid")) - x).abs()
    exponent = torch.frexp(x).exponent - 1
    bits = torch.tensor([3, 2, 1, 0])[torch.bucketize(exponent.abs(), torch.tensor([3, 7, 15]))]
    spacing = torch.exp2((exponent - bits).float()).clamp(min=2.0**-22)
    assert (error < spacing).all()


# --- numpy ---


@pytest.mark.parametrize("overflow", ["saturate", "infinite"])
@pytest.mark.parametrize("make", [random_bits, random_in_range])
def test_numpy_encodes_as_torch(make: object, overflow: hif8.Overflow) -> None:
    assert callable(make)
    x = torch.cat([make(5), around_midpoints(), torch.tensor([-0.0])])
    theirs = torch.from_numpy(hif8.encode_numpy(x.numpy(), overflow=overflow))
    assert torch.equal(theirs, hif8.encode(x, overflow=overflow))


def test_numpy_rounds_float64_once() -> None:
    below = np.nextafter(15.5, 0.0)  # float32 would round it to 15.5, and that to 16
    assert hif8.decode_numpy(hif8.encode_numpy(np.array([below, 15.5]))).tolist() == [15.0, 16.0]


def test_numpy_decodes_as_torch() -> None:
    codes: NDArray[np.uint8] = np.arange(256, dtype=np.uint8).reshape(16, 16)
    theirs = hif8.HIF8.decode(torch.from_numpy(codes))
    np.testing.assert_array_equal(hif8.decode_numpy(codes), theirs.numpy())


# --- recipes ---

ROLE = te.plan.LayerRole()


@pytest.mark.parametrize(
    "chosen",
    [
        recipe.Float8CurrentScaling(fp8_format="HIF8"),
        recipe.DelayedScaling(fp8_format=recipe.Format.HIF8),
        recipe.CustomRecipe(fp8_format="hif8"),
        recipe.by_name("hif8"),
    ],
    ids=["current", "delayed", "custom", "named"],
)
def test_amax_goes_to_15_forward_and_to_224_backward(chosen: recipe.Recipe) -> None:
    plan = chosen.plan(ROLE, torch.bfloat16)
    assert isinstance(plan, te.plan.LinearPlan)
    targets = {
        name: {spec.target for spec in tensor if spec is not None}
        for name, tensor in plan.tensors.items()
    }
    assert targets == {"input": {15.0}, "weight": {15.0}, "grad_output": {224.0}}
    assert {spec.block for tensor in plan.tensors.values() for spec in tensor if spec} == {(0, 0)}


@pytest.mark.parametrize(
    "chosen",
    [recipe.Float8CurrentScaling(fp8_format="hif8"), recipe.DelayedScaling(fp8_format="hif8")],
    ids=["current", "delayed"],
)
def test_a_layer_trains_within_the_error_of_three_bits(chosen: recipe.Recipe) -> None:
    torch.manual_seed(0)
    layer = te.Linear(96, 64, bias=False, params_dtype=torch.float32, device="cpu")
    x, grad = torch.randn(64, 96), 1e-4 * torch.randn(64, 64)
    for _ in range(2):  # delayed scales are 1 in the first step
        layer.zero_grad()
        inputs = x.clone().requires_grad_()
        with te.autocast(recipe=chosen):
            layer(inputs).backward(grad)
    assert inputs.grad is not None
    assert layer.weight.grad is not None
    with torch.no_grad():
        expected = grad @ layer.weight, grad.T @ x
    for ours, exact in zip((inputs.grad, layer.weight.grad), expected, strict=True):
        assert (ours - exact).norm() / exact.norm() < 0.07  # a gradient has 2 or 3 bits of mantissa


@pytest.mark.parametrize("x", [[1.0], None, 2.0], ids=str)
def test_what_is_no_tensor_is_named(x: Any) -> None:
    with pytest.raises(OperandError, match=f"x is {type(x).__name__}, expected float32"):
        hif8.encode(x)
