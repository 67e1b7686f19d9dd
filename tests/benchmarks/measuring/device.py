"""Where contestants run: the GPU, or, to try a benchmark out, a CPU that is timed by its clock."""

from __future__ import annotations

import gc
import importlib.metadata
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date
from typing import Any

import torch

from fp8core.dispatch import plugins
from tests.benchmarks.measuring.turns import CUDA_CLOCK, Clock

__all__ = ["CUDA", "HOST", "Chip", "Device", "versions", "without_collections"]

SECONDS_BETWEEN_SAMPLES = 1.0
CAPTURED_AFTER = 2
"""Steps on the capturing stream before a capture: libraries make a stream's workspaces there."""


def _capture(step: Callable[[], object]) -> Callable[[], object] | None:
    """Return the replay of a graph of ``step``, or None where it cannot be captured."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(CAPTURED_AFTER):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            step()
    except RuntimeError as error:
        print(f"  not captured: {str(error).splitlines()[0][:120]}", flush=True)
        return None
    replay: Callable[[], object] = graph.replay
    return replay


@dataclass(frozen=True, slots=True)
class Device:
    """A device, the clock that times it, and the fp8core backend for it.

    ``capture(step)`` returns a call that replays the step without the host, or None;
    ``allocated()`` and ``peak()`` are bytes of its memory, ``forget_peak()`` begins anew.
    """

    torch_device: torch.device
    backend_name: str
    clock: Clock
    capture: Callable[[Callable[[], object]], Callable[[], object] | None]
    allocated: Callable[[], int]
    peak: Callable[[], int]
    forget_peak: Callable[[], None]

    def backend(self) -> Any:
        """Return fp8core's backend of the device."""
        registry = plugins.load()
        return registry.instance(registry.backends[self.backend_name])


CUDA = Device(
    torch.device("cuda", 0),
    "cuda",
    CUDA_CLOCK,
    _capture,
    torch.cuda.memory_allocated,
    torch.cuda.max_memory_allocated,
    torch.cuda.reset_peak_memory_stats,
)


class _HostEvent:
    """A moment of the host's clock, in place of a device's event."""

    def record(self) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, end: Any) -> float:
        milliseconds: float = (end.at - self.at) * 1e3
        return milliseconds


HOST = Device(
    torch.device("cpu"),
    "reference",
    Clock(_HostEvent, lambda: None),
    lambda step: step,
    lambda: 0,
    lambda: 0,
    lambda: None,
)
"""The CPU: a trial run of a benchmark's code, whose figures mean nothing."""


@dataclass(slots=True)
class Chip:
    """Samples of SM clock (MHz), power (W) and temperature (C), taken while the device is busy."""

    rows: list[tuple[float, ...]] = field(default_factory=list)
    _last: float = 0.0

    def sample(self) -> None:
        """Take one at most once a second; none where nvidia-ml-py is not installed."""
        if not torch.cuda.is_available() or time.perf_counter() - self._last < (
            SECONDS_BETWEEN_SAMPLES
        ):
            return
        self._last = time.perf_counter()
        try:
            row = torch.cuda.clock_rate(), torch.cuda.power_draw() / 1e3, torch.cuda.temperature()
        except (ModuleNotFoundError, RuntimeError) as error:
            print(f"  no clock and power: {error}", flush=True)
            self._last = float("inf")
            return
        self.rows.append(row)

    def summary(self) -> dict[str, list[float]]:
        """Return least, median and most of each; empty without samples."""
        names = ("sm_clock_mhz", "power_w", "temperature_c")
        columns = (sorted(column) for column in zip(*self.rows, strict=True))
        return {
            name: [column[0], column[len(column) // 2], column[-1]]
            for name, column in zip(names, columns, strict=False)
        }


@contextmanager
def without_collections() -> Iterator[None]:
    """Keep Python's collector from running in somebody's slice; what lives now it never visits."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def versions(*packages: str) -> dict[str, str]:
    """Return the device's name, the date, and the versions of torch and of ``packages``."""
    is_gpu = torch.cuda.is_available()
    found = {"device": torch.cuda.get_device_name() if is_gpu else "cpu"}
    found |= {"date": date.today().isoformat(), "torch": torch.__version__}
    found["cuda"] = str(torch.version.cuda)
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found
