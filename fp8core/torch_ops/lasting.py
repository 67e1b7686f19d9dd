"""Where that is created which outlives the call: states of layers, counters, bound operations."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TypeVar

import torch

from fp8core.torch_ops.private import is_transform_active, without_interpreters

__all__ = ["lasting"]

_Created = TypeVar("_Created")


def lasting(create: Callable[[], _Created]) -> _Created:
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
