"""Products of quantized operands: ``d[m, n] = a[m, k] @ b[n, k].T``.

torch_npu takes ``x1 [m, k]`` and ``x2 [k, n]``, each contiguous or transposed, with the scales laid
out the same way: ``x1`` is ``a`` and ``x2`` a transposed view of ``b``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from fp8core.backend_api import GemmDesc, Operand, OperandSpec
from fp8core_backends.ascend.kinds import Kind, groups_of, kind_of
from fp8core_backends.ascend.operators import arguments, products


class _Matrix(NamedTuple):
    """An operand ``[rows, k]`` as torch_npu takes it: codes, and scales in their layout."""

    codes: torch.Tensor
    scale: torch.Tensor


def _matrix(spec: OperandSpec, operand: Operand) -> _Matrix:
    codes, scale_inv = operand.data, operand.scale_inv
    assert scale_inv is not None
    turned = is_transposed(codes)
    if not turned:
        codes = codes.contiguous()
    kind = kind_of(spec)
    if kind in (Kind.TENSOR, Kind.ROW):
        return _Matrix(codes, scale_inv.reshape(-1))
    if kind is Kind.MX:  # k is a multiple of 64: whole pairs
        pairs = dense(scale_inv).view(codes.shape[0], -1, 2)
        if turned:
            pairs = dense(pairs.transpose(0, 1)).transpose(0, 1)
        return _Matrix(codes, pairs)
    scale = dense(scale_inv.t()).t() if turned else dense(scale_inv)
    return _Matrix(codes, scale)


def is_transposed(codes: torch.Tensor) -> bool:
    """Whether ``codes [rows, k]`` are a transposed view, and no matrix of one row or column."""
    return not codes.is_contiguous() and codes.t().is_contiguous()


def dense(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` with the strides of a new tensor: torch_npu reads the layout from them, also
    those of dimensions of size 1, which ``contiguous()`` leaves as they are."""
    strides = [1]
    for size in reversed(x.shape[1:]):
        strides.insert(0, strides[0] * size)
    return x if x.stride() == tuple(strides) else x.clone(memory_format=torch.contiguous_format)


def gemm(
    desc: GemmDesc,
    a: Operand,
    b: Operand,
    *,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return ``a @ b.T + bias``; see the backend API."""
    assert desc.a is not None
    assert desc.b is not None
    m, n, k = a.data.shape[0], b.data.shape[0], a.data.shape[1]
    if 0 in (m, n, k):  # which torch_npu does not take
        product = torch.zeros(m, n, dtype=torch.float32, device=a.data.device)
        return store(desc, product if bias is None else product + bias, out)
    first, second = _matrix(desc.a, a), _matrix(desc.b, b)
    x2 = second.codes.t()
    groups = groups_of(desc.a, desc.b)
    is_vector = groups is None
    scales = (first.scale, second.scale if is_vector else second.scale.transpose(0, 1))
    pair = (desc.a.format, desc.b.format)
    if bias is None and _adds_in_place(desc, a.data, b.data, out):
        assert out is not None
        products.add_quant_matmul_(out, first.codes, x2, scales, pair, groups=groups)
        return out
    wide = bias if bias is None else bias.to(torch.float32)
    adds_later = groups in (arguments.BLOCK_GROUPS, arguments.SQUARE_GROUPS) and bias is not None
    dtype = torch.float32 if out is not None or adds_later else desc.out_dtype
    fused_bias = None if adds_later else wide
    # x1 [m, k] times x2 [k, n] -> [m, n]
    product = products.quant_matmul(
        first.codes, x2, scales, pair, dtype, groups=groups, bias=fused_bias
    )
    return store(desc, product + wide if adds_later and wide is not None else product, out)


def _adds_in_place(
    desc: GemmDesc, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None
) -> bool:
    """Whether torch_npu adds this product to ``out`` itself: one of two columnwise operands, which
    are transposed views."""
    assert desc.a is not None
    assert desc.b is not None
    if out is None or not desc.accumulate or out.dtype != torch.float32 or not out.is_contiguous():
        return False
    if not (is_transposed(a) and is_transposed(b)):
        return False
    kinds = {kind_of(desc.a), kind_of(desc.b)}
    return kinds == {Kind.MX} or (kinds == {Kind.TENSOR} and desc.a.format == "hif8")


def store(desc: GemmDesc, product: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    """Return the product in its dtype, or ``out``, to which it is written or added."""
    if out is None:
        return product.to(desc.out_dtype)
    return out.copy_(product + out if desc.accumulate else product)
