"""Functions that are called in each repeat of a recorded run, besides what backends compute."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from fp8core.backend_api import RecordsFunctions

__all__ = ["called_in_repeats", "recording"]

# By thread, while it records a run.
_recorders: dict[int, RecordsFunctions] = {}


@contextmanager
def recording(recorder: RecordsFunctions) -> Iterator[None]:
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
