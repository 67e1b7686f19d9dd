"""torch_npu, and the device that it runs on."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch

from fp8core.errors import UnsupportedError


def load() -> Any:
    """Return the module torch_npu.

    Raises:
        UnsupportedError: it cannot be imported, mostly because CANN's libraries are not in reach.
    """
    try:
        return importlib.import_module("torch_npu")
    except Exception as error:  # torch_npu raises Exception itself where CANN is missing
        raise UnsupportedError(
            f"torch_npu cannot be imported: {error}. Install CANN, and run `source set_env.sh` of "
            f"its folder before Python starts."
        ) from error


def device_name(device: torch.device) -> str:
    """Return the name of the SoC, such as ``Ascend950PR_9599``; without an index, the current."""
    index = load().npu.current_device() if device.index is None else device.index
    return _device_name(index)


@functools.cache
def _device_name(index: int) -> str:
    name: str = load().npu.get_device_name(index)
    return name
