"""GEMMs through ``torch._scaled_mm``, where there is no native library.

The reference backend then quantizes. Slower than the native path: torch rebuilds cuBLASLt's
descriptors on every call, takes its first algorithm, and cannot add to an output.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from fp8core.backend_api import GemmDesc, Operand
from fp8core_backends.cuda.gemm import store
from fp8core_backends.cuda.layout import k_contiguous, scale_mode
from fp8core_backends.cuda.private import scaled_mm
from fp8core_backends.cuda.tiers import tier_at

_DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def unsupported(desc: GemmDesc, device: torch.device) -> str | None:
    """Say why torch cannot run a low-precision GEMM on the device, or None."""
    if "tensor" not in tier_at(device).modes:
        return "torch's own FP8 kernels need compute capability 8.9"
    modes = {None if spec is None else scale_mode(spec) for spec in (desc.a, desc.b)}
    if modes != {"tensor"}:
        return "torch's own kernels take one scale a tensor; other recipes need the native library"
    return None


def bind_scaled_mm(desc: GemmDesc) -> Callable[..., torch.Tensor]:
    """Return the callable of ``desc``, a low-precision one."""
    assert desc.a is not None
    assert desc.b is not None
    a_dtype, b_dtype = _DTYPES[desc.a.format], _DTYPES[desc.b.format]

    def run(
        a: Operand,
        b: Operand,
        *,
        bias: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert a.scale_inv is not None
        assert b.scale_inv is not None
        # torch adds a bias of the result's dtype, and none to a float32 result.
        is_plain = out is None and (bias is None or bias.dtype == desc.out_dtype != torch.float32)
        product = scaled_mm(
            k_contiguous(a.data).view(a_dtype),
            k_contiguous(b.data).view(b_dtype).t(),
            a.scale_inv,
            b.scale_inv,
            bias=bias if is_plain else None,
            out_dtype=desc.out_dtype if is_plain else torch.float32,
            use_fast_accum=desc.fast_accumulation,
        )
        if is_plain:
            return product
        return store(product, desc, bias, out)

    run.kernel = "torch._scaled_mm"  # type: ignore[attr-defined]  # what explain shows
    return run
