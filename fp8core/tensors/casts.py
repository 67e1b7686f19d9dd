"""The methods of a tensor that convert its dtype, for one that is stored in low precision."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["Casts"]


class Casts(torch.Tensor):
    """A tensor that is plain after every conversion to a dtype, its own nominal one too.

    torch's would return the tensor itself where the dtype is the nominal one, and a master copy
    made like that would be a low-precision one.
    """

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:  # torch's has no dtype
        """Return the values as a plain tensor, in the nominal dtype if ``dtype`` is None."""
        raise NotImplementedError

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return ``dequantize().to(...)`` if a dtype is asked for, as another tensor's too.

        A move to another device alone, or a copy, stays quantized.
        """
        if any(isinstance(one, torch.dtype | torch.Tensor) for one in (*args, *kwargs.values())):
            return self.dequantize().to(*args, **kwargs)
        return super().to(*args, **kwargs)

    def type(self, dtype: Any = None, non_blocking: bool = False) -> Any:
        """Return the values as a plain tensor of ``dtype``; without one, the type's name."""
        return super().type() if dtype is None else self.dequantize().type(dtype, non_blocking)

    def type_as(self, other: torch.Tensor) -> torch.Tensor:
        """Return the values as a plain tensor with dtype and device of ``other``."""
        return self.dequantize().type_as(other)

    def float(self, memory_format: Any = None) -> torch.Tensor:
        """Return the values as a plain float32 tensor, rounded to no dtype before."""
        return self.dequantize(torch.float32)

    def double(self, memory_format: Any = None) -> torch.Tensor:
        """Return the values as a plain float64 tensor, as :meth:`float` gives them."""
        return self.dequantize(torch.float64)

    def bfloat16(self, memory_format: Any = None) -> torch.Tensor:
        """Return the values as a plain bfloat16 tensor, rounded once."""
        return self.dequantize(torch.bfloat16)

    def half(self, memory_format: Any = None) -> torch.Tensor:
        """Return the values as a plain float16 tensor, rounded once."""
        return self.dequantize(torch.float16)
