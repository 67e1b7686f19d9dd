"""The delayed states of a layer, and where its tensors find their slots in them."""

from __future__ import annotations

from dataclasses import dataclass

from fp8core.collectives import Communicator
from fp8core.recipe.plan import SlotNames
from fp8core.tensors.quantizer import Slot
from fp8core.tensors.scaling import DelayedState

__all__ = ["LayerStates"]


@dataclass(frozen=True, slots=True)
class LayerStates:
    """The forward and the backward state of a layer, whose slots are those of ``names``.

    ``records_forward``, ``records_backward``: amaxes are recorded in the forward pass, and in the
    backward pass. A layer that computes its plan several times has as many sets of these slots, one
    after the other. This is the view of ``count`` of them from set ``first`` on: those of one
    linear in a chain of several, one set a group.
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
