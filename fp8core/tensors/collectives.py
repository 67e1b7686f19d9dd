"""Collectives of a QuantizedTensor, as the shards of a DTensor take part in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fp8core.backend_api import Operand, OperandSpec
from fp8core.tensors.pieces import shares_scales
from fp8core.torch_ops.private import WAITING, gathered_rows

__all__ = ["broadcast", "collected"]


def collected(func: Any, args: Sequence[Any]) -> Any:
    """Return the quantized result of a functional collective; None: it takes the values.

    Shards are gathered quantized where no scale covers more than a shard and no block ends in one.
    What is gathered has arrived, so that waiting for it does nothing.
    """
    name, tensor = func.overloadpacket.__name__, args[0]
    if name in WAITING:
        return tensor.rebuilt(*tensor.held, tensor.shape)
    if name != "all_gather_into_tensor":
        return None
    group_size, group_name = args[1:3]
    held: list[Operand | None] = []
    for operand, spec, along in zip(tensor.held, tensor.plan, (0, 1), strict=True):
        if spec is not None and not _is_whole(tensor, spec, along):
            return None
        held.append(None if operand is None else _gathered(operand, along, group_size, group_name))
    shape = [group_size * tensor.shape[0], *tensor.shape[1:]]
    return tensor.rebuilt(*held, shape, shares_scales=False)


def broadcast(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run a broadcast of ``c10d`` in place on the operands of a tensor, or of its flat view.

    Codes and scales arrive as they are on the rank that sends. What is returned waits for all.
    """
    (tensor,), *others = args
    work: Any = None
    for part in getattr(tensor, "whole", tensor).tensors():
        if work is not None:
            work.wait()
        sent = part if part.is_contiguous() else part.contiguous()
        coded = sent.view(torch.uint8) if sent.itemsize == 1 else sent
        _, work = func([coded], *others, **kwargs)
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
