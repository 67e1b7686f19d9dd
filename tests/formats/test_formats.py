"""Every code, every rounding boundary and every edge of the formats, against foreign libraries."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
import torch

from fp8core import formats
from fp8core.errors import OperandError, UnsupportedError
from fp8core.formats import FormatSpec, by_name

ML_DTYPES = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e2m1": ml_dtypes.float4_e2m1fn,
    "e8m0": ml_dtypes.float8_e8m0fnu,
}
TORCH_DTYPES = {
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "e8m0": torch.float8_e8m0fnu,
}
SIGNED = ["e4m3", "e5m2", "e2m1"]
INT32 = torch.int32


def floats(bits: list[int]) -> torch.Tensor:
    return torch.tensor(bits, dtype=torch.int64).to(INT32).view(torch.float32)


def all_codes(spec: FormatSpec) -> torch.Tensor:
    return torch.arange(2**spec.bits, dtype=torch.uint8)


def all_bfloat16() -> torch.Tensor:
    return torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)


def all_float16() -> torch.Tensor:
    return torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.float16)


def around_boundaries(spec: FormatSpec) -> torch.Tensor:
    """Every value and every midpoint of two values, and the float32 one ulp to both sides."""
    values = sorted({v for v in spec.values if math.isfinite(v)})
    middles = [(a + b) / 2 for a, b in itertools.pairwise(values)]
    x = torch.tensor(values + middles, dtype=torch.float32)
    up, down = torch.tensor(math.inf), torch.tensor(-math.inf)
    return torch.cat([x, torch.nextafter(x, up), torch.nextafter(x, down), torch.tensor([-0.0])])


def random_exponents() -> torch.Tensor:
    return torch.randint(-(2**31), 2**31, (200_000,)).to(INT32).view(torch.float32)


INPUTS: dict[str, Callable[[FormatSpec], torch.Tensor]] = {
    "boundaries": around_boundaries,
    "bfloat16": lambda spec: all_bfloat16(),
    "float16": lambda spec: all_float16(),
    "random": lambda spec: random_exponents(),
}


def judged(name: str, x: torch.Tensor) -> torch.Tensor:
    """Codes of float32 x in ml_dtypes."""
    codes = x.numpy().astype(ML_DTYPES[name]).view(np.uint8)
    return torch.from_numpy(codes)


# --- decode ---


@pytest.mark.parametrize("name", ML_DTYPES)
def test_decode_of_every_code_equals_ml_dtypes(name: str) -> None:
    codes = all_codes(by_name(name))
    theirs = torch.from_numpy(codes.numpy().view(ML_DTYPES[name]).astype(np.float32))
    torch.testing.assert_close(by_name(name).decode(codes), theirs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "e2m1"])
def test_decode_of_every_code_has_the_sign_of_the_code(name: str) -> None:
    spec = by_name(name)
    values = spec.decode(all_codes(spec))
    assert torch.equal(torch.signbit(values), all_codes(spec) >= 2 ** (spec.bits - 1))


@pytest.mark.parametrize("name", ML_DTYPES)
def test_decode_of_every_code_equals_the_values(name: str) -> None:
    spec = by_name(name)
    theirs = torch.tensor(spec.values, dtype=torch.float32)
    ours = spec.decode(all_codes(spec))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


def test_decode_gives_nan_for_a_byte_that_is_no_code() -> None:
    codes = torch.arange(16, 256, dtype=torch.uint8)
    assert by_name("e2m1").decode(codes).isnan().all()


def test_decode_refuses_codes_that_are_not_bytes() -> None:
    with pytest.raises(OperandError, match=r"codes are torch\.int64"):
        by_name("e4m3").decode(torch.tensor([1]))


# --- encode ---


@pytest.mark.parametrize("name", ML_DTYPES)
def test_encode_returns_the_code_of_every_finite_value(name: str) -> None:
    spec = by_name(name)
    codes = all_codes(spec)
    values = spec.decode(codes)
    finite = values.isfinite()
    assert torch.equal(spec.encode(values[finite]), codes[finite])


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("name", SIGNED)
def test_encode_equals_ml_dtypes_and_torch_in_range_and_its_table_everywhere(
    name: str, kind: str
) -> None:
    spec = by_name(name)
    x = INPUTS[kind](spec)
    table = FormatSpec(name, spec.bits, spec.values, spec.ties, None)
    assert torch.equal(spec.encode(x), table.encode(x))
    x = x[x.abs() <= spec.max]
    assert x.numel() > 0
    assert torch.equal(spec.encode(x), judged(name, x.float()))
    if name in TORCH_DTYPES:
        assert torch.equal(spec.encode(x), x.float().to(TORCH_DTYPES[name]).view(torch.uint8))


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("name", SIGNED)
def test_encode_by_lookup_equals_encode_by_search(name: str, kind: str) -> None:
    spec = by_name(name)
    x = INPUTS[kind](spec).float()
    searched = formats._search(spec.values, spec.ties, x.view(INT32))
    assert torch.equal(formats.encode_by_table(spec.values, spec.ties, x), searched)


@pytest.mark.parametrize(
    ("name", "beyond", "code"),
    [
        ("e4m3", [449.0, 464.0, 480.0, 1e9], 0x7E),
        ("e5m2", [57345.0, 61440.0, 65536.0], 0x7B),  # though it has inf
        ("e2m1", [6.5, 7.0, 8.0], 0x7),
    ],
)
def test_encode_saturates_beyond_the_largest_value(
    name: str, beyond: list[float], code: int
) -> None:
    spec = by_name(name)
    x = torch.tensor([*beyond, 3.4e38, math.inf])
    minus = code + 2 ** (spec.bits - 1)
    assert spec.encode(x).tolist() == [code] * len(x)
    assert spec.encode(-x).tolist() == [minus] * len(x)
    for dtype in (torch.bfloat16, torch.float16):
        assert spec.encode(torch.tensor([math.inf, -math.inf], dtype=dtype)).tolist() == [
            code,
            minus,
        ]


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_nan_becomes_7f_or_ff_whatever_its_payload(name: str) -> None:
    positive = [0x7F800001, 0x7FC00000, 0x7FFFFFFF]
    x = floats(positive + [bits | 0x80000000 for bits in positive])
    assert by_name(name).encode(x).tolist() == [0x7F] * 3 + [0xFF] * 3


def test_nan_becomes_plus_max_in_e2m1() -> None:
    assert by_name("e2m1").encode(floats([0x7F800001, 0x7FC00000, 0xFFC00000])).tolist() == [7] * 3


@pytest.mark.parametrize("name", SIGNED)
def test_zero_keeps_its_sign(name: str) -> None:
    spec = by_name(name)
    x = torch.tensor([0.0, -0.0, 1e-45, -1e-45])
    minus = 2 ** (spec.bits - 1)
    assert spec.encode(x).tolist() == [0, minus, 0, minus]


def test_encode_refuses_other_dtypes() -> None:
    for dtype in (torch.int32, torch.bool, torch.float64, torch.float8_e4m3fn):
        with pytest.raises(OperandError, match=f"x is {dtype}, expected float32"):
            by_name("e4m3").encode(torch.zeros(2, dtype=dtype))


@pytest.mark.parametrize(("name", "rounding"), [("e4m3", "up"), ("e2m1", "down"), ("e8m0", "even")])
def test_encode_refuses_a_rounding_that_the_format_lacks(name: str, rounding: str) -> None:
    with pytest.raises(UnsupportedError, match=f"{name!r} has no rounding {rounding!r}; it has"):
        by_name(name).encode(torch.ones(1), rounding=rounding)


# --- e8m0 ---


def e8m0_inputs() -> torch.Tensor:
    """Around every power of two and every midpoint, subnormals included, and at random."""
    edges = (0, 1, 2, 0x3FFFFF, 0x400000, 0x400001, 0x7FFFFE, 0x7FFFFF)
    x = floats([(e << 23) | m for e in range(255) for m in edges])
    return torch.cat([x[x > 0], torch.rand(2000) * 1e-38, random_exponents()[:5000].abs()])


def positive_finite(x: torch.Tensor) -> torch.Tensor:
    return x[(x > 0) & x.isfinite()]


def test_e8m0_nearest_equals_ml_dtypes() -> None:
    x = positive_finite(torch.cat([e8m0_inputs(), random_exponents()]))
    x = x[x < 1.5 * 2.0**127]
    assert torch.equal(by_name("e8m0").encode(x), judged("e8m0", x))


def test_e8m0_nearest_takes_a_midpoint_up_whatever_its_parity() -> None:
    assert by_name("e8m0").encode(torch.tensor([1.5, 3.0, 6.0])).tolist() == [128, 129, 130]


def test_e8m0_up_is_the_smallest_power_of_two_not_below() -> None:
    x = positive_finite(e8m0_inputs())
    powers = torch.tensor(by_name("e8m0").values[:255], dtype=torch.float64)
    # number of powers below x = index of the first that is not
    wanted = torch.searchsorted(powers, x.double(), right=False).clamp_(max=254)
    assert torch.equal(by_name("e8m0").encode(x, rounding="up"), wanted.to(torch.uint8))


def test_e8m0_down_is_the_largest_power_of_two_not_above() -> None:
    x = positive_finite(e8m0_inputs())
    powers = torch.tensor(by_name("e8m0").values[:255], dtype=torch.float64)
    wanted = (torch.searchsorted(powers, x.double(), right=True) - 1).clamp_(min=0)
    assert torch.equal(by_name("e8m0").encode(x, rounding="down"), wanted.to(torch.uint8))


def test_e8m0_up_equals_the_rule_of_transformer_engine() -> None:
    def rule(bits: int) -> int:  # common/util/ptx_arch_spec.cuh, float_to_e8m0
        exponent, mantissa = (bits >> 23) & 0xFF, bits & 0x7FFFFF
        if exponent == 0xFF:
            return 0xFF if mantissa else 0xFE
        exact = mantissa == 0 or exponent == 0xFE or (exponent == 0 and mantissa <= 0x400000)
        return exponent if exact else exponent + 1

    x = torch.cat([e8m0_inputs(), torch.tensor([0.0, math.inf, math.nan])])
    wanted = [rule(bits) for bits in x.view(INT32).tolist()]
    assert by_name("e8m0").encode(x, rounding="up").tolist() == wanted


@pytest.mark.parametrize("rounding", ["nearest", "up", "down"])
def test_e8m0_outside_positive_finite(rounding: str) -> None:
    x = torch.tensor([0.0, -0.0, 1e-45, 3.4e38, math.inf, math.nan, -math.nan, -1.0, -math.inf])
    wanted = [0, 0, 0, 254, 254, 255, 255, 255, 255]
    assert by_name("e8m0").encode(x, rounding=rounding).tolist() == wanted


# --- shapes, strides, autograd ---


@pytest.mark.parametrize("name", ML_DTYPES)
def test_shapes_are_kept(name: str) -> None:
    spec = by_name(name)
    for shape in ((0,), (4, 0), (), (3, 5), (2, 3, 4)):
        codes = spec.encode(torch.ones(shape))
        assert (codes.shape, codes.dtype) == (shape, torch.uint8)
        values = spec.decode(codes)
        assert (values.shape, values.dtype) == (shape, torch.float32)
        assert torch.equal(values, torch.ones(shape))


@pytest.mark.parametrize("name", ML_DTYPES)
def test_strides_do_not_matter(name: str) -> None:
    spec = by_name(name)
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.rand(12, 10).to(dtype)
        for view in (x.t(), x[::2, 1::3], x[:, 3], x[0].expand(4, 10)):
            codes = spec.encode(view)
            assert torch.equal(codes, spec.encode(view.contiguous()))
            assert torch.equal(spec.decode(codes.t()), spec.decode(codes.t().contiguous()))


@pytest.mark.parametrize("name", ML_DTYPES)
def test_arguments_are_not_written_and_have_no_gradient(name: str) -> None:
    spec = by_name(name)
    x = torch.nn.Parameter(torch.rand(64) * 1000)
    before = x.detach().clone()
    codes = spec.encode(x)
    assert not codes.requires_grad
    assert codes.grad_fn is None
    assert torch.equal(x, before)
    before = codes.clone()
    spec.decode(codes)
    assert torch.equal(codes, before)


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_fast_paths_compile_to_one_graph(name: str) -> None:
    spec = by_name(name)

    def quantized(x: torch.Tensor) -> torch.Tensor:
        return spec.decode(spec.encode(x))

    x = all_float16()
    compiled = torch.compile(quantized, fullgraph=True, backend="eager")(x)
    torch.testing.assert_close(compiled, quantized(x), rtol=0, atol=0, equal_nan=True)
