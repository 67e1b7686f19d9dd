"""Quantizers: objects that make a QuantizedTensor, with Transformer Engine's names and arguments.

A quantizer holds no format's arithmetic: it is a :class:`fp8core.plan.TensorPlan`, and which of the
plan's orientations to make. Backends compute, as for layers.
"""

from __future__ import annotations

from fp8core.functional.quantizers.base import Quantizer
from fp8core.functional.quantizers.named import (
    DType,
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    HybridQuantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
)

__all__ = [
    "DType",
    "Float8BlockQuantizer",
    "Float8CurrentScalingQuantizer",
    "Float8Quantizer",
    "HybridQuantizer",
    "IdentityQuantizer",
    "MXFP8Quantizer",
    "NVFP4Quantizer",
    "Quantizer",
]


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted(__all__)
