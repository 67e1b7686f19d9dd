"""Compile time, and a step of a compiled layer against eager, on the CPU.

``python -m tests.benchmarks.compile_time``. Forward and backward take turns; medians and their
intervals, in milliseconds.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from functools import partial

import torch

import fp8core as te
from tests.benchmarks.measuring.contest import Contest, step_of
from tests.benchmarks.measuring.device import HOST
from tests.benchmarks.measuring.intervals import median_interval
from tests.benchmarks.measuring.libraries import under_recipe
from tests.benchmarks.measuring.turns import Calls, Stop

ROWS, HIDDEN, SECONDS = 256, 256, 5.0
BF16 = torch.bfloat16
LAYERS: dict[str, Callable[[], torch.nn.Module]] = {
    "Linear": lambda: te.Linear(HIDDEN, HIDDEN, params_dtype=BF16),
    "GroupedLinear": lambda: te.GroupedLinear(4, HIDDEN, HIDDEN, params_dtype=BF16),
    "RMSNorm": lambda: te.RMSNorm(HIDDEN, params_dtype=BF16),
    "LayerNormLinear": lambda: te.LayerNormLinear(HIDDEN, HIDDEN, params_dtype=BF16),
    "LayerNormMLP": lambda: te.LayerNormMLP(HIDDEN, 2 * HIDDEN, params_dtype=BF16),
}


def main() -> None:
    """Measure every layer."""
    print(f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads")
    print(f"torch {torch.__version__}, fp8core {te.__version__}, Float8CurrentScaling, inductor")
    print(f"x [{ROWS}, {HIDDEN}] bfloat16, normal; forward and backward, ms")
    x = torch.randn(ROWS, HIDDEN, dtype=BF16, requires_grad=True)
    grad = torch.ones(ROWS, HIDDEN, dtype=BF16)
    for name, make in LAYERS.items():
        torch._dynamo.reset()
        layer = make()
        forward = partial(layer, m_splits=[ROWS // 4] * 4) if name == "GroupedLinear" else layer
        steps: Calls = {
            kind: step_of(under_recipe("fp8core", "current", own), x, grad, [*layer.parameters()])
            for kind, own in (
                ("eager", forward),
                ("compiled", torch.compile(forward, fullgraph=True)),
            )
        }
        start = time.perf_counter()
        steps["compiled"]()
        print(f"{name:16} compile {time.perf_counter() - start:6.1f} s", flush=True)
        for kind, times in Contest(HOST).take("eager", steps, Stop(SECONDS)).items():
            print(f"    {kind:8} {median_interval([us / 1e3 for us in times]).text(2)} ms")


if __name__ == "__main__":
    main()
