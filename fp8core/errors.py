"""The errors a user can meet.

Each message names the request, the value at fault, and what would work::

    Fp8CoreError
    |-- RecipeError       an unknown recipe, format, backend name or setting
    |   `-- FrozenFieldError    a field of a recipe was written
    |-- OperandError      a tensor that does not fit: wrong k, dtype, device, stored state
    |-- UnsupportedError  a valid request that no installed backend can run
    |-- PluginError       a plug-in that cannot be used: failed import, wrong hook or API version
    `-- NonFiniteError    a NaN or inf that a monitor was asked to stop at
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable

__all__ = [
    "Fp8CoreError",
    "FrozenFieldError",
    "NonFiniteError",
    "OperandError",
    "PluginError",
    "RecipeError",
    "UnsupportedError",
    "did_you_mean",
]


class Fp8CoreError(Exception):
    """Base of every error that fp8core raises on purpose."""


class RecipeError(Fp8CoreError, ValueError):
    """A recipe, format name, backend name or setting is unknown or invalid."""


class FrozenFieldError(RecipeError, dataclasses.FrozenInstanceError):
    """A field of a recipe was written or deleted; a recipe is a value, replaced as a whole."""


class OperandError(Fp8CoreError, ValueError):
    """A tensor, shape or stored state does not fit its use."""


class UnsupportedError(Fp8CoreError, NotImplementedError):
    """The request is valid, but no installed backend can run it, or fp8core does not offer it."""


class PluginError(Fp8CoreError, RuntimeError):
    """A plug-in was asked for by name and cannot be used."""


class NonFiniteError(Fp8CoreError, ArithmeticError):
    """A tensor holds NaN or inf, and a monitor was asked to stop there."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ``" Did you mean 'x'?"`` for the nearest known word, ignoring case, else ``""``.

    >>> did_you_mean("e4m4", ["e4m3", "e5m2"])
    " Did you mean 'e4m3'?"
    >>> did_you_mean("MXFP8", ["mxfp8"])
    " Did you mean 'mxfp8'?"
    >>> did_you_mean("zzz", ["e4m3"])
    ''
    """
    spelt = {name.lower(): name for name in known}
    near = difflib.get_close_matches(word.lower(), spelt, n=1)
    return f" Did you mean {spelt[near[0]]!r}?" if near else ""


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted(__all__)
