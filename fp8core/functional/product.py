"""Products of quantized and plain tensors: ``gemm`` and ``grouped_gemm``."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from fp8core.backend_api import ColumnSumsDesc, GemmDesc, GroupedGemmDesc, Operand, OperandSpec
from fp8core.chain.differentiable import gradients_once, refuse_transform
from fp8core.chain.run import is_under_torch_autocast
from fp8core.chain.unwrap import made_readable, unwrap
from fp8core.dispatch import table
from fp8core.dispatch.table import Resolved
from fp8core.errors import OperandError, UnsupportedError
from fp8core.functional.quantize import dequantize
from fp8core.tensors.quantized_tensor import QuantizedTensor
from fp8core.tensors.storage import FLOATS, pad_operand, per_byte
from fp8core.torch_ops.operators import constant_in_graph

__all__ = ["gemm", "grouped_gemm"]


class _Side(NamedTuple):
    """One side of a product ``[rows, k]``: its operand, and its spec, None in high precision."""

    operand: Operand
    spec: OperandSpec | None

    @property
    def rows(self) -> int:
        return self.operand.data.shape[0]


class _Settings(NamedTuple):
    """What a product has besides its tensors."""

    out_dtype: torch.dtype
    out: torch.Tensor | None = None
    accumulate: bool = False
    splits: tuple[int, ...] = ()


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
    operands in the same way, and everything else is computed from the dequantized tensors.

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
    a, b = _checked("gemm", "a", a), _checked("gemm", "b", b)
    if b.dim() != 2 or not a.dim() or a.shape[-1] != b.shape[1]:
        raise OperandError(
            f"gemm: a is {list(a.shape)}, b {list(b.shape)}; expected a [..., k] and b [n, k]."
        )
    _check_pair("gemm", a, b)
    dtype = _out_dtype("gemm", a, b, out_dtype, out)
    size = (*a.shape[:-1], b.shape[0])
    if bias is not None:
        bias = _checked("gemm", "bias", dequantize(bias))
        if tuple(bias.shape) != (b.shape[0],) or bias.device != a.device:
            raise OperandError(
                f"gemm: bias is {list(bias.shape)} on {bias.device}, expected [{b.shape[0]}] on "
                f"{a.device}."
            )
    _check_out("gemm", out, size, dtype, a, accumulate=accumulate)
    _refuse_out_with_grad("gemm", out, (a, b, bias))
    settings = _Settings(dtype, out, accumulate)
    if is_under_torch_autocast(a):
        with torch.autocast(a.device.type, enabled=False):
            return _apply(_Gemm, settings, a, b, bias)
    return _apply(_Gemm, settings, a, b, bias)


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
    a = _checked("grouped_gemm", "a", a)
    matrices = [_checked("grouped_gemm", f"b[{at}]", one) for at, one in enumerate(_unbound(b))]
    splits = _checked_splits(m_splits, a, len(matrices))
    first = matrices[0]
    for at, one in enumerate(matrices):
        _check_pair("grouped_gemm", a, one)
        is_alike = one.shape == first.shape and _spec_of(one) == _spec_of(first)
        if one.dim() != 2 or one.shape[1] != a.shape[1] or not is_alike or one.dtype != first.dtype:
            raise OperandError(
                f"grouped_gemm: b[{at}] is {list(one.shape)} {one.dtype} {_spec_of(one)}; expected "
                f"[n, {a.shape[1]}], all stored as b[0], {list(first.shape)} {first.dtype} "
                f"{_spec_of(first)}."
            )
    dtype = _out_dtype("grouped_gemm", a, first, out_dtype, out)
    biases = (
        []
        if bias is None
        else [_checked("grouped_gemm", "bias", dequantize(one)) for one in _unbound(bias)]
    )
    if biases and (
        len(biases) != len(matrices) or any(tuple(v.shape) != (first.shape[0],) for v in biases)
    ):
        raise OperandError(
            f"grouped_gemm: bias has the shapes {[list(v.shape) for v in biases]}; expected one "
            f"[{first.shape[0]}] for each of {len(matrices)} groups."
        )
    _check_out("grouped_gemm", out, (a.shape[0], first.shape[0]), dtype, a, accumulate=accumulate)
    _refuse_out_with_grad("grouped_gemm", out, (a, *matrices, *biases))
    settings = _Settings(dtype, out, accumulate, splits)
    if is_under_torch_autocast(a):
        with torch.autocast(a.device.type, enabled=False):
            return _apply(_GroupedGemm, settings, a, *matrices, *biases)
    return _apply(_GroupedGemm, settings, a, *matrices, *biases)


# --- checks ---


def _checked(owner: str, role: str, x: Any) -> torch.Tensor:
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


def _unbound(x: Sequence[torch.Tensor] | torch.Tensor) -> Sequence[torch.Tensor]:
    parts = x.unbind(0) if isinstance(x, torch.Tensor) else tuple(x)
    if not parts:
        raise OperandError("grouped_gemm: there is no group.")
    return parts


def _checked_splits(m_splits: Sequence[int], a: torch.Tensor, groups: int) -> tuple[int, ...]:
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


def _check_pair(owner: str, a: torch.Tensor, b: torch.Tensor) -> None:
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


def _out_dtype(
    owner: str,
    a: torch.Tensor,
    b: torch.Tensor,
    out_dtype: torch.dtype | None,
    out: torch.Tensor | None,
) -> torch.dtype:
    if out_dtype is None and isinstance(out, torch.Tensor):
        out_dtype = out.dtype
    plain = b if isinstance(a, QuantizedTensor) and not isinstance(b, QuantizedTensor) else a
    dtype = out_dtype or plain.dtype
    if dtype not in FLOATS:
        raise OperandError(f"{owner}(out_dtype={dtype}): expected float32, bfloat16 or float16.")
    return dtype


def _check_out(
    owner: str,
    out: torch.Tensor | None,
    size: tuple[int, ...],
    dtype: torch.dtype,
    a: torch.Tensor,
    *,
    accumulate: bool,
) -> None:
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


def _refuse_out_with_grad(
    owner: str, out: torch.Tensor | None, tensors: Sequence[torch.Tensor | None]
) -> None:
    if out is None or not torch.is_grad_enabled():
        return
    if out.requires_grad or any(one is not None and one.requires_grad for one in tensors):
        raise UnsupportedError(
            f"{owner}(out=...) is not differentiable: leave out away, or use torch.no_grad()."
        )


def _apply(function: Any, settings: _Settings, *tensors: torch.Tensor | None) -> torch.Tensor:
    if torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in tensors):
        made: torch.Tensor = function.apply(settings, *tensors)
        return made
    with torch.no_grad():
        made = function.compute(settings, *tensors)
    return made


# --- products ---


def _spec_of(x: torch.Tensor) -> OperandSpec | None:
    return x.plan.rowwise if isinstance(x, QuantizedTensor) else None


def _sides(a: torch.Tensor, bs: Sequence[torch.Tensor]) -> tuple[_Side, list[_Side]]:
    """Return both sides: quantized if all tensors are, else in high precision."""
    if all(isinstance(one, QuantizedTensor) for one in (a, *bs)):
        return _rowwise(a), [_rowwise(b) for b in bs]
    plain = next((one.dtype for one in (a, *bs) if not isinstance(one, QuantizedTensor)), a.dtype)
    return _plain(a, plain), [_plain(b, plain) for b in bs]


def _rowwise(x: Any) -> _Side:
    return _Side(x.operands.rowwise, x.plan.rowwise)


def _columnwise(x: Any) -> _Side:
    return _Side(x.operands.columnwise, x.plan.columnwise)


def _plain(x: torch.Tensor, dtype: torch.dtype | None = None) -> _Side:
    dtype = x.dtype if dtype is None else dtype
    value = x.detach()
    value = value.dequantize(dtype) if isinstance(value, QuantizedTensor) else value.to(dtype)
    return _Side(Operand(value.reshape(math.prod(value.shape[:-1]), value.shape[-1])), None)


def _turned(side: _Side) -> _Side:
    """Return a side in high precision transposed."""
    return _Side(Operand(side.operand.data.t()), None)


def _multiply(
    a: _Side, b: _Side, settings: _Settings, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return ``a [m, k] @ b [n, k].T``, padded with zeros where the backend needs it."""
    desc = GemmDesc(a.spec, b.spec, settings.out_dtype, settings.accumulate)
    resolved = table.resolve(desc, a.operand.data.device)
    m, n = a.rows, b.rows
    out = settings.out
    if out is not None and out.dim() != 2:
        out = out.view(m, n)
    k = _length(a)
    more = [-size % step for size, step in zip((m, n, k), resolved.alignment, strict=True)]
    if not any(more):
        made: torch.Tensor = resolved.run(a.operand, b.operand, bias=bias, out=out)
        return made
    left, right = _padded(a, more[0], more[2]), _padded(b, more[1], more[2])
    pad = torch.nn.functional.pad
    wide_bias = None if bias is None else pad(bias, (0, more[1]))
    wide_out = None if out is None else pad(out, (0, more[1], 0, more[0]))
    product = resolved.run(left.operand, right.operand, bias=wide_bias, out=wide_out)[:m, :n]
    return product.contiguous() if out is None else out.copy_(product)


def _length(side: _Side) -> int:
    return side.operand.data.shape[1] * (1 if side.spec is None else per_byte(side.spec))


def _padded(side: _Side, rows: int, columns: int) -> _Side:
    if not (rows or columns):
        return side
    if side.spec is None:
        data = torch.nn.functional.pad(side.operand.data, (0, columns, 0, rows))
        return _Side(Operand(data), None)
    return _Side(pad_operand(side.operand, side.spec, rows, columns), side.spec)


class _Gemm(torch.autograd.Function):
    """``a @ b.T + bias``; gradients by columnwise operands, or in high precision."""

    @staticmethod
    def compute(
        settings: _Settings, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        left, (right,) = _sides(a, [b])
        product = _multiply(left, right, settings, bias)
        if settings.out is not None:
            return settings.out
        return product.reshape(*a.shape[:-1], b.shape[0])

    @staticmethod
    def forward(
        ctx: Any,
        settings: _Settings,
        a: torch.Tensor,
        b: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        needs_a, needs_b = ctx.needs_input_grad[1:3]
        ctx.save_for_backward(a if needs_b else None, b if needs_a else None)
        ctx.dtypes = a.dtype, b.dtype, None if bias is None else bias.dtype
        ctx.shape = a.shape
        return _Gemm.compute(settings, a, b, bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return gradients_once(_Gemm.gradients, ctx, (grad,), "gemm")

    @staticmethod
    def gradients(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        a, b = ctx.saved_tensors
        a_dtype, b_dtype, bias_dtype = ctx.dtypes
        grad_a = grad_b = grad_bias = None
        if b is not None:
            left, right = _pair(grad, "rowwise", b)
            grad_a = _multiply(left, right, _Settings(a_dtype)).reshape(ctx.shape)
        if a is not None:
            left, right = _pair(grad, "columnwise", a)
            grad_b = _multiply(left, right, _Settings(b_dtype))
        if bias_dtype is not None and ctx.needs_input_grad[3]:
            grad_bias = _column_sums(_plain(grad).operand.data).to(bias_dtype)
        return None, grad_a, grad_b, grad_bias


def _pair(grad: torch.Tensor, way: str, other: torch.Tensor) -> tuple[_Side, _Side]:
    """Return the sides of a gradient: of ``a`` by the rowwise ``grad [m, n]`` and ``b [k, n]``, of
    ``b`` by the columnwise ``grad [n, m]`` and ``a [k, m]``."""
    if isinstance(grad, QuantizedTensor) and isinstance(other, QuantizedTensor):
        left = _rowwise(grad) if way == "rowwise" else _columnwise(grad)
        right = _columnwise(other)
        # An operand that was transformed meets one that was transformed alike.
        is_pair = left.spec is not None and right.spec is not None
        if is_pair and left.spec.transform == right.spec.transform:  # type: ignore[union-attr]  # both are there
            return left, right
    dtype = (other if not isinstance(other, QuantizedTensor) else grad).dtype
    left, right = _plain(grad, dtype), _turned(_plain(other, dtype))
    return (left if way == "rowwise" else _turned(left)), right


def _column_sums(x: torch.Tensor) -> torch.Tensor:
    sums: torch.Tensor = table.resolve(ColumnSumsDesc(x.dtype), x.device).run(x)
    return sums


class _GroupedGemm(torch.autograd.Function):
    """One product a group; gradients in high precision."""

    @staticmethod
    def compute(settings: _Settings, a: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        groups = len(settings.splits)
        left, rights = _sides(a, others[:groups])
        operand = _in_groups(left, groups)
        desc = GroupedGemmDesc(left.spec, rights[0].spec, settings.out_dtype, settings.accumulate)
        resolved = _grouped(desc, settings.splits, (rights[0].rows, _length(left)), a)
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
        ctx: Any, settings: _Settings, a: torch.Tensor, *others: torch.Tensor
    ) -> torch.Tensor:
        groups = len(settings.splits)
        needs = ctx.needs_input_grad[1:]
        ctx.save_for_backward(
            a if any(needs[1 : 1 + groups]) else None, *(others[:groups] if needs[0] else ())
        )
        ctx.splits = settings.splits
        ctx.dtypes = [a.dtype, *(one.dtype for one in others)]
        return _GroupedGemm.compute(settings, a, *others)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return gradients_once(_GroupedGemm.gradients, ctx, (grad,), "grouped_gemm")

    @staticmethod
    def gradients(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        a, *bs = ctx.saved_tensors
        splits, (a_dtype, *dtypes) = ctx.splits, ctx.dtypes
        groups, needs = len(splits), ctx.needs_input_grad[1:]
        grads: list[torch.Tensor | None] = [None] * (1 + len(dtypes))
        dy = _plain(grad)
        dtype = dy.operand.data.dtype
        if bs:
            rights = [_turned(_plain(b, dtype)) for b in bs]  # [k, n]
            desc = GroupedGemmDesc(None, None, a_dtype)
            resolved = _grouped(desc, splits, (rights[0].rows, dy.operand.data.shape[1]), grad)
            grads[0] = resolved.run(
                dy.operand, [right.operand for right in rights], _offsets(splits)
            )
        if a is not None:
            x = _plain(a, dtype)
            desc = GroupedGemmDesc(None, None, dtypes[0], contract_groups=True)
            resolved = table.resolve(desc, grad.device)
            made = resolved.run(_turned(dy).operand, _turned(x).operand, _offsets(splits))
            for group, one in enumerate(made):
                grads[1 + group] = one if needs[1 + group] else None
        parts = torch.split(dy.operand.data, list(splits))
        for at, part in enumerate(parts if len(dtypes) > groups else ()):
            if needs[1 + groups + at]:
                grads[1 + groups + at] = _column_sums(part).to(dtypes[groups + at])
        return None, *grads


def _offsets(splits: Sequence[int]) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(splits)], dtype=torch.int64, device="cpu")


def _in_groups(side: _Side, groups: int) -> Operand:
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


def _grouped(
    desc: GroupedGemmDesc, splits: Sequence[int], sizes: tuple[int, int], like: torch.Tensor
) -> Resolved:
    """Return the product of groups.

    Raises:
        UnsupportedError: the backend's kernels take other sizes.
    """
    resolved = table.resolve(desc, like.device)
    needed = resolved.alignment
    n, k = sizes
    if n % needed.n or k % needed.k or any(size % needed.m for size in splits):
        raise UnsupportedError(
            f"grouped_gemm on {resolved.choice.backend}: groups of {list(splits)} rows, n={n}, "
            f"k={k}; expected multiples of m={needed.m}, n={needed.n}, k={needed.k}. "
            f"fp8core.Fp8Padding pads the groups' rows; GroupedLinear pads everything."
        )
    return resolved
