"""Attention alone, forward, and forward and backward, beside torch's cuDNN path, on one GPU.

    python -m tests.benchmarks.attention_gpu --out results --seconds 120
    python -m tests.benchmarks.attention_gpu --case 8B --contestant "torch cudnn" "fp8core bf16"
    python -m tests.benchmarks.attention_gpu --merge results

Contestants share one set of tensors in one process and take turns in short slices, in a shuffled
order, as measuring/turns.py says: captured in CUDA graphs (``graph``: device time, ``graph
forward``: of forward alone), eagerly (``eager``), and to enqueue a step (``host``, of the tiny size
alone). The bar is torch's operator for cuDNN's attention; ratios are within turns. fp8core's
recipes quantize in forward, with backward in bfloat16. A contestant that is not installed or raises
is named, and the others go on. Each result is compared with float32 first.
"""

from __future__ import annotations

import argparse
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.attention_gpu.cases import CASES, Case, Tensors, exact, tensors
from tests.benchmarks.attention_gpu.contestants import CONTESTANTS, CUDNN, Forward
from tests.benchmarks.measuring import records, turns
from tests.benchmarks.measuring.device import CUDA, Chip, Device, versions, without_collections
from tests.benchmarks.measuring.intervals import median_interval, ratios
from tests.benchmarks.measuring.markdown import head, line

MEASURES = ("graph", "graph forward", "eager", "host")
MOST_ERROR = 0.08
"""Relative Frobenius error of a right result: e4m3 leaves 24 dB."""

Step = Callable[[], object]


def main(arguments: Sequence[str] | None = None, device: Device = CUDA) -> None:
    """Measure, or print what was measured."""
    args = _parse(arguments)
    if args.merge:
        print(table(records.read(*args.merge)))
        return
    deadline, run = time.time() + args.seconds, uuid.uuid4().hex[:12]
    for name in args.case:
        if time.time() >= deadline:
            print("the time is up", flush=True)
            break
        for record in measure(CASES[name], args, device):
            records.append(args.out, "attention", {"run": run, **record})
    print(table(records.read(args.out)))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.attention_gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--contestant", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS))
    parser.add_argument("--measure", nargs="+", choices=MEASURES, default=list(MEASURES))
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin nothing later")
    parser.add_argument("--turn-seconds", type=float, default=2.0, help="most of a measure")
    parser.add_argument("--merge", type=Path, nargs="+", metavar="DIR")
    return parser.parse_args(arguments)


def measure(case: Case, args: argparse.Namespace, device: Device) -> list[records.Record]:
    """Return a record of each measure: the time of a step of each contestant in each turn, us."""
    given = tensors(case, device.torch_device)
    forwards: dict[str, Forward] = {}
    errors: dict[str, float] = {}
    refused: dict[str, str] = {}
    for name in args.contestant:
        try:
            forward = CONTESTANTS[name](case)
            errors[name] = _error(forward, case, given)
            step(forward, given)()
            device.clock.synchronize()
        except Exception as failure:  # noqa: BLE001 a peer raises what it likes; its line says so
            refused[name] = f"{type(failure).__name__}: {str(failure).partition(chr(10))[0][:200]}"
            continue
        forwards[name] = forward
    for name, reason in refused.items():
        print(f"{case.name}: {name} does not run: {reason}", flush=True)
    for name, value in errors.items():
        if value > MOST_ERROR:
            print(f"{case.name}: {name} IS WRONG: its error is {value:.3g}", flush=True)
    found = []
    for what in args.measure:
        if what == "host" and case.name != "tiny":
            continue
        chip, stop = Chip(), _stop(args.turn_seconds, list(forwards))
        with without_collections():
            us = _times(what, forwards, given, stop, chip, device)
        print(f"{case.name} {what}: {len(next(iter(us.values()), []))} turns", flush=True)
        found.append(
            {
                **{"measure": what, "case": case.name, "flops": case.flops, "errors": errors},
                "us": {name: [round(one, 2) for one in values] for name, values in us.items()},
                **{"refused": refused, "chip": chip.summary()},
                "versions": versions("nvidia-cudnn-frontend", "transformer-engine"),
            }
        )
    return found


def step(forward: Forward, given: Tensors) -> Step:
    """Return forward and backward."""

    def run() -> object:
        out = forward(*given[:3])
        return torch.autograd.grad(out, given[:3], given.grad)

    return run


def _forward_alone(forward: Forward, given: Tensors) -> Step:
    def run() -> object:
        return forward(*given[:3])

    return run


def _times(
    what: str,
    forwards: Mapping[str, Forward],
    given: Tensors,
    stop: turns.Stop,
    chip: Chip,
    device: Device,
) -> dict[str, list[float]]:
    """Return the times of a measure; of graphs, of the contestants that can be captured."""
    make = _forward_alone if what == "graph forward" else step
    steps: dict[str, Step] = {name: make(one, given) for name, one in forwards.items()}
    if what == "host":
        return turns.host_us(steps, stop, chip.sample, clock=device.clock)
    if what == "eager":
        return turns.eager_us(steps, stop, chip.sample, clock=device.clock)
    captured = {name: device.capture(one) for name, one in steps.items()}
    replays = {name: one for name, one in captured.items() if one is not None}
    return turns.graph_us(replays, stop, chip.sample, clock=device.clock)


def _stop(seconds: float, names: Sequence[str]) -> turns.Stop:
    return turns.Stop(seconds, tuple((name, CUDNN) for name in names if name != CUDNN))


def _error(forward: Forward, case: Case, given: Tensors) -> float:
    """Return the relative Frobenius error of the first head of the first sequence."""
    want = exact(case, given)
    got = forward(*given[:3]).detach()[:, 0, : case.head_dim].float()
    return float((got - want).norm() / want.norm())


def table(found: Sequence[records.Record]) -> str:
    """Return times, rates and ratios to torch's cuDNN path, with their 95 % intervals."""
    lines = head(("case", "measure", "contestant", "us", "TFLOP/s", "of torch cudnn", "error"))
    for record in found:
        us: dict[str, list[float]] = record["us"]
        for name, values in us.items():
            if not values:
                continue
            median = median_interval(values).median
            passes = 1.0 if record["measure"] == "graph forward" else 3.5
            rate = passes * record["flops"] / median / 1e6
            share = ""
            if us.get(CUDNN):
                estimate = median_interval(ratios(values, us[CUDNN]))
                share = f"{estimate.median:.2f} ({estimate.low:.2f}-{estimate.high:.2f})"
            error = record["errors"].get(name)
            cells: tuple[Any, ...] = (record["case"], record["measure"], name, f"{median:.1f}")
            known = "" if error is None else f"{error:.4f}"
            lines.append(line((*cells, f"{rate:.0f}", share, known)))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
