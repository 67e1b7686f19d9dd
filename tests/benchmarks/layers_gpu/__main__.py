"""Layers, forward and backward, against their peers on one GPU.

    python -m tests.benchmarks.layers_gpu --module mlp_swiglu --size 8B --out results
    python -m tests.benchmarks.layers_gpu --seconds 500        # all cells, until then
    python -m tests.benchmarks.layers_gpu --measure kernels --module mlp_swiglu --size 8B
    python -m tests.benchmarks.layers_gpu --bytes              # ideal bytes; needs no GPU
    python -m tests.benchmarks.layers_gpu --merge results --plot layers_gpu.svg

Each layer and size runs in a process of its own, with all contestants of all recipes in it. What
the folder holds already is not measured again, so the command can be repeated until all is there,
and lines of several folders merge. All contestants have bfloat16 parameters and gradients, biases
where the layer's title says so, attention by cuDNN if it has any, bfloat16 in each recipe, and
quantize each weight in every step, as if an optimizer had changed it. Inputs are normal,
gradients normal times 0.01.

Contestants take turns of some milliseconds, in an order that is shuffled anew for each turn:
measuring/turns.py says how. A ratio is the median of the turns' ratios, its interval holds the
median of their distribution with a probability of 95 %. Turns end when the intervals of fp8core
over the first peer of each recipe are 1 % wide, or after --turn-seconds. Nothing is flushed: a step
finds in the caches what the step before it left there.

graph    a step replayed from a CUDA graph, us; missing where a contestant cannot be captured. Among
         the graphs are the products of each recipe alone, and a copy of 1 GiB: the limit is the
         products' time, and the ideal bytes of the rest at the copy's rate
eager    a step among others, us: the larger of host and device time
host     enqueueing a step on an idle device without waiting, us (at the tiny size alone)
figures  peak memory over what inputs and parameters take, MiB: the layer's own caches are in it,
         what a library keeps for the whole process is not, but stands in the record of the run;
         held: what forward leaves for backward besides its output, MiB, of which copies of weights
         are what does not grow with the rows; relative Frobenius errors of the output and of all
         gradients against float32
kernels  launches and time of each kernel of a step (torch.profiler); with --profile, or if it is
         asked for by --measure
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tests.benchmarks.layers_gpu.cases import (
    FIGURES,
    KERNELS,
    LAYERS,
    RECIPES,
    SIZES,
    TURNS,
    Case,
    Job,
)
from tests.benchmarks.measuring import records
from tests.benchmarks.measuring.command import DONE, parser_of

LIBRARIES = ("torch", "torch.compile", "torchao", "te", "fp8core")
DEFAULT_MEASURES = (FIGURES, *TURNS)
Start = Callable[[Job], "subprocess.Popen[str]"]


def main(arguments: Sequence[str] | None = None, start: Start | None = None) -> int:
    """Measure, or print and draw what was measured; return the number of processes that failed."""
    args = _parse(arguments)
    if args.bytes or args.merge:
        from tests.benchmarks.layers_gpu import report  # which imports torch; see cases.py

        if args.bytes:
            print(report.bytes_table(_cases(args), args.recipe))
        else:
            report.write(records.read(*args.merge), args.plot)
        return 0
    began = time.time()
    deadline = began + args.seconds
    jobs = list(_jobs(args, deadline))
    if not jobs:
        print(f"everything that was asked for is in {args.out}")
    failed = _run(jobs, deadline, start or _start)
    print(f"{time.time() - began:.0f} s", flush=True)
    return failed


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of(
        *("layers_gpu", __doc__), module=LAYERS, size=SIZES, recipe=RECIPES, library=LIBRARIES
    )
    parser.add_argument(
        "--measure", nargs="+", choices=(*DEFAULT_MEASURES, KERNELS), default=DEFAULT_MEASURES
    )
    parser.add_argument("--profile", action="store_true", help="the kernels, too")
    parser.add_argument(
        "--seconds",
        type=float,
        default=float("inf"),
        help="begin no measure after that; turns that run then end as soon as they may",
    )
    parser.add_argument("--turn-seconds", type=float, default=12.0, help="most of a measure")
    parser.add_argument("--width", type=float, default=0.01, help="of intervals, to end turns")
    parser.add_argument("--bytes", action="store_true", help="print the ideal bytes")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="with --merge: an svg or png")
    return parser.parse_args(arguments)


def _cases(args: argparse.Namespace) -> list[Case]:
    pairs = (Case(*names) for names in itertools.product(args.module, args.size))
    return [case for case in pairs if case.size_name in case.layer.sizes]


def _jobs(args: argparse.Namespace, deadline: float) -> Iterator[Job]:
    """Yield a job for each layer and size that lacks a measure of a recipe."""
    wanted = dict.fromkeys((*args.measure, KERNELS) if args.profile else args.measure)
    known = records.read(args.out)
    for case in _cases(args):
        asked = tuple(name for name in wanted if name != "host" or case.size_name == "tiny")
        lacking = {
            (recipe, measure)
            for recipe in args.recipe
            for measure in asked
            if not is_measured(known, case, recipe, measure, args.library)
        }
        recipes = tuple(name for name in args.recipe if any(name == own for own, _ in lacking))
        measures = tuple(name for name in asked if any(name == own for _, own in lacking))
        if lacking:
            yield Job(
                **case._asdict(),
                recipes=recipes,
                measures=measures,
                libraries=tuple(args.library),
                out=str(args.out),
                seconds=args.turn_seconds,
                width=args.width,
                deadline=deadline,
            )


def is_measured(
    known: Sequence[records.Record],
    case: Case,
    recipe: str,
    measure: str,
    libraries: Sequence[str],
) -> bool:
    """Whether a run took a measure of a recipe and had all of ``libraries`` take part.

    A library that was not installed then counts as one that took part.
    """
    return any(
        (record["layer"], record["size"]) == case
        and record["measure"] == DONE
        and record["done"] == measure
        and recipe in record["recipes"]
        and set(libraries) <= set(record["libraries"])
        for record in known
    )


def _run(jobs: Sequence[Job], deadline: float, start: Start) -> int:
    """Run the jobs one after the other; the next one imports while one measures."""
    failed, waiting = 0, start(jobs[0]) if jobs else None
    for number, job in enumerate(jobs):
        assert waiting is not None
        current, waiting = waiting, None
        if time.time() >= deadline:
            current.communicate("")  # an input that ends at once
            print(f"{len(jobs) - number} of {len(jobs)} processes had no time", flush=True)
            break
        assert current.stdin is not None
        current.stdin.write("go\n")
        current.stdin.flush()
        if number + 1 < len(jobs):
            waiting = start(jobs[number + 1])
        if current.wait() != 0:
            print(f"{' '.join(job.case)}: failed with {current.returncode}", flush=True)
            failed += 1
    return failed


def _start(job: Job) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.benchmarks.layers_gpu.cell", job.to_json()]
    return subprocess.Popen(command, stdin=subprocess.PIPE, text=True)


if __name__ == "__main__":
    sys.exit(main())
