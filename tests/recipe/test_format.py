"""``Format``: number formats by name, a plug-in's included."""

from __future__ import annotations

import copy
import pickle

import pytest

from fp8core import formats
from fp8core.errors import RecipeError
from fp8core.recipe import DelayedScaling, Format
from tests.dispatch import toys

PAIRS = {
    "HYBRID": ("e4m3", "e5m2"),
    "E4M3": ("e4m3", "e4m3"),
    "E5M2": ("e5m2", "e5m2"),
    "E2M1": ("e2m1", "e2m1"),
}
MAXIMA = {"HYBRID": (448.0, 57344.0), "E5M2": (57344.0, 57344.0), "E2M1": (6.0, 6.0)}


@pytest.mark.parametrize("name", PAIRS)
def test_format_is_the_string_of_its_name_and_a_pair_of_formats(name: str) -> None:
    found = Format(name)
    assert getattr(Format, name) == found == name.lower()
    assert {found: 1}[name.lower()] == 1
    assert (found.forward, found.backward) == tuple(map(formats.by_name, PAIRS[name]))


def test_maxima_are_those_of_the_formats() -> None:
    assert {name: (Format(name).max_fwd, Format(name).max_bwd) for name in MAXIMA} == MAXIMA


def test_name_and_attribute_are_taken_in_any_case() -> None:
    for spelling in ("hybrid", "HYBRID", "Hybrid"):
        assert Format(spelling) == getattr(Format, spelling) == Format.HYBRID


def test_format_of_a_format_is_itself() -> None:
    assert Format(Format.E4M3) == Format.E4M3


def test_unknown_name_gets_the_list_and_the_nearest() -> None:
    for spelling in ("E4M4", "e4m4"):
        with pytest.raises(RecipeError, match=r"known: e2m1, e4m3, .* Did you mean 'e4m3'\?"):
            Format(spelling)


def test_pair_of_formats_is_among_the_known_names() -> None:
    with pytest.raises(RecipeError, match=r"known: e2m1, .*hybrid\. Did you mean 'hybrid'\?"):
        DelayedScaling(fp8_format="HYBRD")


def test_unknown_attribute_gets_the_same_error() -> None:
    with pytest.raises(RecipeError, match="no format 'e4m4'"):
        _ = Format.E4M4


def test_a_name_that_is_no_format_is_a_missing_attribute() -> None:
    assert not hasattr(Format, "cache_info")  # as tools ask of each object
    assert getattr(Format, "E4M4", None) is None


def test_what_is_no_name_is_refused() -> None:
    for name in (8, None, 1.5):
        with pytest.raises(RecipeError, match="expected the name of a format"):
            Format(name)


def test_private_attributes_are_no_formats() -> None:
    assert not hasattr(Format, "__wrapped__")


def test_format_survives_pickling_and_copying() -> None:
    dumps = (pickle.dumps(Format.HYBRID, way) for way in range(2, pickle.HIGHEST_PROTOCOL + 1))
    copies = (copy.copy(Format.HYBRID), copy.deepcopy(Format.HYBRID))
    for made in (*map(pickle.loads, dumps), *copies):
        assert (type(made), made) == (Format, "hybrid")


def test_format_of_a_plugin_is_unknown_without_it() -> None:
    with pytest.raises(RecipeError, match="no format 'toy8'"):
        Format("toy8")


def test_format_of_a_plugin_has_its_own_name() -> None:
    toys.register(own_formats=[toys.TOY8])
    assert Format.TOY8 == "toy8"
    assert (Format.TOY8.forward, Format.TOY8.max_bwd) == (toys.TOY8, 31.0)


def test_pickled_format_needs_its_plugin_when_it_is_loaded() -> None:
    with toys.isolation():
        toys.register(own_formats=[toys.TOY8])
        pickled = pickle.dumps(Format.TOY8)
    with pytest.raises(RecipeError, match="no format 'toy8'"):
        pickle.loads(pickled)
