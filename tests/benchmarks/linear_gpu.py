"""One Linear, forward and backward, against its peers on one GPU.

    python -m tests.benchmarks.linear_gpu --size 8B --out results   # one run, one cell
    python -m tests.benchmarks.linear_gpu --merge results           # the table of all cells

A run measures every contestant that is installed, in one process, interleaved, after half a second
of warm-up each and a tenth before every measurement; a cell that is there already is not measured
again. All have bfloat16 parameters and gradients, no bias, and quantize the weight in every step,
as if an optimizer had changed it. Inputs are normal,
gradients normal times 0.01.

host    enqueueing a step without waiting, us (meant for the tiny size)
eager   a step among 20 back to back, us: the larger of host and device time
graph   a step replayed from a CUDA graph, us; null where the contestant cannot be captured
kernels sum of the durations of a step's kernels (torch.profiler), us
memory  peak over what inputs and parameters take, MiB: caches and workspaces included
error   relative Frobenius error of y, grad_input and grad_weight against float32
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import json
import statistics
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import increment_version

import fp8core
from fp8core import recipe

SIZES = {  # tokens, in_features, out_features
    "tiny": (256, 512, 2048),
    "1.3B": (8192, 2048, 8192),
    "8B": (8192, 4096, 14336),
    "70B": (8192, 8192, 28672),
}
WARM_UP, HEAT, ROUNDS, CALLS = 0.5, 0.1, 5, 20
DEVICE = torch.device("cuda", 0)


class Data(NamedTuple):
    """What every contestant gets."""

    weight: torch.Tensor
    x: torch.Tensor
    grad: torch.Tensor


class Contestant(NamedTuple):
    """A layer's forward under its recipe, and its weight."""

    forward: Callable[[torch.Tensor], torch.Tensor]
    weight: torch.Tensor


def torch_eager(data: Data) -> Contestant:
    layer = torch.nn.Linear(*reversed(data.weight.shape), bias=False, device="meta")
    layer.weight = torch.nn.Parameter(data.weight.clone())
    return Contestant(layer, layer.weight)


def torch_compiled(data: Data) -> Contestant:
    made = torch_eager(data)
    return Contestant(torch.compile(made.forward, dynamic=False), made.weight)


def torchao(name: str) -> Callable[[Data], Contestant]:
    def make(data: Data) -> Contestant:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        model = torch.nn.Sequential(torch_eager(data).forward)
        config = Float8LinearConfig.from_recipe_name(name)
        convert_to_float8_training(model, config=config)
        return Contestant(torch.compile(model, dynamic=False), model[0].weight)

    return make


def transformer_engine(name: str) -> Callable[[Data], Contestant]:
    def make(data: Data) -> Contestant:
        import transformer_engine.pytorch as te
        from transformer_engine.common import recipe as te_recipe

        chosen = {
            "delayed": te_recipe.DelayedScaling,
            "current": te_recipe.Float8CurrentScaling,
            "block": te_recipe.Float8BlockScaling,
        }[name]()
        n, k = data.weight.shape
        layer = te.Linear(k, n, bias=False, params_dtype=torch.bfloat16, device="cuda")
        layer.weight.data.copy_(data.weight)

        def forward(x: torch.Tensor) -> torch.Tensor:
            with te.autocast(enabled=True, recipe=chosen):
                made: torch.Tensor = layer(x)
            return made

        return Contestant(forward, layer.weight)

    return make


def ours(name: str) -> Callable[[Data], Contestant]:
    def make(data: Data) -> Contestant:
        chosen = recipe.by_name(name)
        n, k = data.weight.shape
        layer = fp8core.Linear(k, n, bias=False, params_dtype=torch.bfloat16, device="cuda")
        with torch.no_grad():
            layer.weight.copy_(data.weight)

        def forward(x: torch.Tensor) -> torch.Tensor:
            increment_version(layer.weight)
            with fp8core.autocast(enabled=True, recipe=chosen):
                made: torch.Tensor = layer(x)
            return made

        return Contestant(forward, layer.weight)

    return make


CONTESTANTS: dict[str, Callable[[Data], Contestant]] = {
    "torch bf16": torch_eager,
    "torch.compile bf16": torch_compiled,
    "torchao tensorwise": torchao("tensorwise"),
    "torchao rowwise": torchao("rowwise"),
    "te delayed": transformer_engine("delayed"),
    "te current": transformer_engine("current"),
    "te block": transformer_engine("block"),
    "fp8core delayed": ours("delayed"),
    "fp8core current": ours("current"),
    "fp8core block": ours("block"),
    "fp8core rowwise": ours("rowwise"),
}


def stepper(made: Contestant, data: Data) -> Callable[[], None]:
    x = data.x.detach().requires_grad_()

    def step() -> None:
        x.grad = made.weight.grad = None
        made.forward(x).backward(data.grad)

    return step


def heat(step: Callable[[], None]) -> None:
    """Run ``step`` for a tenth of a second: what ran before must not decide clocks and caches."""
    torch.cuda.synchronize()
    end = time.perf_counter() + HEAT
    while time.perf_counter() < end:
        for _ in range(5):
            step()
        torch.cuda.synchronize()


def host_us(step: Callable[[], None]) -> float:
    heat(step)
    start = time.perf_counter()
    for _ in range(CALLS):
        step()
    took = time.perf_counter() - start
    torch.cuda.synchronize()
    return took / CALLS * 1e6


def eager_us(step: Callable[[], None]) -> float:
    heat(step)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(CALLS):
        step()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / CALLS * 1e3


def capture(step: Callable[[], None]) -> Callable[[], None] | None:
    """Return a replay of ``step``, or None where it cannot be captured."""
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
    return graph.replay


def kernels_us(step: Callable[[], None]) -> float:
    heat(step)
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(CALLS):
            step()
        torch.cuda.synchronize()
    return sum(event.self_device_time_total for event in profile.key_averages()) / CALLS


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


def run_cell(size: str) -> dict[str, Any]:
    tokens, k, n = SIZES[size]
    torch.manual_seed(0)
    data = Data(
        (torch.randn(n, k, device=DEVICE) * k**-0.5).bfloat16(),
        torch.randn(tokens, k, device=DEVICE).bfloat16(),
        (torch.randn(tokens, n, device=DEVICE) * 1e-2).bfloat16(),
    )
    steps: dict[str, Callable[[], None]] = {}
    report: dict[str, dict[str, Any]] = {}
    for name, make in CONTESTANTS.items():
        try:
            gc.collect()
            own = data.weight.numel() * data.weight.element_size()
            before = torch.cuda.memory_allocated() + own  # the contestant's parameter
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
        report[name] = {"memory": memory_mib(step, before), "error": errors(made, data)}
        made.weight.grad = None
        steps[name] = step
        print(f"{name}: ready", flush=True)
    replays = {name: capture(step) for name, step in steps.items()}
    rounds: dict[str, dict[str, list[float]]] = {
        name: {"host": [], "eager": [], "graph": []} for name in steps
    }
    names = list(steps)
    for turn in range(ROUNDS):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            rounds[name]["host"].append(host_us(steps[name]))
            rounds[name]["eager"].append(eager_us(steps[name]))
            replay = replays[name]
            if replay is not None:
                rounds[name]["graph"].append(eager_us(replay))
    for name, measured in rounds.items():
        for what, values in measured.items():
            spread = [min(values), max(values)] if values else None
            report[name][what] = statistics.median(values) if values else None
            report[name][f"{what} spread"] = spread
        report[name]["kernels"] = kernels_us(steps[name])
    return {"size": size, "shape": SIZES[size], "versions": versions(), "contestants": report}


def versions() -> dict[str, str]:
    found = {"device": torch.cuda.get_device_name(), "date": date.today().isoformat()}
    found |= {"torch": torch.__version__, "cuda": str(torch.version.cuda)}
    for package in ("torchao", "transformer_engine"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def merge(folder: Path) -> str:
    """Return the cells of ``folder`` as one table in Markdown."""
    lines = [
        "| size | contestant | host us | eager us | graph us | kernels us | memory MiB | error |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for size in SIZES:
        file = folder / f"{size}.json"
        if not file.is_file():
            continue
        for name, own in json.loads(file.read_text())["contestants"].items():
            graph = "" if own["graph"] is None else f"{own['graph']:.0f}"
            worst = max(own["error"].values())
            lines.append(
                f"| {size} | {name} | {own['host']:.0f} | {own['eager']:.0f} | {graph} | "
                f"{own['kernels']:.0f} | {own['memory']:.0f} | {worst:.4f} |"
            )
    return "\n".join(lines)


def main() -> None:
    """Measure one cell, or print the table of all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES)
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--merge", type=Path, metavar="DIR")
    args = parser.parse_args()
    if args.merge is not None:
        print(merge(args.merge))
        return
    file = args.out / f"{args.size}.json"
    if file.is_file():
        print(f"{file} is there already")
        return
    args.out.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(run_cell(args.size), indent=1))


if __name__ == "__main__":
    main()
