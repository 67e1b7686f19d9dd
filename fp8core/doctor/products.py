"""Tests of GEMMs: of one and of groups, against products in float64."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

from fp8core.backend_api import (
    GemmDesc,
    GroupedGemmDesc,
    Operand,
)
from fp8core.doctor import cases
from fp8core.doctor.cases import Bench
from fp8core.doctor.compare import Error, share
from fp8core.doctor.matrix import DTYPE
from fp8core.inspect.descriptors import Need

__all__ = ["gemm", "grouped_gemm"]


_SIDES = {  # GEMM: tensor and orientation of a, then of b
    "fprop": (("input", False), ("weight", False)),
    "dgrad": (("grad_output", False), ("weight", True)),
    "wgrad": (("grad_output", True), ("input", True)),
}


def gemm(bench: Bench, need: Need) -> Iterator[Error]:
    """Compare with the float64 product of the dequantized operands."""
    desc, sides = need.desc, _SIDES[need.step]
    assert isinstance(desc, GemmDesc)
    a, b = (
        bench.operand(spec, cases.tensor(name, DTYPE), columnwise=columnwise, grouped=False)
        for spec, (name, columnwise) in zip((desc.a, desc.b), sides, strict=True)
    )
    if a is not None and b is not None:
        product = bench.bind(desc)(a, b)
        yield _product_error(bench, desc, product, a, b)


def _product_error(
    bench: Bench, desc: GemmDesc, product: torch.Tensor, a: Operand, b: Operand
) -> Error:
    left, right = bench.values(desc.a, a), bench.values(desc.b, b)
    expected = left @ right.t()  # [m, k] x [n, k] -> [m, n]
    k = left.shape[1]
    # Tensor cores may keep 14 bits of each sum of 32 products of 8-bit elements.
    # Source: DeepSeek-V3 technical report, sec. 3.3.2.
    c, name = (k / 32 * 2**-13, "k/32 2^-13") if desc.low_precision else (k * 2**-24, "k 2^-24")
    rounding = torch.finfo(desc.out_dtype).eps * expected.abs()
    bound = c * (left.abs() @ right.abs().t()) + rounding
    judged_by = f"float64 product; bound {name} |a||b| + 1 ulp"
    return Error(share(product, expected, bound), judged_by)


def grouped_gemm(bench: Bench, need: Need) -> Iterator[Error]:
    """Compare each group with the float64 product of operands that are quantized alone."""
    desc, sides = need.desc, _SIDES[need.step]
    assert isinstance(desc, GroupedGemmDesc)
    whole, alone = [], []
    for spec, (name, columnwise) in zip((desc.a, desc.b), sides, strict=True):
        x = cases.tensor(name, DTYPE)
        parts = [x] * 2 if name == "weight" else [x[:128], x[128:]]
        operand = functools.partial(bench.operand, spec, columnwise=columnwise)
        operands = [operand(part, grouped=False) for part in parts]
        joined = operands if name == "weight" else operand(x, grouped=True)
        if joined is None or None in operands:
            return
        whole.append(joined)
        alone.append(operands)
    offsets = torch.tensor(cases.OFFSETS, device="cpu")
    products = bench.bind(desc)(*whole, offsets)
    if not desc.contract_groups:
        products = [products[:128], products[128:]]
    for product, a, b in zip(products, *alone, strict=True):
        assert a is not None
        assert b is not None
        yield _product_error(bench, desc, product, a, b)
