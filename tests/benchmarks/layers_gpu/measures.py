"""What needs no turns: memory, bytes held for backward, errors, and the kernels of a step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from tests.benchmarks.layers_gpu.contestants import Contestant
from tests.benchmarks.layers_gpu.data import Data
from tests.benchmarks.measuring.contest import MIB
from tests.benchmarks.measuring.device import Device

__all__ = ["Held", "Kernel", "held_and_errors", "kernels_of", "weight_copies_mib"]

PROFILED_STEPS = 5


class Kernel(NamedTuple):
    """All launches of one kernel in a step."""

    name: str
    launches: float
    us: float


class Held(NamedTuple):
    """What a forward leaves for backward, MiB without the output; and relative errors."""

    held_mib: float
    errors: dict[str, float]


def held_and_errors(
    contestant: Contestant, data: Data, exact: dict[str, torch.Tensor], device: Device
) -> Held:
    """Run a step; measure what it holds in its middle, and its results against ``exact``.

    An error is the Frobenius norm of the difference over that of the exact result.
    """
    x = data.x.detach().requires_grad_()
    for parameter in contestant.parameters.values():
        parameter.grad = None
    held, y = _held_bytes(contestant, x, device)
    y.backward(data.grad)
    results = {"y": y.detach(), "x": x.grad}
    results |= {name: parameter.grad for name, parameter in contestant.parameters.items()}
    for parameter in contestant.parameters.values():
        parameter.grad = None
    errors = {}
    for name, result in results.items():
        assert result is not None
        wanted = exact[name]
        errors[name] = ((result.float() - wanted).norm() / wanted.norm()).item()
    return Held(held / MIB, errors)


def weight_copies_mib(contestant: Contestant, data: Data, held_mib: float, device: Device) -> float:
    """Return the part of ``held_mib`` that does not grow with the rows of the input.

    It is that of a forward of half as many rows, twice, less the whole: copies of weights in the
    main, also states and workspaces of the layer.
    """
    x = data.x[: data.x.shape[0] // 2].detach().requires_grad_()
    contestant.forward(x).backward(data.grad[: x.shape[0]])  # first: what it makes once is made
    for parameter in contestant.parameters.values():
        parameter.grad = None
    x.grad = None
    half, y = _held_bytes(contestant, x, device)
    del y
    return 2 * half / MIB - held_mib


def _held_bytes(
    contestant: Contestant, x: torch.Tensor, device: Device
) -> tuple[int, torch.Tensor]:
    """Run forward; return the bytes it leaves besides its output, and the output."""
    device.clock.synchronize()
    before = device.allocated()
    y = contestant.forward(x)
    device.clock.synchronize()
    return device.allocated() - before - y.numel() * y.element_size(), y


def kernels_of(step: Callable[[], object], device: Device) -> list[Kernel]:
    """Return the kernels of a step, the longest in total first (torch.profiler)."""
    step()
    device.clock.synchronize()
    activity = torch.profiler.ProfilerActivity
    is_gpu = device.torch_device.type == "cuda"
    activities = [activity.CUDA if is_gpu else activity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(PROFILED_STEPS):
            step()
        device.clock.synchronize()
    totals: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    for event in profile.key_averages():
        us = _own_us(event, is_gpu)
        if us > 0:
            totals[event.key][0] += event.count / PROFILED_STEPS
            totals[event.key][1] += us / PROFILED_STEPS
    kernels = [Kernel(name, launches, us) for name, (launches, us) in totals.items()]
    return sorted(kernels, key=lambda kernel: -kernel.us)


def _own_us(event: Any, is_gpu: bool) -> float:
    us: float = event.self_device_time_total if is_gpu else event.self_cpu_time_total
    return us
