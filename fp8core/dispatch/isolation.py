"""Calls into plug-ins: whatever their code raises, ``sys.exit()`` too, becomes a reason.

What the user raises meanwhile goes through: Ctrl-C, and what the program's own signal handlers
raise, such as the ``sys.exit()`` of one for SIGTERM. Both mean the process, not the plug-in.
"""

from __future__ import annotations

import signal
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import torch

from fp8core.errors import (
    Fp8CoreError,
    NonFiniteError,
    OperandError,
    PluginError,
    RecipeError,
    UnsupportedError,
)

__all__ = ["Failure", "answered", "attempt", "describe", "is_a", "name_of_class", "plain", "shown"]

Result = TypeVar("Result")

MOST_CHARACTERS = 4000
"""Of a reason: enough for what a compiler says, little enough for a table."""

_OURS = (NonFiniteError, OperandError, PluginError, RecipeError, UnsupportedError, Fp8CoreError)

# The name that a class was defined with; its metaclass may answer something else, or raise.
_class_name: Any = vars(type)["__name__"].__get__


def name_of_class(value: object) -> str:
    """Return the name of the class of ``value``, running none of its code."""
    found: str = _class_name(type(value))
    return plain(found)


def is_a(value: object, kind: type) -> bool:
    """Say whether ``value`` is of the class ``kind``; unlike isinstance, it runs none of its code,
    as a property ``__class__`` would be."""
    return issubclass(type(value), kind)


def plain(text: str) -> str:
    r"""Return ``text`` as a reason shows it: a str of no other class, which every terminal can
    print, and of at most :data:`MOST_CHARACTERS`.

    >>> print(plain("a\x1b[2Jb"))
    a\x1b[2Jb
    """
    own = str.__str__(text)
    left = len(own) - MOST_CHARACTERS
    kept = "".join(map(_printable, own[:MOST_CHARACTERS]))
    return kept if left <= 0 else f"{kept}... and {left} more characters"


def _printable(character: str) -> str:
    if character in "\n\t" or character.isprintable():
        return character
    return character.encode("unicode_escape").decode("ascii")


@dataclass(frozen=True, slots=True)
class Failure:
    """What a plug-in's code raised; its text is the reason."""

    error: BaseException

    def __str__(self) -> str:
        return describe(self.error)

    def fail(self, what: str) -> NoReturn:
        """Raise PluginError, whose text is ``what`` and the reason.

        Errors of fp8core, which name what is wrong, and a lack of memory, which programs wait for,
        are raised as they are; a class that a plug-in derived from ours, whose constructor is its
        own, as the nearest of ours.
        """
        own = next((kind for kind in _OURS if is_a(self.error, kind)), None)
        if type(self.error) is own or is_a(self.error, torch.OutOfMemoryError):
            raise self.error
        if own is not None:
            raise own(str(self)) from self.error
        raise PluginError(f"{what}: {self}") from self.error


def attempt(call: Callable[[], Result]) -> Result | Failure:
    """Return what ``call`` returns, or how it failed.

    Raises:
        BaseException: what the user raised meanwhile, by Ctrl-C or in a signal handler.
    """
    try:
        result = call()
        isinstance(result, Failure)  # as callers ask; it runs a property __class__ of the result
        return result
    except BaseException as error:
        if _is_users(error):
            raise
        return Failure(error)


def _is_users(error: BaseException) -> bool:
    """Say whether Ctrl-C or a signal handler written in Python raised ``error``."""
    if is_a(error, KeyboardInterrupt):
        return True
    handlers = map(signal.getsignal, signal.valid_signals())
    codes = [code for own in handlers if (code := getattr(own, "__code__", None)) is not None]
    ran = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    return any(code in codes for code in ran)


def describe(error: BaseException) -> str:
    """Return ``error`` as a reason: the text of our own, the class too of anybody else's.

    >>> describe(SystemExit(3)), describe(Fp8CoreError("no such thing"))
    ('SystemExit: 3', 'no such thing')
    """
    kind = name_of_class(error)
    text = attempt(lambda: plain(str(error)) or "no message")  # the message is their code as well
    if isinstance(text, Failure):
        return f"{kind}: its message cannot be read ({name_of_class(text.error)})"
    return text if is_a(error, Fp8CoreError) else f"{kind}: {text}"


def answered(what: str, reason: object) -> str | None:
    """Return the ``reason`` that ``what`` gave, checked: a text, or None for none."""
    if reason is None:
        return None
    if issubclass(type(reason), str):
        text = plain(reason)  # type: ignore[arg-type]  # it is a str
        if text.strip():
            return text
    return f"{what} returned {shown(reason)}; expected a reason as a text, or None"


def shown(value: object) -> str:
    """Return ``value`` as a message shows it, however its own ``repr`` behaves."""
    text = attempt(lambda: plain(repr(value)))
    if isinstance(text, Failure):
        return f"an object of class {name_of_class(value)}"
    return text[:200]
