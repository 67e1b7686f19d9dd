"""The backend of Ascend NPUs: which operations it runs, and on which of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fp8core.backend_api import (
    ActivationBackwardDesc,
    ActivationDesc,
    Alignment,
    AttentionBackwardDesc,
    AttentionDesc,
    DequantizeDesc,
    FusedDesc,
    GemmDesc,
    GroupedGemmDesc,
    NormBackwardDesc,
    NormDesc,
    Numerics,
    OpDesc,
    OperandSpec,
    QuantizeByAmaxDesc,
    QuantizeDesc,
    RotaryDesc,
    bind_method,
    variant_of,
)
from fp8core_backends.ascend.attention import attention, attention_backward, refused_attention
from fp8core_backends.ascend.gemm import gemm
from fp8core_backends.ascend.grouped import grouped_gemm
from fp8core_backends.ascend.kinds import Kind, kind_of, refusal, refused_product
from fp8core_backends.ascend.layers import (
    ACTIVATIONS,
    activation,
    activation_backward,
    norm,
    norm_backward,
)
from fp8core_backends.ascend.operators import arguments, library
from fp8core_backends.ascend.quantize import dequantize, quantize
from fp8core_backends.ascend.rotary import refused_rotary, rotary

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_SOURCE = "CANN's ops-nn: scale = amax * (1 / max) and x / scale, each rounded to float32"
_SOURCE_MX = "CANN's ops-nn: the exponent of a block with inf or NaN is 255, its codes are 0"
_LARGEST = torch.finfo(torch.float32).max
_SMALLEST = 2.0**-110
"""From this amax on, its quotient by the largest value of any format is a normal float32."""


class AscendBackend:
    """FP8, HiFloat8 and MX on Ascend 950; attention, rotary embedding, norms and activations on
    every Ascend."""

    activation = staticmethod(activation)
    activation_backward = staticmethod(activation_backward)
    attention = staticmethod(attention)
    attention_backward = staticmethod(attention_backward)
    dequantize = staticmethod(dequantize)
    gemm = staticmethod(gemm)
    grouped_gemm = staticmethod(grouped_gemm)
    norm = staticmethod(norm)
    norm_backward = staticmethod(norm_backward)
    quantize = staticmethod(quantize)
    rotary = staticmethod(rotary)

    def __init__(self) -> None:
        """Import torch_npu.

        Raises:
            UnsupportedError: it cannot be imported.
        """
        library.load()

    def unsupported(self, desc: OpDesc, device: torch.device) -> str | None:
        """Return the reason why ``desc`` cannot run on ``device``, or None."""
        check = _CHECKS.get(type(desc))
        if check is None:
            return f"it has no {type(desc).__name__}"
        variant = variant_of(desc)
        if variant is not None:
            return f"it has no {desc.op} with {variant}"
        return check(desc) or (_check_soc(device) if desc.low_precision else None)

    def alignment(self, desc: GemmDesc) -> Alignment:
        """Return 64 along k for MX, whose exponents come in pairs; else 1."""
        is_mx = any(s is not None and kind_of(s) is Kind.MX for s in (desc.a, desc.b))
        return Alignment(k=64 if is_mx else 1)

    def bind(self, desc: OpDesc, device: torch.device) -> Callable[..., Any]:
        """Return the method that runs ``desc``."""
        return bind_method(self, desc)

    def numerics(self, desc: OpDesc, device: torch.device) -> Numerics:
        """Return how far casts are from the reference: it multiplies by a scale, Ascend divides.

        Blocks of zeros, of values so small that their scale is subnormal, and of inf have other
        scales than in the reference, and no document gives the codes.
        """
        if type(desc) is not QuantizeDesc:
            return Numerics()
        specs = [spec for spec in (desc.rowwise, desc.columnwise) if spec is not None]
        has_single_scale = all(kind_of(spec) is Kind.TENSOR for spec in specs)
        if all(spec.delayed for spec in specs) or (
            has_single_scale and desc.dtype == torch.float32
        ):
            return Numerics()  # the cast is by a given scale
        if all(spec.delayed or spec.scale_format == "e8m0" for spec in specs):
            return Numerics(source=_SOURCE_MX, amax_range=(0.0, _LARGEST))
        return Numerics(
            source=_SOURCE, code_steps=1, scale_ulps=2, amax_range=(_SMALLEST, _LARGEST)
        )


def _check_soc(device: torch.device) -> str | None:
    name = library.device_name(device)
    if name.startswith("Ascend950"):
        return None
    return (
        f"{name} has no FP8 product, Ascend950PR and Ascend950DT have; train in bfloat16 without a "
        f"recipe, or emulate it by use_backend('reference')"
    )


def _check_specs(*specs: OperandSpec | None) -> str | None:
    return next(filter(None, (refusal(spec) for spec in specs if spec is not None)), None)


def _check_quantize(desc: QuantizeDesc) -> str | None:
    if desc.offsets_on_device:
        return "it would wait for the sizes of groups on the device; give them as a list"
    specs = [spec for spec in (desc.rowwise, desc.columnwise) if spec is not None]
    is_delayed = any(spec.delayed for spec in specs)
    has_single_scale = all(spec.block == (0, 0) for spec in specs)
    dtypes = arguments.SCALABLE if is_delayed or has_single_scale else arguments.QUANTIZABLE
    if desc.dtype not in dtypes:
        return f"the cast takes {', '.join(map(str, dtypes))}, not {desc.dtype}"
    if len({spec.delayed for spec in specs}) > 1:
        return "one orientation is delayed, the other is not"
    if is_delayed and len({spec.format for spec in specs}) > 1:
        return "both orientations of a delayed cast have one format"
    return _check_specs(*specs)


def _check_dequantize(desc: DequantizeDesc) -> str | None:
    is_float = desc.dtype in _FLOATS
    return _check_specs(desc.operand) if is_float else f"no values of {desc.dtype}"


def _check_gemm(desc: GemmDesc) -> str | None:
    if desc.a is None and desc.b is None:
        return "products in high precision are torch's own, which `reference` calls"
    if desc.a is None or desc.b is None:
        return "it has no product of a quantized operand and one in high precision"
    if desc.out_dtype not in arguments.RESULTS:
        return f"no product in {desc.out_dtype}"
    if isinstance(desc, GroupedGemmDesc) and desc.offsets_on_device:
        return "it would wait for the sizes of groups on the device; give them as a list"
    return _check_specs(desc.a, desc.b) or refused_product(desc.a, desc.b)


def _check_norm(desc: NormDesc) -> str | None:
    if desc.kind not in ("layernorm", "rmsnorm"):
        return f"it has no {desc.kind}"
    is_float = desc.dtype in _FLOATS and desc.out_dtype in _FLOATS
    return None if is_float else f"no norm from {desc.dtype} to {desc.out_dtype}"


def _check_activation(desc: ActivationDesc | ActivationBackwardDesc) -> str | None:
    if desc.name not in ACTIVATIONS or desc.params:
        return f"its activations are {', '.join(ACTIVATIONS)}"
    is_float = desc.dtype in _FLOATS and desc.out_dtype in _FLOATS
    return None if is_float else f"no activation from {desc.dtype} to {desc.out_dtype}"


_CHECKS: dict[type, Callable[[Any], str | None]] = {
    QuantizeByAmaxDesc: lambda desc: (
        "its casts derive their scales from the tensor alone; leave the reduction of amaxes, or "
        "use DelayedScaling, whose scale is given"
    ),
    QuantizeDesc: _check_quantize,
    DequantizeDesc: _check_dequantize,
    GemmDesc: _check_gemm,
    GroupedGemmDesc: _check_gemm,
    NormDesc: _check_norm,
    NormBackwardDesc: lambda desc: _check_norm(desc.norm),
    ActivationDesc: _check_activation,
    ActivationBackwardDesc: _check_activation,
    FusedDesc: lambda desc: "its norms and activations with a cast count no NaN and inf",
    RotaryDesc: refused_rotary,
    AttentionDesc: refused_attention,
    AttentionBackwardDesc: lambda desc: (
        "no gradient of a bias" if desc.bias_grad else refused_attention(desc.attention)
    ),
}
