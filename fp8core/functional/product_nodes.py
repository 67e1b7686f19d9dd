"""Products as nodes of autograd, with their gradients."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from fp8core.backend_api import ColumnSumsDesc, GemmDesc, GroupedGemmDesc
from fp8core.chain.differentiable import gradients_once
from fp8core.dispatch.table import Resolved
from fp8core.errors import UnsupportedError
from fp8core.functional.operand_sides import (
    Side,
    gradient_sides,
    in_groups,
    length_of,
    padded,
    plain_side,
    sides_of,
    transposed,
    wide_sides,
)
from fp8core.tensors.storage import resolve_for

__all__ = ["Gemm", "GroupedGemm", "Settings", "apply"]


class Settings(NamedTuple):
    """What a product has besides its tensors."""

    out_dtype: torch.dtype
    out: torch.Tensor | None = None
    accumulate: bool = False
    splits: tuple[int, ...] = ()


def apply(function: Any, settings: Settings, *tensors: torch.Tensor | None) -> torch.Tensor:
    """Return the result of ``function``, with a node of autograd only where one is needed."""
    if torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in tensors):
        made: torch.Tensor = function.apply(settings, *tensors)
        return made
    with torch.no_grad():
        made = function.compute(settings, *tensors)
    return made


class Gemm(torch.autograd.Function):
    """``a @ b.T + bias``; gradients by columnwise operands, or in high precision."""

    @staticmethod
    def compute(
        settings: Settings, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the product, in ``settings.out`` if that is given."""
        left, (right,) = sides_of(a, [b])
        product = _multiply(left, right, settings, bias)
        if settings.out is not None:
            return settings.out
        return product.reshape(*a.shape[:-1], b.shape[0])

    @staticmethod
    def forward(
        ctx: Any,
        settings: Settings,
        a: torch.Tensor,
        b: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """Compute, and save what the gradients need."""
        needs_a, needs_b = ctx.needs_input_grad[1:3]
        ctx.save_for_backward(a if needs_b else None, b if needs_a else None)
        ctx.dtypes = a.dtype, b.dtype, None if bias is None else bias.dtype
        ctx.shape = a.shape
        return Gemm.compute(settings, a, b, bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients, which have none themselves."""
        return gradients_once(Gemm.gradients, ctx, (grad,), "gemm")

    @staticmethod
    def gradients(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients, None where none is needed."""
        a, b = ctx.saved_tensors
        a_dtype, b_dtype, bias_dtype = ctx.dtypes
        grad_a = grad_b = grad_bias = None
        if b is not None:
            left, right = gradient_sides(grad, "rowwise", b, a_dtype)
            grad_a = _multiply(left, right, Settings(a_dtype)).reshape(ctx.shape)
        if a is not None:
            left, right = gradient_sides(grad, "columnwise", a, b_dtype)
            grad_b = _multiply(left, right, Settings(b_dtype))
        if bias_dtype is not None and ctx.needs_input_grad[3]:
            grad_bias = _column_sums(plain_side(grad).operand.data).to(bias_dtype)
        return None, grad_a, grad_b, grad_bias


def _multiply(
    a: Side, b: Side, settings: Settings, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return ``a [m, k] @ b [n, k].T``, padded with zeros where the backend needs it."""
    desc = GemmDesc(a.spec, b.spec, settings.out_dtype, settings.accumulate)
    resolved = resolve_for(desc, a.operand.data)
    m, n = a.rows, b.rows
    out = settings.out
    if out is not None and out.dim() != 2:
        out = out.view(m, n)
    k = length_of(a)
    more = [-size % step for size, step in zip((m, n, k), resolved.alignment, strict=True)]
    if not any(more):
        made: torch.Tensor = resolved.run(a.operand, b.operand, bias=bias, out=out)
        return made
    left, right = padded(a, more[0], more[2]), padded(b, more[1], more[2])
    pad = torch.nn.functional.pad
    wide_bias = None if bias is None else pad(bias, (0, more[1]))
    wide_out = None if out is None else pad(out, (0, more[1], 0, more[0]))
    product = resolved.run(left.operand, right.operand, bias=wide_bias, out=wide_out)[:m, :n]
    return product.contiguous() if out is None else out.copy_(product)


class GroupedGemm(torch.autograd.Function):
    """One product a group; gradients in high precision."""

    @staticmethod
    def compute(settings: Settings, a: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        """Return the products, in ``settings.out`` if that is given."""
        groups = len(settings.splits)
        left, rights = sides_of(a, others[:groups])
        operand = in_groups(left, groups)
        desc = GroupedGemmDesc(left.spec, rights[0].spec, settings.out_dtype, settings.accumulate)
        resolved = _grouped(
            desc, settings.splits, (rights[0].rows, length_of(left)), left.operand.data
        )
        bias = [one.detach() for one in others[groups:]] or None
        product: torch.Tensor = resolved.run(
            operand,
            [right.operand for right in rights],
            _offsets(settings.splits),
            bias=bias,
            out=settings.out,
        )
        return product

    @staticmethod
    def forward(
        ctx: Any, settings: Settings, a: torch.Tensor, *others: torch.Tensor
    ) -> torch.Tensor:
        """Compute, and save what the gradients need."""
        groups = len(settings.splits)
        needs = ctx.needs_input_grad[1:]
        ctx.save_for_backward(
            a if any(needs[1 : 1 + groups]) else None, *(others[:groups] if needs[0] else ())
        )
        ctx.splits = settings.splits
        ctx.dtypes = [a.dtype, *(one.dtype for one in others)]
        return GroupedGemm.compute(settings, a, *others)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients, which have none themselves."""
        return gradients_once(GroupedGemm.gradients, ctx, (grad,), "grouped_gemm")

    @staticmethod
    def gradients(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients, None where none is needed."""
        a, *bs = ctx.saved_tensors
        splits, (a_dtype, *dtypes) = ctx.splits, ctx.dtypes
        groups, needs = len(splits), ctx.needs_input_grad[1:]
        grads: list[torch.Tensor | None] = [None] * (1 + len(dtypes))
        if bs:
            dys, rights = zip(*(wide_sides(grad, b, a_dtype) for b in bs), strict=True)  # [k, n]
            desc = GroupedGemmDesc(None, None, a_dtype)
            resolved = _grouped(
                desc, splits, (rights[0].rows, length_of(dys[0])), dys[0].operand.data
            )
            grads[0] = resolved.run(
                dys[0].operand, [right.operand for right in rights], _offsets(splits)
            )
        if a is not None:
            dy, x = wide_sides(grad, a, dtypes[0])
            desc = GroupedGemmDesc(None, None, dtypes[0], contract_groups=True)
            resolved = resolve_for(desc, dy.operand.data)
            made = resolved.run(transposed(dy).operand, x.operand, _offsets(splits))
            for group, one in enumerate(made):
                grads[1 + group] = one if needs[1 + group] else None
        parts = torch.split(plain_side(grad).operand.data, list(splits))
        for at, part in enumerate(parts if len(dtypes) > groups else ()):
            if needs[1 + groups + at]:
                grads[1 + groups + at] = _column_sums(part).to(dtypes[groups + at])
        return None, *grads


def _grouped(
    desc: GroupedGemmDesc, splits: Sequence[int], sizes: tuple[int, int], like: torch.Tensor
) -> Resolved:
    """Return the product of groups.

    Raises:
        UnsupportedError: the backend's kernels take other sizes.
    """
    resolved = resolve_for(desc, like)
    needed = resolved.alignment
    n, k = sizes
    if n % needed.n or k % needed.k or any(size % needed.m for size in splits):
        raise UnsupportedError(
            f"grouped_gemm on {resolved.choice.backend}: groups of {list(splits)} rows, n={n}, "
            f"k={k}; expected multiples of m={needed.m}, n={needed.n}, k={needed.k}. "
            f"fp8core.Fp8Padding pads the groups' rows; GroupedLinear pads everything."
        )
    return resolved


def _offsets(splits: Sequence[int]) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(splits)], dtype=torch.int64, device="cpu")


def _column_sums(x: torch.Tensor) -> torch.Tensor:
    sums: torch.Tensor = resolve_for(ColumnSumsDesc(x.dtype), x).run(x)
    return sums
