"""The errors a user can meet.

Each message says what was asked, what was found and what would work::

    Fp8CoreError
    |-- RecipeError       a recipe, format, backend name or setting without a meaning as written
    |-- OperandError      a tensor that does not fit: wrong k, dtype, device, stored state
    |-- UnsupportedError  a request that is clear, but that nothing installed here can run
    |-- PluginError       a plug-in that cannot be used: failed import, wrong hook or API version
    `-- NonFiniteError    a NaN or inf that a monitor was asked to stop at
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "Fp8CoreError",
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
    """A recipe, format name, backend name or setting has no meaning as written."""


class OperandError(Fp8CoreError, ValueError):
    """A tensor, shape or stored state does not fit the place it was given to."""


class UnsupportedError(Fp8CoreError, NotImplementedError):
    """The request is understood, but no backend here, or nothing yet, can run it."""


class PluginError(Fp8CoreError, RuntimeError):
    """A plug-in was asked for by name and cannot be used."""


class NonFiniteError(Fp8CoreError, ArithmeticError):
    """A tensor holds NaN or inf, and a monitor was asked to stop there."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ``" Did you mean 'x'?"`` for the nearest known word, in any case, else nothing.

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
