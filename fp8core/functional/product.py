"""Products of quantized and plain tensors: ``gemm`` and ``grouped_gemm``."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fp8core.chain.run import is_under_torch_autocast
from fp8core.dispatch import table
from fp8core.errors import OperandError
from fp8core.functional.operand_sides import spec_of
from fp8core.functional.product_arguments import (
    check_out,
    check_pair,
    checked,
    checked_splits,
    out_dtype_of,
    refuse_out_with_grad,
    unbound,
)
from fp8core.functional.product_nodes import Gemm, GroupedGemm, Settings, apply
from fp8core.functional.quantize import dequantize
from fp8core.torch_ops.operators import constant_in_graph

__all__ = ["gemm", "grouped_gemm"]


def gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    out_dtype: torch.dtype | None = None,
    bias: torch.Tensor | None = None,
    accumulate: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return ``d[..., n] = a[..., k] @ b[n, k].T + bias[n]``.

    Two quantized tensors are multiplied as they are, by their rowwise operands. If one is plain,
    the other is dequantized to its dtype. In backward a quantized gradient meets columnwise
    operands in the same way, and everything else is computed from the dequantized tensors, in the
    widest dtype among those of both operands and of the gradient that is returned.

    Args:
        a, b: quantized or plain, float32, bfloat16 or float16.
        out_dtype: of the result; None takes that of ``out``, or that of ``a``.
        bias: ``[n]``, added in float32 before the one rounding.
        accumulate: add the product to ``out`` instead of writing it there.
        out: a plain tensor ``[..., n]`` for the result. It takes no part in differentiation.

    Raises:
        OperandError: sizes, dtypes or devices do not fit, or a quantized tensor holds no rowwise
            operand.
        UnsupportedError: no backend multiplies two tensors that are stored like these; or ``out``
            where a gradient is needed.
    """
    if torch.compiler.is_compiling():
        _allow_in_graph()
        return _captured_gemm(a, b, out_dtype, bias, accumulate, out)
    return _gemm(a, b, out_dtype, bias, accumulate=accumulate, out=out)


def _allow_in_graph() -> bool:
    torch.compiler.allow_in_graph(_captured_gemm)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return True


constant_in_graph(_allow_in_graph)


def _captured_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    out_dtype: torch.dtype | None,
    bias: torch.Tensor | None,
    accumulate: bool,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """Run :func:`gemm` by operators, which torch.compile records without reading this code."""
    with table.capturing():
        return _gemm(a, b, out_dtype, bias, accumulate=accumulate, out=out)


def _gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    out_dtype: torch.dtype | None,
    bias: torch.Tensor | None,
    *,
    accumulate: bool,
    out: torch.Tensor | None,
) -> torch.Tensor:
    a, b = checked("gemm", "a", a), checked("gemm", "b", b)
    if b.dim() != 2 or not a.dim() or a.shape[-1] != b.shape[1]:
        raise OperandError(
            f"gemm: a is {list(a.shape)}, b {list(b.shape)}; expected a [..., k] and b [n, k]."
        )
    check_pair("gemm", a, b)
    dtype = out_dtype_of("gemm", a, b, out_dtype, out)
    size = (*a.shape[:-1], b.shape[0])
    if bias is not None:
        bias = checked("gemm", "bias", dequantize(bias))
        if tuple(bias.shape) != (b.shape[0],) or bias.device != a.device:
            raise OperandError(
                f"gemm: bias is {list(bias.shape)} on {bias.device}, expected [{b.shape[0]}] on "
                f"{a.device}."
            )
    check_out("gemm", out, size, dtype, a, accumulate=accumulate)
    refuse_out_with_grad("gemm", out, (a, b, bias))
    settings = Settings(dtype, out, accumulate)
    if is_under_torch_autocast(a):
        with torch.autocast(a.device.type, enabled=False):
            return apply(Gemm, settings, a, b, bias)
    return apply(Gemm, settings, a, b, bias)


def grouped_gemm(
    a: torch.Tensor,
    b: Sequence[torch.Tensor] | torch.Tensor,
    m_splits: Sequence[int],
    out_dtype: torch.dtype | None = None,
    bias: Sequence[torch.Tensor] | torch.Tensor | None = None,
    *,
    accumulate: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return ``d[m, n]``: rows of ``a [m, k]``, group by group, times ``b[g] [n, k].T + bias[g]``.

    Tensors are quantized or plain, as in :func:`gemm`; all of ``b`` are stored alike.

    Args:
        a: the rows of all groups, one after the other; the rows of one quantized tensor share what
            scales they share.
        b: a sequence of matrices, or one tensor ``[groups, n, k]``.
        m_splits: the number of rows of each group; their sum is that of ``a``.
        out_dtype, accumulate, out: as in :func:`gemm`.
        bias: a sequence of vectors, or one tensor ``[groups, n]``.

    Raises:
        OperandError: as in :func:`gemm`; or ``m_splits`` do not add up to the rows of ``a``.
        UnsupportedError: as in :func:`gemm`; or the sizes of groups do not fit a backend's kernels.
    """
    a = checked("grouped_gemm", "a", a)
    matrices = [checked("grouped_gemm", f"b[{at}]", one) for at, one in enumerate(unbound(b))]
    splits = checked_splits(m_splits, a, len(matrices))
    first = matrices[0]
    for at, one in enumerate(matrices):
        check_pair("grouped_gemm", a, one)
        is_alike = one.shape == first.shape and spec_of(one) == spec_of(first)
        if one.dim() != 2 or one.shape[1] != a.shape[1] or not is_alike or one.dtype != first.dtype:
            raise OperandError(
                f"grouped_gemm: b[{at}] is {list(one.shape)} {one.dtype} {spec_of(one)}; expected "
                f"[n, {a.shape[1]}], all stored as b[0], {list(first.shape)} {first.dtype} "
                f"{spec_of(first)}."
            )
    dtype = out_dtype_of("grouped_gemm", a, first, out_dtype, out)
    biases = (
        []
        if bias is None
        else [checked("grouped_gemm", "bias", dequantize(one)) for one in unbound(bias)]
    )
    if biases and (
        len(biases) != len(matrices) or any(tuple(v.shape) != (first.shape[0],) for v in biases)
    ):
        raise OperandError(
            f"grouped_gemm: bias has the shapes {[list(v.shape) for v in biases]}; expected one "
            f"[{first.shape[0]}] for each of {len(matrices)} groups."
        )
    check_out("grouped_gemm", out, (a.shape[0], first.shape[0]), dtype, a, accumulate=accumulate)
    refuse_out_with_grad("grouped_gemm", out, (a, *matrices, *biases))
    settings = Settings(dtype, out, accumulate, splits)
    if is_under_torch_autocast(a):
        with torch.autocast(a.device.type, enabled=False):
            return apply(GroupedGemm, settings, a, *matrices, *biases)
    return apply(GroupedGemm, settings, a, *matrices, *biases)
