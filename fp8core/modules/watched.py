"""The layers that a monitor watches: nothing may replace or convert them until it is closed."""

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
    """Reserve ``layers``, by their paths, for one monitor.

    Raises:
        OperandError: another monitor has reserved one of them; then none is reserved.
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
    """Undo :func:`claim`."""
    with _lock:
        _watched.difference_update(layers)


def refuse_watched(asked: str, layers: Mapping[torch.nn.Module, str]) -> None:
    """Refuse the call ``asked`` if a monitor watches one of ``layers``, a mapping to their names.

    Raises:
        OperandError: a monitor watches one.
    """
    taken = [repr(name) for layer, name in layers.items() if layer in _watched]
    if taken:
        raise OperandError(f"{asked}: a monitor watches {some(taken)}. Close the monitor first.")
