"""Where a step spends its time: functions of the host, and kernels of the device."""

from __future__ import annotations

import cProfile
import pstats
import sys
from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

import torch

from tests.benchmarks.measuring.device import Device

__all__ = ["Kernel", "kernels_of", "print_functions", "print_kernels"]

PROFILED_STEPS = 5
SHOWN_FUNCTIONS, SHOWN_KERNELS = 40, 25


class Kernel(NamedTuple):
    """All launches of one kernel in a step."""

    name: str
    launches: float
    us: float


def print_functions(step: Callable[[], object], warm_up: int, calls: int) -> None:
    """Print the functions with the most time of their own in ``step``."""
    for _ in range(warm_up):
        step()
    profiler = cProfile.Profile()
    # In the calling thread, which alone is profiled.
    with torch.autograd.set_multithreading_enabled(False):
        profiler.enable()
        for _ in range(calls):
            step()
        profiler.disable()
    pstats.Stats(profiler, stream=sys.stdout).sort_stats("tottime").print_stats(SHOWN_FUNCTIONS)


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
        us = event.self_device_time_total if is_gpu else event.self_cpu_time_total
        if us > 0:
            totals[event.key][0] += event.count / PROFILED_STEPS
            totals[event.key][1] += us / PROFILED_STEPS
    kernels = [Kernel(name, launches, us) for name, (launches, us) in totals.items()]
    return sorted(kernels, key=lambda kernel: -kernel.us)


def print_kernels(name: str, kernels: list[Kernel]) -> None:
    """Print the longest kernels of contestant ``name``, and how many there are."""
    launches, us = sum(k.launches for k in kernels), sum(k.us for k in kernels)
    print(f"  {name}: {launches:.0f} launches, {us:.0f} us of kernels", flush=True)
    for kernel in kernels[:SHOWN_KERNELS]:
        print(f"    {kernel.us:9.1f} us {kernel.launches:5.1f} x {kernel.name[:110]}")
