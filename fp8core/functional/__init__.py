"""Functions on quantized and plain tensors, for those who build a computation of their own.

The operands are :class:`fp8core.QuantizedTensor`, as quantizers make them, and plain tensors. All
functions are differentiable; the backend that a layer would have computes.
"""

from __future__ import annotations

from fp8core.functional.product import gemm, grouped_gemm, linear
from fp8core.functional.quantize import dequantize, from_codes, from_torch, quantize, to_torch

__all__ = [
    "dequantize",
    "from_codes",
    "from_torch",
    "gemm",
    "grouped_gemm",
    "linear",
    "quantize",
    "to_torch",
]


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted(__all__)
