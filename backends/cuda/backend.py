"""The operations that the CUDA backend runs, and the reasons for which it refuses others."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from fp8core.backend_api import (
    ActivationBackwardDesc,
    ActivationDesc,
    AdamDesc,
    AddNormDesc,
    Alignment,
    AmaxDesc,
    AttentionBackwardDesc,
    AttentionDesc,
    AttentionPartBackwardDesc,
    CachedAttentionDesc,
    ColumnSumsDesc,
    CombineBackwardDesc,
    CombineDesc,
    CrossEntropyBackwardDesc,
    CrossEntropyDesc,
    DequantizeDesc,
    DispatchDesc,
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
    Ranks,
    RotaryDesc,
    RouteDesc,
    RouterBackwardDesc,
    RouterDesc,
    ScaleUpdateDesc,
    has_amax,
)
from fp8core_backends.cuda import native, scaled_mm
from fp8core_backends.cuda.activation import Activation, ActivationBackward, activation_problem
from fp8core_backends.cuda.amax import bind_amax, bind_quantize_by_amax
from fp8core_backends.cuda.attention import bind_attention, bind_attention_backward
from fp8core_backends.cuda.attention_support import attention_backward_problem, attention_problem
from fp8core_backends.cuda.column_sums import ColumnSums
from fp8core_backends.cuda.cross_entropy import (
    CrossEntropy,
    CrossEntropyBackward,
    cross_entropy_problem,
)
from fp8core_backends.cuda.dequantize import Dequantize
from fp8core_backends.cuda.device_groups import DeviceGroupedGemm
from fp8core_backends.cuda.fused import bind_fused, fused_problem
from fp8core_backends.cuda.gemm import (
    LowPrecisionGemm,
    ProductInParts,
    high_precision_gemm,
    parts_problem,
)
from fp8core_backends.cuda.grouped import bind_grouped_gemm
from fp8core_backends.cuda.layout import BLOCKS, TILED, scale_mode
from fp8core_backends.cuda.microscaling import TiledGemm, bind_byte_scaled, spec_problem
from fp8core_backends.cuda.norm import AddNorm, Norm, NormBackward, norm_problem
from fp8core_backends.cuda.optimizers import AdamStep, adam_problem
from fp8core_backends.cuda.permutation import (
    CombineRows,
    CombineRowsBackward,
    DispatchRows,
    Route,
    route_problem,
)
from fp8core_backends.cuda.quantize import bind_quantize, variant_problem
from fp8core_backends.cuda.recorder import Recorder, recorder
from fp8core_backends.cuda.rotary import Rotary, rotary_problem
from fp8core_backends.cuda.router import Router, RouterBackward, router_problem
from fp8core_backends.cuda.scale_update import bind_update
from fp8core_backends.cuda.stream import index_of
from fp8core_backends.cuda.transfers import Transfers, transfers_between

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_FORMATS = ("e4m3", "e5m2")
_K = 16
"""cuBLASLt's FP8 kernels read rows of k bytes in steps of 16."""


class CudaBackend:
    """cuBLASLt's GEMMs and kernels of fp8core, for compute capability 9.0; 10.0 is not run yet."""

    def unsupported(self, desc: OpDesc, device: torch.device) -> str | None:
        """Say why ``desc`` cannot run on ``device``, or None."""
        if device.type != "cuda":
            return f"runs on cuda, not on {device.type}"
        if type(desc) in (AttentionDesc, CachedAttentionDesc):  # a subclass may ask for more
            return attention_problem(desc, device)  # type: ignore[arg-type]  # as the line above
        if type(desc) in (AttentionBackwardDesc, AttentionPartBackwardDesc):
            return attention_backward_problem(desc, device)  # type: ignore[arg-type]  # as above
        missing = native.missing(device)
        if type(desc) in (GemmDesc, GroupedGemmDesc):  # a subclass may ask for more
            return _check_gemm(desc, device, missing)  # type: ignore[arg-type]  # as the line above
        check = _CHECKS.get(type(desc))
        if check is None:
            return f"{getattr(desc, 'op', type(desc).__name__)} is not written for CUDA yet"
        return check(desc) or (None if missing is None else f"no native library: {missing}")

    def alignment(self, desc: GemmDesc) -> Alignment:
        """Return the alignment that cuBLASLt needs: rows of 16 bytes in operands and result.

        How many rows there are is free but for byte scales; see ``row_step`` of the layout.
        """
        if not desc.low_precision:
            return Alignment()
        if isinstance(desc, GroupedGemmDesc) and desc.offsets_on_device:
            return Alignment(n=_K, k=1 if desc.contract_groups else _K)  # groups cannot be padded
        modes = [scale_mode(spec) for spec in (desc.a, desc.b) if spec is not None]
        if modes[0] in TILED:  # whole blocks of 32; two elements of e2m1 a byte
            return Alignment(m=_K, n=_K, k=2 * _K)
        return Alignment(n=_K, k=_K)

    def numerics(self, desc: OpDesc, device: torch.device) -> Numerics:
        """Return how much less than float32 the tensor cores keep of a sum.

        Of the 32 products that one FP8 instruction adds up, each is cut off 13 bits below the
        largest: at most 32 * 2^-14 of the sum of magnitudes. With fast accumulation the sum so far
        is cut off in the same way by each of the k / 32 instructions; without, every 128 products
        are added in float32.
        """
        if not isinstance(desc, GemmDesc | AttentionDesc):
            return Numerics()
        if isinstance(desc, AttentionDesc) and not desc.low_precision:
            return Numerics()
        if not desc.low_precision:
            source = "tensor cores cut off float32 sums instead of rounding them"
            return Numerics(source, sum_error_per_term=2.0**-23)
        source = "DeepSeek-V3 technical report (arXiv:2412.19437) 3.3.2: 14 bits kept on Hopper"
        is_fast = isinstance(desc, AttentionDesc) or desc.fast_accumulation
        per_term = 2.0**-18 if is_fast else 2.0**-24
        return Numerics(source, sum_error=2.0**-9, sum_error_per_term=per_term)

    def bind(self, desc: OpDesc, device: torch.device) -> Callable[..., Any]:
        """Return the callable of ``desc``; the first call may build the native library."""
        if isinstance(desc, GroupedGemmDesc) and desc.offsets_on_device:
            return DeviceGroupedGemm(desc, device, native.load())
        if isinstance(desc, GemmDesc):
            run = _bind_dense(desc, device)
            return bind_grouped_gemm(desc, run) if isinstance(desc, GroupedGemmDesc) else run
        if isinstance(desc, AttentionDesc):  # cuDNN's, which needs no library of this backend
            return bind_attention(desc, device)
        if isinstance(desc, AttentionBackwardDesc):
            return bind_attention_backward(desc, device)
        library = native.load()
        bound: Callable[..., Any] = _BINDERS[type(desc)](desc, device, library)
        return bound

    def recorder(self, desc: OpDesc, device: torch.device) -> Recorder | None:
        """Return what records calls of the native library; of torch's own kernels there is none.

        Operations in groups read sizes, and a product in high precision is one of torch's.
        """
        rows = desc.quantize if isinstance(desc, AmaxDesc) else desc
        is_native = type(desc) in _RECORDED and not getattr(rows, "grouped", False)
        if isinstance(desc, GemmDesc):
            is_native = is_native and desc.low_precision
        if not is_native or native.missing(device) is not None:
            return None
        return recorder(index_of(device), native.load())

    def transfers(self, ranks: Ranks, device: torch.device) -> Transfers | None:
        """Return copies between devices of one host, None for other ranks."""
        return transfers_between(ranks, device)


_RECORDED = (
    *(ActivationBackwardDesc, ActivationDesc, AddNormDesc, AmaxDesc, ColumnSumsDesc),
    *(DequantizeDesc, FusedDesc, GemmDesc, NormBackwardDesc, NormDesc, QuantizeByAmaxDesc),
    QuantizeDesc,
)


def _bind_dense(desc: GemmDesc, device: torch.device) -> Callable[..., torch.Tensor]:
    if desc.part:
        return ProductInParts(desc, device, native.load())
    if not desc.low_precision:  # which takes no library, so none is built for it
        return functools.partial(high_precision_gemm, desc)
    if native.missing(device) is not None:
        return scaled_mm.bind_scaled_mm(desc)
    assert desc.a is not None
    gemm_type = TiledGemm if scale_mode(desc.a) in TILED else LowPrecisionGemm
    return gemm_type(desc, device, native.load())


def _bind_quantize(desc: QuantizeDesc, device: torch.device, library: Any) -> Callable[..., Any]:
    spec = desc.rowwise or desc.columnwise
    assert spec is not None
    bind = bind_quantize if spec.scale_format == "float32" else bind_byte_scaled
    return bind(desc, device, library)


def _check_spec(spec: OperandSpec | None) -> str | None:
    if spec is None:
        return None
    if spec.scale_format != "float32":
        return spec_problem(spec)
    problems = (
        (spec.format not in _FORMATS, f"no kernels for format {spec.format}"),
        (scale_mode(spec) is None, f"no kernels for blocks of {spec.block}"),
        (spec.stochastic, "no stochastic rounding to 8 bits"),
        (spec.transform is not None, f"no kernels for the transform {spec.transform}"),
    )
    return next((reason for wrong, reason in problems if wrong), None)


def _check_quantize(desc: QuantizeDesc) -> str | None:
    specs = [spec for spec in (desc.rowwise, desc.columnwise) if spec is not None]
    if not specs:
        return "neither orientation is asked for"
    if len({spec.delayed for spec in specs}) > 1:
        return "one orientation is delayed, the other is not"
    if len({spec.scale_format == "float32" for spec in specs}) > 1:
        return "one orientation has scales of float32, the other of bytes"
    if desc.rowwise is not None and desc.rowwise.transform is not None:
        return f"no kernels for the transform {desc.rowwise.transform} along rows"
    if desc.dtype not in _FLOATS:
        return f"no low precision from {desc.dtype}"
    if desc.offsets_on_device and not desc.grouped:
        return "offsets without groups"
    if desc.offsets_on_device and specs[0].scale_format != "float32":
        return "scales of bytes take the sizes of groups as a list alone"
    return next(filter(None, map(_check_spec, specs)), None)


def _check_dequantize(desc: DequantizeDesc) -> str | None:
    if desc.dtype not in _FLOATS:
        return f"no low precision to {desc.dtype}"
    return _check_spec(desc.operand)


def _check_column_sums(desc: ColumnSumsDesc) -> str | None:
    return None if desc.dtype in _FLOATS else f"no column sums of {desc.dtype}"


def _check_amax(desc: AmaxDesc) -> str | None:
    quantize = desc.quantize
    specs = [spec for spec in (quantize.rowwise, quantize.columnwise) if spec is not None]
    problems = (
        (type(quantize) is not QuantizeDesc, f"no amax of {type(quantize).__name__}"),
        (quantize.dtype not in _FLOATS, f"no amax of {quantize.dtype}"),
        (not has_amax(quantize), "scales follow from their blocks alone: there is no amax"),
        (quantize.offsets_on_device and not quantize.grouped, "offsets without groups"),
        (
            any(spec.transform is not None for spec in specs),
            "no kernels for amaxes of transformed elements without their cast",
        ),
    )
    return next((reason for wrong, reason in problems if wrong), None)


def _check_quantize_by_amax(desc: QuantizeByAmaxDesc) -> str | None:
    specs = [spec for spec in (desc.rowwise, desc.columnwise) if spec is not None]
    problems = (
        (desc.sums or desc.chunked, "no sums and no chunks by given amaxes"),
        (any(spec.delayed for spec in specs), "a delayed scale is given: it follows from no amax"),
        (not has_amax(desc), "scales follow from their blocks alone: there is no amax"),
        (
            any(spec.scale_format != "float32" for spec in specs),
            "two levels of scales take no amax from outside",
        ),
    )
    reason = next((reason for wrong, reason in problems if wrong), None)
    return reason or _check_quantize(desc)


def _check_gemm(desc: GemmDesc, device: torch.device, missing: str | None) -> str | None:
    if desc.out_dtype not in _FLOATS and (desc.low_precision or desc.out_dtype != torch.float64):
        return f"no result in {desc.out_dtype}"
    if isinstance(desc, GroupedGemmDesc) and desc.offsets_on_device:
        reason = _check_device_groups(desc, device, missing)
        if reason is not None:
            return reason
    if desc.part:
        reason = parts_problem(desc) or (None if missing is None else f"no parts: {missing}")
        if reason is not None:
            return reason
    if not desc.low_precision:
        return None
    if desc.a is None or desc.b is None:
        return "one operand is quantized, the other is not"
    reason = _check_spec(desc.a) or _check_spec(desc.b)
    if reason is not None:
        return reason
    a, b = scale_mode(desc.a), scale_mode(desc.b)
    capability = torch.cuda.get_device_capability(device)
    is_blackwell = capability == (10, 0)
    problems = (
        ("mx32" in (a, b) and not is_blackwell, "MX block scales need compute capability 10.0"),
        ("nv16" in (a, b) and not is_blackwell, "NVFP4 needs compute capability 10.0"),
        (
            a != b and (a in TILED or b in TILED),
            f"cuBLASLt does not multiply {a} by {b} scales",
        ),
        (
            desc.a.transform != desc.b.transform,
            f"a has the transform {desc.a.transform}, b {desc.b.transform}",
        ),
        (a == "nv16" and desc.out_dtype == torch.float16, "no float16 result from NVFP4"),
        (desc.a.format == desc.b.format == "e5m2", "cuBLASLt does not multiply e5m2 by e5m2"),
        ((a in BLOCKS) != (b in BLOCKS), f"cuBLASLt does not multiply {a} by {b} scales"),
        (a == b == "block128", "cuBLASLt does not multiply 128 x 128 blocks by 128 x 128 blocks"),
        ((a == "row") != (b == "row"), f"cuBLASLt does not multiply {a} by {b} scales"),
        (
            a != "tensor" and a not in TILED and capability != (9, 0),
            "cuBLASLt has float32 scales of rows and blocks for compute capability 9.0 alone",
        ),
    )
    reason = next((text for wrong, text in problems if wrong), None)
    if reason is not None or missing is None:
        return reason
    reason = scaled_mm.unsupported(desc, device)
    return None if reason is None else f"{reason} ({missing})"


def _check_device_groups(
    desc: GroupedGemmDesc, device: torch.device, missing: str | None
) -> str | None:
    if not desc.low_precision:
        return "no high precision for groups whose sizes only the device knows; give them as a list"
    if missing is not None:
        return f"no native library: {missing}"
    if torch.cuda.get_device_capability(device) != (9, 0):
        return "groups whose sizes only the device knows need compute capability 9.0"
    return None


def _check_fused(desc: FusedDesc) -> str | None:
    return _check_quantize(desc.quantize) or fused_problem(desc)


def _check_update(desc: ScaleUpdateDesc) -> str | None:
    algorithms = ("max", "most_recent")
    return None if desc.algorithm in algorithms else f"no algorithm {desc.algorithm!r}"


def _check_rows(desc: DispatchDesc | CombineDesc | CombineBackwardDesc) -> str | None:
    return None if desc.dtype in _FLOATS else f"no rows of {desc.dtype}"


_CHECKS: dict[type, Callable[[Any], str | None]] = {
    ActivationBackwardDesc: activation_problem,
    ActivationDesc: activation_problem,
    QuantizeDesc: lambda desc: _check_quantize(desc) or variant_problem(desc),
    QuantizeByAmaxDesc: _check_quantize_by_amax,
    DequantizeDesc: _check_dequantize,
    ColumnSumsDesc: _check_column_sums,
    AmaxDesc: _check_amax,
    ScaleUpdateDesc: _check_update,
    RouteDesc: route_problem,
    DispatchDesc: _check_rows,
    CombineDesc: _check_rows,
    CombineBackwardDesc: _check_rows,
    RouterDesc: router_problem,
    RouterBackwardDesc: router_problem,
    CrossEntropyDesc: cross_entropy_problem,
    CrossEntropyBackwardDesc: cross_entropy_problem,
    AdamDesc: adam_problem,
    NormDesc: norm_problem,
    NormBackwardDesc: lambda desc: norm_problem(desc.norm),
    AddNormDesc: lambda desc: norm_problem(desc.norm),
    RotaryDesc: rotary_problem,
    FusedDesc: _check_fused,
}

_BINDERS: dict[type, Callable[..., Any]] = {
    ActivationBackwardDesc: ActivationBackward,
    ActivationDesc: Activation,
    QuantizeDesc: _bind_quantize,
    QuantizeByAmaxDesc: bind_quantize_by_amax,
    DequantizeDesc: Dequantize,
    ColumnSumsDesc: ColumnSums,
    AmaxDesc: bind_amax,
    ScaleUpdateDesc: bind_update,
    RouteDesc: Route,
    DispatchDesc: DispatchRows,
    CombineDesc: CombineRows,
    CombineBackwardDesc: CombineRowsBackward,
    RouterDesc: Router,
    RouterBackwardDesc: RouterBackward,
    CrossEntropyDesc: CrossEntropy,
    CrossEntropyBackwardDesc: CrossEntropyBackward,
    AdamDesc: AdamStep,
    NormDesc: Norm,
    NormBackwardDesc: NormBackward,
    AddNormDesc: AddNorm,
    RotaryDesc: Rotary,
    FusedDesc: bind_fused,
}
