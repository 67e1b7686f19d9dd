"""Recipes by name: fp8core's own and the plug-ins', and the reading of a ``recipe=`` argument."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fp8core.dispatch import plugins
from fp8core.dispatch.isolation import Failure, attempt, shown
from fp8core.errors import RecipeError, did_you_mean
from fp8core.recipe.base import Recipe
from fp8core.recipe.named import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)

__all__ = ["by_name", "names", "names_of", "recipe_from"]

_NAMED: dict[str, type[Recipe]] = {
    "delayed": DelayedScaling,
    "current": Float8CurrentScaling,
    "mxfp8": MXFP8BlockScaling,
    "block": Float8BlockScaling,
    "nvfp4": NVFP4BlockScaling,
    "rowwise": Float8RowwiseScaling,
}
# What reports call a recipe is taken for its name as well.
_CLASSES: dict[str, type[Recipe]] = {made.__name__: made for made in _NAMED.values()}
plugins.reserve_recipes((*_NAMED, *_CLASSES, "none"))  # which means high precision


def names() -> tuple[str, ...]:
    """Return the short names that :func:`by_name` takes: fp8core's own, then the plug-ins'."""
    return (*_NAMED, *plugins.load().recipes)


def by_name(name: str) -> Recipe:
    """Return the recipe called ``name``, with its defaults.

    The class name of one of fp8core's own is a name of it too.

    >>> by_name("mxfp8") == by_name("MXFP8BlockScaling") == MXFP8BlockScaling()
    True

    Raises:
        RecipeError: there is none of that name; lists those there are.
        PluginError: the plug-in that brings it failed to make it.
    """
    factory = _CLASSES.get(name) or _factories().get(name)
    if factory is None:
        raise RecipeError(
            f"no recipe is called {name!r}; recipes: {', '.join(names())}."
            f"{did_you_mean(name, (*names(), *_CLASSES))}"
        )
    made = attempt(factory)
    if isinstance(made, Failure):
        made.fail(f"recipe {name!r}: its factory failed")
    if not isinstance(made, Recipe):
        raise RecipeError(f"recipe {name!r}: its factory returned {shown(made)}, not a Recipe.")
    return made


def names_of(recipe: Recipe) -> tuple[str, ...]:
    """Return what a recipe of this class is called: its class name, then the names of the class.

    >>> names_of(MXFP8BlockScaling(enable_2d_quantization=True))
    ('MXFP8BlockScaling', 'mxfp8')
    """
    own = type(recipe)
    return own.__name__, *(name for name, made in _factories().items() if made is own)


def recipe_from(given: object, asked_by: str) -> Recipe | None:
    """Return what an argument of ``asked_by`` means: a recipe, one by its name, or None.

    Raises:
        RecipeError: there is none of that name, or ``given`` is something else.
    """
    if given is None or isinstance(given, Recipe):
        return given
    if isinstance(given, str):
        try:
            return by_name(given)
        except RecipeError as error:
            raise RecipeError(f"{asked_by}: {error}") from None
    remedy = ""
    if isinstance(given, type) and issubclass(given, Recipe):
        remedy = f" That is the class; call it: {given.__name__}()."
    raise RecipeError(
        f"{asked_by}: expected a Recipe, a recipe's name or None, found {given!r}.{remedy}"
    )


def _factories() -> Mapping[str, Callable[[], object]]:
    return {**plugins.load().recipes, **_NAMED}
