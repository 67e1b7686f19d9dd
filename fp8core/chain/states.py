"""Where a chain's tensors find their delayed scales: slots in the order of Transformer Engine."""

from __future__ import annotations

from dataclasses import dataclass

from fp8core.tensors.quantizer import Slot
from fp8core.tensors.scaling import DelayedState

__all__ = ["BACKWARD_SLOTS", "FORWARD_SLOTS", "LinearStates"]

FORWARD_SLOTS = 3
"""Slots of one GEMM in a forward state: input, weight, output."""

BACKWARD_SLOTS = 2
"""Slots of one GEMM in a backward state: grad_output, grad_input."""


@dataclass(frozen=True, slots=True)
class LinearStates:
    """The delayed states of a layer; ``records_forward``, ``records_backward``: amaxes are taken
    down on the way forward, and back.

    The slots of the chain's linears follow one another; ``first`` is the index of the linear's
    first GEMM, ``count`` the number of its GEMMs: 1, or one a group.
    """

    forward: DelayedState
    backward: DelayedState
    records_forward: bool = True
    records_backward: bool = True
    first: int = 0
    count: int = 1

    def input(self) -> Slot:
        """Return the slots of the input: one, or one a group."""
        return self._slots(self.forward, FORWARD_SLOTS, self.records_forward)

    def weight(self, group: int) -> Slot:
        """Return the slot of a weight."""
        at = (self.first + group) * FORWARD_SLOTS + 1
        return _slot(self.forward, slice(at, at + 1), self.records_forward)

    def grad_output(self) -> Slot:
        """Return the slots of grad_output: one, or one a group."""
        return self._slots(self.backward, BACKWARD_SLOTS, self.records_backward)

    def _slots(self, state: DelayedState, step: int, is_recording: bool) -> Slot:
        """Return the first slot of each of the linear's GEMMs."""
        end = (self.first + self.count) * step
        return _slot(state, slice(self.first * step, end, step), is_recording)


def _slot(state: DelayedState, where: slice, is_recording: bool) -> Slot:
    return Slot(state.scale[where], state.amax_history[0, where] if is_recording else None)
