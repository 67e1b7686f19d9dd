"""Parameters stored in low precision: how layers get them, and master copies to train them."""

from __future__ import annotations

from fp8core.tensors.parameter.init import (
    Float8BlockwiseQTensor,
    Float8BlockwiseQTensorStorage,
    Float8Tensor,
    Float8TensorStorage,
    HybridQuantizedTensor,
    HybridQuantizedTensorStorage,
    MXFP8Tensor,
    MXFP8TensorStorage,
    NVFP4Tensor,
    NVFP4TensorStorage,
    QuantizedTensorStorage,
    fp8_model_init,
    quantized_model_init,
)
from fp8core.tensors.parameter.master import MasterWeights
from fp8core.tensors.quantized_tensor import QuantizedTensor

__all__ = [
    "Float8BlockwiseQTensor",
    "Float8BlockwiseQTensorStorage",
    "Float8Tensor",
    "Float8TensorStorage",
    "HybridQuantizedTensor",
    "HybridQuantizedTensorStorage",
    "MXFP8Tensor",
    "MXFP8TensorStorage",
    "MasterWeights",
    "NVFP4Tensor",
    "NVFP4TensorStorage",
    "QuantizedTensor",
    "QuantizedTensorStorage",
    "fp8_model_init",
    "quantized_model_init",
]


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted(__all__)
