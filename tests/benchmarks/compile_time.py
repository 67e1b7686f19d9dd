"""Compile time, and a step of a compiled layer against eager.

``python tests/benchmarks/compile_time.py``. Forward and backward on the CPU, in milliseconds:
median and spread (10th to 90th percentile) of interleaved runs. Nothing is asserted.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from functools import partial

import torch

import fp8core as te
from fp8core import recipe

ROWS, HIDDEN, RUNS = 256, 256, 30
BF16 = torch.bfloat16
LAYERS: dict[str, Callable[[], torch.nn.Module]] = {
    "Linear": lambda: te.Linear(HIDDEN, HIDDEN, params_dtype=BF16),
    "GroupedLinear": lambda: te.GroupedLinear(4, HIDDEN, HIDDEN, params_dtype=BF16),
    "RMSNorm": lambda: te.RMSNorm(HIDDEN, params_dtype=BF16),
    "LayerNormLinear": lambda: te.LayerNormLinear(HIDDEN, HIDDEN, params_dtype=BF16),
    "LayerNormMLP": lambda: te.LayerNormMLP(HIDDEN, 2 * HIDDEN, params_dtype=BF16),
}


def step(call: Callable[..., torch.Tensor], x: torch.Tensor) -> float:
    """Run forward and backward once; return milliseconds."""
    start = time.perf_counter()
    with te.autocast(recipe=recipe.Float8CurrentScaling()):
        y = call(x)
    y.backward(torch.ones_like(y))
    return (time.perf_counter() - start) * 1e3


def summary(times: list[float]) -> str:
    ordered = sorted(times)
    tenth = len(ordered) // 10
    low, high = ordered[tenth], ordered[-1 - tenth]
    return f"{ordered[len(ordered) // 2]:7.2f} ({low:.2f} to {high:.2f})"


def main() -> None:
    """Measure every layer."""
    print(f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads")
    print(f"torch {torch.__version__}, fp8core {te.__version__}, Float8CurrentScaling, inductor")
    print(f"x [{ROWS}, {HIDDEN}] bfloat16, normal; forward and backward, ms, {RUNS} runs")
    for name, make in LAYERS.items():
        torch._dynamo.reset()
        layer = make()
        splits = [ROWS // 4] * 4

        grouped = name == "GroupedLinear"
        eager = partial(layer, m_splits=splits) if grouped else layer
        fast = torch.compile(eager, fullgraph=True)
        x = torch.randn(ROWS, HIDDEN, dtype=BF16, requires_grad=True)
        compile_time = step(fast, x) / 1e3
        times: dict[str, list[float]] = {"eager": [], "compiled": []}
        for _ in range(RUNS):
            times["eager"].append(step(eager, x))
            times["compiled"].append(step(fast, x))
        print(
            f"{name:16} compile {compile_time:6.1f} s   eager {summary(times['eager'])}   "
            f"compiled {summary(times['compiled'])}"
        )


if __name__ == "__main__":
    main()
