"""The operations with kernels of this backend: what binds each of them, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

_Bind = TypeVar("_Bind", bound=Callable[..., Any])


class Operation(NamedTuple):
    """``bind(desc, device, native)`` returns the callable of a descriptor, ``refuses(desc)`` says
    why there is none, or None. ``is_recorded``: the recorder can note its calls."""

    bind: Callable[..., Callable[..., Any]]
    refuses: Callable[[Any], str | None]
    is_recorded: bool


OPERATIONS: dict[type, Operation] = {}
"""The operations by the class of their descriptors."""


def runs(
    *descs: type, refuses: Callable[[Any], str | None], is_recorded: bool = False
) -> Callable[[_Bind], _Bind]:
    """Have the decorated function or class bind descriptors of the classes ``descs``."""

    def add(bind: _Bind) -> _Bind:
        OPERATIONS.update(dict.fromkeys(descs, Operation(bind, refuses, is_recorded)))
        return bind

    return add


def first_problem(*problems: tuple[object, str]) -> str | None:
    """Return the reason of the first pair whose condition holds, None if none does."""
    return next((reason for holds, reason in problems if holds), None)
