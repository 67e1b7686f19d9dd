"""How many non-finite elements casts outside any layer have met, by device.

A captured graph is shared by all layers of a shape, and torch may move it, replay it or load it
elsewhere, so it has no layer to count for. Its casts add to the counter of their device instead, a
side effect that torch does not see: no result depends on it, and a cast that torch drops casts
nothing. The casts that write a quantized parameter or a KV cache count there too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from fp8core.torch_ops.capture import in_plain_mode, is_faked
from fp8core.torch_ops.private import without_modes

# Both counters, and a view of each, as each cast of a graph asks for one.
_counters: dict[torch.device, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
_writes_count = False
_lock = threading.Lock()


def ask() -> None:
    """Have writes of quantized parameters and of KV caches count, too."""
    global _writes_count
    _writes_count = True


def counter_of_writes(device: torch.device, *, in_training: bool = True) -> torch.Tensor | None:
    """Return the counter of casts on ``device`` outside any layer, int64 ``[1]``; None where nobody
    has asked, and under FakeTensorMode. Not ``in_training`` are casts that no gradient passes."""
    if not _writes_count or is_faked():
        return None
    return counter_of(device) if in_training else _counters_of(device)[2]


def new_counter(device: torch.device) -> torch.Tensor:
    """Return int64 zeros ``[2]`` on ``device``, real ones even while torch traces.

    Entry 0 is for calls that record gradients, and for those of which that is unknown. Entry 1 is
    for the other calls.
    """
    with without_modes():
        return in_plain_mode(partial(torch.zeros, 2, dtype=torch.int64, device=device))


def counter_of(device: torch.device) -> torch.Tensor:
    """Return the counter of casts on ``device`` outside any layer, int64 ``[1]``; it only grows."""
    return _counters_of(device)[1]


def _counters_of(device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the counters of :func:`new_counter` for casts on ``device`` outside any layer, both
    and each alone."""
    counters = _counters.get(device)
    if counters is None:
        with _lock:
            counters = _counters.get(device)
            if counters is None:
                both = new_counter(device)
                with without_modes():
                    entries = in_plain_mode(lambda: (both[:1], both[1:]))
                counters = _counters[device] = both, *entries
    return counters


def counters() -> dict[torch.device, torch.Tensor]:
    """Return the counters of casts outside any layer, int64 ``[2]``, by device."""
    return {device: both for device, (both, *_) in _counters.items()}


def counting(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return the cast ``run`` of a backend that counts no NaN and inf, with ``nonfinite_out``."""

    def counted(
        x: torch.Tensor,
        *groups: torch.Tensor,
        nonfinite_out: torch.Tensor | None = None,
        **keywords: Any,
    ) -> Any:
        if nonfinite_out is not None:
            is_finite = x.isfinite()
            if groups:  # rows behind the last one belong to none
                end = groups[0].to(x.device).amax()
                is_finite |= (torch.arange(len(x), device=x.device) >= end)[:, None]
            nonfinite_out += x.numel() - is_finite.sum()
        return run(x, *groups, **keywords)

    return counted


def run_counted(
    run: Callable[..., Any],
    arguments: Sequence[Any],
    keywords: dict[str, Any],
    nonfinite: torch.Tensor | None,
    device: torch.device,
) -> tuple[Any, torch.Tensor | None]:
    """Return the result of the cast ``run``, and ``nonfinite`` plus its count as a new tensor."""
    total = counter_of(device)
    if nonfinite is None:
        return run(*arguments, **keywords, nonfinite_out=total), None
    new = nonfinite.clone()
    result = run(*arguments, **keywords, nonfinite_out=new)
    total += new - nonfinite
    return result, new
