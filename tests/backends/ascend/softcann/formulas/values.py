"""Values of tensors in CANN's dtypes, and tensors of values."""

from __future__ import annotations

from typing import Any

import en_dtypes
import numpy as np
import torch

from tests.backends.ascend.softcann.device import Described

LARGEST = {35: 57344.0, 36: 448.0, 34: 32768.0}  # by CANN's dtype
T = Described
Optional = Described | None


def decode(x: T) -> torch.Tensor:
    """The values of a tensor in float32; float64 stays."""
    if x.dtype == "hifloat8":
        return torch.from_numpy(x.values.contiguous().numpy().view(en_dtypes.hifloat8).astype("f4"))
    if x.dtype == "float8_e8m0":
        return torch.exp2(x.values.float() - 127).masked_fill(x.values == 255, torch.nan)
    return x.values if x.values.dtype == torch.float64 else x.values.float()


def store(to: T, values: torch.Tensor) -> None:
    """Write values in the dtype of ``to``: 8-bit floats saturate."""
    if to.dtype == "hifloat8":
        bounded = values.float().clamp(-32768.0, 32768.0).contiguous().numpy()
        with np.errstate(all="ignore"):
            codes = bounded.astype(en_dtypes.hifloat8).view(np.uint8)
        values = torch.from_numpy(codes)
    elif to.dtype in ("float8_e4m3fn", "float8_e5m2"):
        largest = torch.finfo(to.values.dtype).max
        values = values.float().clamp(-largest, largest)
    to.values.copy_(values.reshape(to.shape).to(to.values.dtype))


def amax(x: torch.Tensor, dim: Any = None) -> torch.Tensor:
    magnitudes = torch.where(x.isnan(), 0.0, x.abs())
    return magnitudes.amax() if dim is None else magnitudes.amax(dim)


def divide(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """x / scale, and 0 where both are 0."""
    return torch.where(scale == 0, torch.zeros_like(x), x / scale)
