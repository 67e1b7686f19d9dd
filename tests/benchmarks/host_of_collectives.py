"""What a collective of a layer takes the host: ``python -m tests.benchmarks.host_of_collectives``.

Microseconds of the host for a forward and backward of

    parallel     a sequence-parallel LayerNormMLP of rank 0
    unrecorded   the same, whose chains go through Python in each call
    silent       the same, whose collectives allocate their results, and do nothing else
    alone        the same shards on all tokens, without collectives
    c10d         the calls of the process group that ``parallel`` makes, by themselves
    within       the same calls, timed in a step of ``parallel``, where they are slower

and what follows from these:

    of a collective              (parallel - silent) / collectives
    of it beyond c10d            (parallel - silent - c10d) / collectives, and with ``within``
    of a split layer             silent - alone, a step: other casts and other fusions, as operands
                                 of which a rank has some rows are cast before they are gathered
    beyond c10d, all together    (parallel - alone - c10d) / collectives, which mixes the two

Ranks and devices rest before each step that is timed: behind several steps
that were enqueued the host waits for the device. The least of interleaved rounds, which other
programs of the machine disturb least.

With ``--ranks 2`` that many processes have a GPU each, and NCCL. Without, neither a GPU nor other
ranks are needed: as in :mod:`tests.benchmarks.host_path` the front end and the CUDA backend's
Python run on tensors of the CPU and native calls do nothing; collectives are those of torch's fake
process group, which return at once. Nothing is recorded there, ``parallel`` is ``unrecorded``.

``--profile RECIPE`` prints the functions that take most of the time of ``parallel`` instead.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import random
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from fp8core.chain import series
from fp8core.collectives import Communicator, Started, of_group, register
from fp8core.torch_ops.repeats import called_in_repeats
from tests.benchmarks import host_path
from tests.benchmarks.measuring.command import run_ranks
from tests.benchmarks.measuring.contest import step_of
from tests.benchmarks.measuring.device import without_collections
from tests.benchmarks.measuring.libraries import swiglu_mlp, under_recipe
from tests.benchmarks.measuring.profiles import print_functions
from tests.benchmarks.parallel_gpu.together import join

__all__ = ["Calls", "main"]

RANKS, TOKENS, HIDDEN, FFN = 2, 256, 512, 2048
RECIPES = ("delayed", "current", "block")
CPU, TIMEOUT_S = torch.device("cpu"), 300
WARM_UP, PROFILED_CALLS = 12, 1000
STARTS = ("_allgather_base", "_reduce_scatter_base", "allreduce")

Step = Callable[[], None]


class Calls:
    """The process group, whose calls are noted."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.noted: list[tuple[Callable[..., Any], Sequence[Any]]] = []

    def __getattr__(self, name: str) -> Any:
        call = getattr(self.group, name)
        return functools.partial(self.started, call) if name in STARTS else call

    def started(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Make a call that starts a collective."""
        self.noted.append((call, arguments))
        return call(*arguments)

    def repeat(self) -> None:
        """Make the noted calls again, and wait for each."""
        for start, arguments in self.noted:
            work = start(*arguments)
            if work is not None:
                work.wait()


class Timed(Calls):
    """The process group, the seconds of whose calls, and of the waits for them, are added up."""

    seconds = 0.0

    def started(self, call: Callable[..., Any], *arguments: Any) -> Timed.Work | None:
        start = time.perf_counter()
        work = call(*arguments)
        self.seconds += time.perf_counter() - start
        return None if work is None else Timed.Work(self, work)

    class Work(NamedTuple):
        """A call under way."""

        calls: Timed
        work: Any

        def wait(self) -> None:
            start = time.perf_counter()
            self.work.wait()
            self.calls.seconds += time.perf_counter() - start


class Silent(Communicator):
    """A rank of a group whose collectives allocate their results, and do nothing else."""

    def _start(
        self, collective: str, _: str, x: torch.Tensor, *__: object, **___: object
    ) -> Started:
        rows = {"gather": x.shape[0] * self.size, "scatter": x.shape[0] // self.size}
        size = rows.get(collective, x.shape[0]), *x.shape[1:]
        return Started(called_in_repeats(functools.partial(torch.Tensor.new_empty, size=size), x))

    def max(self, x: torch.Tensor, *_: object, **__: object) -> Started:
        """Return ``x``, in which layers have maxima written."""
        return Started(x)

    def _nothing(self, *_: object, **__: object) -> None:
        """Stand for what is called by collectives, and for comparisons."""

    _compare = _gather = _scatter = _all_reduce = _exchange = _nothing  # type: ignore[assignment]


@functools.cache
def silent() -> Silent:
    """Return the rank, which layers find by its name."""
    communicator = Silent(RANKS, dist.get_rank(), "silent")
    register(communicator)
    return communicator


def of_layer(
    name: str, *, is_alone: bool = False, is_silent: bool = False, device: torch.device = CPU
) -> Step:
    """Return a step of the MLP under a recipe."""
    group = None if is_alone else dist.group.WORLD
    ffn, rows = (FFN // RANKS, TOKENS) if is_alone else (FFN, TOKENS // RANKS)
    layer = swiglu_mlp("fp8core", HIDDEN, ffn, device, group)
    if is_silent:
        group = None
        layer.set_tensor_parallel_group(silent())
    x, grad = (torch.randn(rows, HIDDEN, dtype=torch.bfloat16, device=device) for _ in range(2))
    forward = under_recipe("fp8core", name, layer, group)
    return step_of(forward, x.requires_grad_(), grad, list(layer.parameters()))


def calls_of(step: Step) -> Calls:
    """Return the calls of the process group that a step makes."""
    communicator: Any = of_group()
    calls = Calls(communicator.group)
    with patch.object(type(communicator), "group", calls):
        step()
    return calls


def seconds_within(step: Step) -> float:
    """Return the seconds that a step spends in calls of the process group."""
    communicator: Any = of_group()
    timed = Timed(communicator.group)
    with patch.object(type(communicator), "group", timed):
        step()
    return timed.seconds


def warmed_up(step: Step) -> Step:
    """Return ``step``, which has chosen its algorithms and was recorded, where anything is."""
    for _ in range(WARM_UP):
        step()
    return step


def unrecorded(name: str, device: torch.device) -> Step:
    """Return the parallel step whose chains are not recorded."""
    with patch.object(series, "Repeated", lambda program, *others: program):
        return warmed_up(of_layer(name, device=device))


def measure(
    rounds: int, device: torch.device = CPU, wait: Callable[[], object] = lambda: None
) -> dict[str, dict[str, float]]:
    """Return the microseconds and the number of collectives by recipe; ``wait`` has the ranks and
    their devices come to rest."""
    steps: dict[tuple[str, str], Step] = {}
    counts: dict[str, int] = {}
    for name in RECIPES:
        parallel = warmed_up(of_layer(name, device=device))
        calls = calls_of(unrecorded(name, device))
        counts[name] = len(calls.noted)
        steps |= {
            (name, "parallel"): parallel,
            (name, "unrecorded"): unrecorded(name, device),
            (name, "silent"): warmed_up(of_layer(name, is_silent=True, device=device)),
            (name, "alone"): warmed_up(of_layer(name, is_alone=True, device=device)),
            (name, "c10d"): calls.repeat,
        }
    times: dict[tuple[str, str], list[float]] = {key: [] for key in steps}
    within: dict[str, list[float]] = {name: [] for name in RECIPES}
    order, source = list(steps), random.Random(0)
    for _ in range(rounds):
        source.shuffle(order)
        for key in order:
            step = steps[key]
            step()
            wait()
            start = time.perf_counter()
            step()
            times[key].append((time.perf_counter() - start) * 1e6)
        for name in RECIPES:
            wait()
            within[name].append(seconds_within(steps[name, "parallel"]) * 1e6)
    return {
        name: {
            "collectives": counts[name],
            **derived(
                {kind: min(times[name, kind]) for of, kind in steps if of == name}
                | {"within": min(within[name])},
                counts[name],
            ),
        }
        for name in RECIPES
    }


def derived(us: dict[str, float], count: int) -> dict[str, float]:
    """Return the microseconds of steps, and what follows from them."""
    of_collectives = us["parallel"] - us["silent"]
    more = {
        "of a collective": of_collectives / count,
        "of it beyond c10d": (of_collectives - us["c10d"]) / count,
        "of it beyond within": (of_collectives - us["within"]) / count,
        "of a split layer": us["silent"] - us["alone"],
    } | {
        f"beyond c10d, all together, {kind}": (us[kind] - us["alone"] - us["c10d"]) / count
        for kind in ("parallel", "unrecorded")
    }
    return {key: round(value, 1) for key, value in (us | more).items()}


def report_of(us: dict[str, dict[str, float]], device: str) -> str:
    """Return the figures as JSON."""
    shape = f"{TOKENS} tokens over {RANKS} ranks, {HIDDEN}, {FFN}, bfloat16, no bias"
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    return json.dumps({"device": device, **versions, "shape": shape, "us": us}, indent=2)


def of_rank(rank: int, size: int, folder: str, rounds: int) -> None:
    """Measure as one of several ranks, each with a GPU; rank 0 prints the figures."""
    ranks = join(rank, size, "cuda", folder)
    with without_collections():
        us = measure(rounds, ranks.device.torch_device, ranks.device.clock.synchronize)
    if rank == 0:
        print(report_of(us, torch.cuda.get_device_name()), flush=True)
    ranks.device.clock.synchronize()


def without_devices(rounds: int, profiled: str | None) -> None:
    """Measure with tensors of the CPU and a process group that does nothing."""
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    with ExitStack() as stack:
        stack.callback(dist.destroy_process_group)
        host_path.without_a_device(stack)
        if profiled is None:
            print(report_of(measure(rounds), f"{platform.machine()} CPU, 1 thread"))
        else:
            print_functions(of_layer(profiled), WARM_UP, PROFILED_CALLS)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the figures as JSON, or a profile."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--ranks", type=int, choices=(1, RANKS), default=1)
    parser.add_argument("of_rank", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--profile", choices=RECIPES)
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if args.ranks == 1:
        without_devices(args.rounds, args.profile)
        return
    if args.of_rank:
        rank, folder = args.of_rank
        of_rank(int(rank), args.ranks, folder, args.rounds)
        sys.stdout.flush()
        os._exit(0)  # threads of collectives may outlive the interpreter
    options = ["--ranks", str(RANKS), "--rounds", str(args.rounds)]
    sys.exit(max(run_ranks("host_of_collectives", options, RANKS, TIMEOUT_S)))


if __name__ == "__main__":
    main()
