"""The named recipes, as data: ``recipe.plan(role, dtype)`` says how each operand is quantized.

A recipe is a frozen value, compared by value. Field names and defaults are Transformer Engine's;
docs/numerics.md has the arithmetic of each recipe. An unknown argument, and a value that
contradicts another, is an error when the recipe is constructed.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NoReturn

from fp8core.backend_api import OperandSpec
from fp8core.dispatch import policy, select
from fp8core.errors import RecipeError
from fp8core.names import absent, refusal
from fp8core.recipe.base import Format, FormatRange, MMParams, QParams, Recipe
from fp8core.recipe.custom import (
    CustomRecipe,
    DelayedScalingRequest,
    PerLayer,
    QuantizerRequest,
    QuantizerRole,
    WeightOnly,
)
from fp8core.recipe.data import load, save
from fp8core.recipe.named import (
    NAMED,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    by_name,
    names,
)
from fp8core.recipe.plan import DelayedPlan, GemmPlan, LayerRole, LinearPlan, TensorPlan

__all__ = [
    "CustomRecipe",
    "DelayedPlan",
    "DelayedScaling",
    "DelayedScalingRequest",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Float8RowwiseScaling",
    "Format",
    "FormatRange",
    "GemmPlan",
    "LayerRole",
    "LinearPlan",
    "MMParams",
    "MXFP8BlockScaling",
    "NVFP4BlockScaling",
    "OperandSpec",
    "PerLayer",
    "QParams",
    "QuantizerRequest",
    "QuantizerRole",
    "Recipe",
    "TensorPlan",
    "WeightOnly",
    "by_name",
    "get_default_recipe",
    "load",
    "names",
    "save",
]
__dir__ = partial(sorted, __all__)


def get_default_recipe() -> Recipe:
    """Return the recipe that the selected backend prefers; ``Float8CurrentScaling()`` on a CPU."""
    spec = select.selected_spec(policy.current())
    try:
        return by_name(spec.preferred_recipe)
    except RecipeError as error:
        raise RecipeError(f"backend {spec.name!r} prefers a recipe: {error}") from None


if not TYPE_CHECKING:  # to a type checker, it would make every name an attribute

    def __getattr__(name: str) -> NoReturn:
        """Raise AttributeError, which names the alternative to a name of Transformer Engine, or the
        nearest public name."""
        places = {short: kind.__name__ for short, kind in NAMED.items()} | {n: n for n in __all__}
        text = refusal(f"recipe.{name}") or absent(__name__, name, places)
        raise AttributeError(text, name=name)  # with obj=, Python would add a second suggestion
