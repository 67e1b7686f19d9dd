"""Functions that torch.compile runs as they are, without importing the compiler for them."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import torch

__all__ = ["untraced"]

P = ParamSpec("P")
R = TypeVar("R")


def untraced(function: Callable[P, R]) -> Callable[P, R]:
    """Return ``function``, called outside of what torch.compile captures.

    It is torch.compiler.disable, which imports torch's compiler where it is called. That takes as
    long as importing torch, and most processes compile nothing, so it is called in a capture.
    """

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.compiler.is_compiling():
            return function(*args, **kwargs)
        outside: Callable[P, R] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
        return outside(*args, **kwargs)

    # Each function has a code object: torch keeps what it compiled by code object, and would
    # compile a shared one again for each of them.
    own = cast(types.FunctionType, call)
    own.__code__ = own.__code__.replace(co_name=function.__name__)
    return functools.update_wrapper(call, function)
