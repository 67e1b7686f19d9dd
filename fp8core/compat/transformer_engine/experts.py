"""The delayed scaling of grouped experts as one state an expert, which Megatron's checkpoints hold.

Megatron saves each expert of a grouped linear under its number among all experts, so that a
checkpoint loads with another number of ranks. Each state is the ``_extra_state`` of a linear with
one GEMM, as Transformer Engine writes it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fp8core.errors import OperandError
from fp8core.extra_state.state import format_of_meta, read_extra_state
from fp8core.extra_state.writing import fields_of, write_extra_state
from fp8core.recipe import DelayedScaling
from fp8core.reporting import log_once
from fp8core.tensors.slots import BUFFERS, META, read_meta

__all__ = ["merge_states", "split_state"]

_TENSORS = tuple(name for name in BUFFERS if name != META)


def split_state(buffers: Mapping[str, torch.Tensor | None], num_experts: int) -> list[torch.Tensor]:
    """Return an ``_extra_state`` for each expert, uint8 ``[bytes]``; empty ones without a state.

    Args:
        buffers: the delayed state of a grouped linear, ``scale_fwd [3 num_experts]`` and so on.
        num_experts: the number of its GEMMs.
    """
    empty = torch.empty(0, dtype=torch.uint8, device="cpu")
    stored = buffers.get(META)
    meta = None if stored is None or stored.is_meta else read_meta(stored)
    if meta is None:
        return [empty] * num_experts
    pair = format_of_meta(meta[0])
    if pair is None:
        log_once(
            f"grouped experts have delayed scales for {meta[0]}, which no recipe of Transformer "
            f"Engine has: they are left out of Megatron's checkpoint, and start fresh when it is "
            f"loaded",
            logging.WARNING,
        )
        return [empty] * num_experts
    fields = fields_of(DelayedScaling(fp8_format=pair, amax_history_len=meta[1]))
    parts: dict[str, Sequence[torch.Tensor]] = {}
    for name in _TENSORS:
        tensor = buffers[name]
        assert tensor is not None
        parts[name] = tensor.cpu().chunk(num_experts, dim=-1)
    return [
        torch.frombuffer(bytearray(write_extra_state(expert, fields)), dtype=torch.uint8)
        for expert in (
            {name: part[number] for name, part in parts.items()} for number in range(num_experts)
        )
    ]


def merge_states(states: Sequence[Any]) -> dict[str, torch.Tensor]:
    """Return the buffers of a grouped linear whose experts have ``states``; none if all are empty.

    Raises:
        OperandError: a state is missing (None), damaged, or of another recipe than the first.
    """
    read = [None if state is None else _read(state) for state in states]
    absent = [number for number, one in enumerate(read) if not one]
    if len(absent) == len(read) and None not in read:
        return {}
    if absent:
        raise OperandError(
            f"the checkpoint has no delayed state of the experts {absent} of {len(read)}, but has "
            f"that of the others. Leave out every _extra_state to start the scales fresh"
        )
    experts = [one for one in read if one]
    if any(not torch.equal(one[META], experts[0][META]) for one in experts):
        raise OperandError("the experts' delayed states in the checkpoint are of several recipes")
    merged = {name: torch.cat([one[name] for one in experts], dim=-1) for name in _TENSORS}
    return {**merged, META: experts[0][META]}


def _read(state: Any) -> dict[str, torch.Tensor]:
    """Return the buffers that one expert's state holds."""
    is_empty = isinstance(state, torch.Tensor) and not state.numel()
    return {} if is_empty else read_extra_state(state)
