"""The judge of the other backends: every operation in plain torch, on any device.

``docs/numerics.md`` defines the results; the vectors in ``tests/golden`` decide.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from fp8core import formats
from fp8core.backend_api import (
    ATTENTION_LAYOUTS,
    MASTER_KINDS,
    ROUTE_KINDS,
    SCORE_FUNCTIONS,
    TRANSFORMS,
    ActivationBackwardDesc,
    ActivationDesc,
    AdamDesc,
    Alignment,
    AmaxDesc,
    AttentionBackwardDesc,
    AttentionDesc,
    AttentionPartBackwardDesc,
    ColumnSumsDesc,
    CombineBackwardDesc,
    CombineDesc,
    CrossEntropyBackwardDesc,
    CrossEntropyDesc,
    DequantizeDesc,
    DispatchDesc,
    GemmDesc,
    GroupedGemmDesc,
    NormBackwardDesc,
    NormDesc,
    OpDesc,
    OperandSpec,
    QuantizeByAmaxDesc,
    QuantizeDesc,
    RotaryDesc,
    RouteDesc,
    RouterBackwardDesc,
    RouterDesc,
    ScaleUpdateDesc,
    bind_method,
    has_amax,
)
from fp8core_backends.reference.activation import NUM_PARAMS, activation, activation_backward
from fp8core_backends.reference.attention import attention, attention_backward
from fp8core_backends.reference.attention_sequences import contradiction
from fp8core_backends.reference.column_sums import column_sums
from fp8core_backends.reference.cross_entropy import cross_entropy, cross_entropy_backward
from fp8core_backends.reference.gemm import gemm, grouped_gemm
from fp8core_backends.reference.norm import norm, norm_backward
from fp8core_backends.reference.optimizers import adam
from fp8core_backends.reference.permutation import (
    combine_rows,
    combine_rows_backward,
    dispatch_rows,
    route,
)
from fp8core_backends.reference.quantize import amax, dequantize, quantize
from fp8core_backends.reference.rotary import rotary
from fp8core_backends.reference.router import router, router_backward
from fp8core_backends.reference.scaling import scale_update

__all__ = ["ReferenceBackend"]

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
SCALE_FORMATS = ("float32", "e8m0", "e4m3")


class ReferenceBackend:
    """Implements every operation of the backend API."""

    adam = staticmethod(adam)
    activation = staticmethod(activation)
    activation_backward = staticmethod(activation_backward)
    amax = staticmethod(amax)
    attention = staticmethod(attention)
    attention_backward = staticmethod(attention_backward)
    column_sums = staticmethod(column_sums)
    combine_rows = staticmethod(combine_rows)
    combine_rows_backward = staticmethod(combine_rows_backward)
    cross_entropy = staticmethod(cross_entropy)
    cross_entropy_backward = staticmethod(cross_entropy_backward)
    dispatch_rows = staticmethod(dispatch_rows)
    norm = staticmethod(norm)
    norm_backward = staticmethod(norm_backward)
    quantize = staticmethod(quantize)
    dequantize = staticmethod(dequantize)
    gemm = staticmethod(gemm)
    grouped_gemm = staticmethod(grouped_gemm)
    rotary = staticmethod(rotary)
    route = staticmethod(route)
    router = staticmethod(router)
    router_backward = staticmethod(router_backward)
    scale_update = staticmethod(scale_update)

    def unsupported(self, desc: OpDesc, device: torch.device) -> str | None:
        """Return the reason why ``desc`` cannot run, or None."""
        check = _CHECKS.get(type(desc))
        if check is None:
            return f"unknown descriptor {desc}"
        # Low precision runs here only if it is asked for by name; high precision runs unasked.
        is_unasked = isinstance(desc, GroupedGemmDesc) and not desc.low_precision
        if is_unasked and device.type != "cpu" and getattr(desc, "offsets_on_device", False):
            return "in high precision it would wait for the sizes of groups on the device"
        return check(desc)

    def alignment(self, desc: GemmDesc) -> Alignment:
        """Return 1 for m and n, and for k the size of whole blocks and bytes."""
        specs = [spec for spec in (desc.a, desc.b) if spec is not None]
        return Alignment(k=math.lcm(*map(_whole_block, specs)))

    def bind(self, desc: OpDesc, device: torch.device) -> Callable[..., Any]:
        """Return the method that runs ``desc``."""
        return bind_method(self, desc)


def _whole_block(spec: OperandSpec) -> int:
    """Return the number of which k must be a multiple: operands with byte scales have no partial
    blocks, and e2m1 packs pairs."""
    per_byte = 8 // formats.by_name(spec.format).bits
    return per_byte if spec.scale_format == "float32" else math.lcm(per_byte, spec.block[1])


def _check_spec(spec: OperandSpec | None) -> str | None:
    if spec is None:
        return None
    if spec.format not in formats.names():
        return f"unknown format {spec.format!r}"
    if spec.scale_format not in SCALE_FORMATS:
        return f"unknown scale format {spec.scale_format!r}"
    if spec.transform is not None and spec.transform not in TRANSFORMS:
        return f"unknown transform {spec.transform!r}"
    if spec.stochastic and not formats.by_name(spec.format).rounds_stochastically:
        return f"no stochastic rounding of {spec.format}"
    return None


def _check_float(dtype: torch.dtype, *more: torch.dtype) -> str | None:
    return None if dtype in (*FLOATS, *more) else f"no low precision from or to {dtype}"


def _check_quantize(desc: QuantizeDesc) -> str | None:
    halves = [spec for spec in (desc.rowwise, desc.columnwise) if spec is not None]
    if len({spec.delayed for spec in halves}) > 1:
        return "one orientation is delayed, the other is not"
    if desc.grouped and any(spec.row_scaled for spec in halves):
        return "no groups with an outer scale a row"
    return _check_float(desc.dtype) or next(filter(None, map(_check_spec, halves)), None)


def _check_amax(desc: AmaxDesc) -> str | None:
    quantize = desc.quantize
    if type(quantize) is not QuantizeDesc:
        return f"no amax of {type(quantize).__name__}"
    return _check_quantize(quantize) or _check_has_amax(quantize)


def _check_has_amax(desc: QuantizeDesc) -> str | None:
    return None if has_amax(desc) else "scales follow from their blocks alone: there is no amax"


def _check_quantize_by_amax(desc: QuantizeByAmaxDesc) -> str | None:
    is_delayed = any(spec is not None and spec.delayed for spec in (desc.rowwise, desc.columnwise))
    if is_delayed:
        return "a delayed scale is given: it follows from no amax of the tensor"
    return _check_quantize(desc) or _check_has_amax(desc)


def _check_dequantize(desc: DequantizeDesc) -> str | None:
    return _check_float(desc.dtype) or _check_spec(desc.operand)


def _check_gemm(desc: GemmDesc) -> str | None:
    # One transform undoes the other in the product, so an untransformed operand cannot meet one.
    a, b = (None if spec is None else spec.transform for spec in (desc.a, desc.b))
    if a != b:
        return f"a has the transform {a}, b {b}"
    wide = () if desc.low_precision else (torch.float64,)
    return _check_float(desc.out_dtype, *wide) or _check_spec(desc.a) or _check_spec(desc.b)


def _check_update(desc: ScaleUpdateDesc) -> str | None:
    algorithms = ("max", "most_recent")
    return None if desc.algorithm in algorithms else f"no algorithm {desc.algorithm!r}"


def _check_norm(desc: NormDesc) -> str | None:
    kind = None if desc.kind in ("layernorm", "rmsnorm") else f"no norm {desc.kind!r}"
    wide = torch.float64
    return kind or _check_float(desc.dtype, wide) or _check_float(desc.out_dtype, wide)


def _check_activation(desc: ActivationDesc | ActivationBackwardDesc) -> str | None:
    if desc.name not in NUM_PARAMS:
        return f"no activation {desc.name!r}"
    count = NUM_PARAMS[desc.name]
    params = None if len(desc.params) == count else f"{desc.name} takes {count} parameters"
    wide = torch.float64
    return params or _check_float(desc.dtype, wide) or _check_float(desc.out_dtype, wide)


def _check_attention(desc: AttentionDesc) -> str | None:
    wide = () if desc.low_precision else (torch.float64,)
    specs = map(_check_spec, (desc.qkv, desc.s, desc.out))
    return _check_float(desc.dtype, *wide) or contradiction(desc) or next(filter(None, specs), None)


def _check_attention_backward(desc: AttentionBackwardDesc) -> str | None:
    gradients = [spec is not None for spec in (desc.grad_output, desc.dp)]
    if len(set(gradients)) > 1 or (any(gradients) and not desc.low_precision):
        return "both the gradient and those of logits are quantized, with q, k and v, or neither"
    specs = map(_check_spec, (desc.grad_output, desc.dp))
    return _check_attention(desc.attention) or next(filter(None, specs), None)


def _check_column_sums(desc: ColumnSumsDesc) -> str | None:
    is_float = desc.dtype in (*FLOATS, torch.float64)
    return None if is_float else f"no column sums of {desc.dtype}"


def _check_rotary(desc: RotaryDesc) -> str | None:
    if desc.dtype not in (*FLOATS, torch.float64):
        return f"no rotary embedding of {desc.dtype}"
    return None if desc.layout in ATTENTION_LAYOUTS else f"no layout {desc.layout!r}"


def _check_route(desc: RouteDesc) -> str | None:
    if desc.dtype not in INTEGERS:
        return f"no route of {desc.dtype}"
    return None if desc.kind in ROUTE_KINDS else f"no route from {desc.kind!r}"


def _check_rows(desc: DispatchDesc | CombineDesc | CombineBackwardDesc) -> str | None:
    return _check_float(desc.dtype, torch.float64)


def _check_router(desc: RouterDesc | RouterBackwardDesc) -> str | None:
    is_softmax = desc.score_function == "softmax"
    problems = (
        (desc.score_function not in SCORE_FUNCTIONS, f"no scores {desc.score_function!r}"),
        (desc.topk < 1, f"top {desc.topk} of the experts"),
        (desc.pre_softmax and not is_softmax, f"no softmax before {desc.score_function}"),
        (bool(desc.num_groups) != bool(desc.group_topk), "num_groups or group_topk alone"),
        (desc.group_topk > desc.num_groups, "more groups are chosen than there are"),
        (bool(desc.group_topk) and desc.topk % (desc.group_topk or 1) != 0, "unequal groups"),
        (desc.of_all and bool(desc.num_groups), "no groups for the probabilities of all"),
    )
    reason = next((text for wrong, text in problems if wrong), None)
    return reason or _check_float(desc.dtype)


def _check_cross_entropy(desc: CrossEntropyDesc | CrossEntropyBackwardDesc) -> str | None:
    if not 0 <= desc.label_smoothing <= 1:
        return f"no label smoothing of {desc.label_smoothing}"
    return _check_float(desc.dtype, torch.float64)


def _check_adam(desc: AdamDesc) -> str | None:
    is_short = desc.master == "remainder"
    averages = (torch.float32, torch.bfloat16)
    problems = (
        (desc.master not in MASTER_KINDS, f"no masters {desc.master!r}"),
        (is_short and desc.dtype != torch.bfloat16, f"no remainders of {desc.dtype}"),
        (desc.state_dtype not in averages, f"no averages in {desc.state_dtype}"),
    )
    reason = next((text for wrong, text in problems if wrong), None)
    return reason or _check_float(desc.dtype) or _check_float(desc.grad_dtype)


_CHECKS: dict[type, Callable[[Any], str | None]] = {
    QuantizeDesc: _check_quantize,
    DequantizeDesc: _check_dequantize,
    GemmDesc: _check_gemm,
    GroupedGemmDesc: _check_gemm,
    NormDesc: _check_norm,
    NormBackwardDesc: lambda desc: _check_norm(desc.norm),
    ActivationDesc: _check_activation,
    ActivationBackwardDesc: _check_activation,
    AmaxDesc: _check_amax,
    AttentionDesc: _check_attention,
    AttentionBackwardDesc: _check_attention_backward,
    AttentionPartBackwardDesc: _check_attention_backward,
    ColumnSumsDesc: _check_column_sums,
    QuantizeByAmaxDesc: _check_quantize_by_amax,
    RotaryDesc: _check_rotary,
    ScaleUpdateDesc: _check_update,
    RouteDesc: _check_route,
    DispatchDesc: _check_rows,
    CombineDesc: _check_rows,
    CombineBackwardDesc: _check_rows,
    RouterDesc: _check_router,
    RouterBackwardDesc: _check_router,
    CrossEntropyDesc: _check_cross_entropy,
    CrossEntropyBackwardDesc: _check_cross_entropy,
    AdamDesc: _check_adam,
}
