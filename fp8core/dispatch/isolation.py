"""Calls into plug-ins: every exception of a plug-in, also ``sys.exit()``, becomes a reason.

Exceptions of the user pass through: Ctrl-C, and an exception from a signal handler of the program,
such as ``sys.exit()`` on SIGTERM. These concern the process as a whole.
"""

from __future__ import annotations

import signal
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import torch

from fp8core.errors import (
    CollectiveError,
    Fp8CoreError,
    NonFiniteError,
    OperandError,
    PluginError,
    RecipeError,
    UnsupportedError,
)

Result = TypeVar("Result")

MOST_CHARACTERS = 4000
"""The limit of a reason's length: enough for a compiler's message, little enough for a table."""

_ERRORS = (
    *(CollectiveError, NonFiniteError, OperandError, PluginError, RecipeError, UnsupportedError),
    Fp8CoreError,
)

# Reads the name in a class's definition; ``__name__`` of a metaclass could be another, or raise.
_class_name: Any = vars(type)["__name__"].__get__


def name_of_class(value: object) -> str:
    """Return the name of the class of ``value`` without running code of that class."""
    name: str = _class_name(type(value))
    return plain(name)


def is_a(value: object, kind: type) -> bool:
    """Say whether ``value`` is of the class ``kind`` without running code of its class.

    ``isinstance`` would run a property ``__class__``.
    """
    return issubclass(type(value), kind)


def plain(text: str) -> str:
    r"""Return ``text`` as a reason shows it: an ordinary str that every terminal can print, of at
    most :data:`MOST_CHARACTERS`.

    >>> print(plain("a\x1b[2Jb"))
    a\x1b[2Jb
    """
    text = str.__str__(text)
    num_more = len(text) - MOST_CHARACTERS
    beginning = "".join(map(_printable, text[:MOST_CHARACTERS]))
    return beginning if num_more <= 0 else f"{beginning}... and {num_more} more characters"


def _printable(character: str) -> str:
    if character in "\n\t" or character.isprintable():
        return character
    return character.encode("unicode_escape").decode("ascii")


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception that a plug-in's code raised; ``str()`` gives the reason."""

    error: BaseException

    def __str__(self) -> str:
        return describe(self.error)

    def fail(self, action: str) -> NoReturn:
        """Raise PluginError with a text of ``action``, which names the call, and the reason.

        An error of fp8core, which names the fault, and a lack of memory, which programs handle, are
        raised unchanged. A plug-in's class derived from an error of fp8core may have a constructor
        of any arguments: such an error is raised as the nearest class of fp8core.
        """
        kind = next((kind for kind in _ERRORS if is_a(self.error, kind)), None)
        if type(self.error) is kind or is_a(self.error, torch.OutOfMemoryError):
            raise self.error
        if kind is not None:
            raise kind(str(self)) from self.error
        raise PluginError(f"{action}: {self}") from self.error


def attempt(call: Callable[[], Result]) -> Result | Failure:
    """Return the result of ``call``, or the failure.

    Raises:
        BaseException: the user interrupted ``call``, by Ctrl-C or in a signal handler.
    """
    try:
        result = call()
        isinstance(result, Failure)  # as callers do; a property __class__ then fails here
        return result
    except BaseException as error:
        if _is_of_user(error):
            raise
        return Failure(error)


def _is_of_user(error: BaseException) -> bool:
    """Say whether Ctrl-C or a signal handler written in Python raised ``error``."""
    if is_a(error, KeyboardInterrupt):
        return True
    handlers = map(signal.getsignal, signal.valid_signals())
    codes = [code for handler in handlers if (code := getattr(handler, "__code__", None))]
    ran = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    return any(code in codes for code in ran)


def describe(error: BaseException) -> str:
    """Return ``error`` as a reason: its text, after the class's name unless it is fp8core's.

    >>> describe(SystemExit(3)), describe(Fp8CoreError("no such thing"))
    ('SystemExit: 3', 'no such thing')
    """
    kind = name_of_class(error)
    text = attempt(lambda: plain(str(error)) or "no message")  # str() may run the plug-in's code
    if isinstance(text, Failure):
        return f"{kind}: its message cannot be read ({name_of_class(text.error)})"
    return text if is_a(error, Fp8CoreError) else f"{kind}: {text}"


def answered(question: str, reason: object) -> str | None:
    """Return the ``reason`` that a plug-in's method returned, a text or None; for any other value a
    reason that names the value.

    ``question`` names the method in messages.
    """
    if reason is None:
        return None
    if issubclass(type(reason), str):
        text = plain(reason)  # type: ignore[arg-type]  # it is a str
        if text.strip():
            return text
    return f"{question} returned {shown(reason)}; expected a reason as a text, or None"


def shown(value: object) -> str:
    """Return the text of ``value`` for a message, even if its ``repr`` raises."""
    text = attempt(lambda: plain(repr(value)))
    if isinstance(text, Failure):
        return f"an object of class {name_of_class(value)}"
    return text[:200]
