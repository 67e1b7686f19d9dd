"""Norms, activations, casts and sums alone, each at the rate of a copy or not, on one GPU.

    python -m tests.benchmarks.pointwise_gpu --out results --seconds 300
    python -m tests.benchmarks.pointwise_gpu --operation swiglu rmsnorm --library fp8core
    python -m tests.benchmarks.pointwise_gpu --operation cast cast_rowwise --recipe mxfp8 nvfp4
    python -m tests.benchmarks.pointwise_gpu --bytes           # needs no GPU
    python -m tests.benchmarks.pointwise_gpu --merge results

Contestants are the operations of fp8core's backend, in bfloat16 and with the cast of each recipe in
both orientations as a layer asks for it, torch.compile of the same formulas, Liger and QuACK where
they are installed and have a kernel, and a copy of the largest input. Each is captured in a CUDA
graph that calls it on several sets of inputs in turn, which together exceed the L2 cache; the
graphs take turns as measuring/turns.py says. Shapes of at most 16 MiB have one set, which stays in
the cache: they are marked. The shares of the copy's rate are of ideal bytes, which
measuring/ideal_bytes.py counts, and of the same turns.

What a contestant refuses or cannot run stands in the record, and the benchmark goes on. First
results in bfloat16 are compared with float32 formulas. What the folder holds is not measured again.
"""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import sys
import time
from collections.abc import Sequence

import torch

from tests.benchmarks.layers_gpu.cases import RECIPES
from tests.benchmarks.measuring import records, turns
from tests.benchmarks.measuring.command import parser_of
from tests.benchmarks.measuring.contest import Contest
from tests.benchmarks.measuring.device import CUDA, Device
from tests.benchmarks.measuring.markdown import head, line
from tests.benchmarks.pointwise_gpu import report
from tests.benchmarks.pointwise_gpu.contestants import (
    LIBRARIES,
    Entrant,
    enter,
    names_of,
)
from tests.benchmarks.pointwise_gpu.operations import (
    OPERATIONS,
    Inputs,
    Operation,
    Shape,
    exact_results,
)

SHAPES = ("32768x2048", "8192x4096", "8192x5120", "8192x8192", "4096x16384", "1024x4096")
RESIDENT_BYTES, ROTATED_BYTES = 16 << 20, 256 << 20
CALLS = 4
"""At least this many in a graph."""
MOST_ERROR = {"dequantize": 0.12}
"""Relative Frobenius error of a right result, where it is not 0.01: e2m1 keeps two bits."""


def main(arguments: Sequence[str] | None = None, device: Device = CUDA) -> None:
    """Measure, or print what was measured."""
    args = _parse(arguments)
    operations = [OPERATIONS[name] for name in args.operation]
    if args.bytes:
        print(_bytes_table(operations, args.shape, args.recipe))
        return
    if args.merge:
        print(report.markdown(records.read(*args.merge)))
        return
    deadline = time.time() + args.seconds
    options = {"recipes": args.recipe, "libraries": args.library}
    known = {
        (one["operation"], one["shape"])
        for one in records.read(args.out)
        if one["measure"] == "pointwise"
        and set(args.library) <= set(one["libraries"])
        and set(args.recipe) <= set(one["recipes"])
    }
    wanted = list(itertools.product(args.shape, operations))
    for shape, operation in wanted:
        if (operation.name, str(shape)) in known:
            continue
        if time.time() >= deadline:
            print("the time is up", flush=True)
            break
        names = names_of(operation, args.recipe, args.library)
        record = measure(operation, shape, names, args.turn_seconds, device)
        records.Run(args.out, "pointwise", options).write("pointwise", **record)
    print(report.markdown(records.read(args.out)))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of("pointwise_gpu", __doc__, operation=OPERATIONS, library=LIBRARIES)
    shapes = [_shape(text) for text in SHAPES]
    parser.add_argument("--shape", nargs="+", type=_shape, default=shapes, metavar="ROWSxCOLUMNS")
    parser.add_argument("--recipe", nargs="+", choices=report.ALL_RECIPES, default=list(RECIPES))
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin nothing later")
    parser.add_argument("--turn-seconds", type=float, default=0.6, help="most of an operation")
    parser.add_argument("--bytes", action="store_true", help="print the ideal bytes")
    return parser.parse_args(arguments)


def _shape(text: str) -> Shape:
    rows, columns = map(int, text.split("x"))
    return Shape(rows, columns)


def measure(
    operation: Operation, shape: Shape, names: Sequence[str], seconds: float, device: Device
) -> records.Record:
    """Return the record of an operation at a shape: the time of a call in each turn, us."""
    began = time.perf_counter()
    print(f"{operation.name} {shape}", flush=True)
    torch.manual_seed(0)
    gc.collect()
    sets, contest = _sets(operation, shape, device), Contest(device)
    exact = exact_results(operation, sets[0])
    replays: turns.Calls = {}
    entrants = []  # with the tensors that their graphs read: a graph holds addresses alone
    ideal: dict[str, int] = {}
    errors: dict[str, float] = {}
    count = max(CALLS, len(sets))

    def entered(name: str) -> Entrant:
        entrant = enter(name, operation, sets, device)
        error = _error(entrant, exact)
        device.clock.synchronize()  # before a capture
        replays[name] = contest.capture(entrant.calls, count)
        if error is not None:
            errors[name] = error
        return entrant

    for name in names:
        entrant = contest.enter(name, functools.partial(entered, name))
        if entrant is None:
            _check_device(device, name, operation, shape)
            continue
        entrants.append(entrant)
        recipe = name.partition(" ")[2]
        ideal[name] = operation.ideal_bytes(shape, recipe or RECIPES[0])
    source = max(sets[0], key=torch.Tensor.numel)
    index = [tensor is source for tensor in sets[0]].index(True)
    replays[report.COPY] = contest.capture([own[index].clone for own in sets], count)
    ideal[report.COPY] = 2 * source.numel() * source.element_size()
    pairs = tuple((name, report.COPY) for name in replays if name != report.COPY)
    us = contest.take("graph", replays, turns.Stop(seconds, pairs, 0.02))
    for name, value in errors.items():
        if value > MOST_ERROR.get(operation.step, 0.01):
            print(f"  {name} IS WRONG: its error is {value:.3g}", flush=True)
    return {
        **{"operation": operation.name, "shape": str(shape)},
        **{"is_resident": _is_resident(shape), "bytes": ideal},
        "us": {name: [round(value / count, 3) for value in times] for name, times in us.items()},
        **{"refused": contest.refused, "errors": errors},
        "seconds": round(time.perf_counter() - began, 2),
        **contest.conditions("liger-kernel", "quack-kernels"),
    }


def _sets(operation: Operation, shape: Shape, device: Device) -> list[Inputs]:
    """Return as many sets of inputs as exceed the L2 cache together; one of a small shape."""
    first = operation.inputs(shape, device.torch_device)
    size = sum(tensor.numel() * tensor.element_size() for tensor in first)
    if _is_resident(shape):
        return [first]
    more = range(1, -(-ROTATED_BYTES // size))
    return [first, *(operation.inputs(shape, device.torch_device) for _ in more)]


def _is_resident(shape: Shape) -> bool:
    return shape.rows * shape.columns * 2 <= RESIDENT_BYTES


def _check_device(device: Device, name: str, operation: Operation, shape: Shape) -> None:
    """End the process if a contestant left the device in an error: nothing would run on it."""
    try:
        device.clock.synchronize()
    except RuntimeError as error:
        sys.exit(f"{operation.name} {shape}: {name} broke the device: {error}")


def _error(entrant: Entrant, exact: torch.Tensor) -> float | None:
    result = entrant.calls[0]()
    if entrant.result is None:
        return None
    tensor = entrant.result(result)
    error: float = ((tensor.float() - exact).norm() / exact.norm()).item()
    return error


def _bytes_table(
    operations: Sequence[Operation], shapes: Sequence[Shape], recipes: Sequence[str]
) -> str:
    lines = head(("operation", "shape", "result", "MB", "bytes an element"))
    for shape, operation in itertools.product(shapes, operations):
        for recipe in recipes:
            if operation.desc(recipe) is not None:
                size = operation.ideal_bytes(shape, recipe)
                each = size / shape.rows / shape.columns
                values = (recipe, f"{size / 1e6:.1f}", f"{each:.2f}")
                lines.append(line((operation.name, str(shape), *values)))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
