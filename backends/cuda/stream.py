"""The stream that torch would enqueue on, as an address."""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ["raw_stream"]


def _public(index: int) -> int:
    return torch.cuda.current_stream(index).cuda_stream


# What torch's own compiled code calls: 0.1 us instead of 1, as it makes no Stream object.
raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _public)
