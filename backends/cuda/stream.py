"""Where a call goes: the device by its index, and torch's stream there as an address."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fp8core_backends.cuda import private


def index_of(device: torch.device) -> int:
    """Return the index of a CUDA device, that of the current one if it has none."""
    return torch.cuda.current_device() if device.index is None else device.index


def _public(index: int) -> int:
    return torch.cuda.current_stream(index).cuda_stream


raw_stream: Callable[[int], int] = private.raw_stream or _public
