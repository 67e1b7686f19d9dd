"""The operations: the union of their descriptors, and their names."""

from __future__ import annotations

from typing import TypeAlias

from fp8core.backend_api.amax import AmaxDesc, QuantizeByAmaxDesc, ScaleUpdateDesc
from fp8core.backend_api.attention import AttentionBackwardDesc, AttentionDesc, RotaryDesc
from fp8core.backend_api.descriptors import DequantizeDesc, GemmDesc, QuantizeDesc
from fp8core.backend_api.layers import (
    ActivationBackwardDesc,
    ActivationDesc,
    AddNormDesc,
    ColumnSumsDesc,
    FusedDesc,
    NormBackwardDesc,
    NormDesc,
)
from fp8core.backend_api.optimizers import AdamDesc
from fp8core.backend_api.permutation import (
    CombineBackwardDesc,
    CombineDesc,
    CrossEntropyBackwardDesc,
    CrossEntropyDesc,
    DispatchDesc,
    RouteDesc,
    RouterBackwardDesc,
    RouterDesc,
)

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
    | RouteDesc
    | DispatchDesc
    | CombineDesc
    | CombineBackwardDesc
    | RouterDesc
    | RouterBackwardDesc
    | CrossEntropyDesc
    | CrossEntropyBackwardDesc
    | AdamDesc
    | FusedDesc
    | AddNormDesc
)

OPS: tuple[str, ...] = (
    "activation",
    "activation_backward",
    "adam",
    "amax",
    "attention",
    "attention_backward",
    "column_sums",
    "combine_rows",
    "combine_rows_backward",
    "cross_entropy",
    "cross_entropy_backward",
    "dequantize",
    "dispatch_rows",
    "gemm",
    "grouped_gemm",
    "norm",
    "norm_backward",
    "quantize",
    "rotary",
    "route",
    "router",
    "router_backward",
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
