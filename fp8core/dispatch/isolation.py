"""Calls into plug-ins: whatever their code raises, ``sys.exit()`` too, becomes a reason.

Only Ctrl-C goes through: it is the user's, and means the process.
"""

from __future__ import annotations

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
        KeyboardInterrupt: the user pressed Ctrl-C meanwhile.
    """
    try:
        return call()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001  a third party's code may raise anything, and must not end the process
        return Failure(error)


def describe(error: BaseException) -> str:
    """Return ``error`` as a reason: the text of our own, the class too of anybody else's.

    >>> describe(SystemExit(3)), describe(Fp8CoreError("no such thing"))
    ('SystemExit: 3', 'no such thing')
    """
    kind = type(error).__name__
    try:
        text = str(error) or "no message"
    except KeyboardInterrupt:
        raise
    except BaseException as second:  # noqa: BLE001  the message is a third party's code as well
        return f"{kind}: its message cannot be read ({type(second).__name__})"
    return text if isinstance(error, Fp8CoreError) else f"{kind}: {text}"


def answered(what: str, reason: object) -> str | None:
    """Return the ``reason`` that ``what`` gave, checked: a text, or None for none."""
    if reason is None or (isinstance(reason, str) and reason.strip()):
        return reason
    return f"{what} returned {shown(reason)}; expected a reason as a text, or None"


def shown(value: object) -> str:
    """Return ``value`` as a message shows it, however its own ``repr`` behaves."""
    text = attempt(lambda: repr(value))
    kind = type(value).__name__
    return f"an object of class {kind}" if isinstance(text, Failure) else text[:200]
