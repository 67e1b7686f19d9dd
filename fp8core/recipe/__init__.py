"""The named recipes, as data: ``recipe.plan(role, dtype)`` says how each operand is quantized.

A recipe is a frozen value, compared by value. Field names and defaults are Transformer Engine's;
what each recipe computes is in docs/numerics.md. An unknown argument, and a value that contradicts
another, is an error here, not a surprise later.
"""

from __future__ import annotations

from collections.abc import Callable

from fp8core.backend_api import OperandSpec
from fp8core.dispatch import plugins, policy, select
from fp8core.errors import RecipeError, did_you_mean
from fp8core.plan import DelayedPlan, GemmPlan, LayerRole, LinearPlan, TensorPlan
from fp8core.recipe.base import Format, MMParams, Recipe
from fp8core.recipe.custom import CustomRecipe, DelayedScalingRequest, PerLayer, QuantizerRole
from fp8core.recipe.named import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)

__all__ = [
    "CustomRecipe",
    "DelayedPlan",
    "DelayedScaling",
    "DelayedScalingRequest",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Float8RowwiseScaling",
    "Format",
    "GemmPlan",
    "LayerRole",
    "LinearPlan",
    "MMParams",
    "MXFP8BlockScaling",
    "NVFP4BlockScaling",
    "OperandSpec",
    "PerLayer",
    "QuantizerRole",
    "Recipe",
    "TensorPlan",
    "by_name",
    "get_default_recipe",
    "names",
]

_NAMED: dict[str, Callable[[], Recipe]] = {
    "delayed": DelayedScaling,
    "current": Float8CurrentScaling,
    "mxfp8": MXFP8BlockScaling,
    "block": Float8BlockScaling,
    "nvfp4": NVFP4BlockScaling,
    "rowwise": Float8RowwiseScaling,
}
plugins.reserve_recipes(_NAMED)


def names() -> tuple[str, ...]:
    """Return the names that :func:`by_name` takes: fp8core's own, then the plug-ins'."""
    return (*_NAMED, *plugins.load().recipes)


def by_name(name: str) -> Recipe:
    """Return the recipe called ``name``, with its defaults.

    Raises:
        RecipeError: there is none of that name; lists those there are.
    """
    factory = {**plugins.load().recipes, **_NAMED}.get(name)
    if factory is None:
        raise RecipeError(
            f"no recipe is called {name!r}; recipes: {', '.join(names())}."
            f"{did_you_mean(name, names())}"
        )
    made = factory()
    if not isinstance(made, Recipe):
        raise RecipeError(f"recipe {name!r}: its factory returned {made!r}, not a Recipe.")
    return made


def get_default_recipe() -> Recipe:
    """Return what the selected backend runs best; ``Float8CurrentScaling()`` on a CPU."""
    return by_name(select.selected_spec(policy.current()).preferred_recipe)
