"""Torch's views of a QuantizedTensor, and copies of its parts.

Leading dimensions are rows, so a view is quantized where it keeps the last dimension, or cuts it
where blocks end: it shares codes and scales with its base, and a write to it reaches the base.
Where blocks are cut, a view raises, but for the flat view of the whole, and a copy is made from the
dequantized values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fp8core.backend_api import Operand, OperandSpec
from fp8core.errors import UnsupportedError
from fp8core.reporting import log_once
from fp8core.tensors.flat_view import FlatView
from fp8core.tensors.pieces import (
    cut,
    gather_columns,
    gather_rows,
    join,
    refold,
    shares_scales,
)
from fp8core.tensors.storage import StoredOperands, matrix_shape
from fp8core.torch_ops.private import pytree

Arguments = tuple[Any, ...]
_aten = torch.ops.aten


def say_dequantized(func: Any, tensor: Any) -> None:
    """Log once for each operator that it computes with dequantized values."""
    name = str(func.overloadpacket)
    log_once(
        f"{name} of {tensor} computes with its dequantized values, and returns a plain tensor",
        about=f"{name} of a QuantizedTensor",
    )


def _refuse(func: Any, tensor: Any, change: str) -> UnsupportedError:
    blocks = " and ".join(
        f"{way} {spec.format} blocks of {spec.block[0] or 'all'} x {spec.block[1] or 'all'}"
        for way, spec in zip(("rowwise", "columnwise"), tensor.plan, strict=True)
        if spec is not None
    )
    return UnsupportedError(
        f"{func.overloadpacket} of {tensor}: {change} cuts a block, or its last dimension changes. "
        f"It is stored in {blocks}.\n"
        f"  Take whole blocks, keep one orientation alone by update_usage(), or view "
        f".dequantize(), whose writes do not reach this tensor."
    )


def _strides(tensor: Any, shape: Sequence[int]) -> Sequence[int] | None:
    """Return the strides of the view ``shape``, None for a contiguous view.

    Raises:
        RuntimeError: ``tensor`` is a view with gaps that are not between its new dimensions.
    """
    if tensor.is_contiguous():
        return None
    plain = torch.empty_strided(tensor.shape, tensor.stride(), device="meta")
    return plain.view(list(shape)).stride()


def _size(shape: Sequence[int], count: int) -> list[int]:
    """Return the sizes ``shape``, -1 replaced by what is left of ``count`` elements."""
    sizes = list(shape)
    if -1 in sizes:
        product = math.prod(size for size in sizes if size != -1)
        sizes[sizes.index(-1)] = count // product if product else 0
    return sizes


def _view(func: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    if not isinstance(args[1], (list, tuple, torch.Size)):
        raise UnsupportedError(
            f"{func} of {tensor} to {args[1]}: its codes are {tensor.tensors()[0].dtype}. "
            f"Use dequantize(dtype), or to_torch() for torch's FP8 tensors."
        )
    shape = _size(args[1], tensor.numel())
    if math.prod(shape) != tensor.numel():
        raise RuntimeError(f"shape '{list(args[1])}' is invalid for {tensor}")
    if matrix_shape(shape) == matrix_shape(tensor.shape):
        return tensor.rebuilt(*tensor.stored, shape, strides=_strides(tensor, shape))
    return _refolded(func, tensor, shape)


def _refolded(func: Any, tensor: Any, shape: Sequence[int]) -> Any:
    """Return the view ``[shape]``, whose last dimension is another one: quantized where no block is
    cut, else, of one dimension, its values."""
    strides = _strides(tensor, shape)
    (rowwise, columnwise), (row, column) = tensor.stored, tensor.plan
    is_view = column is None or columnwise is None
    folded = None
    if rowwise is not None and is_view and (column is None or row.block == (0, 0)):
        folded = refold(rowwise, row, *matrix_shape(shape))
    if folded is None and len(shape) == 1:
        return FlatView(tensor)
    if folded is None:
        raise _refuse(func, tensor, f"a view as {list(shape)}")
    return tensor.rebuilt(folded, None, shape, strides=strides)


def _cut_rows(
    tensor: Any, dim: int, start: int, stop: int, step: int
) -> tuple[StoredOperands, bool] | None:
    """Return the operands of a part along ``dim``, and whether the parts of it share scales.

    None where a block is cut, or where the part is no range of rows.
    """
    shape = tensor.shape
    is_last = dim == len(shape) - 1
    inner = 1
    if not is_last:
        inner = math.prod(shape[dim + 1 : -1])
        if math.prod(shape[:dim]) != 1 or (step != 1 and inner != 1):
            return None
    operands: list[Operand | None] = []
    is_shared = False
    for way, (operand, spec) in enumerate(zip(tensor.stored, tensor.plan, strict=True)):
        if spec is not None:
            is_shared |= shares_scales(spec, int(is_last != bool(way)))
        if operand is None:
            operands.append(None)
            continue
        along = int(is_last != bool(way))  # rowwise [rows, k], columnwise [k, rows]
        part = cut(operand, spec, along, start * inner, stop * inner, step)
        if part is None:
            return None
        operands.append(part)
    return (operands[0], operands[1]), is_shared


def _part(
    func: Any, tensor: Any, dim: int, start: int, stop: int, step: int = 1, *, drops: bool = False
) -> Any:
    shape, strides = list(tensor.shape), list(tensor.stride())
    length = shape[dim]
    if drops and dim == len(shape) - 1:
        raise _refuse(func, tensor, f"index {start} along the last dimension")
    is_whole = (start, stop, step) == (0, length, 1)
    shape[dim] = -(-(stop - start) // step)
    strides[dim] *= step
    if drops:
        del shape[dim], strides[dim]
    if is_whole:
        return tensor.rebuilt(*tensor.stored, shape, strides=strides)
    pieces = _cut_rows(tensor, dim, start, stop, step)
    if pieces is None:
        raise _refuse(func, tensor, f"{start}:{stop}:{step} along dimension {dim}")
    operands, is_shared = pieces
    return tensor.rebuilt(*operands, shape, strides=strides, shares_scales=is_shared or None)


def _argument(args: Arguments, kwargs: dict[str, Any], at: int, name: str, default: Any) -> Any:
    return args[at] if len(args) > at else kwargs.get(name, default)


def _dim(tensor: Any, dim: int) -> int:
    if not -tensor.dim() <= dim < tensor.dim():
        raise IndexError(f"dimension {dim} of {tensor}")
    return dim % int(tensor.dim())


def _slice(func: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    dim = _dim(tensor, _argument(args, kwargs, 1, "dim", 0))
    start = _argument(args, kwargs, 2, "start", None)
    end = _argument(args, kwargs, 3, "end", None)
    step = _argument(args, kwargs, 4, "step", 1)
    start, stop, step = slice(start, end, step).indices(tensor.shape[dim])
    return _part(func, tensor, dim, start, max(start, stop), step)


def _select(func: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    dim = _dim(tensor, _argument(args, kwargs, 1, "dim", 0))
    index = int(_argument(args, kwargs, 2, "index", 0))
    length = tensor.shape[dim]
    if not -length <= index < length:
        raise IndexError(f"index {index} of {tensor} along dimension {dim}")
    index %= length
    return _part(func, tensor, dim, index, index + 1, drops=True)


def _split(func: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
    tensor, sizes = args[:2]
    dim = _dim(tensor, _argument(args, kwargs, 2, "dim", 0))
    length = tensor.shape[dim]
    if not isinstance(sizes, (list, tuple)):
        sizes = [min(sizes, length - start) for start in range(0, max(length, 1), max(sizes, 1))]
    elif sum(sizes) != length:
        raise RuntimeError(f"split sizes {list(sizes)} do not add up to {length} of {tensor}")
    parts, start = [], 0
    for size in sizes:
        parts.append(_part(func, tensor, dim, start, start + size))
        start += size
    return parts


def _unbind(func: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    dim = _dim(tensor, _argument(args, kwargs, 1, "dim", 0))
    return [_part(func, tensor, dim, at, at + 1, drops=True) for at in range(tensor.shape[dim])]


def _unsqueeze(func: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
    tensor, dim = args[:2]
    at = dim if dim >= 0 else dim + tensor.dim() + 1
    shape = list(tensor.shape)
    shape.insert(at, 1)
    return _view(func, (tensor, shape), kwargs)


def _squeeze(func: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    dims = _argument(args, kwargs, 1, "dim", range(tensor.dim()))
    chosen = {_dim(tensor, dim) for dim in ([dims] if isinstance(dims, int) else dims)}
    shape = [size for at, size in enumerate(tensor.shape) if size != 1 or at not in chosen]
    return _view(func, (tensor, shape), kwargs)


VIEWS: dict[Any, Callable[[Any, Arguments, dict[str, Any]], Any]] = {
    _aten.view: _view,
    _aten.slice: _slice,
    _aten.select: _select,
    _aten.split: _split,
    _aten.split_with_sizes: _split,
    _aten.unbind: _unbind,
    _aten.unsqueeze: _unsqueeze,
    _aten.squeeze: _squeeze,
}
"""Operators whose result shares memory with the tensor: quantized, or an error."""


def _cat(func: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
    tensors = args[0]
    first = tensors[0]
    is_uniform = all(
        type(tensor) is type(first) and tensor.plan == first.plan and tensor.dtype == first.dtype
        for tensor in tensors
    )
    if not is_uniform:
        return None
    dim = _dim(first, _argument(args, kwargs, 1, "dim", 0))
    shape = list(first.shape)
    shape[dim] = sum(tensor.shape[dim] for tensor in tensors)
    is_last = dim == first.dim() - 1
    rests = [[*tensor.shape[:dim], *tensor.shape[dim + 1 :]] for tensor in tensors]
    is_ragged = (
        any(tensor != rests[0] for tensor in rests) or len({tensor.dim() for tensor in tensors}) > 1
    )
    if is_ragged or (not is_last and math.prod(first.shape[:dim]) != 1):
        return None
    operands: list[Operand | None] = []
    for way, spec in enumerate(first.plan):
        parts = [tensor.stored[way] for tensor in tensors]
        if all(part is None for part in parts):
            operands.append(None)
            continue
        if any(part is None for part in parts):
            return None
        joined = join(parts, spec, int(is_last != bool(way)))
        if joined is None:
            return None
        operands.append(joined)
    return first.rebuilt(*operands, shape, shares_scales=False)


def _gathered(tensor: Any, index: torch.Tensor) -> StoredOperands | None:
    """Return the rows of numbers ``index``, int64 ``[rows]``; None where blocks span rows."""
    gathers: tuple[Callable[[Operand, OperandSpec, torch.Tensor], Operand | None], ...] = (
        gather_rows,
        gather_columns,
    )
    operands: list[Operand | None] = []
    for gather, operand, spec in zip(gathers, tensor.stored, tensor.plan, strict=True):
        part = None if operand is None else gather(operand, spec, index)
        if part is None and operand is not None:
            return None
        operands.append(part)
    return operands[0], operands[1]


def _index_rows(func: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
    """Return rows by an index of leading dimensions: what ``func`` makes of the rows' numbers."""
    tensor = args[0]
    if isinstance(args[1], int):  # index_select(dim, index)
        is_leading = _dim(tensor, args[1]) < tensor.dim() - 1
        rest: Arguments = (_dim(tensor, args[1]), *args[2:])
    else:
        dims = [
            index.dim() if index is not None and index.dtype == torch.bool else 1
            for index in args[1]
        ]
        is_leading = sum(dims) < tensor.dim()
        rest = args[1:]
    leaves = pytree.tree_leaves((args[1:], kwargs))
    if not is_leading or any(type(leaf) is type(tensor) for leaf in leaves):
        return None
    leading = tensor.shape[:-1]
    numbers = torch.arange(math.prod(leading), device=tensor.device).view(leading)
    rows = func(numbers, *rest, **kwargs)
    operands = _gathered(tensor, rows.reshape(-1))
    if operands is None:
        return None
    return tensor.rebuilt(*operands, [*rows.shape, tensor.shape[-1]], shares_scales=False)


COPIES: dict[Any, Callable[[Any, Arguments, dict[str, Any]], Any]] = {
    _aten.cat: _cat,
    _aten.index_select: _index_rows,
    _aten.index: _index_rows,
}
"""Operators whose result is a copy: quantized, or None where that would cut blocks."""
