"""What casts of no layer count: their non-finite elements, in one number a device.

A captured graph is shared by all layers of a shape, and torch may move it, replay it or load it
elsewhere, so it knows no layer. Its casts add to the number of their device instead, as a side
effect that torch does not see: no result depends on it, and where torch drops a cast nothing is
hidden. So do the casts that write a quantized parameter.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fp8core.torch_ops.private import without_modes

__all__ = ["counter_of", "counters", "new_counter", "run_counted"]

_counters: dict[torch.device, torch.Tensor] = {}
_lock = threading.Lock()


def new_counter(device: torch.device) -> torch.Tensor:
    """Return int64 zeros ``[2]`` on ``device``, real ones even while torch traces.

    Entry 0 is for training: for calls that record gradients, and where nobody can tell. Entry 1 is
    for the other calls.
    """
    with without_modes(), torch.inference_mode(False):
        return torch.zeros(2, dtype=torch.int64, device=device)


def counter_of(device: torch.device) -> torch.Tensor:
    """Return where such casts on ``device`` count, int64 ``[1]``; it only grows."""
    found = _counters.get(device)
    if found is None:
        with _lock:
            found = _counters.get(device)
            if found is None:
                found = _counters[device] = new_counter(device)
    return found[:1]


def counters() -> dict[torch.device, torch.Tensor]:
    """Return the counters of casts of no layer, int64 ``[2]``, by device."""
    return dict(_counters)


def run_counted(
    run: Callable[..., Any],
    arguments: Sequence[Any],
    keywords: dict[str, Any],
    nonfinite: torch.Tensor | None,
    device: torch.device,
) -> tuple[Any, torch.Tensor | None]:
    """Return what the cast ``run`` makes, and what ``nonfinite`` becomes, in a new tensor."""
    total = counter_of(device)
    if nonfinite is None:
        return run(*arguments, **keywords, nonfinite_out=total), None
    new = nonfinite.clone()
    made = run(*arguments, **keywords, nonfinite_out=new)
    total += new - nonfinite
    return made, new
