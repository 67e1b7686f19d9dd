"""Calls into plug-ins: whatever their code raises, ``sys.exit()`` too, becomes a reason.

What the user raises meanwhile goes through: Ctrl-C, and what the program's own signal handlers
raise, such as the ``sys.exit()`` of one for SIGTERM. Both mean the process, not the plug-in.
"""

from __future__ import annotations

import signal
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn, TypeVar

import torch

from fp8core.errors import Fp8CoreError, PluginError

__all__ = ["Failure", "answered", "attempt", "describe", "shown"]

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Failure:
    """What a plug-in's code raised; its text is the reason."""

    error: BaseException

    def __str__(self) -> str:
        return describe(self.error)

    def fail(self, what: str) -> NoReturn:
        """Raise PluginError, whose text is ``what`` and the reason.

        Errors of fp8core, which name what is wrong, and a lack of memory, which programs wait for,
        are raised as they are.
        """
        if isinstance(self.error, Fp8CoreError | torch.OutOfMemoryError):
            raise self.error
        raise PluginError(f"{what}: {self}") from self.error


def attempt(call: Callable[[], Result]) -> Result | Failure:
    """Return what ``call`` returns, or how it failed.

    Raises:
        BaseException: what the user raised meanwhile, by Ctrl-C or in a signal handler.
    """
    try:
        return call()
    except BaseException as error:
        if _is_users(error):
            raise
        return Failure(error)


def _is_users(error: BaseException) -> bool:
    """Say whether Ctrl-C or a signal handler written in Python raised ``error``."""
    if isinstance(error, KeyboardInterrupt):
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
    kind = type(error).__name__
    try:
        text = str(error) or "no message"
    except BaseException as second:
        if _is_users(second):
            raise
        return f"{kind}: its message cannot be read ({type(second).__name__})"
    return text if isinstance(error, Fp8CoreError) else f"{kind}: {text}"


def answered(what: str, reason: object) -> str | None:
    """Return the ``reason`` that ``what`` gave, checked: a text, or None for none."""
    if reason is None:
        return None
    # A subclass of str may do anything when it is printed; this copies its characters.
    text = str.__str__(reason) if isinstance(reason, str) else ""
    return (
        text
        if text.strip()
        else f"{what} returned {shown(reason)}; expected a reason as a text, or None"
    )


def shown(value: object) -> str:
    """Return ``value`` as a message shows it, however its own ``repr`` behaves."""
    text = attempt(lambda: repr(value))
    kind = type(value).__name__
    return f"an object of class {kind}" if isinstance(text, Failure) else text[:200]
