"""Products of an operand in high precision by codes: of few rows by a kernel, else with the codes
decoded first."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from fp8core.backend_api import (
    DequantizeDesc,
    GemmDesc,
    GroupedGemmDesc,
    Operand,
    OperandError,
    OperandSpec,
)
from fp8core_backends.cuda.dequantize import Dequantize
from fp8core_backends.cuda.gemm import FEW_ROWS, LowPrecisionGemm, high_precision_gemm
from fp8core_backends.cuda.layout import DTYPES, spec_problem
from fp8core_backends.cuda.operations import first_problem
from fp8core_backends.cuda.tiers import tier_at


def weight_only_problem(desc: GemmDesc, spec: OperandSpec) -> str | None:
    """Say why there is no product of an operand in high precision by one of ``spec``, or None."""
    return spec_problem(spec) or first_problem(
        (desc.accumulate, "one operand is quantized, the other is not: no sum of such products"),
        (
            isinstance(desc, GroupedGemmDesc) and desc.offsets_on_device,
            "one operand is quantized, the other is not: groups take a list of sizes",
        ),
        (
            spec.format != "e4m3" or spec.scale_format != "float32",
            f"no product of high precision by {spec}",
        ),
    )


class WeightOnlyGemm:
    """``d[m, n] = a[m, k] @ b[n, k].T``, ``b`` alone quantized; see GemmDesc."""

    __slots__ = ("_decode", "_desc", "_of_few_rows", "_plain", "kernel")

    def __init__(self, desc: GemmDesc, device: torch.device, native: Any) -> None:
        assert desc.b is not None
        self._desc = desc
        self._plain = dataclasses.replace(desc, b=None)
        self._of_few_rows = {
            dtype: LowPrecisionGemm(desc, device, native, a_dtype=dtype)
            for dtype in (torch.bfloat16, torch.float16)
            if tier_at(device).shares_memory
        }
        self._decode = {
            dtype: Dequantize(DequantizeDesc(desc.b, dtype), device, native) for dtype in DTYPES
        }
        few = f"up to {FEW_ROWS} rows fp8core::multiply_few_rows, decoded of more"
        self.kernel = few if self._of_few_rows else "decoded"

    def __call__(
        self,
        a: Operand,
        b: Operand,
        *,
        bias: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Multiply; see the backend API."""
        dtype = a.data.dtype
        few = self._of_few_rows.get(dtype) if a.data.shape[0] <= FEW_ROWS else None
        if few is not None:
            return few(a, b, bias=bias, out=out)
        if dtype not in self._decode:
            expected = ", ".join(map(str, self._decode))
            raise OperandError(f"{self._desc}: a is {dtype}; expected one of {expected}.")
        decoded = Operand(self._decode[dtype](b))
        return high_precision_gemm(self._plain, a, decoded, bias=bias, out=out)
