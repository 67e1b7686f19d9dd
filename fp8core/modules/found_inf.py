"""``found_inf``: whether a model's casts met NaN or inf, as a number on the device.

A cast to FP8 or FP4 hides them: inf becomes the largest value, and formats without NaN make a
number of it. So the casts count them, in tensors of the device that only ever grow: who wants to
know whether there were new ones remembers what they were, and nobody waits to find out.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch

from fp8core.errors import OperandError
from fp8core.modules.base import LowPrecisionModule
from fp8core.torch_ops import counted

__all__ = [
    "Counts",
    "clear_found_inf",
    "device_of",
    "differ",
    "found_inf",
    "layers_of",
    "read_counts",
]


class _Counts(NamedTuple):
    """What ``counters`` of one device were at some time: ``values`` int64 ``[n, 2]``, first what
    calls that record gradients counted, then what others did.

    The last counter is that of casts of no layer, if there is one.
    """

    counters: Sequence[torch.Tensor]
    values: torch.Tensor


Counts: TypeAlias = "dict[torch.device, _Counts]"

_remembered: weakref.WeakKeyDictionary[torch.nn.Module, Counts] = weakref.WeakKeyDictionary()


def found_inf(model: torch.nn.Module) -> torch.Tensor:
    """Return 1.0 if a cast of ``model`` met NaN or inf since :func:`clear_found_inf`, else 0.0.

    A float32 scalar on the device, which nobody waits for: on the model's accelerator, on the first
    one if there are several. Inputs, weights and gradients of all layers count, forward and
    backward, with gradients or without; layers in high precision cast nothing. Casts in graphs of
    torch.compile and torch.export, and those that write a quantized parameter, are counted by
    device: they make it 1.0 for every model.

    Raises:
        OperandError: ``model`` has no layer of fp8core.
    """
    now = read_counts(layers_of(model, "found_inf"))
    return differ(now, _remembered.get(model, {}), device_of(model, now))


def clear_found_inf(model: torch.nn.Module) -> None:
    """Forget what casts of ``model`` met: :func:`found_inf` of it is 0.0 until they meet more.

    Of this very module: what it says of another one that has the same layers does not change.

    Raises:
        OperandError: ``model`` has no layer of fp8core.
    """
    _remembered[model] = read_counts(layers_of(model, "clear_found_inf"))


def layers_of(model: torch.nn.Module, asked: str) -> list[LowPrecisionModule]:
    """Return the layers of ``model``.

    Raises:
        OperandError: there is none.
    """
    found = [own for own in model.modules() if isinstance(own, LowPrecisionModule)]
    if not found:
        raise OperandError(
            f"{asked}: {type(model).__name__} has no layer of fp8core, so no cast counts NaN and "
            f"inf. Pass the model whose layers fp8core made or converted."
        )
    return found


def read_counts(layers: Sequence[LowPrecisionModule]) -> Counts:
    """Return what ``layers``, and casts of no layer, have counted so far."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for layer in layers:
        for device, counter in layer._bindings.nonfinite.items():
            by_device.setdefault(device, []).append(counter)
    for device, counter in counted.counters().items():
        by_device.setdefault(device, []).append(counter)
    return {device: _Counts(own, torch.stack(own)) for device, own in by_device.items()}


def differ(
    now: Counts, before: Counts, to: torch.device, *, in_training: bool = False
) -> torch.Tensor:
    """Return 1.0 if something was counted since ``before``, else 0.0; a float32 scalar on ``to``.

    ``in_training``: by calls that record gradients, or casts of no layer.
    """
    found = []
    for device, own in now.items():
        changed = own.values != _as_it_was(own, before.get(device))
        changed = changed[:, 0] if in_training else changed
        # On the CPU it could be read before it is there.
        met = changed.any().to(torch.float32).to(to, non_blocking=to.type != "cpu")
        found.append(met)
    return torch.stack(found).amax() if found else torch.zeros((), device=to)


def _as_it_was(now: _Counts, before: _Counts | None) -> torch.Tensor:
    """Return what the counters of ``now`` were ``before``: 0 where they are newer."""
    if before is None:
        return torch.zeros_like(now.values)
    if [*map(id, now.counters)] == [*map(id, before.counters)]:
        return before.values
    rows = {id(own): row for own, row in zip(before.counters, before.values, strict=True)}
    zeros = before.values.new_zeros(2)
    return torch.stack([rows.get(id(own), zeros) for own in now.counters])


def device_of(model: torch.nn.Module, now: Counts) -> torch.device:
    """Return where to say it: on an accelerator that casts ran on, else where the model is."""
    places = [*now, *(own.device for own in model.parameters())]
    there = (own for own in places if own.type not in ("cpu", "meta"))
    return next(there, torch.device("cpu"))
