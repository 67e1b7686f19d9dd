"""Delayed scaling in graphs that torch captures.

A graph reads the scales of a layer from its buffers, and its casts record their amaxes there, as
kernels do. Layers of one shape share a graph, so it knows a layer by the memory of the buffers that
it gets: before the first cast of each pass an operator looks the layer up, and has its state
updated when the autocast, or the backward pass, ends, as a layer in eager does.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from fp8core.collectives import named
from fp8core.context.autocast import Active
from fp8core.context.scopes import touch
from fp8core.dispatch import policy
from fp8core.errors import Fp8CoreError, UnsupportedError
from fp8core.recipe.plan import Plan
from fp8core.tensors.delayed_state import STATE_BUFFERS, GraphState, LayerStates
from fp8core.tensors.scaling import update_after_backward
from fp8core.torch_ops.capture import left_to_backward
from fp8core.torch_ops.definition import Tensors, define, implementation
from fp8core.torch_ops.private import (
    NO_BACKWARD_PASS,
    copy_all,
    current_backward_pass,
    first_row,
    foreach_mul,
    is_exporting,
)

_HISTORIES = STATE_BUFFERS[1::2]
Followers: TypeAlias = "tuple[Sequence[int], int]"
"""The numbers of layers of which the first casts for all, and the entry that its amax has."""

_layers: weakref.WeakSet[Any] = weakref.WeakSet()
_layers_lock = threading.Lock()
_by_address: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
# The operators of graphs refer to entries by number, so none is ever removed.
_states: list[GraphStates] = []


class GraphStates:
    """The delayed states of the layers whose calls a graph runs by ``plan``.

    ``request`` was active when the graph was captured. The amaxes are recorded if it ``records``.
    ``groups`` are the names of the groups over whose ranks the layers are spread. ``refuse(error)``
    returns the numbers of links that raise it when the graph runs.
    """

    def __init__(
        self,
        plan: Plan,
        request: Active,
        groups: Sequence[str],
        refuse: Callable[[Fp8CoreError], tuple[int, ...]],
        *,
        records: bool,
    ) -> None:
        self._plan, self._request, self._groups = plan, request, groups
        self.refuse = refuse
        self._policy = policy.chosen()
        self._records = records
        self.number = len(_states)
        _states.append(self)

    def in_graph(self, buffers: Sequence[Any], phase: str) -> LayerStates:
        """Return the states of a graph that has these ``buffers``, named
        :data:`~fp8core.tensors.delayed_state.STATE_BUFFERS`, at that ``phase`` of the step."""
        scale, history, grad_scale, grad_history = buffers
        note, note_later = (_note, _note_in_backward) if self._records else (None, None)
        forward = GraphState(scale, history, note, self.number, phase)
        backward = GraphState(grad_scale, grad_history, note_later, self.number, "backward")
        records = self._records
        return LayerStates(forward, backward, self._plan.slots, records, records)

    def of(self, layer: Any) -> LayerStates:
        """Return the states of ``layer``, which has the buffers after that.

        Raises:
            RecipeError: the layer has those of another recipe, see its ``check_delayed_state``.
            UnsupportedError: torch exports, and has put tensors without values in the place of the
                buffers that would be made or read.
        """
        recipe = self._request.quantize
        key = (recipe, self._plan.delayed, self._policy)
        states: LayerStates | None = layer._bindings.states.get(key)
        if states is None and is_exporting():
            raise UnsupportedError(
                "delayed scaling is not offered in an exported program of a layer that has not run "
                "under this recipe, on the backend of the program. Train a step, calibrate or "
                "evaluate before, or use a recipe without state, such as Float8CurrentScaling."
            )
        if states is None:
            with policy.activated(self._policy):
                states = layer.delayed_states(recipe, self._plan, records=self._records)
            for name in self._groups:
                states.spread_over(named(name))
        states.backward.is_saved = True
        return states

    def note(self, history: torch.Tensor, phase: str) -> None:
        """Have the state of the layer that has the buffer ``history`` updated when the autocast, or
        the backward pass, ends. ``phase`` is backward, or forward's phase in its step.

        Raises:
            UnsupportedError: there is no such layer any more; or a forward is repeated in backward.
        """
        layer = _layer_of(history)
        states = None if layer is None else self.of(layer)
        if states is None or not _has(layer, history):
            raise UnsupportedError(
                "a compiled graph records amaxes for a layer that is gone, or whose delayed state "
                "was replaced since its forward. Run forward again."
            )
        if phase == "backward":
            update_after_backward(states.backward)
        elif current_backward_pass() != NO_BACKWARD_PASS:
            raise UnsupportedError(
                f"{layer.label}: a compiled forward is recomputed in backward under delayed "
                f"scaling, whose scales have moved on since. Checkpoint the module uncompiled, by "
                f"fp8core.checkpoint, or use a recipe without state, such as Float8CurrentScaling."
            )
        else:
            touch(states.forward, states.backward, self._request.group, phase)


def graph_states(number: int) -> GraphStates:
    """Return the states of that number."""
    return _states[number]


def add_layer(layer: Any) -> None:
    """Have graphs find ``layer``, which has the buffers of a delayed state, or is about to."""
    with _layers_lock:
        _layers.add(layer)


def _has(layer: Any, history: torch.Tensor) -> bool:
    address, buffers = history.data_ptr(), layer._buffers
    for name in _HISTORIES:  # of each pass of each layer: without a generator
        buffer = buffers.get(name)
        if buffer is not None and buffer.data_ptr() == address:
            return True
    return False


def _histories_of(layer: Any) -> list[torch.Tensor]:
    buffers = map(layer._buffers.get, _HISTORIES)  # another thread may reset the layer
    return [buffer for buffer in buffers if buffer is not None]


def _layer_of(history: torch.Tensor) -> Any:
    """Return the layer that has the buffer ``history``; None if there is none."""
    global _by_address
    address = history.data_ptr()
    layer = _by_address.get(address)
    if layer is not None and _has(layer, history):
        return layer
    with _layers_lock:
        layers = list(_layers)
    addresses = weakref.WeakValueDictionary(  # anew, as buffers move with their layers
        {buffer.data_ptr(): layer for layer in layers for buffer in _histories_of(layer)}
    )
    _by_address = addresses
    return addresses.get(address)


_SCHEMA = "(int[] states, str phase, Tensor[] amax_histories, Tensor[] scales) -> Tensor[]"
_TAGS = (torch.Tag.cudagraph_unsafe,)  # each replay has to call it


def _empty_scales(
    states: list[int], phase: str, amax_histories: Tensors, scales: Tensors
) -> list[torch.Tensor]:
    return [torch.empty_like(scale) for scale in scales]


@define(_SCHEMA, _empty_scales, tags=_TAGS)
def _delayed_scale(
    states: list[int], phase: str, amax_histories: Tensors, scales: Tensors
) -> list[torch.Tensor]:
    for number, history in zip(states, amax_histories, strict=True):
        _states[number].note(history, phase)
        phase = "step" if phase == "begin" else phase
    return [*foreach_mul(scales, 1.0)]  # copies, in one kernel


# The same after the update of an earlier step in the graph, and before the next one.
_scale_in_step = define(_SCHEMA, _empty_scales, name="scale_in_step", tags=_TAGS, is_ordered=True)(
    implementation("delayed_scale")
)


# Ordered, as the end of a step in the graph reads what it writes.
@define(
    "(Tensor output, Tensor source, Tensor[] targets, int entry) -> ()",
    lambda output, source, targets, entry: None,
    is_ordered=True,
)
def _follow_amax(
    output: torch.Tensor, source: torch.Tensor, targets: list[torch.Tensor], entry: int
) -> None:
    column = slice(entry, entry + 1)
    rows = [first_row(target, column) for target in targets]  # whose writes torch does not count
    copy_all(rows, [first_row(source, column)] * len(rows))


def follow_amax(output: torch.Tensor, buffers: Sequence[Any], groups: Sequence[Followers]) -> None:
    """Put into a graph that layers record the amax of the first of their group, when ``output`` has
    been computed; ``buffers`` are those of several layers, one after the other."""
    histories = buffers[1 :: len(STATE_BUFFERS)]
    for (first, *followers), entry in groups:
        targets = [histories[at] for at in followers]
        _follow_amax(output.detach(), histories[first], targets, entry)


def _note(states: Sequence[GraphState]) -> Sequence[torch.Tensor]:
    """Put into a graph what notes states when the graph runs, as of
    :class:`~fp8core.tensors.delayed_state.GraphState`."""
    phase = states[0].phase
    operator = _scale_in_step if phase in ("begin", "step") else _delayed_scale
    numbers, histories = [s.number for s in states], [s.amax_history for s in states]
    noted: list[torch.Tensor] = operator(numbers, phase, histories, [s.stored for s in states])
    return noted


def _note_in_backward(states: Sequence[GraphState]) -> Sequence[torch.Tensor]:
    with left_to_backward():
        return _note(states)
