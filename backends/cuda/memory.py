"""Memory for results, uninitialized, from torch's allocator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch

__all__ = ["Empty", "allocator"]

Empty: TypeAlias = "Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor]"
"""``empty(size, stride, dtype)``; a stride of 1 for a dimension of 1 will do."""

# What torch's own compiled code allocates by: no parsing of arguments, no dispatch, half the time.
# It allocates on the current device.
_guards: Any = getattr(torch._C._dynamo, "guards", None)
_empty_here: Empty | None = getattr(_guards, "_empty_strided_cuda", None)
_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


def allocator(index: int) -> Empty:
    """Return what allocates on the CUDA device of ``index``."""
    here, current, device = _empty_here, _current_device, torch.device("cuda", index)

    def empty(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if here is not None and current() == index:
            return here(size, stride, dtype)
        return torch.empty_strided(size, stride, dtype=dtype, device=device)

    return empty
