"""Code that torch captures in a graph: whether it does, and what it leaves out or calls once."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, ParamSpec, TypeVar, cast

import torch

from fp8core.torch_ops.private import (
    DISABLED_BECAUSE,
    FAKE,
    MARKED_CONSTANT,
    MARKED_DISABLED,
    PASSES_DATACLASSES,
    FakeTensor,
    is_traced,
    is_transform_active,
    mode_of,
    without_interpreters,
)

P = ParamSpec("P")
R = TypeVar("R")
_REAL = (torch.Tensor, torch.nn.Parameter)


def is_captured(x: torch.Tensor) -> bool:
    """Say whether torch is capturing a graph, and ``x`` stands for a tensor of it."""
    return torch.compiler.is_compiling() or type(x) not in _REAL or is_traced()


def constant_in_graph(function: Callable[..., Any]) -> None:
    """Have torch.compile call ``function`` while it traces, and keep its result.

    As torch.compiler.assume_constant_result, which imports all of torch.compile: that takes longer
    than the rest of ``import fp8core``.
    """
    setattr(function, MARKED_CONSTANT, True)


def is_faked() -> bool:
    """Return whether FakeTensorMode computes no values, outside of torch.compile."""
    return mode_of(FAKE) is not None and not torch.compiler.is_compiling()


constant_in_graph(is_faked)  # which cannot trace it, and has not to ask itself in each call


def has_no_values(x: torch.Tensor) -> bool:
    """Return whether there is nothing to read in ``x``, on meta or of FakeTensorMode."""
    return x.is_meta or isinstance(x, FakeTensor)


def taking_dataclasses(function: Callable[P, R]) -> Callable[P, R]:
    """Return ``function``, which is then made a constant in graphs, for calls with a frozen
    dataclass.

    torch before 2.13 has none of those passed to a constant: there the graph breaks at the call,
    and with ``fullgraph=True`` torch raises that it would.
    """
    return function if PASSES_DATACLASSES else untraced(function)


def untraced(function: Callable[P, R]) -> Callable[P, R]:
    """Return ``function``, called outside of what torch.compile captures.

    As torch.compiler.disable, which imports torch's compiler where it is called. That takes as
    long as importing torch, and most processes compile nothing, so it is called in a capture.
    """

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.compiler.is_compiling():
            return function(*args, **kwargs)
        outside: Callable[P, R] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
        return outside(*args, **kwargs)

    # Each function has a code object: torch keeps what it compiled by code object, and would
    # compile a shared one again for each of them.
    unshared = cast(types.FunctionType, call)
    unshared.__code__ = unshared.__code__.replace(co_name=function.__name__)
    setattr(call, MARKED_DISABLED, True)  # for a message with the name, where no graph may break
    setattr(call, DISABLED_BECAUSE, f"fp8core runs {function.__name__} outside of graphs")
    return functools.update_wrapper(call, function)


def left_to_backward() -> AbstractContextManager[None]:
    """Have torch's partitioner leave what is traced within to the graph of backward, also where it
    follows from what forward has: instead of it forward saves what it is computed from."""
    # torch 2.11 traces backward outside of what it calls compiling.
    return _tagged() if torch.compiler.is_compiling() or is_traced() else _UNTAGGED


_UNTAGGED, _TAG, _LEFT = nullcontext(), "partitioner_tag", "must_be_in_backward"


@contextmanager
def _tagged() -> Iterator[None]:
    meta = torch.fx.traceback.current_meta
    before = meta.get(_TAG)
    meta[_TAG] = _LEFT
    try:
        yield
    finally:
        meta[_TAG] = before


def is_left_to_backward() -> bool:
    """Return whether what is traced now is left to the graph of backward."""
    return torch.fx.traceback.current_meta.get(_TAG) == _LEFT


def in_plain_mode(create: Callable[[], R]) -> R:
    """Return ``create()``, which runs outside inference mode and torch.func's transforms.

    Training could not update an inference tensor, and a tensor that a transform has wrapped has no
    memory after it. What is imported or bound meanwhile may hold tensors as well.
    """
    with ExitStack() as outside:
        if torch.is_inference_mode_enabled():
            outside.enter_context(torch.inference_mode(False))
            outside.enter_context(torch.no_grad())
        if is_transform_active():
            outside.enter_context(without_interpreters())
            # Without them torch.compile would take this for a place to compile.
            create = torch.compiler.disable(create)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return create()
