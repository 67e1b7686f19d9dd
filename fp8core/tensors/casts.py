"""Conversions of a tensor stored in low precision to a dtype: each returns a plain tensor."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["Casts"]


class Casts(torch.Tensor):
    """A tensor whose conversions to a dtype, also to its nominal one, return plain tensors.

    torch's methods return the tensor itself if it has the dtype already. A master copy taken by
    such a conversion would then be in low precision.
    """

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:  # torch's has no dtype
        """Return the values as a plain tensor, in the nominal dtype if ``dtype`` is None."""
        raise NotImplementedError

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return a plain tensor, rounded once, if a dtype, or a tensor that has one, is given.

        A move to another device alone, or a copy, stays quantized.
        """
        for given in (*args, *kwargs.values()):
            if isinstance(given, torch.dtype | torch.Tensor):
                dtype = given.dtype if isinstance(given, torch.Tensor) else given
                return self.dequantize(dtype).to(*args, **kwargs)
        return super().to(*args, **kwargs)

    def type(self, dtype: Any = None, non_blocking: bool = False) -> Any:
        """Return the values as a plain tensor of ``dtype``; without one, the type's name."""
        if dtype is None:
            return super().type()
        return self.dequantize(torch.float32).type(dtype, non_blocking)

    def type_as(self, other: torch.Tensor) -> torch.Tensor:
        """Return the values as a plain tensor with dtype and device of ``other``."""
        return self.to(other)

    def float(self, memory_format: Any = None) -> torch.Tensor:
        """Return the values as a plain float32 tensor, without rounding."""
        return self.dequantize(torch.float32)

    def double(self, memory_format: Any = None) -> torch.Tensor:
        """Return the values of :meth:`float` as a plain float64 tensor."""
        return self.dequantize(torch.float64)

    def bfloat16(self, memory_format: Any = None) -> torch.Tensor:
        """Return the values as a plain bfloat16 tensor, rounded once."""
        return self.dequantize(torch.bfloat16)

    def half(self, memory_format: Any = None) -> torch.Tensor:
        """Return the values as a plain float16 tensor, rounded once."""
        return self.dequantize(torch.float16)
