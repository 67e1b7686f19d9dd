"""A format is its table: specs as values, tables that are no minifloat, registry, properties."""

from __future__ import annotations

import copy
import math
import pickle
import subprocess
import sys
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from fp8core import formats
from fp8core.errors import RecipeError
from fp8core.formats import FormatSpec, by_name, minifloat
from tests.formats.test_formats import around_boundaries

BUILT_IN = ["e2m1", "e4m3", "e5m2", "e8m0"]
SIGNED = ["e4m3", "e5m2", "e2m1"]


def nearest_by_search(spec: FormatSpec, xs: list[float]) -> list[float]:
    """The obvious way: exact distance to every value; a tie by the rule of the format."""
    codes = {v: c for c, v in reversed(list(enumerate(spec.values))) if math.isfinite(v)}

    def exact(x: float) -> int:
        return int(Fraction(x) * 2**149)

    results = []
    integers = [(exact(v), v) for v in codes]
    for x in map(exact, xs):
        distances = [(abs(integer - x), v) for integer, v in integers]
        least = min(distances)[0]
        nearest = [v for distance, v in distances if distance == least]
        results.append(
            max(nearest, key=abs)
            if spec.ties == "away"
            else min(nearest, key=lambda v: codes[v] % 2)
        )
    return results


def hif8() -> FormatSpec:
    """HiFloat8: the exponent has as many bits as it needs, the mantissa the rest; ties go away."""
    magnitudes = {0: 0.0, 0x6F: math.inf}
    for code in range(1, 0x6F):
        if code < 8:  # denormal
            magnitudes[code] = 2.0 ** (code - 23)
    prefixes = (
        (0b0001, 4, 0, 3),
        (0b001, 3, 1, 3),
        (0b01, 2, 2, 3),
        (0b10, 2, 3, 2),
        (0b11, 2, 4, 1),
    )
    for prefix, prefix_bits, exponent_bits, mantissa_bits in prefixes:
        assert prefix_bits + exponent_bits + mantissa_bits == 7
        for rest in range(2 ** (exponent_bits + mantissa_bits)):
            field, mantissa = divmod(rest, 2**mantissa_bits)
            exponent = 0
            if exponent_bits:
                negative, low = divmod(field, 2 ** (exponent_bits - 1))
                exponent = (-1) ** negative * (2 ** (exponent_bits - 1) + low)
            code = (prefix << (exponent_bits + mantissa_bits)) | rest
            magnitudes.setdefault(code, (1 + mantissa / 2**mantissa_bits) * 2.0**exponent)
    positive = [magnitudes[code] for code in range(128)]
    values = (*positive, math.nan, *(-v for v in positive[1:]))
    return FormatSpec("hif8", 8, values, "away", None)


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """The built-in formats only; what the test registers is forgotten."""
    builtin = {name: formats._formats[name] for name in BUILT_IN}
    monkeypatch.setattr(formats, "_formats", builtin)
    monkeypatch.setattr(formats, "_pending_discovery", [])


# --- a format as a value ---


def test_specs_are_compared_and_hashed_by_name() -> None:
    assert minifloat("a", 4, 3, specials="fn") == minifloat("a", 4, 3, specials="fn")
    assert minifloat("a", 4, 3, specials="fn") != minifloat("b", 4, 3, specials="fn")
    assert len({by_name("e4m3"), by_name("e5m2"), copy.deepcopy(by_name("e4m3"))}) == 2


def test_equal_names_with_other_values_do_not_share_tables() -> None:
    x = torch.tensor([3.5])
    coarse, fine = minifloat("a", 2, 1, specials="finite"), minifloat("a", 3, 4, specials="finite")
    assert coarse.decode(coarse.encode(x)).tolist() == [4.0]
    assert fine.decode(fine.encode(x)).tolist() == [3.5]


def test_a_spec_survives_pickle() -> None:
    spec = pickle.loads(pickle.dumps(by_name("e8m0")))
    assert spec.encode(torch.tensor([2.5]), rounding="up").tolist() == [129]


def test_a_contradictory_spec_is_refused() -> None:
    legal = {"bits": 4, "values": (1.0,) * 16, "ties": "even", "torch_dtype": None}
    table: tuple[tuple[dict[str, Any], str], ...] = (
        ({"bits": 6}, "bits=6"),
        ({"values": (0.0, 1.0)}, "2 values"),
        ({"values": (math.nan,) * 16}, "0 finite values"),
        ({"values": (0.1,) * 16}, "not exact in float32"),
        ({"values": (1e300,) * 16}, "not exact in float32"),
        ({"ties": "odd"}, "ties='odd'"),
        ({"roundings": ("nearest", "up")}, "without an encoder"),
        ({"targets": (1.0,)}, "targets"),
        ({"targets": (0.0, 1.0)}, "two numbers above 0, up to 1.0"),
        ({"targets": (1.0, 1.5)}, "two numbers above 0, up to 1.0"),
    )
    for changes, complaint in table:
        with pytest.raises(RecipeError, match=complaint):
            FormatSpec("own", **{**legal, **changes})  # type: ignore[arg-type]  # wrong on purpose


# --- tables that are not minifloats ---

# Quantiles: midpoints that no bfloat16 holds; one value thrice; no -0; more negative than positive.
QUANTILE_VALUES = torch.tensor(
    [-1, -0.7, -0.5, -0.4, -0.28, -0.2, -0.1, 0, 0, 0, 0.1, 0.2, 0.3, 0.44, 0.6, 1]
)
QUANTILES = FormatSpec("quantiles", 4, tuple(QUANTILE_VALUES.tolist()), "even", None)
# Midpoints that float32 holds, and bfloat16 only with an odd last bit.
FINE = minifloat("fine", 1, 6, specials="finite")


@pytest.mark.parametrize("ties", ["even", "away"])
@pytest.mark.parametrize(
    "spec", [hif8(), QUANTILES, FINE, by_name("e2m1")], ids=lambda spec: spec.name
)
def test_encode_by_table_equals_exact_search(spec: FormatSpec, ties: str) -> None:
    own = FormatSpec(spec.name, spec.bits, spec.values, ties, None)  # type: ignore[arg-type]  # str
    x = around_boundaries(own)
    assert own.decode(own.encode(x)).tolist() == nearest_by_search(own, x.tolist())


@pytest.mark.parametrize("tiny", [2.0**-149, 2.0**-126, 2.0**127])
def test_encode_by_table_holds_at_the_ends_of_float32(tiny: float) -> None:
    values = tuple(tiny * v for v in (-1, 0, *[1] * 14))
    spec = FormatSpec("ends", 4, values, "even", None)
    x = torch.cat([around_boundaries(spec), torch.tensor([0.0, 1e-45, -1e-45])])
    assert spec.decode(spec.encode(x)).tolist() == nearest_by_search(spec, x.tolist())


def test_hif8_rounds_half_away_and_saturates_by_the_table_rule() -> None:
    x = torch.tensor([2.0**-23, 2.0**-24, 1.0625, -1.0625, 40000.0, math.inf, math.nan, -0.0])
    assert hif8().encode(x).tolist() == [0x01, 0x00, 0x09, 0x89, 0x6E, 0x6E, 0x80, 0x00]


def test_hif8_overflows_to_inf_with_an_encoder_of_its_own() -> None:
    table = hif8()

    def encoder(x: torch.Tensor, rounding: str) -> torch.Tensor:
        codes = table.encode(x)
        codes[x >= 40960] = 0x6F
        return codes.masked_fill_(x <= -40960, 0xEF)

    spec = FormatSpec("hif8", 8, table.values, "away", None, encoder=encoder)
    x = torch.tensor([40959.0, 40960.0, -math.inf, 1.0], dtype=torch.bfloat16)
    assert spec.decode(spec.encode(x)).tolist()[1:] == [math.inf, -math.inf, 1.0]


def test_zero_keeps_its_sign_by_the_table_rule_when_ties_go_away() -> None:
    spec = FormatSpec("own", 4, by_name("e2m1").values, "away", None)
    assert spec.encode(torch.tensor([0.0, -0.0, 1e-45, -1e-45])).tolist() == [0, 8, 0, 8]


def test_specials_of_another_name_are_refused() -> None:
    with pytest.raises(RecipeError, match=r"specials='none'\): expected 'ieee', 'fn' or 'finite'"):
        minifloat("own", 3, 4, specials="none")  # type: ignore[arg-type]  # the mistake


# --- tables and modes of torch ---


def test_tables_made_in_inference_mode_serve_outside_of_it() -> None:
    spec = minifloat("own", 2, 5, specials="finite")
    x = torch.rand(8)
    with torch.inference_mode():
        inside = spec.decode(spec.encode(x))
    y = spec.decode(spec.encode(x.requires_grad_()))
    assert torch.equal(inside, y)
    (grad,) = torch.autograd.grad((y * x).sum(), x)
    assert torch.equal(grad, y)


def test_tables_made_under_a_fake_tensor_mode_do_not_outlive_it() -> None:
    spec = minifloat("own", 6, 1, specials="finite")
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(torch.rand(8))
        assert spec.decode(spec.encode(fake)).shape == (8,)
    assert torch.equal(spec.decode(spec.encode(torch.ones(1))), torch.ones(1))


# --- registry ---


def test_an_unknown_name_is_refused_with_the_known_and_the_nearest(registry: None) -> None:
    message = r"no format 'e4m4'; known: e2m1, e4m3, e5m2, e8m0\. Did you mean 'e4m3'\?"
    with pytest.raises(RecipeError, match=message):
        by_name("e4m4")


def test_names_are_sorted(registry: None) -> None:
    assert formats.names() == ("e2m1", "e4m3", "e5m2", "e8m0")


def test_a_registered_table_is_found_and_used(registry: None) -> None:
    formats.register(hif8())
    spec = by_name("hif8")
    assert "hif8" in formats.names()
    assert spec.max == 32768.0
    assert spec.decode(spec.encode(torch.tensor([3.3, -20.1]))).tolist() == [3.25, -20.0]


def test_registering_the_same_definition_again_does_nothing(registry: None) -> None:
    first = by_name("e4m3")
    formats.register(minifloat("e4m3", 4, 3, specials="fn", torch_dtype=torch.float8_e4m3fn))
    assert by_name("e4m3") is first


def test_registering_another_definition_of_a_name_is_refused(registry: None) -> None:
    with pytest.raises(RecipeError, match=r"'e4m3'.*name is taken"):
        formats.register(minifloat("e4m3", 4, 3, specials="finite"))


def test_the_package_is_imported_where_meta_is_the_default_device() -> None:
    program = (
        "import torch; torch.set_default_device('meta'); import fp8core; "
        "print(fp8core.Linear(16, 16).weight.device)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "meta", done.stderr


def test_registering_a_torch_dtype_with_other_values_is_refused(registry: None) -> None:
    with pytest.raises(RecipeError, match=r"other values than torch\.float8_e4m3fn"):
        formats.register(minifloat("own", 4, 3, specials="ieee", torch_dtype=torch.float8_e4m3fn))


@pytest.mark.parametrize("ask", [lambda: by_name("hif8"), formats.names], ids=["by_name", "names"])
def test_discovery_runs_once_on_a_miss_or_a_listing(
    registry: None, ask: Callable[[], object]
) -> None:
    calls = []

    def discover() -> None:
        calls.append(formats.names())  # asking again inside does not recurse
        formats.register(hif8())

    formats.set_discovery(discover)
    by_name("e4m3")
    assert calls == []
    ask()
    assert "hif8" in formats.names()
    with pytest.raises(RecipeError):
        by_name("unknown")
    assert len(calls) == 1


# --- properties ---

finite_lists = st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=64)
any_spec = st.sampled_from([*(by_name(name) for name in SIGNED), hif8(), QUANTILES])


@given(any_spec, finite_lists)
def test_quantizing_a_quantized_tensor_changes_nothing(spec: FormatSpec, xs: list[float]) -> None:
    once = spec.decode(spec.encode(torch.tensor(xs)))
    assert torch.equal(spec.decode(spec.encode(once)), once)


@given(any_spec, finite_lists)
def test_encoding_is_monotone(spec: FormatSpec, xs: list[float]) -> None:
    values = spec.decode(spec.encode(torch.tensor(sorted(xs))))
    assert (values.diff() >= 0).all()


@given(any_spec, st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_no_value_lies_nearer_than_the_encoded_one(spec: FormatSpec, x: float) -> None:
    encoded = spec.decode(spec.encode(torch.tensor([x]))).item()
    distance = min(abs(Fraction(v) - Fraction(x)) for v in spec.values if math.isfinite(v))
    assert abs(Fraction(encoded) - Fraction(x)) == distance
