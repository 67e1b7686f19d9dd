"""One process: a layer at a size, with every contestant of the recipes that are asked for.

``python -m tests.benchmarks.layers_gpu.cell JSON`` is what the benchmark's command starts. It
imports everything, waits for a line on its input, so that imports take no time of the device, and
measures. An input that ends without a line ends the process.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tests.benchmarks.layers_gpu import contestants, limits
from tests.benchmarks.layers_gpu.cases import FIGURES, FILE, KERNELS, Job
from tests.benchmarks.layers_gpu.contestants import (
    COMPILED_BF16,
    CONTESTANTS,
    PEERS,
    Contestant,
)
from tests.benchmarks.layers_gpu.data import Data, exact_results, make_data
from tests.benchmarks.layers_gpu.transformer import attention_by_cudnn, use_cudnn_of_torch
from tests.benchmarks.measuring import turns
from tests.benchmarks.measuring.command import DONE
from tests.benchmarks.measuring.contest import MIB, Contest
from tests.benchmarks.measuring.device import CUDA, Device
from tests.benchmarks.measuring.profiles import kernels_of, print_kernels
from tests.benchmarks.measuring.records import Run

__all__ = ["contestants_of", "run_cell"]

WARM_UP_STEPS = 3
"""The first compiles, allocates and times algorithms; the second is the first with delayed scales
that follow from the data; after the third the gradients' scales have settled as well."""
_SAMPLES = {"torch": "torch bf16", "te": "te current", "fp8core": "fp8core current"}
_MODULES = {"te": "transformer_engine.pytorch", "torchao": "torchao.float8"}


def contestants_of(recipes: Sequence[str], libraries: Sequence[str]) -> tuple[str, ...]:
    """Return the contestants of ``recipes`` that are of ``libraries``, in the order of the table.

    Each recipe brings fp8core's layer and its peers.
    """
    wanted = {f"fp8core {name}" for name in recipes}
    wanted |= {peer for name in recipes for peer in PEERS[name]}
    return tuple(name for name in CONTESTANTS if name in wanted and _library(name) in libraries)


def _library(name: str) -> str:
    return name.split()[0]


@dataclass(slots=True)
class Entrant:
    """A contestant with all that its step and its graph read and write: held while they may run."""

    contestant: Contestant
    step: Callable[[], None]
    replay: Callable[[], object] | None = None


@dataclass(slots=True)
class Cell:
    """The state of one process: its job, its contest, and the file it writes."""

    job: Job
    contest: Contest
    run: Run
    seconds: dict[str, float] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, job: Job, device: Device) -> Cell:
        """Return the state in which a job begins."""
        layer, size = job.case
        return cls(job, Contest(device), Run(Path(job.out), FILE, {"layer": layer, "size": size}))

    @property
    def device(self) -> Device:
        """Where the contestants run."""
        return self.contest.device

    def write_done(self, measure: str) -> None:
        """Add the record that a measure was taken."""
        job = self.job
        self.run.write(DONE, done=measure, recipes=job.recipes, libraries=job.libraries)

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Print and keep how long a phase takes."""
        start = time.perf_counter()
        yield
        self.device.clock.synchronize()
        self.seconds[phase] = round(time.perf_counter() - start, 2)
        print(f"  {phase}: {self.seconds[phase]:.1f} s", flush=True)

    @property
    def is_late(self) -> bool:
        """Whether the deadline has passed."""
        return time.time() >= self.job.deadline


def run_cell(job: Job, device: Device = CUDA) -> None:
    """Measure what the job asks for; each measure is written as soon as it is taken."""
    with attention_by_cudnn(device.torch_device):
        _run_cell(job, device)


def _run_cell(job: Job, device: Device) -> None:
    cell = Cell.of(job, device)
    started = time.perf_counter()
    names = contestants_of(job.recipes, job.libraries)
    print(f"{' '.join(job.case)}: {', '.join(names)}", flush=True)
    with cell.timed("data"):
        data = make_data(job.case, device.torch_device)
        kept = _kept_by_libraries(cell, data)
    exact = None
    if FIGURES in job.measures:
        with cell.timed("float32"):
            exact = exact_results(job.case, data)
    entrants = _enter(cell, names, data, exact)
    if exact is not None:
        cell.write_done(FIGURES)
    del exact
    if "graph" in job.measures and not cell.is_late:
        _measure_graphs(cell, entrants, data)
    for measure in ("eager", "host"):
        if measure in job.measures and not cell.is_late:
            _take_turns(cell, measure, {name: own.step for name, own in entrants.items()})
    if KERNELS in job.measures and not cell.is_late:
        with cell.timed("profile"):
            _profile(cell, entrants)
    cell.seconds["all"] = round(time.perf_counter() - started, 1)
    cell.run.write(
        "run",
        seconds=cell.seconds,
        **cell.contest.conditions("transformer_engine", "torchao"),
        kept_by_libraries_mib=kept,
        recipes=job.recipes,
        failed=cell.failed,
    )
    print(f"{' '.join(job.case)}: {cell.seconds['all']:.1f} s in all", flush=True)
    if cell.failed:
        raise RuntimeError(f"{' '.join(job.case)}: {', '.join(cell.failed)} failed, see above")


def _kept_by_libraries(cell: Cell, data: Data) -> dict[str, float]:
    """Run a throwaway step of each library; return what each keeps afterwards, MiB.

    cuBLAS's and Transformer Engine's workspaces, say: else they would count for the contestant that
    happens to run first. It also compiles kernels that all contestants of the library use.
    """
    kept, job = {}, cell.job
    for library, name in _SAMPLES.items():
        if library not in job.libraries:
            continue
        before = cell.contest.allocated()
        try:
            CONTESTANTS[name](job.case, data).stepper(data)()
        except Exception as error:  # noqa: BLE001  reported when it takes part
            print(f"  {name}: {type(error).__name__}", flush=True)
            continue
        cell.device.clock.synchronize()
        kept[library] = (cell.contest.allocated() - before) / MIB
    return kept


def _enter(
    cell: Cell, names: Sequence[str], data: Data, exact: dict[str, torch.Tensor] | None
) -> dict[str, Entrant]:
    """Make and warm up every contestant, and measure and capture it; note those that fail."""
    entrants = {}
    for name in names:
        before = cell.contest.allocated()
        with cell.timed(name):
            try:
                entrants[name] = _entrant(cell, name, data, exact, before)
            except ImportError as error:
                print(f"  {name}: {error}", flush=True)
            except Exception:  # noqa: BLE001  whatever stops one, the others take their turns
                print(f"  {name}: failed\n{traceback.format_exc()}", flush=True)
                cell.failed.append(name)
    return entrants


def _entrant(
    cell: Cell, name: str, data: Data, exact: dict[str, torch.Tensor] | None, before: int
) -> Entrant:
    """Make, warm up, measure and capture a contestant; ``before`` are the bytes without it."""
    contestant = CONTESTANTS[name](cell.job.case, data)
    entrant = Entrant(contestant, contestant.stepper(data))
    for _ in range(WARM_UP_STEPS):
        entrant.step()
    if exact is not None:
        _write_figures(cell, name, entrant, data, exact, before)
    if "graph" in cell.job.measures:
        entrant.replay = cell.device.capture(entrant.step)
    for parameter in contestant.parameters.values():
        parameter.grad = None
    return entrant


def _write_figures(
    cell: Cell,
    name: str,
    entrant: Entrant,
    data: Data,
    exact: dict[str, torch.Tensor],
    before: int,
) -> None:
    device, contestant = cell.device, entrant.contestant
    peak = cell.contest.peak_mib(entrant.step, before)
    held, errors = contestants.held_and_errors(contestant, data, exact, device)
    is_compiled = name == COMPILED_BF16 or name.startswith("torchao")
    copies = None  # another number of rows would be compiled again
    if not is_compiled:
        copies = contestants.weight_copies_mib(contestant, data, held, device)
    elif name == COMPILED_BF16:
        copies = 0.0  # it multiplies by the parameters themselves
    cell.run.write(
        FIGURES,
        contestant=name,
        peak_mib=peak,
        held_mib=held,
        weight_copies_mib=copies,
        errors=errors,
    )


def _measure_graphs(cell: Cell, entrants: dict[str, Entrant], data: Data) -> None:
    """Take turns of graphs, among them the products alone and a copy."""
    device = cell.device
    replays: turns.Calls = {
        name: entrant.replay for name, entrant in entrants.items() if entrant.replay is not None
    }
    with cell.timed("limits"):
        steps = {limits.COPY: limits.copy_step(device)}
        for recipe in cell.job.recipes:
            step = limits.products_step(cell.job.case, recipe, data, device)
            steps[limits.products_name(recipe)] = step
        for name, step in steps.items():
            replay = device.capture(step)
            assert replay is not None
            replays[name] = replay
    _take_turns(cell, "graph", replays)


def _take_turns(cell: Cell, measure: str, calls: turns.Calls) -> None:
    left = cell.job.deadline - time.time()
    pairs = tuple(
        (f"fp8core {recipe}", peer) for recipe in cell.job.recipes for peer in PEERS[recipe][:1]
    )
    stop = turns.Stop(min(cell.job.seconds, left), pairs, cell.job.width)
    with cell.timed(measure):
        us = cell.contest.take(measure, calls, stop)
    cell.run.write(measure, us=us)
    cell.write_done(measure)


def _profile(cell: Cell, entrants: dict[str, Entrant]) -> None:
    for name, entrant in entrants.items():
        kernels = kernels_of(entrant.step, cell.device)
        cell.run.write(KERNELS, contestant=name, kernels=kernels)
        print_kernels(name, kernels)
    cell.write_done(KERNELS)


def main() -> None:
    """Measure the job on the command line once the parent says so."""
    job = Job.from_json(sys.argv[1])
    use_cudnn_of_torch(os.environ)
    for name in job.libraries:
        _import(_MODULES.get(name))
    if sys.stdin.readline():
        run_cell(job)


def _import(module: str | None) -> None:
    try:
        if module is not None:
            importlib.import_module(module)
    except ImportError as error:
        print(f"  {module}: {error}", flush=True)


if __name__ == "__main__":
    main()
