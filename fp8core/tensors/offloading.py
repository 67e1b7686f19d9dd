"""Told by layers, for an offload context around them: which saved tensors are codes of weights.

Such codes stay on the device: a weight that is kept quantized, or stored so, holds them anyway.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeAlias

import torch

__all__ = ["Note", "is_noting", "note_weight", "set_note"]

Note: TypeAlias = Callable[..., None]


class _Thread(threading.local):
    note: Note | None = None


_thread = _Thread()


def set_note(note: Note | None) -> Note | None:
    """Call ``note`` with the codes and scales of the weights that this thread's layers save; return
    what was called before."""
    before, _thread.note = _thread.note, note
    return before


def is_noting() -> bool:
    """Say whether this thread's layers are asked for their weights."""
    return _thread.note is not None


def note_weight(operand: tuple[object, ...]) -> None:
    """Say that the tensors of ``operand``, or of a tuple of operands, are those of a weight."""
    note = _thread.note
    if note is None:
        return
    for part in operand:
        if isinstance(part, tuple):
            note_weight(part)
        elif isinstance(part, torch.Tensor):
            note(part)
