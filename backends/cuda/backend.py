"""The operations that the CUDA backend runs, and the reasons for which it refuses others."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from fp8core.backend_api import (
    Alignment,
    AmaxDesc,
    AttentionBackwardDesc,
    AttentionDesc,
    AttentionPartBackwardDesc,
    CachedAttentionDesc,
    GemmDesc,
    GroupedGemmDesc,
    Numerics,
    OpDesc,
    PagedAttentionDesc,
    Ranks,
    SingleQueryDesc,
)
from fp8core_backends.cuda import (  # noqa: F401  most of them run operations
    activation,
    amax,
    column_sums,
    cross_entropy,
    dequantize,
    fused,
    native,
    norm,
    optimizers,
    permutation,
    quantize,
    rotary,
    router,
    scale_update,
    scaled_mm,
)
from fp8core_backends.cuda.attention import bind_attention, bind_attention_backward
from fp8core_backends.cuda.attention_cached import (
    PagedAttention,
    SingleQueryAttention,
    paged_problem,
    single_query_problem,
)
from fp8core_backends.cuda.attention_support import attention_backward_problem, attention_problem
from fp8core_backends.cuda.device_groups import DeviceGroupedGemm
from fp8core_backends.cuda.gemm import (
    LowPrecisionGemm,
    ProductInParts,
    high_precision_gemm,
    parts_problem,
)
from fp8core_backends.cuda.grouped import bind_grouped_gemm
from fp8core_backends.cuda.layout import BLOCKS, DTYPES, TILED, scale_mode, spec_problem
from fp8core_backends.cuda.microscaling import TiledGemm
from fp8core_backends.cuda.operations import OPERATIONS, first_problem
from fp8core_backends.cuda.recorder import Recorder, recorder
from fp8core_backends.cuda.stream import index_of
from fp8core_backends.cuda.tiers import products_problem, tier_at
from fp8core_backends.cuda.transfers import Transfers, transfers_between
from fp8core_backends.cuda.weight_only import WeightOnlyGemm, WeightOnlyGroups, weight_only_problem

_K = 16
"""cuBLASLt's FP8 kernels read rows of k bytes in steps of 16."""


class CudaBackend:
    """cuBLASLt's GEMMs and kernels of fp8core, on the GPUs of the table in tiers.py."""

    def unsupported(self, desc: OpDesc, device: torch.device) -> str | None:
        """Say why ``desc`` cannot run on ``device``, or None."""
        if device.type != "cuda":
            return f"runs on cuda, not on {device.type}"
        if type(desc) in (AttentionDesc, CachedAttentionDesc):  # a subclass may ask for more
            return attention_problem(desc, device)  # type: ignore[arg-type]  # as the line above
        if type(desc) in (AttentionBackwardDesc, AttentionPartBackwardDesc):
            return attention_backward_problem(desc, device)  # type: ignore[arg-type]  # as above
        missing = native.missing(device)
        if type(desc) in (PagedAttentionDesc, SingleQueryDesc):
            problem = paged_problem if type(desc) is PagedAttentionDesc else single_query_problem
            return problem(desc, device) or (missing and f"no native library: {missing}")  # type: ignore[arg-type]  # as above
        if type(desc) in (GemmDesc, GroupedGemmDesc):  # a subclass may ask for more
            return _check_gemm(desc, device, missing)  # type: ignore[arg-type]  # as the line above
        operation = OPERATIONS.get(type(desc))
        if operation is None:
            return f"{getattr(desc, 'op', type(desc).__name__)} is not written for CUDA yet"
        lacks = None if missing is None else f"no native library: {missing}"
        return operation.refuses(desc) or lacks

    def alignment(self, desc: GemmDesc) -> Alignment:
        """Return the alignment that cuBLASLt needs: rows of 16 bytes in operands and result.

        How many rows there are is free; see ``row_step`` of the layout.
        """
        if not desc.low_precision:
            return Alignment()
        if isinstance(desc, GroupedGemmDesc) and desc.offsets_on_device:
            return Alignment(n=_K, k=1 if desc.contract_groups else _K)  # groups cannot be padded
        # Of bytes: whole blocks of 32; two elements of e2m1 a byte.
        is_tiled = desc.a is not None and scale_mode(desc.a) in TILED
        is_of_groups = isinstance(desc, GroupedGemmDesc) and desc.contract_groups  # GROUP_STEP
        return Alignment(n=_K, k=2 * _K if is_tiled or is_of_groups else _K)

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
        if isinstance(desc, GemmDesc) and desc.a is None:
            source = "codes times scales are rounded to the dtype of a, bfloat16 with 8 bits"
            return Numerics(source, sum_error=2.0**-8, sum_error_per_term=2.0**-23)
        source = "DeepSeek-V3 technical report (arXiv:2412.19437) 3.3.2: 14 bits kept on Hopper"
        is_fast = isinstance(desc, AttentionDesc) or desc.fast_accumulation
        per_term = 2.0**-18 if is_fast else 2.0**-24
        return Numerics(source, sum_error=2.0**-9, sum_error_per_term=per_term)

    def bind(self, desc: OpDesc, device: torch.device) -> Callable[..., Any]:
        """Return the callable of ``desc``; the first call may build the native library."""
        if isinstance(desc, GroupedGemmDesc) and desc.offsets_on_device and desc.low_precision:
            of_groups = WeightOnlyGroups if desc.a is None else DeviceGroupedGemm
            return of_groups(desc, device, native.load())
        if isinstance(desc, GemmDesc):
            run = _bind_dense(desc, device)
            if isinstance(desc, GroupedGemmDesc):
                return bind_grouped_gemm(desc, run, reads_offsets=_reads_offsets(device))
            return run
        if isinstance(desc, PagedAttentionDesc):
            return PagedAttention(desc, device, native.load())
        if isinstance(desc, SingleQueryDesc):
            return SingleQueryAttention(desc, device, native.load())
        if isinstance(desc, CachedAttentionDesc) and native.missing(device) is None:
            return bind_attention(desc, device, native.load())
        if isinstance(desc, AttentionDesc):  # cuDNN's, which needs no library of this backend
            return bind_attention(desc, device)
        if isinstance(desc, AttentionBackwardDesc):
            return bind_attention_backward(desc, device)
        return OPERATIONS[type(desc)].bind(desc, device, native.load())

    def recorder(self, desc: OpDesc, device: torch.device) -> Recorder | None:
        """Return what records calls of the native library, and torch's products in high precision.

        Of operations in groups there is none: they read sizes. A product in high precision has one
        where the library is loaded: it takes none itself, so none is built for it.
        """
        rows = desc.quantize if isinstance(desc, AmaxDesc) else desc
        operation = OPERATIONS.get(type(desc))
        is_recorded = operation is not None and operation.is_recorded
        is_recorded |= type(desc) is GemmDesc and (desc.low_precision or native.is_loaded())
        if not is_recorded or getattr(rows, "grouped", False) or native.missing(device) is not None:
            return None
        return recorder(index_of(device), native.load())

    def transfers(self, ranks: Ranks, device: torch.device) -> Transfers | None:
        """Return copies between devices of one host, None for other ranks."""
        return transfers_between(ranks, device)


def _reads_offsets(device: torch.device) -> bool:
    return device.type == "cuda" and tier_at(device).is_hopper


def _bind_dense(desc: GemmDesc, device: torch.device) -> Callable[..., torch.Tensor]:
    if desc.part:
        return ProductInParts(desc, device, native.load())
    if not desc.low_precision:  # which takes no library, so none is built for it
        return functools.partial(high_precision_gemm, desc)
    if native.missing(device) is not None:
        return scaled_mm.bind_scaled_mm(desc)
    if desc.a is None:
        return WeightOnlyGemm(desc, device, native.load())
    gemm_type = TiledGemm if scale_mode(desc.a) in TILED else LowPrecisionGemm
    return gemm_type(desc, device, native.load())


def _check_gemm(desc: GemmDesc, device: torch.device, missing: str | None) -> str | None:
    if desc.out_dtype not in DTYPES and (desc.low_precision or desc.out_dtype != torch.float64):
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
    if desc.b is None:
        return "one operand is quantized, the other is not: a alone"
    if desc.a is None:
        lacks = None if missing is None else f"no products of mixed operands: {missing}"
        return weight_only_problem(desc, desc.b) or lacks
    reason = spec_problem(desc.a) or spec_problem(desc.b)
    if reason is not None:
        return reason
    a, b = scale_mode(desc.a), scale_mode(desc.b)
    is_torch_s = missing is not None and a == b == "tensor"
    lacking = None if is_torch_s else products_problem((a, b), device)
    reason = first_problem(
        (lacking is not None and (a in TILED or b in TILED), lacking or ""),
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
        (lacking is not None, lacking or ""),
    )
    if reason is not None or missing is None:
        return reason
    reason = scaled_mm.unsupported(desc, device)
    return None if reason is None else f"{reason} ({missing})"


def _check_device_groups(
    desc: GroupedGemmDesc, device: torch.device, missing: str | None
) -> str | None:
    if not desc.low_precision:  # which torch's kernels run
        return None
    if missing is not None:
        return f"no native library: {missing}"
    if desc.a is None and not tier_at(device).shares_memory:
        return "groups whose sizes only the device knows need 227 KiB of shared memory a block"
    if desc.a is not None and not tier_at(device).is_hopper:
        return "groups whose sizes only the device knows need compute capability 9.0"
    return None
