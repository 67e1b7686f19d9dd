"""Products as nodes of autograd, with their gradients."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from fp8core.backend_api import ColumnSumsDesc, GemmDesc, GroupedGemmDesc, Operand, OperandSpec
from fp8core.chain.differentiable import gradients_once
from fp8core.dispatch.table import Resolved
from fp8core.errors import UnsupportedError
from fp8core.tensors.quantized_tensor import QuantizedTensor
from fp8core.tensors.storage import pad_operand, per_byte, resolve_for


class Side(NamedTuple):
    """A side of a product ``[rows, k]``: its operand, and its spec, None in high precision."""

    operand: Operand
    spec: OperandSpec | None

    @property
    def rows(self) -> int:
        """The rows of the product along this side."""
        return self.operand.data.shape[0]


def spec_of(x: torch.Tensor) -> OperandSpec | None:
    """Return how the rowwise operand of ``x`` is quantized; None for a plain tensor."""
    return x.plan.rowwise if isinstance(x, QuantizedTensor) else None


def sides_of(a: torch.Tensor, bs: Sequence[torch.Tensor]) -> tuple[Side, list[Side]]:
    """Return both sides: quantized if all tensors are, else in high precision."""
    if all(isinstance(tensor, QuantizedTensor) for tensor in (a, *bs)):
        return _rowwise(a), [_rowwise(b) for b in bs]
    plain = next(
        (tensor.dtype for tensor in (a, *bs) if not isinstance(tensor, QuantizedTensor)), a.dtype
    )
    return plain_side(a, plain), [plain_side(b, plain) for b in bs]


def _rowwise(x: Any) -> Side:
    return Side(x.operands.rowwise, x.plan.rowwise)


def _columnwise(x: Any) -> Side:
    return Side(x.operands.columnwise, x.plan.columnwise)


def plain_side(x: torch.Tensor, dtype: torch.dtype | None = None) -> Side:
    """Return the values of ``x`` in ``dtype``, or in its own, as rows."""
    dtype = x.dtype if dtype is None else dtype
    value = x.detach()
    value = value.dequantize(dtype) if isinstance(value, QuantizedTensor) else value.to(dtype)
    return Side(Operand(value.reshape(math.prod(value.shape[:-1]), value.shape[-1])), None)


def transposed(side: Side) -> Side:
    """Return a side in high precision transposed."""
    return Side(Operand(side.operand.data.t()), None)


def length_of(side: Side) -> int:
    """Return how many values a row of ``side`` has."""
    return side.operand.data.shape[1] * (1 if side.spec is None else per_byte(side.spec))


def padded(side: Side, rows: int, columns: int) -> Side:
    """Return ``side`` with so many more ``rows`` and ``columns`` of zeros."""
    if not (rows or columns):
        return side
    if side.spec is None:
        data = torch.nn.functional.pad(side.operand.data, (0, columns, 0, rows))
        return Side(Operand(data), None)
    return Side(pad_operand(side.operand, side.spec, rows, columns), side.spec)


def gradient_sides(
    grad: torch.Tensor, way: str, factor: torch.Tensor, dtype: torch.dtype
) -> tuple[Side, Side]:
    """Return the sides of a gradient in ``dtype``: of ``a`` by the rowwise ``grad [m, n]`` and
    ``b [k, n]``, of ``b`` by the columnwise ``grad [n, m]`` and ``a [k, m]``."""
    if isinstance(grad, QuantizedTensor) and isinstance(factor, QuantizedTensor):
        left = _rowwise(grad) if way == "rowwise" else _columnwise(grad)
        right = _columnwise(factor)
        # An operand that was transformed needs one with the same transform.
        is_pair = left.spec is not None and right.spec is not None
        if is_pair and left.spec.transform == right.spec.transform:  # type: ignore[union-attr]  # both are there
            return left, right
    left, right = wide_sides(grad, factor, dtype)
    return (left if way == "rowwise" else transposed(left)), right


def wide_sides(grad: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype) -> tuple[Side, Side]:
    """Return ``grad`` and ``factor``, transposed, in the widest of their dtypes and ``dtype``, that
    of their product, so that none of them is rounded first."""
    widest = functools.reduce(torch.promote_types, (grad.dtype, factor.dtype, dtype))
    return plain_side(grad, widest), transposed(plain_side(factor, widest))


def in_groups(side: Side, groups: int) -> Operand:
    """Return an operand of rows as one of groups: with a scale a group where it has one."""
    data, scale_inv, global_scale_inv = side.operand
    spec = side.spec
    if spec is None or scale_inv is None:
        return side.operand
    if spec.block[0] > 1 or spec.row_scaled:
        raise UnsupportedError(
            f"grouped_gemm: a is stored as {spec}, whose scales cover rows of several groups, or "
            f"have no grouped product. Quantize it with blocks of one row, or one scale a tensor."
        )
    if not spec.block[0]:
        scale_inv = scale_inv.expand(groups, -1).contiguous()
    if global_scale_inv is not None:
        global_scale_inv = global_scale_inv.expand(groups, 1).contiguous()
    return Operand(data, scale_inv, global_scale_inv)


class Settings(NamedTuple):
    """The options of a product, besides its tensors."""

    out_dtype: torch.dtype
    out: torch.Tensor | None = None
    accumulate: bool = False
    splits: tuple[int, ...] = ()


def apply(function: Any, settings: Settings, *tensors: torch.Tensor | None) -> torch.Tensor:
    """Return the result of ``function``, with a node of autograd only where one is needed."""
    if torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in tensors
    ):
        result: torch.Tensor = function.apply(settings, *tensors)
        return result
    with torch.no_grad():
        result = function.compute(settings, *tensors)
    return result


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
        exact: torch.Tensor = resolved.run(a.operand, b.operand, bias=bias, out=out)
        return exact
    left, right = padded(a, more[0], more[2]), padded(b, more[1], more[2])
    pad = torch.nn.functional.pad
    wide_bias = None if bias is None else pad(bias, (0, more[1]))
    wide_out = None if out is None else pad(out, (0, more[1], 0, more[0]))
    product = resolved.run(left.operand, right.operand, bias=wide_bias, out=wide_out)[:m, :n]
    return product.contiguous() if out is None else out.copy_(product)


class GroupedGemm(torch.autograd.Function):
    """A product for each group; gradients in high precision."""

    @staticmethod
    def compute(settings: Settings, a: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        """Return the products, in ``settings.out`` if that is given."""
        groups = len(settings.splits)
        left, rights = sides_of(a, tensors[:groups])
        operand = in_groups(left, groups)
        desc = GroupedGemmDesc(left.spec, rights[0].spec, settings.out_dtype, settings.accumulate)
        resolved = _grouped(
            desc, settings.splits, (rights[0].rows, length_of(left)), left.operand.data
        )
        bias = [tensor.detach() for tensor in tensors[groups:]] or None
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
        ctx: Any, settings: Settings, a: torch.Tensor, *tensors: torch.Tensor
    ) -> torch.Tensor:
        """Compute, and save what the gradients need."""
        groups = len(settings.splits)
        needs = ctx.needs_input_grad[1:]
        ctx.save_for_backward(
            a if any(needs[1 : 1 + groups]) else None, *(tensors[:groups] if needs[0] else ())
        )
        ctx.splits = settings.splits
        ctx.dtypes = [a.dtype, *(tensor.dtype for tensor in tensors)]
        return GroupedGemm.compute(settings, a, *tensors)

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
            products = resolved.run(transposed(dy).operand, x.operand, _offsets(splits))
            for group, product in enumerate(products):
                grads[1 + group] = product if needs[1 + group] else None
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
