"""Products of an operand in high precision by codes: of few rows, or of few a group, by a kernel,
else with the codes decoded first."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
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
from fp8core_backends.cuda.device_groups import DeviceGroupedGemm
from fp8core_backends.cuda.gemm import FEW_ROWS, LowPrecisionGemm, high_precision_gemm
from fp8core_backends.cuda.grouped import bind_grouped_gemm, stacked_product
from fp8core_backends.cuda.layout import DTYPES, spec_problem
from fp8core_backends.cuda.operations import first_problem
from fp8core_backends.cuda.tiers import tier_at


def weight_only_problem(desc: GemmDesc, spec: OperandSpec) -> str | None:
    """Say why there is no product of an operand in high precision by one of ``spec``, or None."""
    return spec_problem(spec) or first_problem(
        (desc.accumulate, "one operand is quantized, the other is not: no sum of such products"),
        (
            isinstance(desc, GroupedGemmDesc) and desc.offsets_on_device and desc.contract_groups,
            "one operand is quantized, the other is not: no sums over groups of such products",
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
        few = self._of_few_rows.get(a.data.dtype) if a.data.shape[0] <= FEW_ROWS else None
        if few is not None:
            return few(a, b, bias=bias, out=out)
        decoded = Operand(_decoder(self._decode, self._desc, a)(b))
        return high_precision_gemm(self._plain, a, decoded, bias=bias, out=out)


MOST_ROWS_A_GROUP = 64
"""Rows of a group, in the mean, up to which the kernel multiplies in bfloat16; more read decoded
weights. On an H200 it takes 0.64 to 0.99 of their time at 64 rows and 1.6 to 1.9 at 256."""


class WeightOnlyGroups:
    """The same of groups whose sizes only the device knows. No host waits for them."""

    __slots__ = ("_decode", "_desc", "_of_few_rows", "_of_torch", "kernel")

    def __init__(self, desc: GroupedGemmDesc, device: torch.device, native: Any) -> None:
        assert desc.b is not None
        self._desc = desc
        self._of_few_rows = {
            dtype: DeviceGroupedGemm(desc, device, native, dtype)
            for dtype in (torch.bfloat16, torch.float16)
        }
        self._decode = {
            dtype: Dequantize(DequantizeDesc(desc.b, dtype), device, native) for dtype in DTYPES
        }
        plain = dataclasses.replace(desc, b=None)
        dense = functools.partial(high_precision_gemm, plain)
        self._of_torch: Callable[..., torch.Tensor] = bind_grouped_gemm(plain, dense)
        few = self._of_few_rows[torch.bfloat16].kernel
        self.kernel = f"{few}; decoded of more than {MOST_ROWS_A_GROUP} rows a group"

    def __call__(
        self,
        a: Operand,
        b: Sequence[Operand],
        group_offsets: torch.Tensor,
        *,
        bias: Sequence[torch.Tensor] | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Multiply; see the backend API."""
        (rows, k), dtype = a.data.shape, a.data.dtype
        is_torchs = k > 0 and bias is None and dtype == self._desc.out_dtype == torch.bfloat16
        few = self._of_few_rows.get(dtype) if k > 0 else None
        if few is not None and not (is_torchs and rows > MOST_ROWS_A_GROUP * len(b)):
            return few(a, b, group_offsets, bias=bias, out=out)  # type: ignore[return-value]  # one
        decode = _decoder(self._decode, self._desc, a)
        decoded = a.data.new_empty(len(b), *b[0].data.shape)
        for weight, operand in zip(decoded, b, strict=True):
            decode(operand, weight)
        if is_torchs:
            product = stacked_product(a.data, decoded, group_offsets)
            return product if out is None else out.copy_(product)
        weights = [Operand(weight) for weight in decoded]
        return self._of_torch(a, weights, group_offsets, bias=bias, out=out)


def _decoder(decoders: dict[torch.dtype, Dequantize], desc: GemmDesc, a: Operand) -> Dequantize:
    """Return what decodes to the dtype of ``a``, or refuse it."""
    if a.data.dtype not in decoders:
        expected = ", ".join(map(str, decoders))
        raise OperandError(f"{desc}: a is {a.data.dtype}; expected one of {expected}.")
    return decoders[a.data.dtype]
