"""Recomputes that a framework runs itself, between ``activation_recompute_forward`` contexts."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from fp8core.context.recompute import Tape, TapeEntry, current, playing
from fp8core.errors import OperandError
from fp8core.tensors.scaling import DelayedState

__all__ = [
    "activation_recompute_forward",
    "in_fp8_activation_recompute_phase",
    "is_fp8_activation_recompute_enabled",
]


class _Recorded(NamedTuple):
    """A layer's forward; the layer is held so that no other object gets its id."""

    entry: TapeEntry
    layer: torch.nn.Module


# The forwards of each layer that no recompute has repeated yet, oldest first. A framework repeats
# its layers in any order, but the microbatches of one layer in theirs.
_waiting: dict[int, deque[_Recorded]] = {}
_waiting_lock = threading.Lock()


class _Forward(Tape):
    """Records layers one by one, for recomputes in another order."""

    def visit(
        self,
        label: str,
        key: tuple[object, ...],
        layer: torch.nn.Module,
        state: DelayedState | None,
        first_microbatch: bool | None = None,
    ) -> TapeEntry:
        """Record one layer's forward."""
        entry = super().visit(label, key, layer, state, first_microbatch)
        with _waiting_lock:
            queue = _waiting.setdefault(id(layer), deque())
            queue.append(_Recorded(entry, layer))
        return entry


class _Repeat(Tape):
    """Hands each layer the oldest of its forwards that was not repeated yet."""

    def __init__(self, outer: Tape | None) -> None:
        super().__init__(True, outer)
        self.replay()

    def visit(
        self,
        label: str,
        key: tuple[object, ...],
        layer: torch.nn.Module,
        state: DelayedState | None,
        first_microbatch: bool | None = None,
    ) -> TapeEntry:
        """Return the record of the forward that this call repeats.

        Raises:
            OperandError: there is none, or it ran with another recipe, dtype or weight.
        """
        with _waiting_lock:
            queue = _waiting.get(id(layer))
            if not queue:
                raise OperandError(
                    f"recompute of {label}: its forward did not run within "
                    f"activation_recompute_forward(recompute_phase=False), or was repeated already."
                )
            entry = queue.popleft().entry
            if not queue:
                del _waiting[id(layer)]
        self.expect(entry)
        return super().visit(label, key, layer, state, first_microbatch)


class _Phase(threading.local):
    is_enabled = False
    is_recompute = False


_phase = _Phase()


@contextmanager
def activation_recompute_forward(
    activation_recompute: bool = False, recompute_phase: bool = False
) -> Iterator[None]:
    """Have layers remember their forward, or, with ``recompute_phase``, repeat it exactly.

    A repeat has the delayed scales and stored weights of the forward, and records no amax. Forwards
    of one layer are repeated in the order in which they ran.
    """
    before = _phase.is_enabled, _phase.is_recompute
    _phase.is_enabled = activation_recompute
    _phase.is_recompute = activation_recompute and recompute_phase
    try:
        if not activation_recompute:
            yield
            return
        tape = _Repeat(current()) if recompute_phase else _Forward(True, current())
        with playing(tape):
            yield
    finally:
        _phase.is_enabled, _phase.is_recompute = before


def is_fp8_activation_recompute_enabled() -> bool:
    """Return whether the calling thread is in :func:`activation_recompute_forward`."""
    return _phase.is_enabled


def in_fp8_activation_recompute_phase() -> bool:
    """Return whether it is in the recompute."""
    return _phase.is_recompute
