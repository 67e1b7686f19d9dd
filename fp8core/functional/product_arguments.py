"""Checks of the arguments of ``gemm`` and ``grouped_gemm``."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch

from fp8core.chain.differentiable import refuse_transform
from fp8core.chain.unwrap import made_readable, unwrap
from fp8core.errors import OperandError, UnsupportedError
from fp8core.tensors.quantized_tensor import QuantizedTensor
from fp8core.tensors.storage import FLOATS

__all__ = [
    "check_out",
    "check_pair",
    "checked",
    "checked_splits",
    "out_dtype_of",
    "refuse_out_with_grad",
    "unbound",
]


def checked(owner: str, role: str, x: Any) -> torch.Tensor:
    """Return ``x`` as a QuantizedTensor, or a plain tensor whose memory a backend can read.

    Raises:
        OperandError: it is neither.
    """
    name = f"{owner}: {role}"
    if isinstance(x, QuantizedTensor):
        return x
    if not isinstance(x, torch.Tensor):
        raise OperandError(f"{name} is {type(x).__name__}; expected a tensor.")
    refuse_transform(x, name, "Use torch.nn.functional.linear on dequantized tensors.")
    plain = unwrap(x, name)
    if plain.dtype not in FLOATS:
        raise OperandError(f"{name} is {plain.dtype}; expected float32, bfloat16 or float16.")
    return made_readable(plain, plain.device, name)


def unbound(x: Sequence[torch.Tensor] | torch.Tensor) -> Sequence[torch.Tensor]:
    """Return the tensors of the groups, of which there is at least one."""
    parts = x.unbind(0) if isinstance(x, torch.Tensor) else tuple(x)
    if not parts:
        raise OperandError("grouped_gemm: there is no group.")
    return parts


def checked_splits(m_splits: Sequence[int], a: torch.Tensor, groups: int) -> tuple[int, ...]:
    """Return the rows of each group, which add up to those of ``a``."""
    try:
        splits = tuple(map(operator.index, m_splits))
    except TypeError:
        raise OperandError(f"grouped_gemm: m_splits={m_splits!r}; expected integers.") from None
    if a.dim() != 2 or len(splits) != groups or min(splits) < 0 or sum(splits) != a.shape[0]:
        raise OperandError(
            f"grouped_gemm: m_splits={list(splits)} of {groups} matrices, and a is "
            f"{list(a.shape)}; expected a matrix, and one size a group that add up to its rows."
        )
    return splits


def check_pair(owner: str, a: torch.Tensor, b: torch.Tensor) -> None:
    """Raise unless ``a`` and ``b`` are on one device, and fit each other as they are stored."""
    if a.device != b.device:
        raise OperandError(
            f"{owner}: a is on {a.device}, b on {b.device}. Move one of them; nothing is moved "
            f"silently."
        )
    both_plain = not isinstance(a, QuantizedTensor) and not isinstance(b, QuantizedTensor)
    if both_plain and a.dtype != b.dtype:
        raise OperandError(f"{owner}: a is {a.dtype}, b {b.dtype}. Convert one of them.")
    for role, one in (("a", a), ("b", b)):
        if isinstance(one, QuantizedTensor) and one.plan.rowwise is None:
            raise OperandError(
                f"{owner}: {role} holds no rowwise operand, which is the one along k. Quantize it "
                f"with rowwise usage."
            )


def out_dtype_of(
    owner: str,
    a: torch.Tensor,
    b: torch.Tensor,
    out_dtype: torch.dtype | None,
    out: torch.Tensor | None,
) -> torch.dtype:
    """Return the dtype of the result: the one asked for, that of ``out``, or a plain side's."""
    if out_dtype is None and isinstance(out, torch.Tensor):
        out_dtype = out.dtype
    plain = b if isinstance(a, QuantizedTensor) and not isinstance(b, QuantizedTensor) else a
    dtype = out_dtype or plain.dtype
    if dtype not in FLOATS:
        raise OperandError(f"{owner}(out_dtype={dtype}): expected float32, bfloat16 or float16.")
    return dtype


def check_out(
    owner: str,
    out: torch.Tensor | None,
    size: tuple[int, ...],
    dtype: torch.dtype,
    a: torch.Tensor,
    *,
    accumulate: bool,
) -> None:
    """Raise unless the result, of ``size`` and ``dtype``, can be written to ``out``."""
    if out is None:
        if accumulate:
            raise OperandError(f"{owner}(accumulate=True) needs out, to which it adds.")
        return
    if isinstance(out, QuantizedTensor) or unwrap(out, f"{owner}: out") is not out:
        raise OperandError(
            f"{owner}(out={type(out).__name__}): expected a plain tensor. Quantize the result by "
            f"a quantizer's update_quantized()."
        )
    found, wanted = (tuple(out.shape), out.dtype, out.device), (size, dtype, a.device)
    if found != wanted:
        raise OperandError(
            f"{owner}: out is {list(out.shape)} {out.dtype} on {out.device}, expected {list(size)} "
            f"{dtype} on {a.device}."
        )
    made_readable(out, out.device, f"{owner}: out")


def refuse_out_with_grad(
    owner: str, out: torch.Tensor | None, tensors: Sequence[torch.Tensor | None]
) -> None:
    """Raise if ``out`` is given where a gradient would be needed."""
    if out is None or not torch.is_grad_enabled():
        return
    if out.requires_grad or any(one is not None and one.requires_grad for one in tensors):
        raise UnsupportedError(
            f"{owner}(out=...) is not differentiable: leave out away, or use torch.no_grad()."
        )
