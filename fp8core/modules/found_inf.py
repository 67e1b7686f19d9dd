"""``found_inf``: whether a model's casts met NaN or inf, as a number on the device.

A cast to FP8 or FP4 hides them: inf becomes the largest value, and a format without NaN turns NaN
into a number. So the casts count them in tensors on the device, which only ever grow. A caller who
compares two copies of the counters learns whether there were new ones, without a wait for the
device.
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
    """The values of one device's ``counters`` at some time, int64 ``[n, 2]``.

    Column 0 counts in calls that record gradients, column 1 in other calls. The last counter is
    that of casts of no layer, if there is one.
    """

    counters: Sequence[torch.Tensor]
    values: torch.Tensor


Counts: TypeAlias = "dict[torch.device, _Counts]"

_remembered: weakref.WeakKeyDictionary[torch.nn.Module, Counts] = weakref.WeakKeyDictionary()


def found_inf(model: torch.nn.Module) -> torch.Tensor:
    """Return 1.0 if a cast of ``model`` met NaN or inf since :func:`clear_found_inf`, else 0.0.

    A float32 scalar on the model's accelerator, the first one if there are several; the host does
    not wait for it. Casts of inputs, weights and gradients of all layers count, forward and
    backward, with gradients or without; layers in high precision have no casts. Casts in graphs of
    torch.compile and torch.export, and those that write a quantized parameter, are counted by
    device: they turn the result to 1.0 for every model.

    Raises:
        OperandError: ``model`` has no layer of fp8core.
    """
    now = read_counts(layers_of(model, "found_inf"))
    return differ(now, _remembered.get(model, {}), device_of(model, now))


def clear_found_inf(model: torch.nn.Module) -> None:
    """Reset :func:`found_inf` of ``model`` to 0.0, until its casts meet NaN or inf again.

    The result for another module with the same layers does not change.

    Raises:
        OperandError: ``model`` has no layer of fp8core.
    """
    _remembered[model] = read_counts(layers_of(model, "clear_found_inf"))


def layers_of(model: torch.nn.Module, asked: str) -> list[LowPrecisionModule]:
    """Return the layers of fp8core in ``model``.

    Raises:
        OperandError: there is none.
    """
    layers = [module for module in model.modules() if isinstance(module, LowPrecisionModule)]
    if not layers:
        raise OperandError(
            f"{asked}: {type(model).__name__} has no layer of fp8core, so no cast counts NaN and "
            f"inf. Pass a model with layers of fp8core, built with them or converted."
        )
    return layers


def read_counts(layers: Sequence[LowPrecisionModule]) -> Counts:
    """Return a copy of the counters of ``layers``, and of casts of no layer."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for layer in layers:
        for device, counter in layer._bindings.nonfinite.items():
            by_device.setdefault(device, []).append(counter)
    for device, counter in counted.counters().items():
        by_device.setdefault(device, []).append(counter)
    return {device: _Counts(counts, torch.stack(counts)) for device, counts in by_device.items()}


def differ(
    now: Counts, before: Counts, to: torch.device, *, in_training: bool = False
) -> torch.Tensor:
    """Return 1.0 if a counter has grown since ``before``, else 0.0; a float32 scalar on ``to``.

    ``in_training`` looks at calls that record gradients, and casts of no layer, alone.
    """
    flags = []
    for device, counts in now.items():
        changed = counts.values != _earlier_values(counts, before.get(device))
        changed = changed[:, 0] if in_training else changed
        # A copy to the CPU waits, as it could be read before it arrives.
        flags.append(changed.any().to(torch.float32).to(to, non_blocking=to.type != "cpu"))
    return torch.stack(flags).amax() if flags else torch.zeros((), device=to)


def _earlier_values(now: _Counts, before: _Counts | None) -> torch.Tensor:
    """Return the values in ``before`` of the counters of ``now``: 0 for newer counters."""
    if before is None:
        return torch.zeros_like(now.values)
    if [*map(id, now.counters)] == [*map(id, before.counters)]:
        return before.values
    rows = {id(counter): row for counter, row in zip(before.counters, before.values, strict=True)}
    zeros = before.values.new_zeros(2)
    return torch.stack([rows.get(id(counter), zeros) for counter in now.counters])


def device_of(model: torch.nn.Module, now: Counts) -> torch.device:
    """Return the device for the answer: an accelerator of the casts or the model, else the CPU."""
    devices = [*now, *(parameter.device for parameter in model.parameters())]
    accelerators = (device for device in devices if device.type not in ("cpu", "meta"))
    return next(accelerators, torch.device("cpu"))
