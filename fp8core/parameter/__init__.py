"""Parameters stored in low precision: how layers get them, and master copies to train them."""

from __future__ import annotations

from fp8core.parameter.init import fp8_model_init, quantized_model_init
from fp8core.parameter.master import MasterWeights
from fp8core.parameter.names import (
    Float8BlockwiseQTensor,
    Float8Tensor,
    MXFP8Tensor,
    NVFP4Tensor,
)
from fp8core.tensors.quantized_tensor import QuantizedTensor

__all__ = [
    "Float8BlockwiseQTensor",
    "Float8Tensor",
    "MXFP8Tensor",
    "MasterWeights",
    "NVFP4Tensor",
    "QuantizedTensor",
    "fp8_model_init",
    "quantized_model_init",
]


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted(__all__)
