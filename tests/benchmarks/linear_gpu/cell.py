"""One cell: every contestant that is installed at one size, in one process."""

from __future__ import annotations

import gc
import importlib.metadata
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date
from typing import Any

import torch

from tests.benchmarks.linear_gpu import timing
from tests.benchmarks.linear_gpu.contestants import (
    CONTESTANTS,
    LIBRARIES,
    SIZES,
    Contestant,
    Data,
    make_data,
    stepper,
)

WARM_UP, PROFILED_CALLS, PROFILE_SECONDS = 0.4, 10, 5.0
SECONDS_BETWEEN_SAMPLES = 2.0


@dataclass(slots=True)
class Entrant:
    """A contestant with all that its step and its graph read and write: held while they may run."""

    made: Contestant
    step: Callable[[], None]
    report: dict[str, Any]
    graph: torch.cuda.CUDAGraph | None = None


@dataclass(slots=True)
class Chip:
    """Samples of SM clock (MHz), power (W) and temperature (C) while contestants run untimed."""

    calls: timing.Calls
    rows: list[tuple[float, ...]] = field(default_factory=list)
    last: float = 0.0

    def sample(self) -> None:
        """Ask nvidia-smi, at most once in some seconds, while the device is busy."""
        if time.perf_counter() - self.last < SECONDS_BETWEEN_SAMPLES:
            return
        uuid = torch.cuda.get_device_properties(0).uuid
        command = ["nvidia-smi", "-i", f"GPU-{uuid}", "--format=csv,noheader,nounits"]
        command += ["--query-gpu=clocks.sm,power.draw,temperature.gpu"]
        asked = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        while asked.poll() is None:  # the calls' own mix, a turn of it at a time
            for call in self.calls.values():
                call()
            torch.cuda.synchronize()
        said = asked.communicate()[0].strip()
        if asked.returncode == 0:
            self.rows.append(tuple(float(word) for word in said.split(",")))
        self.last = time.perf_counter()

    def after_a_batch(self) -> None:
        """What no slice must hold: the sample, and Python's collection of cycles."""
        gc.collect()
        self.sample()

    def summary(self) -> dict[str, list[float]]:
        """Return least, median and most of each."""
        names = ("sm_clock_mhz", "power_w", "temperature_c")
        return {
            name: [min(column), statistics.median(column), max(column)]
            for name, column in zip(names, zip(*self.rows, strict=True), strict=False)
        }


def run_cell(size: str, seconds: float) -> dict[str, Any]:
    """Measure a cell in about ``seconds``, warming up and compiling included."""
    end_at = time.perf_counter() + seconds
    data = make_data(size)
    libraries = kept_by_libraries(data)
    entrants = enter(data)
    for entrant in entrants.values():
        entrant.graph = capture(entrant.step)
    steps: timing.Calls = {name: entrant.step for name, entrant in entrants.items()}
    replays: timing.Calls = {
        name: entrant.graph.replay
        for name, entrant in entrants.items()
        if entrant.graph is not None
    }
    chips = {"eager": Chip(steps), "graph": Chip(replays)}
    with without_collections():
        found = {"host": timing.host_us(steps, gc.collect)}
        left = end_at - time.perf_counter() - PROFILE_SECONDS
        found["graph"] = timing.graph_us(replays, left / 2, chips["graph"].after_a_batch)
        left = end_at - time.perf_counter() - PROFILE_SECONDS
        found["eager"] = timing.eager_us(steps, left, chips["eager"].after_a_batch)
    for name, entrant in entrants.items():
        for what, measured in found.items():
            record(entrant.report, what, measured.get(name, []))
        entrant.report["kernels"] = kernels_us(entrant.step)
    return {
        "size": size,
        "shape": SIZES[size],
        "seconds": seconds,
        "versions": versions(),
        "chip": {what: chip.summary() for what, chip in chips.items()},
        "kept by libraries": libraries,
        "contestants": {name: entrant.report for name, entrant in entrants.items()},
    }


def record(report: dict[str, Any], what: str, values: list[float]) -> None:
    """Add the summary of ``values`` under ``what``; null where there are none."""
    report[what] = None
    if values:
        found = timing.summarize(values)
        report[what] = found.median
        report[f"{what} quartiles"] = found.quartiles
        report[f"{what} range"] = found.range
        report[f"{what} turns"] = found.turns


def kept_by_libraries(data: Data) -> dict[str, float]:
    """Run a throwaway step of each library; return what each keeps afterwards, MiB.

    cuBLAS's and Transformer Engine's workspaces, say: else they would count for the contestant that
    happens to run first.
    """
    kept = {}
    for name, make in LIBRARIES.items():
        gc.collect()
        before = torch.cuda.memory_allocated()
        try:
            made = make(data)
        except ImportError:
            continue
        stepper(made, data)()
        torch.cuda.synchronize()
        del made
        gc.collect()
        kept[name] = (torch.cuda.memory_allocated() - before) / 2**20
    return kept


def enter(data: Data) -> dict[str, Entrant]:
    """Make and warm up every contestant, and measure what needs no turns."""
    entrants = {}
    for name, make in CONTESTANTS.items():
        gc.collect()
        own = data.weight.numel() * data.weight.element_size()
        before = torch.cuda.memory_allocated() + own  # the contestant's parameter
        try:
            made = make(data)
        except ImportError as error:
            print(f"{name}: {error}", flush=True)
            continue
        step = stepper(made, data)
        end = time.perf_counter() + WARM_UP
        step()
        torch.cuda.synchronize()
        while time.perf_counter() < end:
            step()
            torch.cuda.synchronize()
        report = {"memory": memory_mib(step, before), "error": errors(made, data)}
        made.weight.grad = None
        entrants[name] = Entrant(made, step, report)
        print(f"{name}: ready", flush=True)
    return entrants


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


def capture(step: Callable[[], None]) -> torch.cuda.CUDAGraph | None:
    """Return a graph of ``step``, or None where it cannot be captured."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            step()
    except RuntimeError as error:
        print(f"  not captured: {str(error).splitlines()[0][:120]}", flush=True)
        return None
    return graph


def kernels_us(step: Callable[[], None]) -> float:
    step()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(PROFILED_CALLS):
            step()
        torch.cuda.synchronize()
    total = sum(event.self_device_time_total for event in profile.key_averages())
    return total / PROFILED_CALLS


def errors(made: Contestant, data: Data) -> dict[str, float]:
    x = data.x.detach().requires_grad_()
    y = made.forward(x)
    made.weight.grad = None
    y.backward(data.grad)
    x32, w32, g32 = (tensor.float() for tensor in (data.x, data.weight, data.grad))
    exact = {"y": x32 @ w32.t(), "grad_input": g32 @ w32, "grad_weight": g32.t() @ x32}
    got = {"y": y, "grad_input": x.grad, "grad_weight": made.weight.grad}
    return {
        name: ((got[name].float() - want).norm() / want.norm()).item()
        for name, want in exact.items()
    }


def memory_mib(step: Callable[[], None], before: int) -> float:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def versions() -> dict[str, str]:
    found = {"device": torch.cuda.get_device_name(), "date": date.today().isoformat()}
    found |= {"torch": torch.__version__, "cuda": str(torch.version.cuda)}
    for package in ("torchao", "transformer_engine"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found
