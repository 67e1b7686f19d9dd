"""Recipes as data of JSON, for the configuration files of frameworks, and back."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from fp8core.errors import RecipeError, did_you_mean
from fp8core.recipe import named
from fp8core.recipe.base import MMParams, Recipe
from fp8core.recipe.custom import PerLayer, WeightOnly
from fp8core.recipe.named import by_name, names_of, recipe_from

RecipeData: TypeAlias = "str | dict[str, Any]"
"""A recipe's name, or ``{"recipe": class name, field: value, ...}``."""

_KIND = "recipe"
_WRITABLE: dict[str, type[Recipe]] = {
    name: kind
    for name, kind in vars(named).items()
    if isinstance(kind, type) and issubclass(kind, Recipe) and dataclasses.is_dataclass(kind)
}


def as_data(recipe: Recipe) -> RecipeData:
    """Return ``recipe`` as data from which :func:`from_data` constructs an equal one.

    >>> as_data(named.MXFP8BlockScaling())
    'mxfp8'
    >>> as_data(named.DelayedScaling(amax_history_len=16))
    {'recipe': 'DelayedScaling', 'amax_history_len': 16}
    >>> as_data(PerLayer({"*.fc2": None}, default="mxfp8"))
    {'recipe': 'PerLayer', 'rules': [['*.fc2', None]], 'default': 'mxfp8'}

    Raises:
        RecipeError: a CustomRecipe, a PerLayer with a rule for a LayerRole, or a recipe of a
            plug-in with other values than the one of its name.
    """
    if isinstance(recipe, PerLayer):
        return _per_layer(recipe)
    if isinstance(recipe, WeightOnly):
        return {_KIND: WeightOnly.__name__, "weights": as_data(recipe.weights)}
    kind, *short = names_of(recipe)
    if short and by_name(short[0]) == recipe:
        return short[0]
    if _WRITABLE.get(kind) is not type(recipe):
        raise RecipeError(
            f"{recipe!r} cannot be written as data, only "
            f"{', '.join((*_WRITABLE, 'PerLayer', 'WeightOnly'))} and the recipes that plug-ins "
            f"register by name."
        )
    data: dict[str, Any] = {_KIND: kind}
    for field in dataclasses.fields(recipe):  # type: ignore[arg-type]  # one of _WRITABLE
        value = getattr(recipe, field.name)
        if field.init and value != field.default:
            data[field.name] = _plain(value)
    return data


def from_data(data: object, origin: str) -> Recipe | None:
    """Return the recipe of ``data``: data of :func:`as_data`, a Recipe, or None, which stays None.

    >>> from_data({"recipe": "DelayedScaling", "amax_history_len": 16}, "recipe").amax_history_len
    16

    Raises:
        RecipeError: another value, an unknown recipe, or a field that it does not have;
            ``origin`` is what the message calls the argument.
    """
    if not isinstance(data, Mapping):
        return recipe_from(data, origin)
    if data.get(_KIND) == PerLayer.__name__ and data.keys() == {_KIND, "rules", "default"}:
        rules = [(pattern, from_data(value, origin)) for pattern, value in data["rules"]]
        return PerLayer(rules, from_data(data["default"], origin))
    if data.get(_KIND) == WeightOnly.__name__ and data.keys() == {_KIND, "weights"}:
        return WeightOnly(from_data(data["weights"], origin))  # type: ignore[arg-type]  # it checks
    kind = _WRITABLE.get(str(data.get(_KIND)))
    if kind is None:
        raise RecipeError(
            f"{origin}: {dict(data)!r} names no recipe; expected {_KIND!r} to be one of "
            f"{', '.join(_WRITABLE)}.{did_you_mean(str(data.get(_KIND)), _WRITABLE)}"
        )
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    values = {name: value for name, value in data.items() if name != _KIND}
    for name, value in values.items():
        if name not in fields:
            raise RecipeError(
                f"{origin}: {kind.__name__} has no field {name!r}.{did_you_mean(name, fields)}"
            )
        if isinstance(fields[name].default, MMParams):
            values[name] = MMParams(bool(value))
    recipe: Recipe = kind(**values)
    return recipe


def save(recipe: Recipe, path: str | Path) -> None:
    """Write ``recipe`` to ``path`` as JSON, for :func:`load`.

    Raises:
        RecipeError: it cannot be written as data: a CustomRecipe, or a rule for a LayerRole.
    """
    text = json.dumps(as_data(recipe), indent=1)
    Path(path).write_text(text + "\n", encoding="utf-8")


def load(path: str | Path) -> Recipe:
    """Return the recipe that :func:`save` wrote to ``path``.

    Raises:
        RecipeError: the file cannot be read, or holds no recipe; the message names the file.
    """
    try:
        recipe = from_data(json.loads(Path(path).read_text(encoding="utf-8")), str(path))
    except (OSError, ValueError, TypeError) as error:
        raise RecipeError(f"{str(path)!r} is no file of a recipe: {error}.") from None
    if recipe is None:
        raise RecipeError(f"{str(path)!r} is no file of a recipe: it holds null.")
    return recipe


def _per_layer(recipe: PerLayer) -> RecipeData:
    rules = []
    for pattern, value in recipe.rules:
        if not isinstance(pattern, str):
            raise RecipeError(
                f"{recipe!r} cannot be written as data, as its rule {pattern!r} is no pattern of "
                f"names."
            )
        rules.append([pattern, None if value is None else as_data(value)])
    default = None if recipe.default is None else as_data(recipe.default)
    return {_KIND: PerLayer.__name__, "rules": rules, "default": default}


def _plain(value: object) -> object:
    if isinstance(value, MMParams):
        return value.use_split_accumulator
    return str(value) if isinstance(value, str) else value
