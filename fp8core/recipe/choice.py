"""Recipes by name, of fp8core and of plug-ins, and the meaning of a ``recipe=`` argument."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fp8core.dispatch import plugins
from fp8core.dispatch.isolation import Failure, attempt, shown
from fp8core.errors import RecipeError, did_you_mean
from fp8core.recipe import named
from fp8core.recipe.base import Recipe

# Reports print a recipe's class name, so that is accepted as its name as well.
_CLASSES: dict[str, type[Recipe]] = {kind.__name__: kind for kind in named.NAMED.values()}
plugins.reserve_recipes((*named.NAMED, *_CLASSES, "none"))  # "none": high precision


def names() -> tuple[str, ...]:
    """Return the short names that :func:`by_name` takes: those of fp8core, then of plug-ins."""
    return (*named.NAMED, *plugins.load().recipes)


def by_name(name: str) -> Recipe:
    """Return the recipe called ``name``, with its defaults.

    The class name of a recipe of fp8core is a name of it too.

    >>> by_name("mxfp8") == by_name("MXFP8BlockScaling") == named.MXFP8BlockScaling()
    True

    Raises:
        RecipeError: no recipe has that name; the message lists the names.
        PluginError: the factory of the plug-in that registered it failed.
    """
    factory = _CLASSES.get(name) or _factories().get(name)
    if factory is None:
        raise RecipeError(
            f"no recipe is called {name!r}; recipes: {', '.join(names())}."
            f"{did_you_mean(name, (*names(), *_CLASSES))}"
        )
    recipe = attempt(factory)
    if isinstance(recipe, Failure):
        recipe.fail(f"recipe {name!r}: its factory failed")
    if not isinstance(recipe, Recipe):
        raise RecipeError(f"recipe {name!r}: its factory returned {shown(recipe)}, not a Recipe.")
    return recipe


def names_of(recipe: Recipe) -> tuple[str, ...]:
    """Return the names of the recipe's class: its class name, then those of :func:`by_name`.

    >>> names_of(named.MXFP8BlockScaling(enable_2d_quantization=True))
    ('MXFP8BlockScaling', 'mxfp8')
    """
    kind = type(recipe)
    return kind.__name__, *(name for name, factory in _factories().items() if factory is kind)


def recipe_from(argument: object, origin: str) -> Recipe | None:
    """Return the recipe that an argument names or is; None stays None.

    ``origin`` is what messages call the argument.

    Raises:
        RecipeError: no recipe has that name, or ``argument`` is something else.
    """
    if argument is None or isinstance(argument, Recipe):
        return argument
    if isinstance(argument, str):
        try:
            return by_name(argument)
        except RecipeError as error:
            raise RecipeError(f"{origin}: {error}") from None
    remedy = ""
    if isinstance(argument, type) and issubclass(argument, Recipe):
        remedy = f" That is the class; call it: {argument.__name__}()."
    raise RecipeError(
        f"{origin}: expected a Recipe, a recipe's name or None, found {argument!r}.{remedy}"
    )


def _factories() -> Mapping[str, Callable[[], object]]:
    return {**plugins.load().recipes, **named.NAMED}
