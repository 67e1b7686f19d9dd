"""Recipes that take the arguments of Transformer Engine's, where fp8core's refuse unknown ones.

An argument that changes nothing passes with one warning. ``override_linear_precision`` changes the
plan. Every other unknown argument is an error, where Transformer Engine drops it.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch

from fp8core import recipe
from fp8core.errors import RecipeError
from fp8core.recipe.base import explains_writes
from fp8core.recipe.plan import GemmPlan, LayerRole, LinearPlan, Plan
from fp8core.reporting import log_once

__all__ = [
    "CustomRecipe",
    "DelayedScaling",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "MXFP8BlockScaling",
    "NVFP4BlockScaling",
]

_GEMMS = ("fprop", "dgrad", "wgrad")
_NO_OVERRIDE = (False, False, False)
# Arguments that frameworks pass to recipes, and that no recipe has had a use for.
_WITHOUT_EFFECT = ("config", "params_dtype", "device")


def _taken(owner: str, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return ``kwargs`` without those that change nothing, which is logged once."""
    dropped = [name for name in kwargs if name in _WITHOUT_EFFECT]
    if kwargs.get("interval") == 1:  # scales are updated in every step
        dropped.append("interval")
    elif "interval" in kwargs:
        raise RecipeError(
            f"{owner}(interval={kwargs['interval']!r}): scales are updated in every step. Leave it "
            f"out, or give 1."
        )
    if dropped:
        names = ", ".join(dropped)
        log_once(f"{owner}: {names} change nothing in a recipe", logging.WARNING)
    return {name: value for name, value in kwargs.items() if name not in dropped}


def _override(owner: str, value: Any) -> tuple[bool, bool, bool]:
    flags = tuple(value) if isinstance(value, tuple | list) else ()
    if len(flags) != len(_GEMMS) or not all(isinstance(flag, bool) for flag in flags):
        raise RecipeError(
            f"{owner}(override_linear_precision={value!r}): expected three bools, for "
            f"{', '.join(_GEMMS)}; True computes that product in high precision."
        )
    return flags[0], flags[1], flags[2]


class _Tolerant(recipe.Recipe):
    """A recipe whose constructor takes arguments without effect."""

    __slots__ = ()

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Leave the check of the arguments to the constructor, which knows more of them."""
        return object.__new__(cls)


def _init(self: Any, native: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    owner = type(self).__name__
    kwargs = _taken(owner, kwargs)
    if any(_override(owner, kwargs.pop("override_linear_precision", _NO_OVERRIDE))):
        raise RecipeError(
            f"{owner}(override_linear_precision=...): only DelayedScaling takes a product out of "
            f"low precision. Use fp8core.recipe.CustomRecipe."
        )
    _check_names(native, owner, kwargs)
    native.__init__(self, *args, **kwargs)


def _check_names(native: type[recipe.Recipe], owner: str, kwargs: dict[str, Any]) -> None:
    known = list(inspect.signature(native.__init__).parameters)[1:]
    for name in kwargs:
        if name not in known:
            raise RecipeError(
                f"{owner} has no argument {name!r}; valid ones: {', '.join(known)}. Transformer "
                f"Engine ignores arguments that it does not know."
            )


@explains_writes
@dataclass(frozen=True, init=False)
class DelayedScaling(_Tolerant, recipe.DelayedScaling):
    """:class:`fp8core.recipe.DelayedScaling`, and ``override_linear_precision``: which of fprop,
    dgrad and wgrad compute in high precision."""

    _: KW_ONLY
    override_linear_precision: tuple[bool, bool, bool] = _NO_OVERRIDE

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        owner = type(self).__name__
        kwargs = _taken(owner, kwargs)
        override = _override(owner, kwargs.pop("override_linear_precision", _NO_OVERRIDE))
        object.__setattr__(self, "override_linear_precision", override)
        _check_names(recipe.DelayedScaling, owner, kwargs)
        recipe.DelayedScaling.__init__(self, *args, **kwargs)

    def plan(self, role: LayerRole, dtype: torch.dtype) -> Plan:
        """Return the plan of delayed scaling, without the products in high precision."""
        plan = recipe.DelayedScaling.plan(self, role, dtype)
        if not any(self.override_linear_precision) or not isinstance(plan, LinearPlan):
            return plan
        fprop, dgrad, wgrad = (
            GemmPlan() if is_high else getattr(plan, name)
            for name, is_high in zip(_GEMMS, self.override_linear_precision, strict=True)
        )
        return dataclasses.replace(plan, fprop=fprop, dgrad=dgrad, wgrad=wgrad)


class Float8CurrentScaling(_Tolerant, recipe.Float8CurrentScaling):
    """:class:`fp8core.recipe.Float8CurrentScaling` with Transformer Engine's arguments."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _init(self, recipe.Float8CurrentScaling, args, kwargs)


class Float8BlockScaling(_Tolerant, recipe.Float8BlockScaling):
    """:class:`fp8core.recipe.Float8BlockScaling` with Transformer Engine's arguments."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _init(self, recipe.Float8BlockScaling, args, kwargs)


class MXFP8BlockScaling(_Tolerant, recipe.MXFP8BlockScaling):
    """:class:`fp8core.recipe.MXFP8BlockScaling` with Transformer Engine's arguments."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _init(self, recipe.MXFP8BlockScaling, args, kwargs)


class NVFP4BlockScaling(_Tolerant, recipe.NVFP4BlockScaling):
    """:class:`fp8core.recipe.NVFP4BlockScaling` with Transformer Engine's arguments."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _init(self, recipe.NVFP4BlockScaling, args, kwargs)


class CustomRecipe(_Tolerant, recipe.CustomRecipe):
    """:class:`fp8core.recipe.CustomRecipe` with Transformer Engine's arguments."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _init(self, recipe.CustomRecipe, args, kwargs)


for _kind in (
    *(DelayedScaling, Float8CurrentScaling, Float8BlockScaling),
    *(MXFP8BlockScaling, NVFP4BlockScaling, CustomRecipe),
):
    _kind.__module__ = "transformer_engine.common.recipe"
