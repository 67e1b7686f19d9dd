"""The operations: the union of their descriptors, and their names."""

from __future__ import annotations

from typing import TypeAlias

from fp8core.backend_api.amax import AmaxDesc, QuantizeByAmaxDesc
from fp8core.backend_api.attention import AttentionBackwardDesc, AttentionDesc
from fp8core.backend_api.delayed import ScaleUpdateDesc
from fp8core.backend_api.descriptors import DequantizeDesc, GemmDesc, QuantizeDesc
from fp8core.backend_api.fused import AddNormDesc, FusedDesc
from fp8core.backend_api.layers import (
    ActivationBackwardDesc,
    ActivationDesc,
    ColumnSumsDesc,
    NormBackwardDesc,
    NormDesc,
)
from fp8core.backend_api.rotary import RotaryDesc

__all__ = ["OPS", "OPTIONAL_OPS", "OpDesc"]

OpDesc: TypeAlias = (
    QuantizeDesc
    | QuantizeByAmaxDesc
    | DequantizeDesc
    | GemmDesc
    | AmaxDesc
    | ScaleUpdateDesc
    | NormDesc
    | NormBackwardDesc
    | ActivationDesc
    | ActivationBackwardDesc
    | ColumnSumsDesc
    | RotaryDesc
    | AttentionDesc
    | AttentionBackwardDesc
    | FusedDesc
    | AddNormDesc
)

OPS: tuple[str, ...] = (
    "activation",
    "activation_backward",
    "amax",
    "attention",
    "attention_backward",
    "column_sums",
    "dequantize",
    "gemm",
    "grouped_gemm",
    "norm",
    "norm_backward",
    "quantize",
    "rotary",
    "scale_update",
)
"""Names of the operations every backend's devices need, as ``FP8CORE_OP_BACKEND`` spells them."""

OPTIONAL_OPS: tuple[str, ...] = (
    "activation_backward_quantize",
    "activation_quantize",
    "add_norm",
    "norm_backward_quantize",
    "norm_quantize",
)
"""Fusions that a backend may offer; without them the pair runs."""
