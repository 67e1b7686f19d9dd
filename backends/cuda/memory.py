"""Memory for results, uninitialized, from torch's allocator."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fp8core_backends.cuda.private import Empty
from fp8core_backends.cuda.private import current_device as _current_device
from fp8core_backends.cuda.private import empty_strided as _empty_here

__all__ = ["Empty", "allocator", "allocator_now"]


def allocator(index: int) -> Empty:
    """Return the function that allocates on the CUDA device of ``index``."""
    here, current, device = _empty_here, _current_device, torch.device("cuda", index)

    def empty(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if here is not None and current() == index:
            return here(size, stride, dtype)
        return torch.empty_strided(size, stride, dtype=dtype, device=device)

    return empty


def allocator_now(index: int) -> Callable[[], Empty]:
    """Return a function that returns what allocates on the CUDA device of ``index`` as long as the
    current device does not change: for several results at once, with one look at the device."""
    here, current, elsewhere = _empty_here, _current_device, allocator(index)
    if here is None:
        return lambda: elsewhere

    def now() -> Empty:
        return here if current() == index else elsewhere

    return now
