"""The state of delayed scaling of a layer: scales and amaxes, the slots of its tensors in them, and
the metadata that is saved with them."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch

from fp8core import formats
from fp8core.backend_api import OperandSpec, ScaleUpdateDesc
from fp8core.collectives import Communicator
from fp8core.collectives.base import GroupReference
from fp8core.dispatch import table
from fp8core.recipe.plan import DelayedPlan, Plan, SlotNames
from fp8core.tensors.quantizer import Slot
from fp8core.torch_ops.capture import is_faked
from fp8core.torch_ops.operators import in_slot
from fp8core.torch_ops.private import NO_BACKWARD_PASS, current_backward_pass

Order: TypeAlias = "tuple[int, ...]"
"""A layer's number in the order of creation, ``(n,)``; of a copy ``(n, m)``: it is the m-th copy of
layer n, as a copy on one rank alone must not change the numbers of layers that all ranks create."""

Family: TypeAlias = "tuple[int, ...]"
"""Layers that are numbered together: ``()`` for those created, ``(n,)`` for copies of layer n."""

_created: Counter[Family] = Counter()
_lock = threading.Lock()


def new_order(original: Order | None = None) -> Order:
    """Return the number of a layer that is created now, or copied from ``original``.

    A copy of a copy is one more of the layer that was created.
    """
    family = () if original is None else original[:1]
    with _lock:
        number = _created[family]
        _created[family] = number + 1
    return (*family, number)


def family_of(order: Order) -> Family:
    """Return the family of a layer."""
    return order[:-1]


def num_created() -> Counter[Family]:
    """Return how many layers of each family there were so far, whether they still exist or not."""
    with _lock:
        return _created.copy()


def shown(order: Order) -> str:
    """Return the number in words."""
    number = f"layer {order[0]} of its process"
    return number if len(order) == 1 else f"copy {order[1]} of {number}"


class DelayedState:
    """Scale and amax history of one direction of one layer, in the layer's buffers.

    ``scale [slots]`` and ``amax_history [length, slots]`` are float32 and updated in place; row 0
    of the history holds the amax since the last update, rows 1 to length - 1 older ones, the
    oldest first. ``fp8_max [slots]`` is the largest value of each slot's format, ``nonfinite [1]``
    int64 counts the amaxes that were not recorded because they were inf. ``order`` is the
    layer's number, see :mod:`fp8core.tensors.delayed_state`.
    """

    def __init__(
        self,
        owner: str,
        plan: DelayedPlan,
        recipe: Any,
        *,
        scale: torch.Tensor,
        amax_history: torch.Tensor,
        maxima: Sequence[float],
        order: Order,
    ) -> None:
        self.owner = owner
        self.plan = plan
        self.recipe = recipe
        self.scale = scale
        self.amax_history = amax_history
        # States with the same buffers have the same key, as long as one of them is alive.
        self.key = id(amax_history)
        # Whether it is that of a FakeTensorMode, whose calls record no amax.
        self.is_faked = is_faked()
        self.fp8_max = torch.tensor(maxima, dtype=torch.float32, device=scale.device)
        self.targets = self.fp8_max * 2.0**-plan.margin
        self.nonfinite = torch.zeros(1, dtype=torch.int64, device=scale.device)
        # The backend's update, bound like every other operation; None for the user's own functions.
        self.advance: Callable[..., None] | None = None
        self.prepare: Callable[..., Callable[[], None]] | None = None
        desc = update_desc(plan)
        if desc is not None:
            resolved = table.resolve(desc, scale.device)
            self.advance = resolved.run
            prepared = table.resolve_optional(
                replace(desc, prepared=True), scale.device, resolved.choice.backend
            )
            self.prepare = None if prepared is None else prepared.run
        self.group: GroupReference | None = None
        # The ranks over which the layer is spread: they exchange codes, and need equal scales.
        self.communicator: Communicator | None = None
        self.order = order
        # Which part of the layer's slots these are, and of how many: each rank has other experts.
        self.part = (0, 1)
        # Whether a backward pass that recorded here has failed. Its amaxes are discarded at once,
        # but on the stream of the engine's thread, and a kernel on another stream may still record.
        # So they are discarded again where the next pass begins to record.
        self.is_abandoned = False
        # Whether autograd may have saved the buffers: graphs do, which read them as they are in
        # backward, so that a write to them is none to what was saved.
        self.is_saved = False
        # The batch of states that was last updated together, if this state is its first member.
        self.batch: Any = None

    @property
    def reduced_over(self) -> GroupReference | None:
        """The group over which the amaxes are reduced, besides the layer's ranks."""
        return self.group if self.plan.reduce_amax else None

    @property
    def left_to_reduce(self) -> Communicator | None:
        """The layer's ranks, unless they are that group, and have reduced the amaxes as it."""
        communicator, over = self.communicator, self.reduced_over
        if communicator is None or over is None:
            return communicator
        return None if communicator.reference is over else communicator

    @property
    def newest(self) -> torch.Tensor:
        """The amaxes since the last update ``[slots]``, in the history's memory; torch counts no
        write to them, as it counts none of a kernel's."""
        return self.amax_history.data[0]

    def part_of(self, amaxes: torch.Tensor) -> torch.Tensor:
        """Return the amaxes of these slots, of ``amaxes`` of all parts of the layer."""
        at, count = self.part
        return amaxes if count == 1 else amaxes.view(count, -1)[at]

    def among_all(self) -> torch.Tensor:
        """Return the newest amaxes among those of all parts of the layer, which are zeros."""
        newest = self.amax_history[0]
        if self.part[1] == 1:
            return newest
        amaxes = newest.new_zeros(self.part[1] * newest.numel())
        self.part_of(amaxes).copy_(newest)
        return amaxes

    def slot(self, entries: slice, *, records: bool) -> Slot:
        """Return the slot of these ``entries``."""
        return Slot(self.scale[entries], self.newest[entries] if records else None)


class GraphState:
    """A :class:`DelayedState` as a graph has it that torch captures: the buffers alone.

    ``note(states)`` puts the operator into the graph that has these states noted for their update,
    when the graph runs, and returns copies of their scales as they are then; None where nothing is
    recorded. ``number`` and ``phase`` are what it needs to know of this one.
    """

    __slots__ = ("_note", "_present", "amax_history", "begun_in", "number", "phase", "stored")

    def __init__(
        self,
        scale: torch.Tensor,
        amax_history: torch.Tensor,
        note: Callable[[Sequence[GraphState]], Sequence[torch.Tensor]] | None,
        number: int,
        phase: str,
    ) -> None:
        self.stored, self.amax_history = scale, amax_history
        self.number, self.phase = number, phase
        self._note = note
        self._present: torch.Tensor | None = None
        self.begun_in = NO_BACKWARD_PASS

    @property
    def scale(self) -> torch.Tensor:
        """The scale by which the next cast is, ``[slots]``; the first one notes the state."""
        if self._present is None:
            begin_all([self])
        assert self._present is not None
        return self._present

    @property
    def copies_scale(self) -> bool:
        """Whether :attr:`scale` is a copy, as of every state that is noted."""
        return self._note is not None

    def slot(self, entries: slice, *, records: bool) -> Slot:
        """Return the slot of these ``entries``."""
        return GraphSlot(self, entries, records=records)


def begin_all(states: Sequence[GraphState]) -> None:
    """Note states of one phase before a pass records in them, by one operator; a backward pass
    notes each once."""
    task = current_backward_pass()
    if task != NO_BACKWARD_PASS:
        states = [state for state in states if state.begun_in != task]
    if not states:
        return
    note = states[0]._note
    scales = [state.stored for state in states] if note is None else note(states)
    for state, scale in zip(states, scales, strict=True):
        state._present, state.begun_in = scale, task


class GraphSlot(Slot):
    """The slot of a :class:`GraphState`, whose casts get the whole state and its entries."""

    state: GraphState
    entries: slice

    def __new__(cls, state: GraphState, entries: slice, *, records: bool) -> GraphSlot:
        """Return the slot; where nothing is recorded its amax is None."""
        slot = super().__new__(cls, state.amax_history, state.amax_history if records else None)
        slot.state, slot.entries = state, entries
        return slot

    def bound(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return the cast ``run`` by the scale of the time of its call."""
        cast = in_slot(run, self.entries)

        def cast_in_graph(*arguments: torch.Tensor, **keywords: Any) -> Any:
            return cast(*arguments, scale=self.state.scale, amax_out=self.amax, **keywords)

        return cast_in_graph

    def bound_beside(self, second: Any, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return the split cast ``run`` by the scales of the time of its call."""
        cast = in_slot(run, self.entries, second.entries)

        def cast_in_graph(*arguments: torch.Tensor, **keywords: Any) -> Any:
            scales = self.state.scale, second.state.scale
            return cast(*arguments, scale=scales, amax_out=(self.amax, second.amax), **keywords)

        return cast_in_graph

    def present_scale(self) -> torch.Tensor:
        """Return the scale of the graph that calls this, which no later update changes."""
        scale = self.state.scale[self.entries]
        return scale if self.state.copies_scale else scale.clone()


def update_desc(plan: DelayedPlan | None) -> ScaleUpdateDesc | None:
    """Return the update of delayed scales, without a ``plan`` that of the defaults; None where the
    user's own functions do it."""
    if plan is None:
        return ScaleUpdateDesc("max")
    if isinstance(plan.amax_algorithm, str) and plan.scaling_algorithm is None:
        return ScaleUpdateDesc(plan.amax_algorithm)
    return None


@dataclass(frozen=True, slots=True)
class LayerStates:
    """The forward and the backward state of a layer, whose slots are those of ``names``.

    ``records_forward``, ``records_backward``: amaxes are recorded in the forward pass, and in the
    backward pass. A layer that computes its plan several times has as many sets of these slots, one
    after the other. The object is a view of ``count`` sets from set ``first`` on: those of one
    linear in a chain of several, a set for each group.
    """

    forward: Any
    backward: Any
    names: SlotNames
    records_forward: bool = True
    records_backward: bool = True
    first: int = 0
    count: int = 1

    def spread_over(self, communicator: Communicator) -> None:
        """Have both states reduced over the ranks that the layer is spread over."""
        self.forward.communicator = self.backward.communicator = communicator

    def take_part(self, number: int, count: int) -> None:
        """Have both states hold part ``number`` of ``count`` of the layer's slots."""
        self.forward.part = self.backward.part = (number, count)

    def slot(self, tensor: str, number: int | None = None) -> Slot:
        """Return the slots of ``tensor``: one entry a set, or that of the set ``number``, counted
        from ``first`` on."""
        first, count = (self.first, self.count) if number is None else (self.first + number, 1)
        if tensor in self.names.forward:
            state, names, records = self.forward, self.names.forward, self.records_forward
        else:
            state, names, records = self.backward, self.names.backward, self.records_backward
        step = len(names)
        begin = first * step + names.index(tensor)
        entries = slice(begin, begin + (count - 1) * step + 1, step)
        slot: Slot = state.slot(entries, records=records)
        return slot


META = "delayed_meta"
BUFFERS = ("scale_fwd", "amax_history_fwd", "scale_bwd", "amax_history_bwd", META)
"""The names of a layer's buffers."""

STATE_BUFFERS = BUFFERS[:-1]
"""Those that a graph reads: scale and history, forward's first."""

_MAX_META = 4096
"""Bytes of the longest metadata that is read."""


def _slots(plan: Plan) -> list[OperandSpec | None]:
    """Return the delayed spec of each slot's tensor, forward slots first; None for an unused
    slot."""
    tensors = plan.tensors
    of_slots = [tensors.get(name) or () for names in plan.slots for name in names]
    return [next((spec for spec in specs if spec and spec.delayed), None) for specs in of_slots]


def describe(plan: Plan) -> str:
    """Return the text that ``delayed_meta`` holds under ``plan``."""
    assert plan.delayed is not None
    names = [None if spec is None else spec.format for spec in _slots(plan)]
    return meta_text(names, plan.delayed.history_len)


def maxima(plan: Plan) -> tuple[list[float], list[float]]:
    """Return the value that the amax of each forward and each backward slot is scaled to.

    For an unused slot it is the largest value of e4m3.
    """
    unused = formats.by_name("e4m3").max
    targets = [unused if spec is None else spec.target for spec in _slots(plan)]
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
    if not _is_description(stored):
        return False
    left, right = json.loads(stored), json.loads(planned)
    pairs = list(zip(left["formats"], right["formats"], strict=False))
    return (
        left["history_len"] == right["history_len"]
        and len(left["formats"]) == len(right["formats"])
        and any(name is not None for _, name in pairs)
        and all(name in (None, has) for has, name in pairs)
    )


def _is_description(text: str) -> bool:
    encoded = torch.tensor(list(text.encode()), dtype=torch.uint8, device="cpu")
    return read_meta(encoded) is not None


def differing(stored: str, planned: str, slots: SlotNames) -> tuple[str, str]:
    """Return the fields in which two texts of :func:`describe` differ, with the values of the first
    and of the second; ``slots`` are those of the plan.

    >>> texts = meta_text(["e4m3", "e5m2"], 16), meta_text(["e4m3", "e4m3"], 16)
    >>> differing(*texts, SlotNames(("input",), ("grad_output",)))
    ('grad_output in e5m2', 'grad_output in e4m3')
    """
    if not _is_description(stored):
        return stored, planned
    left, right = json.loads(stored), json.loads(planned)
    names = (*slots.forward, *slots.backward)
    if len(left["formats"]) != len(right["formats"]):
        return f"{len(left['formats'])} tensors", f"{len(names)}: {', '.join(names)}"
    formats = list(zip(names, left["formats"], right["formats"], strict=True))
    # A state may have more slots than the plan uses, see covers().
    used = [row for row in formats if row[2] is not None] or formats
    fields = [("amax_history_len=", left["history_len"], right["history_len"])]
    fields += [(f"{name} in ", a or "high precision", b or "high precision") for name, a, b in used]
    rows = [(field, a, b) for field, a, b in fields if a != b]
    return ", ".join(f"{field}{a}" for field, a, _ in rows), ", ".join(
        f"{field}{b}" for field, _, b in rows
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
