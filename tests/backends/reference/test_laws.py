"""Laws of quantization that hold for every spec, shape and value, as Hypothesis properties.

These are about the judge alone; tests/conformance holds it to what every backend promises.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8core import formats
from fp8core.backend_api import DequantizeDesc, Operand, OperandSpec, Quantized, QuantizeDesc
from fp8core_backends.reference.backend import ReferenceBackend

CPU = torch.device("cpu")
Test = TypeVar("Test", bound=Callable[..., None])
UNIT = 2.0**-24  # largest relative error of one float32 rounding

TENSORWISE = OperandSpec("e4m3", (0, 0), 448.0)
DELAYED = replace(TENSORWISE, delayed=True)
FLOAT32_SCALES = (
    TENSORWISE,
    OperandSpec("e5m2", (0, 0), 57344.0),
    OperandSpec("e4m3", (1, 0), 448.0),
    OperandSpec("e4m3", (1, 128), 448.0),
    OperandSpec("e4m3", (5, 3), 448.0),
    OperandSpec("e2m1", (1, 16), 6.0),
)
POWER_OF_TWO = (
    replace(TENSORWISE, power_of_two=True),
    OperandSpec("e5m2", (1, 0), 57344.0, power_of_two=True),
    OperandSpec("e4m3", (1, 128), 448.0, power_of_two=True),
    OperandSpec("e4m3", (128, 128), 448.0, power_of_two=True),
    OperandSpec("e4m3", (1, 32), 448.0, scale_format="e8m0"),
    OperandSpec("e5m2", (32, 32), 57344.0, scale_format="e8m0"),
    OperandSpec("e2m1", (1, 32), 6.0, scale_format="e8m0"),
)
TWO_LEVEL = (
    OperandSpec("e2m1", (1, 16), 6.0, scale_format="e4m3"),
    OperandSpec("e2m1", (16, 16), 6.0, scale_format="e4m3"),
)
TRANSFORMED = (
    replace(TWO_LEVEL[0], transform="hadamard16"),
    OperandSpec("e4m3", (16, 16), 448.0, scale_format="e4m3", transform="hadamard16"),
)
STOCHASTIC = (
    replace(TWO_LEVEL[0], stochastic=True),
    replace(TWO_LEVEL[1], stochastic=True),
    replace(TRANSFORMED[0], stochastic=True),
)
EPSILON = OperandSpec("e4m3", (1, 8), 448.0, amax_epsilon=1e-3)
PLAIN = (*FLOAT32_SCALES, *POWER_OF_TWO, *TWO_LEVEL, EPSILON, DELAYED)
EVERY = (*PLAIN, *TRANSFORMED, *STOCHASTIC)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """The tensors are small: a second thread adds nothing but waiting when the machine is busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Case(NamedTuple):
    """A tensor, the specs of its two orientations, and what else the call is given."""

    x: torch.Tensor
    row: OperandSpec
    column: OperandSpec
    given: dict[str, torch.Tensor]

    def quantize(self, x: torch.Tensor | None = None) -> Quantized:
        return run(self.row, self.column, self.x if x is None else x, **self.given)


def run(
    row: OperandSpec | None,
    column: OperandSpec | None,
    x: torch.Tensor,
    *groups: torch.Tensor,
    **given: torch.Tensor,
) -> Quantized:
    desc = QuantizeDesc(x.dtype, row, column, grouped=bool(groups))
    backend = ReferenceBackend()
    assert backend.unsupported(desc, CPU) is None
    return backend.bind(desc, CPU)(x, *groups, **given)


def dequantize(spec: OperandSpec, operand: Operand) -> torch.Tensor:
    return ReferenceBackend().bind(DequantizeDesc(spec), CPU)(operand)


def multiple(*specs: OperandSpec) -> int:
    """What both dimensions must be multiples of for a quantization to exist."""
    if any(spec.transform for spec in specs):
        return 16
    return 2 if any(spec.format == "e2m1" for spec in specs) else 1


def extras(specs: Sequence[OperandSpec], seed: int, num_groups: int = 1) -> dict[str, Any]:
    if any(spec.delayed for spec in specs):
        scale = torch.arange(1, num_groups + 1) * 0.37
        return {"scale": scale, "amax_out": torch.full((num_groups,), 0.5)}
    if any(spec.stochastic for spec in specs):
        return {"rng": torch.tensor([seed, 3])}
    return {}


def tensor(data: st.DataObject, rows: int, cols: int, *, special: bool = True) -> torch.Tensor:
    """Values over up to 16 decades; with zero rows, an outlier, and NaN, inf and -0 if special."""
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32), label="seed"))
    decades = data.draw(st.sampled_from((0, 3, 8)), label="decades")
    noise = torch.rand(rows, cols, generator=generator) * 2 - 1
    x = torch.randn(rows, cols, generator=generator) * 10.0 ** (noise * decades)
    if x.numel() and data.draw(st.booleans(), label="outlier"):
        x[rows // 2, cols // 3] = 1e6
    if special:
        x[torch.rand(rows, 1, generator=generator)[:, 0] < 0.3] = 0.0
        odd_ones = data.draw(
            st.sampled_from(((), (math.nan,), (math.inf, -0.0), (-math.inf, math.nan)))
        )
        for value in odd_ones:
            x[torch.rand(rows, cols, generator=generator) < 0.05] = value
    else:
        x = torch.where(x == 0, 1.0, x)
    # float16 turns large values into inf, so it is no dtype for plain values
    dtypes = (torch.float32, torch.bfloat16, *([torch.float16] if special else []))
    return x.to(data.draw(st.sampled_from(dtypes), label="dtype"))


SIZES = st.sampled_from((0, 1, 2, 3, 17, 33, 64, 130))


def draw_case(data: st.DataObject, row: OperandSpec, column: OperandSpec) -> Case:
    step = multiple(row, column)
    rows, cols = (-(-data.draw(SIZES) // step) * step for _ in range(2))
    return Case(tensor(data, rows, cols), row, column, extras((row, column), 11))


def for_each(specs: Sequence[OperandSpec], num_examples: int = 8) -> Callable[[Test], Test]:
    """Run a test of a drawn tensor for each of the specs."""

    def decorate(test: Test) -> Test:
        drawn = settings(max_examples=num_examples)(given(data=st.data())(test))
        return pytest.mark.parametrize("spec", specs, ids=str)(drawn)

    return decorate


def with_one_nan(spec: OperandSpec, data: torch.Tensor) -> torch.Tensor:
    """Codes with every NaN as 0x7f: torch's conversions keep its sign at some positions only."""
    element = formats.by_name(spec.format)
    return data if element.bits == 4 else data.masked_fill(element.decode(data).isnan(), 0x7F)


def assert_same(spec: OperandSpec, made: Operand | None, expected: Operand | None) -> None:
    """Compare shapes, dtypes and bits: -0 is not 0."""
    for name in Operand._fields:
        ours, theirs = getattr(made, name, None), getattr(expected, name, None)
        if ours is None or theirs is None:
            assert ours is theirs, name
            continue
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype), name
        if name == "data":
            ours, theirs = with_one_nan(spec, ours), with_one_nan(spec, theirs)
        if ours.dtype == torch.float32:
            ours, theirs = (part.contiguous().view(torch.int32) for part in (ours, theirs))
        assert torch.equal(ours, theirs), f"{name}: {ours} is not {theirs}"


@for_each(EVERY)
def test_shapes_and_dtypes_follow_the_contract(spec: OperandSpec, data: st.DataObject) -> None:
    case = draw_case(data, spec, spec)
    shapes = case.x.shape, case.x.t().shape
    for operand, (rows, k) in zip(case.quantize(), shapes, strict=True):
        counts = [
            -(-size // step) if step else 1
            for size, step in zip((rows, k), spec.block, strict=True)
        ]
        data, scale_inv, global_scale_inv = operand
        assert data.shape == (rows, k // 2 if spec.format == "e2m1" else k)
        assert data.dtype == torch.uint8
        assert scale_inv.shape == tuple(counts)
        is_float32 = spec.scale_format == "float32"
        assert scale_inv.dtype == (torch.float32 if is_float32 else torch.uint8)
        assert (global_scale_inv is None) == (spec.scale_format != "e4m3")
        if global_scale_inv is not None:
            assert global_scale_inv.shape == (1, 1)
            assert global_scale_inv.dtype == torch.float32


@for_each([spec for spec in PLAIN if spec.block[0] in (0, 1)])
def test_permuting_rows_permutes_the_result(spec: OperandSpec, data: st.DataObject) -> None:
    case = draw_case(data, spec, spec)
    order = data.draw(st.permutations(range(case.x.shape[0])))
    plain = run(spec, None, case.x, **case.given).rowwise
    permuted = run(spec, None, case.x[order], **case.given).rowwise
    scale_inv = plain.scale_inv[order] if spec.block[0] == 1 else plain.scale_inv
    expected = Operand(plain.data[order], scale_inv, plain.global_scale_inv)
    assert_same(spec, permuted, expected)


@for_each((*FLOAT32_SCALES, *POWER_OF_TWO, *TWO_LEVEL, TRANSFORMED[0]))
def test_power_of_two_factor_moves_to_the_scale(spec: OperandSpec, data: st.DataObject) -> None:
    power = data.draw(st.integers(-20, 20), label="power")
    step = multiple(spec)
    rows, cols = (-(-data.draw(SIZES) // step) * step for _ in range(2))
    x = tensor(data, rows, cols, special=False)
    factor = 2.0**power if x.numel() else 1.0  # the scale of an empty tensor stays 1
    for one, other in zip(run(spec, spec, x), run(spec, spec, x * 2.0**power), strict=True):
        if spec.scale_format == "e8m0":
            expected = one._replace(scale_inv=(one.scale_inv.int() + power).to(torch.uint8))
        elif spec.scale_format == "e4m3":
            expected = one._replace(global_scale_inv=one.global_scale_inv * factor)
        else:
            expected = one._replace(scale_inv=one.scale_inv * factor)
        assert_same(spec, other, expected)


@for_each((*POWER_OF_TWO, DELAYED))
def test_requantizing_with_power_of_two_or_given_scales_changes_no_value(
    spec: OperandSpec, data: st.DataObject
) -> None:
    # A power-of-two scale leaves the largest code of a block above target / 2, or at it, and then
    # the next scale is a factor 2 finer: the same values with other codes, each of them exact.
    case = draw_case(data, spec, spec)
    values = dequantize(spec, run(spec, None, case.x, **case.given).rowwise)
    again = dequantize(spec, run(spec, None, values, **case.given).rowwise)
    torch.testing.assert_close(again, values, rtol=0, atol=0, equal_nan=True)


@for_each(FLOAT32_SCALES, 30)
def test_requantizing_with_float32_scales_changes_no_code(
    spec: OperandSpec, data: st.DataObject
) -> None:
    # With u = 2^-24: i = scale_inv; the amax comes back as T i (1+u); the new scale is
    # T / that (1+u) = (1+2u) / i; its reciprocal i (1+3u). A value is code * i, rounded (u)
    # before and after: 5 u. A code is met within 4 u, far below half the spacing of the format.
    first = run(spec, None, draw_case(data, spec, spec).x).rowwise
    values = dequantize(spec, first)
    second = run(spec, None, values).rowwise
    assert_same(spec, Operand(second.data), Operand(first.data))
    again = dequantize(spec, second)
    torch.testing.assert_close(again, values, rtol=5 * UNIT, atol=0, equal_nan=True)


@given(st.integers(0, 2**32), st.sampled_from(TWO_LEVEL), SIZES, SIZES)
def test_requantizing_with_two_level_scales_changes_no_code(
    seed: int, spec: OperandSpec, rows: int, cols: int
) -> None:
    # Block amaxes within a factor 448 * 2^6 of the tensor's have a normal e4m3 scale s, within
    # 2^-4 of the wanted one t: the amax meets 6 t / s in [5.6, 6.4], code 6, and t' = s (1 + few u)
    # has code s again. Below that s is subnormal, too coarse for the law to hold.
    # Values: d = fl(1/S), amax' = fl(6 fl(448 d)), S' = fl(2688 / amax') = (1+3u) / d, and
    # d' = d (1+4u); a value is fl(code * fl(s d)), 2 u before and 2 u after: 8 u.
    generator = torch.Generator().manual_seed(seed)
    shape = rows, cols + cols % 2
    magnitude = 10.0 ** (4 * torch.rand(shape, generator=generator) - 2)
    sign = torch.randint(-1, 2, shape, generator=generator)  # 0 among them
    first = run(spec, None, magnitude * sign).rowwise
    values = dequantize(spec, first)
    second = run(spec, None, values).rowwise
    assert_same(spec, Operand(second.data), Operand(first.data))
    assert torch.equal(second.scale_inv, first.scale_inv)
    torch.testing.assert_close(dequantize(spec, second), values, rtol=8 * UNIT, atol=0)
