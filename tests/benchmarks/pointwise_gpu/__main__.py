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
import gc
import itertools
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.layers_gpu.cases import RECIPES
from tests.benchmarks.measuring import records, turns
from tests.benchmarks.measuring.device import CUDA, Chip, Device, versions, without_collections
from tests.benchmarks.measuring.markdown import head, line
from tests.benchmarks.pointwise_gpu import report
from tests.benchmarks.pointwise_gpu.contestants import (
    LIBRARIES,
    Entrant,
    Unavailable,
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
    run = uuid.uuid4().hex[:12]
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
        record |= {"recipes": args.recipe, "libraries": args.library}
        records.append(args.out, "pointwise", {"run": run, **record})
    print(report.markdown(records.read(args.out)))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.pointwise_gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--operation", nargs="+", choices=OPERATIONS, default=list(OPERATIONS))
    shapes = [_shape(text) for text in SHAPES]
    parser.add_argument("--shape", nargs="+", type=_shape, default=shapes, metavar="ROWSxCOLUMNS")
    parser.add_argument("--recipe", nargs="+", choices=report.ALL_RECIPES, default=list(RECIPES))
    parser.add_argument("--library", nargs="+", choices=LIBRARIES, default=list(LIBRARIES))
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin nothing later")
    parser.add_argument("--turn-seconds", type=float, default=0.6, help="most of an operation")
    parser.add_argument("--bytes", action="store_true", help="print the ideal bytes")
    parser.add_argument("--merge", type=Path, nargs="+", metavar="DIR")
    return parser.parse_args(arguments)


def _shape(text: str) -> Shape:
    rows, columns = map(int, text.split("x"))
    return Shape(rows, columns)


def measure(
    operation: Operation, shape: Shape, names: Sequence[str], seconds: float, device: Device
) -> records.Record:
    """Return the record of an operation at a shape: the time of a call in each turn, us."""
    began = time.perf_counter()
    torch.manual_seed(0)
    gc.collect()
    sets = _sets(operation, shape, device)
    exact = exact_results(operation, sets[0])
    replays: turns.Calls = {}
    entrants = []  # with the tensors that their graphs read: a graph holds addresses alone
    ideal: dict[str, int] = {}
    refused: dict[str, str] = {}
    errors: dict[str, float] = {}
    count = max(CALLS, len(sets))
    for name in names:
        try:
            entrant = enter(name, operation, sets, device)
            entrants.append(entrant)
            error = _error(entrant, exact)
            device.clock.synchronize()  # an error of a kernel belongs to its contestant
            replays[name] = _captured(entrant.calls, count, device)
        except Unavailable as unavailable:
            refused[name] = str(unavailable)
            continue
        except Exception as failure:  # noqa: BLE001 a peer raises what it likes; its row says so
            refused[name] = f"{type(failure).__name__}: {str(failure).splitlines()[0][:200]}"
            _check_device(device, name, operation, shape)
            continue
        recipe = name.partition(" ")[2]
        ideal[name] = operation.ideal_bytes(shape, recipe or RECIPES[0])
        if error is not None:
            errors[name] = error
    source = max(sets[0], key=torch.Tensor.numel)
    index = [tensor is source for tensor in sets[0]].index(True)
    replays[report.COPY] = _captured([own[index].clone for own in sets], count, device)
    ideal[report.COPY] = 2 * source.numel() * source.element_size()
    chip = Chip()
    pairs = tuple((name, report.COPY) for name in replays if name != report.COPY)
    with without_collections():
        stop = turns.Stop(seconds, pairs, 0.02)
        us = turns.graph_us(replays, stop, chip.sample, clock=device.clock)
    took = time.perf_counter() - began
    wrong = {name: value for name, value in errors.items() if value > _most_error(operation)}
    print(f"{operation.name} {shape}: {took:.1f} s, {len(us[report.COPY])} turns", flush=True)
    for name, reason in refused.items():
        print(f"  {name} does not run: {reason}", flush=True)
    for name, value in wrong.items():
        print(f"  {name} IS WRONG: its error is {value:.3g}", flush=True)
    return {
        **{"measure": "pointwise", "operation": operation.name, "shape": str(shape)},
        **{"is_resident": _is_resident(shape), "bytes": ideal},
        "us": {name: [round(value / count, 3) for value in times] for name, times in us.items()},
        **{"refused": refused, "errors": errors, "seconds": round(took, 2)},
        **{"chip": chip.summary(), "versions": versions("liger-kernel", "quack-kernels")},
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


def _captured(
    calls: Sequence[Callable[[], Any]], count: int, device: Device
) -> Callable[[], object]:
    """Return the replay of ``count`` calls, of each set of inputs in turn."""

    def run() -> None:
        for number in range(count):
            calls[number % len(calls)]()

    replay = device.capture(run)
    if replay is None:
        raise Unavailable("cannot be captured in a graph")
    return replay


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


def _most_error(operation: Operation) -> float:
    return MOST_ERROR.get(operation.step, 0.01)


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
