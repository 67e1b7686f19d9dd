"""Types of arguments that several commands take; a wrong name is an error with the nearest name.

argparse calls them as ``type``: it prints the message of their ArgumentTypeError and exits with
status 2.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TypeVar

import torch

from fp8core.dispatch import plugins
from fp8core.dispatch.settings import check_op
from fp8core.errors import RecipeError, did_you_mean
from fp8core.recipe import PerLayer, Recipe, by_name

NO_RECIPE = "none"
"""The name that commands use for high precision, in the argument for a recipe."""

_TORCH_DEVICES = ("cpu", "cuda", "meta", "mps", "xpu")  # torch has no public list of them

Value = TypeVar("Value")


def device_argument(text: str) -> torch.device:
    """Return the device called ``text``, present or not.

    >>> device_argument("cuda:1")
    device(type='cuda', index=1)
    """
    try:
        return torch.device(text)
    except RuntimeError:
        backends = plugins.load().backends.values()
        kinds = sorted(
            {*_TORCH_DEVICES, *(kind for spec in backends for kind in spec.device_types)}
        )
        near = did_you_mean(text.partition(":")[0], kinds)
        raise argparse.ArgumentTypeError(
            f"{text!r} is no torch device; devices are {', '.join(kinds)}, with an index where "
            f"there are several, as in cuda:0.{near}"
        ) from None


def recipe_argument(text: str) -> Recipe:
    """Return the recipe called ``text``; ``none`` is high precision."""
    return PerLayer({}) if text == NO_RECIPE else _usage(lambda: by_name(text))


def op_argument(text: str) -> str:
    """Return ``text`` if it is the name of an operation."""
    _usage(lambda: check_op(text, "the command"))
    return text


def _usage(find: Callable[[], Value]) -> Value:
    try:
        return find()
    except RecipeError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
