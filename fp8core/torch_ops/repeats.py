"""Repeats of a call: whether tensors are like the earlier ones, and functions that a recorder calls
again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

import torch

from fp8core.backend_api import Recorder
from fp8core.torch_ops.private import tensor_guards

Likeness: TypeAlias = Callable[..., bool]
"""Called with as many tensors as it was made from; what is no tensor is not alike."""


def likeness_to(first: torch.Tensor, others: Sequence[torch.Tensor] = ()) -> Likeness | None:
    """Return what says in one call whether tensors are like these; None if torch cannot.

    Like are distinct tensors of the same types, dtypes and devices, with as many dimensions and the
    same ``requires_grad``, of which the first has as many columns. Neither layouts, pending
    negations and zeros, wrappers of torch.func and of inference mode, nor torch.autocast, the
    transforms and the modes that are active may differ. Other sizes, strides and the memory, which
    may be freed, are not compared. The answer may be no for tensors that are like these.
    """
    if tensor_guards is None:
        return None
    tensors = (first, *others)
    sizes: list[list[int | None]] = [[None] * tensor.dim() for tensor in tensors]
    if sizes[0]:
        sizes[0][-1] = first.shape[-1]
    strides = [[None] * tensor.dim() for tensor in tensors]
    guards = tensor_guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    check: Likeness = guards.check
    return check


def sameness_to(tensors: Sequence[torch.Tensor]) -> Likeness | None:
    """Return what says in one call whether tensors are like these, of the same sizes and strides;
    None if torch cannot.

    The answer is to be asked about as many tensors.
    """
    if tensor_guards is None:
        return None
    guards = tensor_guards(
        *tensors,
        dynamic_dims_sizes=[list(tensor.shape) for tensor in tensors],
        dynamic_dims_strides=[list(tensor.stride()) for tensor in tensors],
    )
    check: Likeness = guards.check
    return check


# By thread, while it records a run.
_recorders: dict[int, Recorder] = {}


@contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Hand the calling thread's :func:`called_in_repeats` to ``recorder``, which records a run."""
    thread = threading.get_ident()
    _recorders[thread] = recorder
    try:
        yield
    finally:
        del _recorders[thread]


def called_in_repeats(
    function: Callable[..., torch.Tensor], *tensors: torch.Tensor
) -> torch.Tensor:
    """Return ``function(*tensors)``; if a run is being recorded, each repeat of it calls the
    function as well.

    The function must not keep the tensors of a call: others stand for them in a repeat.
    """
    if _recorders:
        thread = threading.get_ident()
        recorder = _recorders.pop(thread, None)  # what the function calls is part of the function
        if recorder is not None:
            try:
                return recorder.call(function, *tensors)
            finally:
                _recorders[thread] = recorder
    return function(*tensors)
