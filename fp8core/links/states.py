"""Where a chain's tensors find their delayed scales: slots in the order of Transformer Engine."""

from __future__ import annotations

from dataclasses import dataclass

from fp8core.quantizer import Slot
from fp8core.scaling import DelayedState

__all__ = ["BACKWARD_SLOTS", "FORWARD_SLOTS", "LinearStates"]

FORWARD_SLOTS = 3
"""Slots of one GEMM in a forward state: input, weight, output."""

BACKWARD_SLOTS = 2
"""Slots of one GEMM in a backward state: grad_output, grad_input."""


@dataclass(frozen=True, slots=True)
class LinearStates:
    """The delayed states of a layer; ``is_recording``: amaxes are taken down.

    The slots of the chain's linears follow one another; ``first`` is the index of the linear's
    first GEMM, ``count`` the number of its GEMMs: 1, or one a group.
    """

    forward: DelayedState
    backward: DelayedState
    is_recording: bool = True
    first: int = 0
    count: int = 1

    def input(self) -> Slot:
        """Return the slots of the input: one, or one a group."""
        return self._slot(self.forward, FORWARD_SLOTS, 0)

    def weight(self, group: int) -> Slot:
        """Return the slot of a weight."""
        at = (self.first + group) * FORWARD_SLOTS + 1
        return self._at(self.forward, slice(at, at + 1))

    def grad_output(self) -> Slot:
        """Return the slots of grad_output: one, or one a group."""
        return self._slot(self.backward, BACKWARD_SLOTS, 0)

    def _slot(self, state: DelayedState, step: int, offset: int) -> Slot:
        start, end = self.first * step + offset, (self.first + self.count) * step
        return self._at(state, slice(start, end, step))

    def _at(self, state: DelayedState, where: slice) -> Slot:
        return Slot(state.scale[where], state.amax_history[0, where] if self.is_recording else None)
