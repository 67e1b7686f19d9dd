"""The slots of a layer's delayed state: their formats and targets, and the buffers' metadata."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fp8core import formats
from fp8core.collectives import Communicator
from fp8core.recipe.plan import Plan, SlotNames, TensorPlan
from fp8core.tensors.delayed_state import DelayedState
from fp8core.tensors.quantizer import Slot


@dataclass(frozen=True, slots=True)
class LayerStates:
    """The forward and the backward state of a layer, whose slots are those of ``names``.

    ``records_forward``, ``records_backward``: amaxes are recorded in the forward pass, and in the
    backward pass. A layer that computes its plan several times has as many sets of these slots, one
    after the other. The object is a view of ``count`` sets from set ``first`` on: those of one
    linear in a chain of several, a set for each group.
    """

    forward: DelayedState
    backward: DelayedState
    names: SlotNames
    records_forward: bool = True
    records_backward: bool = True
    first: int = 0
    count: int = 1

    def spread_over(self, communicator: Communicator) -> None:
        """Have both states reduced over the ranks that the layer is spread over."""
        self.forward.communicator = self.backward.communicator = communicator

    def slot(self, tensor: str) -> Slot:
        """Return the slots of ``tensor``: one entry a set."""
        return self._slot(tensor, self.first, self.count)

    def slot_of_set(self, tensor: str, number: int) -> Slot:
        """Return the slot of ``tensor`` in one set, counted from ``first`` on."""
        return self._slot(tensor, self.first + number, 1)

    def _slot(self, tensor: str, first: int, count: int) -> Slot:
        if tensor in self.names.forward:
            state, names, records = self.forward, self.names.forward, self.records_forward
        else:
            state, names, records = self.backward, self.names.backward, self.records_backward
        step = len(names)
        begin = first * step + names.index(tensor)
        entries = slice(begin, begin + (count - 1) * step + 1, step)
        return Slot(state.scale[entries], state.amax_history[0, entries] if records else None)


META = "delayed_meta"
BUFFERS = ("scale_fwd", "amax_history_fwd", "scale_bwd", "amax_history_bwd", META)
"""The names of a layer's buffers."""

_MAX_META = 4096
"""Bytes of the longest metadata that is read."""


def _slots(plan: Plan) -> list[TensorPlan | None]:
    """Return the plan of each slot's tensor, forward slots first; None for an unused slot."""
    tensors = plan.tensors
    return [tensors.get(name) for names in plan.slots for name in names]


def describe(plan: Plan) -> str:
    """Return the text that ``delayed_meta`` holds under ``plan``."""
    assert plan.delayed is not None
    names = [
        next((s.format for s in tensor if s is not None and s.delayed), None) if tensor else None
        for tensor in _slots(plan)
    ]
    return meta_text(names, plan.delayed.history_len)


def maxima(plan: Plan) -> tuple[list[float], list[float]]:
    """Return the value that the amax of each forward and each backward slot is scaled to.

    For an unused slot it is the largest value of e4m3.
    """
    targets = []
    for tensor in _slots(plan):
        spec = next((s for s in tensor or () if s is not None and s.delayed), None)
        targets.append(spec.target if spec is not None else formats.by_name("e4m3").max)
    num_forward = len(plan.slots.forward)
    return targets[:num_forward], targets[num_forward:]


def meta_text(formats: Sequence[str | None], history_len: int) -> str:
    """Return the text of ``delayed_meta``: JSON of the slots' formats and the history's length."""
    return json.dumps({"formats": list(formats), "history_len": history_len})


def covers(stored: str, planned: str) -> bool:
    """Say whether a state described by ``stored`` serves a plan that ``planned`` describes.

    A state serves where each slot that the plan uses has its format; the state may have more slots,
    as a run of Transformer Engine leaves, whose attention always quantizes its gradients.
    """
    if stored == planned:
        return True
    description = read_meta(torch.tensor(list(stored.encode()), dtype=torch.uint8, device="cpu"))
    if description is None:
        return False
    left, right = json.loads(stored), json.loads(planned)
    pairs = list(zip(left["formats"], right["formats"], strict=False))
    return (
        left["history_len"] == right["history_len"]
        and len(left["formats"]) == len(right["formats"])
        and any(name is not None for _, name in pairs)
        and all(name in (None, has) for has, name in pairs)
    )


def read_meta(stored: torch.Tensor) -> tuple[str, int] | None:
    """Return the text of ``stored``, as :func:`meta_text` writes it, and the history's length.

    None if it is no metadata of fp8core.
    """
    if stored.dtype != torch.uint8 or stored.dim() != 1 or stored.numel() > _MAX_META:
        return None
    try:
        meta = json.loads(bytes(stored.tolist()))
    except (ValueError, RecursionError):
        return None
    if not isinstance(meta, dict) or set(meta) != {"formats", "history_len"}:
        return None
    formats, length = meta["formats"], meta["history_len"]
    if type(length) is not int or length < 1 or not isinstance(formats, list):
        return None
    if not all(name is None or isinstance(name, str) for name in formats):
        return None
    return meta_text(formats, length), length
