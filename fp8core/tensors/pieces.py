"""Parts of an operand, and operands joined from parts: codes together with the scales of blocks.

An operand ``[rows, k]`` can be cut where its blocks end. Whoever wants other parts has to decode
it, so every function here returns None where a block would be cut.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from fp8core.backend_api import Operand, OperandSpec
from fp8core.tensors.storage import per_byte
from fp8core.torch_ops.private import WAITING, gathered_rows
from fp8core.torch_ops.shapes import is_captured


def collected(func: Any, args: Sequence[Any]) -> Any:
    """Return the quantized result of a functional collective; None: it takes the values.

    Shards are gathered quantized where no scale covers more than a shard and no block ends in one.
    What is gathered has arrived, so that waiting for it does nothing.
    """
    name, tensor = func.overloadpacket.__name__, args[0]
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
            None if operand is None else _gathered(operand, along, group_size, group_name)
        )
    shape = [group_size * tensor.shape[0], *tensor.shape[1:]]
    return tensor.rebuilt(*operands, shape, shares_scales=False)


def broadcast(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run a broadcast of ``c10d`` in place on the operands of a tensor, or of its flat view.

    Codes and scales arrive as they are on the rank that sends. What is returned waits for all.
    """
    (tensor,), *rest = args
    work: Any = None
    for part in getattr(tensor, "whole", tensor).tensors():
        if work is not None:
            work.wait()
        sent = part if part.is_contiguous() else part.contiguous()
        coded = sent.view(torch.uint8) if sent.itemsize == 1 else sent
        _, work = func([coded], *rest, **kwargs)
        if sent is not part:
            work.wait()
            part.copy_(sent)
        if not part.is_inference():
            torch.autograd.graph.increment_version(part)
    return [tensor], work


def _is_whole(tensor: Any, spec: OperandSpec, along: int) -> bool:
    """Say whether blocks along the rows, dimension ``along`` of an operand, end with the tensor."""
    rows = tensor.numel() // tensor.shape[-1] if tensor.shape[-1] else 0
    return not shares_scales(spec, along) and bool(rows) and rows % spec.block[along] == 0


def _gathered(operand: Operand, along: int, group_size: int, group_name: str) -> Operand:
    def gather(part: torch.Tensor | None) -> torch.Tensor | None:
        if part is None:
            return None
        rows = gathered_rows(part if along == 0 else part.t(), group_size, group_name)
        return rows if along == 0 else rows.t()

    data, scale_inv, global_scale_inv = map(gather, operand)
    assert data is not None
    return Operand(data, scale_inv, global_scale_inv)


def cut(
    operand: Operand, spec: OperandSpec, dim: int, start: int, stop: int, step: int = 1
) -> Operand | None:
    """Return elements ``start`` to ``stop`` along ``dim`` of ``operand``, as views.

    ``dim`` is 0 for the rows, 1 for the elements along k. Parts of one block are refused, and steps
    over parts of blocks.
    """
    data, scale_inv, global_scale_inv = operand
    assert scale_inv is not None
    packed = per_byte(spec) if dim == 1 else 1
    size, block = data.shape[dim] * packed, spec.block[dim]
    if (start, stop, step) == (0, size, 1):
        return operand
    if start % packed or stop % packed or (step != 1 and (packed != 1 or block > 1)):
        return None
    if block > 1 and (start % block or (stop % block and stop != size)):
        return None
    index = slice(start // packed, stop // packed, step)
    codes = data[index] if dim == 0 else data[:, index]
    if block:
        blocks = slice(start // block, -(-stop // block), step)
        scale_inv = scale_inv[blocks] if dim == 0 else scale_inv[:, blocks]
    if spec.row_scaled and dim == 0 and global_scale_inv is not None:
        global_scale_inv = global_scale_inv[start:stop:step]
    return Operand(codes, scale_inv, global_scale_inv)


def shares_scales(spec: OperandSpec, dim: int) -> bool:
    """Say whether parts of an operand along ``dim`` have a scale in common."""
    if spec.scale_format == "e4m3":
        return not (spec.row_scaled and dim == 0)
    return spec.block[dim] == 0


def join(operands: Sequence[Operand], spec: OperandSpec, dim: int) -> Operand | None:
    """Return ``operands`` one after the other along ``dim``, copied.

    A block may end with the last operand alone, and what shares a scale has to share its memory.
    """
    packed = per_byte(spec) if dim == 1 else 1
    sizes = [operand.data.shape[dim] * packed for operand in operands]
    if spec.block[dim] > 1 and any(size % spec.block[dim] for size in sizes[:-1]):
        return None
    data = torch.cat([operand.data for operand in operands], dim)
    scales = [operand.scale_inv for operand in operands if operand.scale_inv is not None]
    scale_inv = _common(scales) if not spec.block[dim] else torch.cat(scales, dim)
    outer = [
        operand.global_scale_inv for operand in operands if operand.global_scale_inv is not None
    ]
    if not outer:
        return None if scale_inv is None else Operand(data, scale_inv)
    global_scale_inv = torch.cat(outer) if spec.row_scaled and dim == 0 else _common(outer)
    if scale_inv is None or global_scale_inv is None:
        return None
    return Operand(data, scale_inv, global_scale_inv)


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


def gather_rows(operand: Operand, spec: OperandSpec, index: torch.Tensor) -> Operand | None:
    """Return the rows of numbers ``index``, int64 ``[rows]``, copied."""
    data, scale_inv, global_scale_inv = operand
    assert scale_inv is not None
    if spec.block[0] > 1:
        return None
    scales = scale_inv[index] if spec.block[0] else scale_inv.clone()
    if global_scale_inv is not None:
        outer = global_scale_inv[index] if spec.row_scaled else global_scale_inv.clone()
        return Operand(data[index], scales, outer)
    return Operand(data[index], scales)


def gather_columns(operand: Operand, spec: OperandSpec, index: torch.Tensor) -> Operand | None:
    """Return the elements along k of numbers ``index``, int64 ``[k]``, copied."""
    assert operand.scale_inv is not None
    if spec.block[1] or per_byte(spec) != 1:
        return None
    return Operand(operand.data[:, index], operand.scale_inv.clone())


def refold(operand: Operand, spec: OperandSpec, rows: int, columns: int) -> Operand | None:
    """Return the same elements in memory as ``[rows, columns]``, as views."""
    data, scale_inv, global_scale_inv = operand
    assert scale_inv is not None
    packed = per_byte(spec)
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
