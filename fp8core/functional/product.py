"""``gemm`` and ``grouped_gemm``: products of quantized and plain tensors, with their gradients."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from fp8core.backend_api import ColumnSumsDesc, GemmDesc, GroupedGemmDesc, Operand, OperandSpec
from fp8core.backend_api.operand_spec import codes_per_byte
from fp8core.chain.differentiable import gradients_once
from fp8core.chain.node import is_under_torch_autocast
from fp8core.chain.unwrap import as_readable, unwrap
from fp8core.dispatch import table
from fp8core.errors import OperandError, UnsupportedError, elsewhere
from fp8core.functional.quantize import dequantize
from fp8core.functional.quantizers.base import readable
from fp8core.tensors.quantized_tensor import QuantizedTensor
from fp8core.tensors.quantizer import Orientations
from fp8core.tensors.storage import FLOATS, pad_operand, padded_with, resolve_for
from fp8core.torch_ops.capture import constant_in_graph


def gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    out_dtype: torch.dtype | None = None,
    bias: torch.Tensor | None = None,
    accumulate: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return ``d[..., n] = a[..., k] @ b[n, k].T + bias[n]``.

    Two quantized tensors are multiplied as they are, by their rowwise operands. If one operand is
    plain, the quantized operand is dequantized to its dtype. In backward a quantized gradient meets
    columnwise operands in the same way, and everything else is computed from the dequantized
    tensors, in the widest dtype among those of both operands and of the gradient that is returned.

    Args:
        a, b: quantized or plain, float32, bfloat16 or float16.
        out_dtype: of the result; None takes that of ``out``, or that of ``a``.
        bias: ``[n]``, added in float32 before the one rounding.
        accumulate: add the product to ``out`` instead of writing it there.
        out: a plain tensor ``[..., n]`` for the result. ``out`` takes no part in differentiation.

    Raises:
        OperandError: sizes, dtypes or devices do not fit, or a quantized tensor holds no rowwise
            operand.
        UnsupportedError: no backend multiplies two tensors that are stored like these; or ``out``
            where a gradient is needed.
    """
    arguments = (a, b, out_dtype, bias, accumulate, out)
    if torch.compiler.is_compiling():
        _allow_in_graph()
        return _captured_gemm(*arguments)
    return _gemm(*arguments)


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

    Tensors are quantized or plain, as in :func:`gemm`; all of ``b`` have one plan.

    Args:
        a: the rows of all groups, one after the other; rows of a quantized tensor share its scales
            across groups.
        b: a sequence of matrices, or one tensor ``[groups, n, k]``.
        m_splits: the number of rows of each group; their sum is that of ``a``.
        out_dtype, accumulate, out: as in :func:`gemm`.
        bias: a sequence of vectors, or one tensor ``[groups, n]``.

    Raises:
        OperandError: as in :func:`gemm`; or ``m_splits`` do not add up to the rows of ``a``.
        UnsupportedError: as in :func:`gemm`; or the sizes of groups do not fit a backend's kernels.
    """
    a = checked("grouped_gemm", "a", a)
    matrices = [checked("grouped_gemm", f"b[{at}]", matrix) for at, matrix in enumerate(unbound(b))]
    splits = checked_splits(m_splits, a, len(matrices))
    first = matrices[0]
    for at, matrix in enumerate(matrices):
        check_pair("grouped_gemm", a, matrix)
        is_uniform = matrix.shape == first.shape and spec_of(matrix) == spec_of(first)
        if (
            matrix.dim() != 2
            or matrix.shape[1] != a.shape[1]
            or not is_uniform
            or matrix.dtype != first.dtype
        ):
            raise OperandError(
                f"grouped_gemm: b[{at}] is {list(matrix.shape)} {matrix.dtype} {spec_of(matrix)}; "
                f"expected [n, {a.shape[1]}], all stored as b[0], {list(first.shape)} "
                f"{first.dtype} {spec_of(first)}."
            )
    biases = [
        checked("grouped_gemm", "bias", dequantize(tensor))
        for tensor in (() if bias is None else unbound(bias))
    ]
    if biases and (
        len(biases) != len(matrices) or any(tuple(v.shape) != (first.shape[0],) for v in biases)
    ):
        raise OperandError(
            f"grouped_gemm: bias has the shapes {[list(v.shape) for v in biases]}; expected one "
            f"[{first.shape[0]}] for each of {len(matrices)} groups."
        )
    settings = Settings("grouped_gemm", out_dtype, out, accumulate, splits)
    return _product(settings, a, matrices, biases)


def _allow_in_graph() -> bool:
    torch.compiler.allow_in_graph(_captured_gemm)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return True


constant_in_graph(_allow_in_graph)


def _captured_gemm(*arguments: Any) -> torch.Tensor:
    """Run :func:`gemm` by operators, which torch.compile records without reading this code."""
    with table.capturing():
        return _gemm(*arguments)


def _gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    out_dtype: torch.dtype | None,
    bias: torch.Tensor | None,
    accumulate: bool,
    out: torch.Tensor | None,
) -> torch.Tensor:
    a, b = checked("gemm", "a", a), checked("gemm", "b", b)
    if b.dim() != 2 or not a.dim() or a.shape[-1] != b.shape[1]:
        raise OperandError(
            f"gemm: a is {list(a.shape)}, b {list(b.shape)}; expected a [..., k] and b [n, k]."
        )
    check_pair("gemm", a, b)
    if bias is not None:
        bias = checked("gemm", "bias", dequantize(bias))
        if tuple(bias.shape) != (b.shape[0],) or bias.device != a.device:
            raise OperandError(
                f"gemm: bias is {list(bias.shape)} on {bias.device}, expected [{b.shape[0]}] on "
                f"{a.device}."
            )
    settings = Settings("gemm", out_dtype, out, accumulate)
    return _product(settings, a, [b], [] if bias is None else [bias])


# Checks


def checked(owner: str, role: str, x: Any) -> torch.Tensor:
    """Return ``x`` as a QuantizedTensor, or a plain tensor whose memory a backend can read.

    Raises:
        OperandError: it is neither.
    """
    name = f"{owner}: {role}"
    if isinstance(x, QuantizedTensor):
        return x
    plain = readable(x, name, "Use torch.nn.functional.linear on dequantized tensors.")
    if plain.dtype not in FLOATS:
        raise OperandError(f"{name} is {plain.dtype}; expected float32, bfloat16 or float16.")
    return plain


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
    """Raise unless ``a`` and ``b`` are on one device, plain in one dtype, or stored along k."""
    if a.device != b.device:
        raise elsewhere(f"{owner}: a", a.device, "b", b.device)
    both_plain = not isinstance(a, QuantizedTensor) and not isinstance(b, QuantizedTensor)
    if both_plain and a.dtype != b.dtype:
        raise OperandError(f"{owner}: a is {a.dtype}, b {b.dtype}. Convert one of them.")
    for role, operand in (("a", a), ("b", b)):
        if isinstance(operand, QuantizedTensor) and operand.plan.rowwise is None:
            is_value = operand._value is not None
            remedy = "Give its dequantize()" if is_value else "Quantize it with rowwise usage"
            raise OperandError(
                f"{owner}: {role} holds no rowwise operand, which is the one along k. {remedy}."
            )


def _dtype_of(settings: Settings, a: torch.Tensor, b: torch.Tensor) -> torch.dtype:
    """Return the dtype of the result: the one asked for, that of ``out``, or a plain side's."""
    dtype: torch.dtype | None = settings.out_dtype
    if dtype is None and isinstance(settings.out, torch.Tensor):
        dtype = settings.out.dtype
    plain = b if isinstance(a, QuantizedTensor) and not isinstance(b, QuantizedTensor) else a
    dtype = dtype or plain.dtype
    if dtype not in FLOATS:
        raise OperandError(
            f"{settings.owner}(out_dtype={dtype}): expected float32, bfloat16 or float16."
        )
    return dtype


def _check_out(settings: Settings, size: tuple[int, ...], tensors: Sequence[torch.Tensor]) -> None:
    """Raise unless the result, of ``size``, can be written to the ``out`` of ``settings``, and no
    gradient would be needed of what is."""
    owner, dtype, out = settings[:3]
    if out is None:
        if settings.accumulate:
            raise OperandError(f"{owner}(accumulate=True) needs out, to which it adds.")
        return
    if isinstance(out, QuantizedTensor) or unwrap(out, f"{owner}: out") is not out:
        raise OperandError(
            f"{owner}(out={type(out).__name__}): expected a plain tensor. Quantize the result by "
            f"a quantizer's update_quantized()."
        )
    device = tensors[0].device
    if (tuple(out.shape), out.dtype, out.device) != (size, dtype, device):
        raise OperandError(
            f"{owner}: out is {list(out.shape)} {out.dtype} on {out.device}, expected {list(size)} "
            f"{dtype} on {device}."
        )
    as_readable(out, out.device, f"{owner}: out")
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (out, *tensors)):
        raise UnsupportedError(
            f"{owner}(out=...) is not differentiable: leave out away, or use torch.no_grad()."
        )


# The operation and its gradients


class Settings(NamedTuple):
    """The options of a product, besides its tensors; ``splits`` are the rows of groups."""

    owner: str
    out_dtype: Any  # a dtype; None until it is known
    out: torch.Tensor | None = None
    accumulate: bool = False
    splits: tuple[int, ...] | None = None


def _product(
    settings: Settings,
    a: torch.Tensor,
    matrices: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
) -> torch.Tensor:
    """Return the product, with a node of autograd only where one is needed."""
    first, tensors = matrices[0], (a, *matrices, *biases)
    settings = settings._replace(out_dtype=_dtype_of(settings, a, first))
    _check_out(settings, (*a.shape[:-1], first.shape[0]), tensors)
    if is_under_torch_autocast(a):
        with torch.autocast(a.device.type, enabled=False):
            return _applied(settings, tensors)
    return _applied(settings, tensors)


def _applied(settings: Settings, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        result: torch.Tensor = Product.apply(settings, *tensors)  # type: ignore[no-untyped-call]  # torch's
        return result
    with torch.no_grad():
        return _computed(settings, *tensors)


def _computed(settings: Settings, a: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
    """Return the product of ``a`` with the matrices that come first in ``tensors``, plus the
    biases behind them, in ``settings.out`` if that is given."""
    if settings.splits is None:
        left, (right,) = sides_of(a, tensors[:1])
        product = _multiply(left, right, settings, *tensors[1:])
        if settings.out is not None:
            return settings.out
        return product.reshape(*a.shape[:-1], right.rows)
    groups = len(settings.splits)
    left, rights = sides_of(a, tensors[:groups])
    operand = in_groups(left, groups)
    bias = [tensor.detach() for tensor in tensors[groups:]] or None
    return _multiply_groups(operand, left, rights, settings, bias=bias, out=settings.out)


class Product(torch.autograd.Function):
    """``a @ b.T + bias``, of one matrix or of one for each group of rows.

    The gradients of one are products of columnwise operands, or in high precision; those of groups
    are in high precision.
    """

    @staticmethod
    def forward(
        ctx: Any, settings: Settings, a: torch.Tensor, *tensors: torch.Tensor
    ) -> torch.Tensor:
        """Compute, and save what the gradients need."""
        groups = 1 if settings.splits is None else len(settings.splits)
        needs = ctx.needs_input_grad[1:]
        ctx.save_for_backward(
            a if any(needs[1 : 1 + groups]) else None, *(tensors[:groups] if needs[0] else ())
        )
        ctx.settings = settings._replace(out=None)
        ctx.shape = a.shape
        ctx.dtypes = [a.dtype, *(tensor.dtype for tensor in tensors)]
        return _computed(settings, a, *tensors)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients, which have none themselves."""
        return gradients_once(_gradients, ctx, (grad,), ctx.settings.owner)


def _gradients(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients, None where none is needed."""
    a, *bs = ctx.saved_tensors
    splits, (a_dtype, *dtypes) = ctx.settings.splits, ctx.dtypes
    groups, needs = 1 if splits is None else len(splits), ctx.needs_input_grad[1:]
    grads: list[torch.Tensor | None] = [None] * (1 + len(dtypes))
    if bs and splits is None:
        left, right = gradient_sides(grad, "rowwise", bs[0], a_dtype)
        grads[0] = _multiply(left, right, Settings("gemm", a_dtype)).reshape(ctx.shape)
    elif bs:
        dys, rights = zip(*(wide_sides(grad, b, a_dtype) for b in bs), strict=True)  # [k, n]
        settings = Settings("grouped_gemm", a_dtype, splits=splits)
        grads[0] = _multiply_groups(dys[0].operand, dys[0], rights, settings)
    if a is not None and splits is None:
        left, right = gradient_sides(grad, "columnwise", a, dtypes[0])
        grads[1] = _multiply(left, right, Settings("gemm", dtypes[0]))
    elif a is not None:
        dy, x = wide_sides(grad, a, dtypes[0])
        desc = GroupedGemmDesc(None, None, dtypes[0], contract_groups=True)
        resolved = resolve_for(desc, dy.operand.data)
        products = resolved.run(transposed(dy).operand, x.operand, _offsets(splits))
        for group, product in enumerate(products):
            grads[1 + group] = product if needs[1 + group] else None
    if any(needs[1 + groups :]):
        rows = plain_side(grad).operand.data
        parts = torch.split(rows, [rows.shape[0]] if splits is None else list(splits))
        for at, part in enumerate(parts, 1 + groups):
            if needs[at]:
                sums = resolve_for(ColumnSumsDesc(part.dtype), part).run(part)
                grads[at] = sums.to(dtypes[at - 1])
    return None, *grads


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
    wide_out = None if out is None else padded_with(out, (more[0], more[1]))
    product = resolved.run(left.operand, right.operand, bias=wide_bias, out=wide_out)[:m, :n]
    return product.contiguous() if out is None else out.copy_(product)


def _multiply_groups(
    operand: Operand,
    a: Side,
    bs: Sequence[Side],
    settings: Settings,
    bias: Sequence[torch.Tensor] | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the product of ``operand``, the rows of ``a`` by groups, with a matrix a group."""
    desc = GroupedGemmDesc(a.spec, bs[0].spec, settings.out_dtype, settings.accumulate)
    resolved, splits = resolve_for(desc, a.operand.data), settings.splits
    assert splits is not None
    needed, n, k = resolved.alignment, bs[0].rows, length_of(a)
    if n % needed.n or k % needed.k or any(size % needed.m for size in splits):
        raise UnsupportedError(
            f"grouped_gemm on {resolved.choice.backend}: groups of {list(splits)} rows, n={n}, "
            f"k={k}; expected multiples of m={needed.m}, n={needed.n}, k={needed.k}. "
            f"fp8core.Fp8Padding pads the groups' rows; GroupedLinear pads everything."
        )
    right = [b.operand for b in bs]
    product: torch.Tensor = resolved.run(operand, right, _offsets(splits), bias=bias, out=out)
    return product


def _offsets(splits: Sequence[int]) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(splits)], dtype=torch.int64, device="cpu")


# Operands


class Side(NamedTuple):
    """A side of a product ``[rows, k]``: its operand, and its spec, None in high precision.

    ``padded`` is the operand with zeros behind its ends in whose memory it lies, if it does.
    """

    operand: Operand
    spec: OperandSpec | None
    padded: Operand | None = None

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
    return Side(x.operands.rowwise, x.plan.rowwise, _padded_operands(x).rowwise)


def _columnwise(x: Any) -> Side:
    return Side(x.operands.columnwise, x.plan.columnwise, _padded_operands(x).columnwise)


def _padded_operands(x: Any) -> Orientations:
    return Orientations(None, None) if x._padded is None else x._padded.operands


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
    return side.operand.data.shape[1] * (1 if side.spec is None else codes_per_byte(side.spec))


def padded(side: Side, rows: int, columns: int) -> Side:
    """Return ``side`` with so many more ``rows`` and ``columns`` of zeros."""
    if not (rows or columns):
        return side
    if side.spec is None:
        return Side(Operand(padded_with(side.operand.data, (rows, columns))), None)
    whole, (height, width) = side.padded, side.operand.data.shape
    if whole is not None and whole.data.shape == (height + rows, width + columns):  # of 8 bits
        return Side(whole, side.spec)
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
