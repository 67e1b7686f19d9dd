"""Memory for results, uninitialized, from torch's allocator."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from fp8core_backends.cuda.private import Empty as Empty
from fp8core_backends.cuda.private import current_device as _current_device
from fp8core_backends.cuda.private import empty_strided as _empty_here


class Source(NamedTuple):
    """Allocators of one CUDA device: ``here`` while it is the current one, None where torch
    lacks that function, and ``elsewhere`` at any time."""

    device_index: int
    here: Empty | None
    elsewhere: Empty
    current: Callable[[], int]

    def now(self) -> Empty:
        """Return what allocates as long as the current device does not change."""
        here = self.here
        return here if here is not None and self.current() == self.device_index else self.elsewhere


def source(index: int) -> Source:
    """Return what allocates on the CUDA device of ``index``."""
    device = torch.device("cuda", index)

    def elsewhere(
        size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        return torch.empty_strided(size, stride, dtype=dtype, device=device)

    return Source(index, _empty_here, elsewhere, _current_device)


# By thread while it records a run: the index of a device, and what allocates there and takes note.
_noting: dict[int, tuple[int, Empty]] = {}


@contextmanager
def noting(index: int, empty: Empty) -> Iterator[None]:
    """Have the calling thread allocate results on the CUDA device of ``index`` by ``empty``."""
    thread = threading.get_ident()
    _noting[thread] = index, empty
    try:
        yield
    finally:
        del _noting[thread]


def _noted(index: int) -> Empty | None:
    """Return what the calling thread allocates by on that device, None unless it takes note."""
    noted = _noting.get(threading.get_ident())
    return noted[1] if noted is not None and noted[0] == index else None


def allocator(index: int) -> Empty:
    """Return the function that allocates on the CUDA device of ``index``."""
    _, here, elsewhere, current = source(index)

    def empty(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if _noting and (noted := _noted(index)) is not None:
            return noted(size, stride, dtype)
        if here is not None and current() == index:
            return here(size, stride, dtype)
        return elsewhere(size, stride, dtype)

    return empty


def allocator_now(index: int) -> Callable[[], Empty]:
    """Return a function that returns what allocates on the CUDA device of ``index`` as long as the
    current device does not change: for several results at once, with one look at the device."""
    _, here, elsewhere, current = source(index)

    def now() -> Empty:
        if _noting and (noted := _noted(index)) is not None:
            return noted
        return here if here is not None and current() == index else elsewhere

    return now
