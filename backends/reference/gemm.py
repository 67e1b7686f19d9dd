"""GEMM over dequantized operands, in float32, rounded once."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fp8core import formats
from fp8core.backend_api import (
    GROUP_STEP,
    GemmDesc,
    GroupedGemmDesc,
    Operand,
    OperandSpec,
    split_groups,
)
from fp8core_backends.reference.operations import computes, float_problem, spec_problem
from fp8core_backends.reference.products import product
from fp8core_backends.reference.quantize import bounds_of, dequantize_float32

# Without AVX-512 torch multiplies half-precision matrices in plain loops, which take ten to forty
# times as long as the product in float32 with its casts (docs/measured.md).
_HAS_SLOW_HALF = torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "AVX2")


def _problem(desc: GemmDesc) -> str | None:
    # One transform undoes the other in the product, so an untransformed operand cannot meet one.
    a, b = (None if spec is None else spec.transform for spec in (desc.a, desc.b))
    if a != b:
        return f"a has the transform {a}, b {b}"
    wide = () if desc.low_precision else (torch.float64,)
    return float_problem(desc.out_dtype, *wide) or spec_problem(desc.a) or spec_problem(desc.b)


@computes(GemmDesc, refuses=_problem)
def gemm(
    desc: GemmDesc,
    a: Operand,
    b: Operand,
    *,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``d[m, n] = a[m, k] @ b[n, k].T + bias``; see the backend API."""
    is_plain = not desc.low_precision and a.data.dtype == b.data.dtype == desc.out_dtype
    is_rounded_once = not desc.accumulate or desc.out_dtype.itemsize > 2
    if is_plain and is_rounded_once and (bias is None or bias.dtype == desc.out_dtype):
        return _store(_torch_product(a.data, b.data, bias), desc, out)
    return _store(_float32_gemm(desc, a, b, bias), desc, out)


@computes(GroupedGemmDesc, refuses=_problem)
def grouped_gemm(
    desc: GroupedGemmDesc,
    a: Operand,
    b: Operand | Sequence[Operand],
    group_offsets: torch.Tensor,
    *,
    bias: Sequence[torch.Tensor] | None = None,
    out: torch.Tensor | Sequence[torch.Tensor] | None = None,
) -> torch.Tensor | list[torch.Tensor]:
    """Multiply each group; see the backend API."""
    rows = a.data.shape[0]
    if desc.contract_groups:
        rows = a.data.shape[1] * (1 if desc.a is None else 8 // formats.by_name(desc.a.format).bits)
    bounds = bounds_of(group_offsets, rows)
    step = GROUP_STEP if desc.offsets_on_device else 1
    a_parts = split_groups(desc.a, a, bounds, 1 if desc.contract_groups else 0, step)
    if desc.contract_groups:
        assert isinstance(b, Operand)
        b_parts: Sequence[Operand] = split_groups(desc.b, b, bounds, 1, step)
        outs: Sequence[torch.Tensor | None] = [None] * len(a_parts) if out is None else list(out)
        return [
            gemm(desc, a_part, b_part, out=out_part)  # [m, k_g] x [n, k_g] -> [m, n]
            for a_part, b_part, out_part in zip(a_parts, b_parts, outs, strict=True)
        ]
    assert not isinstance(b, Operand)
    biases: Sequence[torch.Tensor | None] = [None] * len(a_parts) if bias is None else bias
    # [m_g, k] x [n, k] -> [m_g, n], stacked to [m, n]
    if out is None:
        products = [
            gemm(desc, a_part, b_part, bias=bias_part)
            for a_part, b_part, bias_part in zip(a_parts, b, biases, strict=True)
        ]
        rest = products[0].new_zeros(rows - bounds[-1], products[0].shape[1])
        return torch.cat([*products, rest])
    assert isinstance(out, torch.Tensor)
    for group, (a_part, b_part, bias_part) in enumerate(zip(a_parts, b, biases, strict=True)):
        gemm(desc, a_part, b_part, bias=bias_part, out=out[bounds[group] : bounds[group + 1]])
    if not desc.accumulate:
        out[bounds[-1] :] = 0
    return out


def _torch_product(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return ``a [m, k] @ b [n, k].T + bias`` in their dtype, by torch's own float32 sums."""
    is_half_on_cpu = a.dtype.itemsize == 2 and a.device.type == "cpu"
    if _HAS_SLOW_HALF and is_half_on_cpu:  # whatever the rows, so that parts have the whole's bits
        wide_bias = None if bias is None else bias.float()
        return torch.nn.functional.linear(a.float(), b.float(), wide_bias).to(a.dtype)
    return torch.nn.functional.linear(a, b, bias)


def _float32_gemm(
    desc: GemmDesc, a: Operand, b: Operand, bias: torch.Tensor | None
) -> torch.Tensor:
    d = product(_values(desc.a, a), _values(desc.b, b).t())  # [m, k] x [n, k] -> [m, n]
    return d if bias is None else d.add_(bias.to(d.dtype))


def _values(spec: OperandSpec | None, operand: Operand) -> torch.Tensor:
    """Return the operand's values ``[rows, k]`` in float32 (float64 stays)."""
    if spec is not None:
        return dequantize_float32(spec, operand)
    wide = torch.float64 if operand.data.dtype == torch.float64 else torch.float32
    return operand.data.to(wide)


def _store(d: torch.Tensor, desc: GemmDesc, out: torch.Tensor | None) -> torch.Tensor:
    if out is None:
        return d.to(desc.out_dtype)
    return out.copy_(d.add_(out) if desc.accumulate else d)
