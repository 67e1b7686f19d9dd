"""What the front end costs on one CPU core: ``python -m tests.benchmarks.front_end``.

Host time of a Linear's forward and backward over a bare autograd.Function that makes the same
backend calls; host time of each layer; import time over torch's. Interleaved rounds, medians.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

import fp8core as te
from fp8core import recipe
from fp8core.backend_api import Operand
from fp8core.chain.linear.link import LinearLink
from fp8core.modules.calls.bind import bind
from tests.benchmarks.measuring.turns import round_us

ROWS, SIZE, CALLS = 16, 32, 300


def bare_linear(link: LinearLink) -> type[torch.autograd.Function]:
    """Return a Function that makes the link's backend calls and nothing else."""

    class Bare(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            x_row, x_column = link.input(x)
            w_row, w_column = link.weight(w, columnwise=True)  # type: ignore[arg-type]  # dense
            ctx.save_for_backward(*x_column, *w_column)
            y: torch.Tensor = link.fprop(x_row, w_row, bias=b)
            return y

        @staticmethod
        def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, ...]:
            saved = ctx.saved_tensors
            row, column = link.grad_output(dy)
            dx = link.dgrad(row, Operand(*saved[3:]))
            dw = link.wgrad(column, Operand(*saved[:3]))
            return dx, dw, dy.sum(0, dtype=torch.float32)

    return Bare


def linear_overhead(name: str | None, rounds: int) -> dict[str, list[float]]:
    """Time the layer against the bare function for one recipe, or for none."""
    chosen = None if name is None else recipe.by_name(name)
    layer = te.Linear(SIZE, SIZE)
    x, grad = torch.randn(ROWS, SIZE, requires_grad=True), torch.randn(ROWS, SIZE)
    context = te.autocast(enabled=chosen is not None, recipe=chosen)
    with context:
        link = bind(layer, x.device, x.dtype).linears[0]
    bare = bare_linear(link)

    def run_bare() -> None:
        bare.apply(x, layer.weight, layer.bias).backward(grad)  # type: ignore[no-untyped-call]

    def run_layer() -> None:
        with context:
            y = layer(x)
        y.backward(grad)

    return round_us({"bare": run_bare, "layer": run_layer}, rounds, CALLS)


def layers(rounds: int) -> dict[str, list[float]]:
    """Time forward and backward of each layer, under current scaling and without."""
    modules = {
        "Linear": te.Linear(SIZE, SIZE),
        "LayerNormLinear": te.LayerNormLinear(SIZE, SIZE),
        "LayerNormMLP": te.LayerNormMLP(SIZE, SIZE, activation="swiglu"),
        "torch.nn.Linear": torch.nn.Linear(SIZE, SIZE),
    }
    x, grad = torch.randn(ROWS, SIZE, requires_grad=True), torch.randn(ROWS, SIZE)

    def step(module: torch.nn.Module, context: AbstractContextManager[None]) -> Callable[[], None]:
        def run() -> None:
            with context:
                y = module(x)
            y.backward(grad)

        return run

    current, off = te.autocast(recipe=recipe.Float8CurrentScaling()), te.autocast(enabled=False)
    contestants = {f"{name} current": step(own, current) for name, own in modules.items()}
    contestants |= {f"{name} high precision": step(own, off) for name, own in modules.items()}
    return round_us(contestants, rounds, CALLS)


def import_ms(rounds: int) -> dict[str, float]:
    """Return the median time of ``import torch``, and of fp8core after it, milliseconds."""
    code = (
        "import time; a = time.perf_counter(); import torch; b = time.perf_counter(); "
        "import fp8core; c = time.perf_counter(); print(b - a, c - b)"
    )
    runs = []
    for _ in range(rounds):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
        runs.append([float(word) * 1e3 for word in done.stdout.split()])
    first, second = (round(statistics.median(column), 1) for column in zip(*runs, strict=True))
    return {"torch": first, "fp8core over torch": second}


def main() -> None:
    """Print the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    rounds: int = parser.parse_args().rounds
    torch.set_num_threads(1)
    report = {
        "device": f"{platform.machine()} CPU, 1 thread",
        "torch": torch.__version__,
        "shape": f"x [{ROWS}, {SIZE}] float32, weight [{SIZE}, {SIZE}]",
        "linear_us": {str(n): linear_overhead(n, rounds) for n in (None, "current", "delayed")},
        "layers_us": layers(rounds),
        "import_ms": import_ms(5),
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
