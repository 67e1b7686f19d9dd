"""Recipes by name, and the default one."""

from __future__ import annotations

import copy
import pickle

import pytest

import fp8core
from fp8core import formats, recipe
from fp8core.dispatch import plugins
from fp8core.errors import PluginError, RecipeError
from fp8core.recipe import DelayedScaling, Format
from fp8core.recipe.named import names_of
from tests.dispatch import toys

NAMES = {
    "delayed": recipe.DelayedScaling,
    "current": recipe.Float8CurrentScaling,
    "mxfp8": recipe.MXFP8BlockScaling,
    "block": recipe.Float8BlockScaling,
    "nvfp4": recipe.NVFP4BlockScaling,
    "rowwise": recipe.Float8RowwiseScaling,
}


def test_name_and_class_name_give_the_recipe_with_its_defaults() -> None:
    for name, kind in NAMES.items():
        assert recipe.by_name(name) == recipe.by_name(kind.__name__) == kind()


@pytest.mark.parametrize(
    ("typo", "nearest"),
    [("MXFP8", "mxfp8"), ("MXFP8BlockScalling", "MXFP8BlockScaling"), ("Delayed", "delayed")],
)
def test_typo_is_compared_with_names_and_class_names(typo: str, nearest: str) -> None:
    with pytest.raises(RecipeError, match=f"Did you mean '{nearest}'"):
        recipe.by_name(typo)


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        *((word, "current") for word in ("fp8", "FP8", "float8", "tensorwise", "per-tensor")),
        *((word, "block") for word in ("blockwise", "deepseek-v3")),
        *((word, "nvfp4") for word in ("fp4", "mxfp4")),
        ("microscaling", "mxfp8"),
    ],
)
def test_word_of_another_library_gets_the_recipe_that_it_stands_for(word: str, meant: str) -> None:
    with pytest.raises(RecipeError, match=rf"Did you mean '{meant}'\?$"):
        recipe.by_name(word)


def test_a_word_for_high_precision_stands_for_no_recipe() -> None:
    for word in ("bf16", "bfloat16", "float16"):
        with pytest.raises(RecipeError, match=r"rowwise\.$"):
            recipe.by_name(word)


def test_names_of_a_recipe_are_its_class_and_what_by_name_takes() -> None:
    toys.register(recipes={"toy": recipe.Float8RowwiseScaling})
    assert names_of(recipe.Float8RowwiseScaling()) == (
        "Float8RowwiseScaling", "toy", "rowwise"
    )  # fmt: skip


def test_names_are_listed() -> None:
    assert recipe.names() == tuple(NAMES)


def test_unknown_name_gets_the_list_and_the_nearest() -> None:
    with pytest.raises(RecipeError) as caught:
        recipe.by_name("mxpf8")
    assert str(caught.value) == (
        "no recipe is called 'mxpf8'; recipes: delayed, current, mxfp8, block, nvfp4, rowwise. "
        "Did you mean 'mxfp8'?"
    )


def test_plugin_cannot_take_a_name_of_fp8core() -> None:
    for name in (*NAMES, "MXFP8BlockScaling"):
        with pytest.raises(PluginError, match=f"recipe {name!r} is fp8core's own"):
            toys.register(recipes={name: recipe.Float8RowwiseScaling})


def test_two_plugins_cannot_take_one_name() -> None:
    toys.register(recipes={"toy": recipe.Float8RowwiseScaling})
    other = toys.plugin(recipes={"toy": recipe.Float8CurrentScaling})
    with pytest.raises(PluginError, match="recipe 'toy' is already registered by another plug-in"):
        plugins.register(other, "other")
    assert recipe.by_name("toy") == recipe.Float8RowwiseScaling()


def test_default_on_a_cpu_is_current_scaling() -> None:
    assert fp8core.get_default_recipe() == recipe.Float8CurrentScaling()


def test_default_is_what_the_best_backend_prefers() -> None:
    plugins.register(toys.whole_plugin(), "toy")
    assert fp8core.get_default_recipe() == recipe.Float8RowwiseScaling(fp8_format="toy8")


def test_default_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    plugins.register(toys.whole_plugin(), "toy")
    monkeypatch.setenv("FP8CORE_BACKEND", "reference")
    assert fp8core.get_default_recipe() == recipe.Float8CurrentScaling()


def test_default_that_a_backend_misspells_is_an_error() -> None:
    toys.register(toys.backend("toy", preferred_recipe="curent"))
    with pytest.raises(RecipeError, match=r"no recipe is called 'curent'.*Did you mean 'current'"):
        fp8core.get_default_recipe()


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


def test_unknown_format_gets_the_list_and_the_nearest() -> None:
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
