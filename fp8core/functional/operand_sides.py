"""The two sides of a product: operands of tensors, quantized or plain."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from fp8core.backend_api import Operand, OperandSpec
from fp8core.errors import UnsupportedError
from fp8core.tensors.quantized_tensor import QuantizedTensor
from fp8core.tensors.storage import pad_operand, per_byte

__all__ = [
    "Side",
    "gradient_sides",
    "in_groups",
    "length_of",
    "padded",
    "plain_side",
    "sides_of",
    "spec_of",
    "transposed",
    "wide_sides",
]


class Side(NamedTuple):
    """One side of a product ``[rows, k]``: its operand, and its spec, None in high precision."""

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
    if all(isinstance(one, QuantizedTensor) for one in (a, *bs)):
        return _rowwise(a), [_rowwise(b) for b in bs]
    plain = next((one.dtype for one in (a, *bs) if not isinstance(one, QuantizedTensor)), a.dtype)
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
    grad: torch.Tensor, way: str, other: torch.Tensor, dtype: torch.dtype
) -> tuple[Side, Side]:
    """Return the sides of a gradient in ``dtype``: of ``a`` by the rowwise ``grad [m, n]`` and
    ``b [k, n]``, of ``b`` by the columnwise ``grad [n, m]`` and ``a [k, m]``."""
    if isinstance(grad, QuantizedTensor) and isinstance(other, QuantizedTensor):
        left = _rowwise(grad) if way == "rowwise" else _columnwise(grad)
        right = _columnwise(other)
        # An operand that was transformed meets one that was transformed alike.
        is_pair = left.spec is not None and right.spec is not None
        if is_pair and left.spec.transform == right.spec.transform:  # type: ignore[union-attr]  # both are there
            return left, right
    left, right = wide_sides(grad, other, dtype)
    return (left if way == "rowwise" else transposed(left)), right


def wide_sides(grad: torch.Tensor, other: torch.Tensor, dtype: torch.dtype) -> tuple[Side, Side]:
    """Return ``grad`` and ``other``, transposed, in the widest of their dtypes and ``dtype``, that
    of their product, so that none of them is rounded first."""
    widest = functools.reduce(torch.promote_types, (grad.dtype, other.dtype, dtype))
    return plain_side(grad, widest), transposed(plain_side(other, widest))


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
