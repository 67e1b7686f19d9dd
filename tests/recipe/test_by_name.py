"""Recipes by name, and the default one."""

from __future__ import annotations

import pytest

import fp8core
from fp8core import recipe
from fp8core.dispatch import plugins
from fp8core.errors import PluginError, RecipeError
from fp8core.recipe.choice import names_of
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
