"""Which layers a monitor watches: who would make something else of one has to wait for its end."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Mapping

import torch

from fp8core.errors import OperandError
from fp8core.reporting import some

__all__ = ["claim", "refuse_watched", "release"]

_watched: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
_lock = threading.Lock()


def claim(layers: Mapping[str, torch.nn.Module]) -> None:
    """Take ``layers``, by their paths, for one monitor.

    Raises:
        OperandError: one of them is another monitor's; then none is taken.
    """
    with _lock:
        taken = [repr(path) for path, layer in layers.items() if layer in _watched]
        if taken:
            raise OperandError(
                f"monitor: {some(taken)} of this model is monitored already. "
                f"Close the other monitor first."
            )
        _watched.update(layers.values())


def release(layers: Iterable[torch.nn.Module]) -> None:
    """Give back what :func:`claim` took."""
    with _lock:
        _watched.difference_update(layers)


def refuse_watched(asked: str, layers: Mapping[torch.nn.Module, str]) -> None:
    """Refuse ``asked``, a call as the user wrote it, if a monitor watches one of ``layers``, which
    have their names as values.

    Raises:
        OperandError: a monitor does.
    """
    taken = [repr(name) for layer, name in layers.items() if layer in _watched]
    if taken:
        raise OperandError(f"{asked}: a monitor watches {some(taken)}. Close the monitor first.")
