"""The errors a user can meet.

Each message names the request, the value at fault, and what would work::

    Fp8CoreError
    |-- RecipeError       an unknown recipe, format, backend name or setting
    |   |-- FormatNameError     an attribute of recipe.Format that is no format
    |   `-- FrozenFieldError    a field of a recipe was written
    |-- OperandError      a tensor that does not fit: wrong k, dtype, device, stored state
    |-- UnsupportedError  a valid request that no installed backend can run
    |-- PluginError       a plug-in that cannot be used: failed import, wrong hook or API version
    |-- CollectiveError   a collective over ranks that failed, as where a rank is missing
    `-- NonFiniteError    a NaN or inf that a monitor was asked to stop at
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Collection, Iterable, Mapping
from typing import TypeVar


class Fp8CoreError(Exception):
    """Base of every error that fp8core raises on purpose."""


class RecipeError(Fp8CoreError, ValueError):
    """A recipe, format name, backend name or setting is unknown or invalid."""


class FormatNameError(RecipeError, AttributeError):
    """``recipe.Format`` has no format of the name by which an attribute was asked for."""


class FrozenFieldError(RecipeError, dataclasses.FrozenInstanceError):
    """A field of a recipe was written or deleted; a recipe is a value, replaced as a whole."""


class OperandError(Fp8CoreError, ValueError):
    """A tensor, shape or stored state does not fit its use."""


class UnsupportedError(Fp8CoreError, NotImplementedError):
    """The request is valid, but no installed backend can run it, or fp8core does not offer it."""


class PluginError(Fp8CoreError, RuntimeError):
    """A plug-in was asked for by name and cannot be used."""


class CollectiveError(Fp8CoreError, RuntimeError):
    """A collective over several ranks failed, for instance because a rank did not take part."""

    @classmethod
    def of(cls, collective: str, error: BaseException) -> CollectiveError:
        """Return the error of ``collective``, described in words, from the ``error`` of torch."""
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return cls(
            f"{collective} failed: {lines[0]} All ranks of the group have to call the same "
            f"collectives, in the same order and before the timeout of the group "
            f"(init_process_group(timeout=...), new_group(timeout=...)). Look for a rank that "
            f"raised an error, ended, or took another path through the model."
        )


class NonFiniteError(Fp8CoreError, ArithmeticError):
    """A tensor holds NaN or inf, and a monitor was asked to stop there."""


def elsewhere(name: str, device: object, second: str, its_device: object) -> OperandError:
    """Return the error for the tensor ``name`` that is on another device than the ``second``."""
    return OperandError(
        f"{name} is on {device}, {second} on {its_device}. Move one of them; nothing is moved "
        f"silently."
    )


def nearest(word: str, candidates: Iterable[str]) -> str | None:
    """Return the candidate that is spelt most like ``word``; None if none is. Case counts only
    between candidates that are equally near without it.

    >>> nearest("quantize", ["Quantizer", "quantize_"])
    'quantize_'
    """

    def ratio(name: str, word: str) -> float:
        return difflib.SequenceMatcher(None, name, word).ratio()

    near = [(ratio(name.lower(), word.lower()), ratio(name, word), name) for name in candidates]
    best = max(near, default=(0.0, 0.0, None))
    return best[2] if best[0] >= 0.6 else None


def did_you_mean(
    word: str, candidates: Iterable[str], synonyms: Mapping[str, str] | None = None
) -> str:
    """Return ``" Did you mean 'x'?"`` for the nearest known word, ignoring case, else ``""``.

    ``synonyms`` are words of other libraries, in lower case, each with the name that it stands for;
    they count where ``word`` is one of them.

    >>> did_you_mean("e4m4", ["e4m3", "e5m2"])
    " Did you mean 'e4m3'?"
    >>> did_you_mean("FP8", ["current", "mxfp8"], {"fp8": "current"})
    " Did you mean 'current'?"
    >>> did_you_mean("MXFP8", ["mxfp8"])
    " Did you mean 'mxfp8'?"
    >>> did_you_mean("zzz", ["e4m3"])
    ''
    """
    meant = (synonyms or {}).get(word.lower()) or nearest(word, candidates)
    return "" if meant is None else f" Did you mean {meant!r}?"


_Choice = TypeVar("_Choice")


def checked_choice(
    owner: object,
    name: str,
    value: _Choice,
    choices: Collection[_Choice],
    error: type[Fp8CoreError] = OperandError,
) -> _Choice:
    """Return ``value``, the argument ``name`` of ``owner``, which is one of ``choices``.

    Raises:
        OperandError: it is another one; or the ``error`` that is given instead.

    >>> checked_choice("f", "mode", "row", ["row", "column"])
    'row'
    >>> checked_choice("f", "mode", "rows", ["row", None])
    Traceback (most recent call last):
    fp8core.errors.OperandError: f(mode='rows'): expected one of 'row', None. Did you mean 'row'?
    """
    if value in [*choices]:  # of a mapping too, whose keys a list cannot be compared with
        return value
    hint = did_you_mean(str(value), [choice for choice in choices if isinstance(choice, str)])
    expected = ", ".join(map(repr, choices))
    raise error(f"{owner}({name}={value!r}): expected one of {expected}.{hint}")


def no_argument(
    owner: str, name: str, valid: Iterable[str], synonyms: Mapping[str, str] | None = None
) -> str:
    """Return the message that ``owner`` has no argument ``name``, with the ``valid`` ones and
    :func:`did_you_mean` of them.

    >>> print(no_argument("autocast", "recip", ["enabled", "recipe"]))
    autocast has no argument 'recip'; valid ones: enabled, recipe. Did you mean 'recipe'?
    """
    names = list(valid)
    hint = did_you_mean(name, names, synonyms)
    return f"{owner} has no argument {name!r}; valid ones: {', '.join(names)}.{hint}"
