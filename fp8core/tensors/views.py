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
from fp8core.backend_api.operand_spec import codes_per_byte
from fp8core.errors import UnsupportedError
from fp8core.tensors.storage import entries, matrix_shape, steps
from fp8core.tensors.values import FlatView
from fp8core.torch_ops.capture import is_captured
from fp8core.torch_ops.private import WAITING, gathered_rows, pytree

Arguments = tuple[Any, ...]
_aten = torch.ops.aten


def cut(operand: Operand, spec: OperandSpec, dim: int, span: range) -> Operand | None:
    """Return the elements of ``span`` along ``dim`` of ``operand``, as views.

    ``dim`` is 0 for the rows, 1 for the elements along k. None for parts of a block, and for
    strides over parts of blocks.
    """
    size = operand.data.shape[dim] * steps(spec, dim)[0]
    start, stop, stride = span.start, span.stop, span.step
    if (start, stop, stride) == (0, size, 1):
        return operand
    parts: list[torch.Tensor | None] = []
    for part, step in zip(operand, steps(spec, dim), strict=True):
        if part is not None and step:
            if start % step or (stop % step and stop != size) or (stride != 1 and step != 1):
                return None
            index = slice(start // step, entries(stop, step), stride)
            part = part[index] if dim == 0 else part[:, index]
        parts.append(part)
    return Operand(*parts)  # type: ignore[arg-type]  # data is there


def shares_scales(spec: OperandSpec, dim: int) -> bool:
    """Say whether parts of an operand along ``dim`` have a scale in common."""
    _, block, above = steps(spec, dim)
    return not (above if spec.scale_format == "e4m3" else block)


def join(operands: Sequence[Operand], spec: OperandSpec, dim: int) -> Operand | None:
    """Return ``operands`` one after the other along ``dim``, copied.

    None where a block would end before the last operand does, and where what shares a scale does
    not share its memory.
    """
    sizes = [operand.data.shape[dim] * steps(spec, dim)[0] for operand in operands]
    joined: list[torch.Tensor | None] = []
    for parts, step in zip(zip(*operands, strict=True), steps(spec, dim), strict=True):
        there = [part for part in parts if part is not None]
        whole = None
        if there:
            if step and any(size % step for size in sizes[:-1]):
                return None
            whole = torch.cat(there, dim) if step else _common(there)
            if whole is None:
                return None
        joined.append(whole)
    return Operand(*joined)  # type: ignore[arg-type]  # data is there


def _common(scales: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return a copy of the scale that all ``scales`` are; None if they are several."""
    first = scales[0]
    if all(scale is first for scale in scales):
        return first.clone()
    if first.is_meta or any(map(is_captured, scales)):  # no address
        return None
    if any(scale.data_ptr() != first.data_ptr() or scale.shape != first.shape for scale in scales):
        return None
    return first.clone()


def gather(operand: Operand, spec: OperandSpec, dim: int, index: torch.Tensor) -> Operand | None:
    """Return the elements of numbers ``index``, int64, along ``dim`` of ``operand``, copied; None
    where that cuts blocks."""
    if max(steps(spec, dim)) > 1:
        return None
    parts: list[torch.Tensor | None] = []
    for part, step in zip(operand, steps(spec, dim), strict=True):
        if part is not None:
            part = (part[index] if dim == 0 else part[:, index]) if step else part.clone()
        parts.append(part)
    return Operand(*parts)  # type: ignore[arg-type]  # data is there


def refold(operand: Operand, spec: OperandSpec, rows: int, columns: int) -> Operand | None:
    """Return the same elements in memory as ``[rows, columns]``, as views."""
    data, scale_inv, global_scale_inv = operand
    assert scale_inv is not None
    packed = codes_per_byte(spec)
    if columns % packed or spec.row_scaled:
        return None
    sizes = (rows, columns // packed)
    if math.prod(sizes) != data.numel() or not data.is_contiguous():
        return None
    if spec.block == (0, 0):
        return Operand(data.view(sizes), scale_inv, global_scale_inv)
    step = spec.block[1]
    whole = step and not columns % step and not data.shape[1] * packed % step
    if spec.block[0] != 1 or not whole or not scale_inv.is_contiguous():
        return None
    scales = scale_inv.view(rows, columns // step)
    return Operand(data.view(sizes), scales, global_scale_inv)


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


def _view(func: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
    """Return the view ``func``, or the views, of a tensor. Torch says which elements these have and
    how they lie, of tensors of its sizes without memory: one whose elements follow each other, and,
    where its own do not, one of its strides."""
    tensor, *rest = args
    if rest and isinstance(rest[0], torch.dtype):
        raise UnsupportedError(
            f"{func} of {tensor} to {rest[0]}: its codes are {tensor.tensors()[0].dtype}. "
            f"Use dequantize(dtype), or to_torch() for torch's FP8 tensors."
        )
    places = func(torch.empty(tensor.shape, device="meta"), *rest, **kwargs)
    views = places
    if not tensor.is_contiguous():
        like = torch.empty_strided(tensor.shape, tensor.stride(), device="meta")
        views = func(like, *rest, **kwargs)
    if isinstance(places, torch.Tensor):
        return _part(func, tensor, places, views.stride())
    pairs = zip(places, views, strict=True)
    return [_part(func, tensor, place, view.stride()) for place, view in pairs]


def _part(func: Any, tensor: Any, place: torch.Tensor, strides: Sequence[int]) -> Any:
    """Return the elements of ``place``, a view of a contiguous tensor of the sizes of ``tensor``:
    whole rows, the same columns of all rows, or all elements in other dimensions."""
    shape, start, size = list(place.shape), place.storage_offset(), matrix_shape(tensor.shape)
    is_whole = place.numel() == tensor.numel() and place.is_contiguous()
    if is_whole and matrix_shape(shape) == size:
        return tensor.rebuilt(*tensor.stored, shape, strides=strides)
    is_last, span = False, None
    if shape[-1:] == [size[1]] and place.stride(-1) == 1:
        span = _rows(place)
    elif shape[:-1] == [*tensor.shape[:-1]] and shape[-1:] < [size[1]]:
        step = place.stride(-1)
        is_last, span = True, range(start, start + shape[-1] * step, step)
    elif is_whole:
        return _refolded(func, tensor, shape, strides)
    part = None if span is None else _cut(tensor, span, is_last=is_last)
    if part is None:
        raise _refuse(func, tensor, f"a part {shape}")
    operands, is_shared = part
    return tensor.rebuilt(*operands, shape, strides=strides, shares_scales=is_shared or None)


def _rows(place: torch.Tensor) -> range | None:
    """Return the numbers of the rows of ``place``; None if they do not lie equally far apart."""
    columns, count, step = max(place.shape[-1], 1), 1, 1
    for size, stride in zip(place.shape[-2::-1], place.stride()[-2::-1], strict=True):
        if size == 1:
            continue
        if count == 1:
            step = stride // columns
        elif stride != count * step * columns:
            return None
        count *= size
    start = place.storage_offset() // columns
    return range(start, start + count * step, step)


def _refolded(func: Any, tensor: Any, shape: Sequence[int], strides: Sequence[int]) -> Any:
    """Return the view ``[shape]``, whose last dimension is another one: quantized where no block is
    cut, else, of one dimension, its values."""
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


def _cut(tensor: Any, span: range, *, is_last: bool) -> tuple[list[Operand | None], bool] | None:
    """Return the operands of the rows ``span``, or of such elements along the last dimension, and
    whether parts share scales; None where a block is cut."""
    along = _along(is_last)
    operands = _of_each(tensor, along, lambda operand, spec, at: cut(operand, spec, at, span))
    if operands is None:
        return None
    specs = zip((*tensor.plan, tensor._casting.columns_of), (*along, along[0]), strict=True)
    return operands, any(spec is not None and shares_scales(spec, at) for spec, at in specs)


def _along(is_last: bool) -> tuple[int, int]:
    """Return along which dimensions of its operands, rowwise ``[rows, k]`` and columnwise
    ``[k, rows]``, the last dimension of a tensor is, or its rows are."""
    return int(is_last), int(not is_last)


def _of_each(
    tensor: Any,
    along: tuple[int, int],
    part_of: Callable[[Operand, OperandSpec, int], Operand | None],
) -> list[Operand | None] | None:
    """Return ``part_of`` each operand of ``tensor``, its spec and its dimension ``along``; None if
    it is None of one that is there."""
    operands: list[Operand | None] = []
    for operand, spec, at in zip(tensor.stored, tensor.plan, along, strict=True):
        part = None if operand is None else part_of(operand, spec, at)
        if part is None and operand is not None:
            return None
        operands.append(part)
    return operands


def _dim(tensor: Any, dim: int) -> int:
    if not -tensor.dim() <= dim < tensor.dim():
        raise IndexError(f"dimension {dim} of {tensor}")
    return dim % int(tensor.dim())


VIEWS: dict[Any, Callable[[Any, Arguments, dict[str, Any]], Any]] = dict.fromkeys(
    (
        *(_aten.view, _aten.slice, _aten.select, _aten.split, _aten.split_with_sizes),
        *(_aten.unbind, _aten.unsqueeze, _aten.squeeze),
    ),
    _view,
)
"""Operators whose result shares memory with the tensor: quantized, or an error."""


def _cat(func: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
    tensors = args[0]
    first = tensors[0]
    is_uniform = all(
        type(tensor) is type(first)
        and tensor.plan == first.plan
        and tensor.dtype == first.dtype
        and tensor._value is None
        for tensor in tensors
    )
    if not is_uniform:
        return None
    dim = _dim(first, args[1] if len(args) > 1 else kwargs.get("dim", 0))
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
    for way, (spec, along) in enumerate(zip(first.plan, _along(is_last), strict=True)):
        parts = [tensor.stored[way] for tensor in tensors]
        if all(part is None for part in parts):
            operands.append(None)
            continue
        if any(part is None for part in parts):
            return None
        joined = join(parts, spec, along)
        if joined is None:
            return None
        operands.append(joined)
    return first.rebuilt(*operands, shape, shares_scales=False)


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
    index = rows.reshape(-1)
    operands = _of_each(
        tensor, _along(is_last=False), lambda operand, spec, at: gather(operand, spec, at, index)
    )
    if operands is None:
        return None
    return tensor.rebuilt(*operands, [*rows.shape, tensor.shape[-1]], shares_scales=False)


COPIES: dict[Any, Callable[[Any, Arguments, dict[str, Any]], Any]] = {
    _aten.cat: _cat,
    _aten.index_select: _index_rows,
    _aten.index: _index_rows,
}
"""Operators whose result is a copy: quantized, or None where that would cut blocks."""


def collected(func: Any, args: Sequence[Any]) -> Any:
    """Return the quantized result of a functional collective; None: it takes the values.

    Shards are gathered quantized where no scale covers more than a shard and no block ends in one.
    What is gathered has arrived, so that waiting for it does nothing.
    """
    name, tensor = func.overloadpacket.__name__, args[0]
    if tensor._value is not None:
        return None
    if name in WAITING:
        return tensor.rebuilt(*tensor.stored, tensor.shape)
    if name != "all_gather_into_tensor":
        return None
    group_size, group_name = args[1:3]
    operands: list[Operand | None] = []
    for operand, spec, along in zip(tensor.stored, tensor.plan, (0, 1), strict=True):
        if spec is not None and not _is_whole(tensor, spec, along):
            return None
        operands.append(
            None if operand is None else _of_all_ranks(operand, along, group_size, group_name)
        )
    shape = [group_size * tensor.shape[0], *tensor.shape[1:]]
    return tensor.rebuilt(*operands, shape, shares_scales=False)


def _is_whole(tensor: Any, spec: OperandSpec, along: int) -> bool:
    """Say whether blocks along the rows, dimension ``along`` of an operand, end with the tensor."""
    rows = tensor.numel() // tensor.shape[-1] if tensor.shape[-1] else 0
    return not shares_scales(spec, along) and bool(rows) and rows % spec.block[along] == 0


def _of_all_ranks(operand: Operand, along: int, group_size: int, group_name: str) -> Operand:
    def gather(part: torch.Tensor | None) -> torch.Tensor | None:
        if part is None:
            return None
        rows = gathered_rows(part if along == 0 else part.t(), group_size, group_name)
        return rows if along == 0 else rows.t()

    data, scale_inv, global_scale_inv = map(gather, operand)
    assert data is not None
    return Operand(data, scale_inv, global_scale_inv)
