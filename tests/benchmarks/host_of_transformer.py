"""The host's own time of a TransformerLayer under the CUDA backend:
``python -m tests.benchmarks.host_of_transformer``.

Needs no GPU: as in :mod:`tests.benchmarks.host_path` the front end and the CUDA backend's Python
run as they are, on tensors of the CPU. Native calls are replaced by nothing, recorded runs by
allocations of their results, and cuDNN's attention by operators that allocate its results. Prints
the least 5 % of interleaved rounds, microseconds a step, forward and backward, and for each
contestant how many functions of Python a step calls and how many operators of torch it dispatches.

``--profile NAME`` prints the functions that take most of the time instead.
"""

from __future__ import annotations

import argparse
import cProfile
import dataclasses
import itertools
import json
import platform
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fp8core
from fp8core import recipe
from fp8core.backend_api import AttentionBackwardDesc, AttentionDesc, OpDesc, Recording
from fp8core.dispatch import plugins
from fp8core_backends.cuda import attention_torch
from tests.benchmarks import host_path
from tests.benchmarks.host_path import CPU
from tests.benchmarks.measuring.device import without_collections
from tests.benchmarks.measuring.turns import orders

TOKENS, LENGTH, HIDDEN, FFN, HEADS = 16, 8, 128, 256, 2  # small: some of torch's operators run
ROUNDS, CALLS, WARM_UP = 40, 20, 20
RECIPES = ("delayed", "current", "block")

Step = Callable[[], None]
_empty = torch._C._dynamo.guards._empty_strided_cpu  # type: ignore[attr-defined]


class Run:
    """Stands for a recorded run: allocates its results, and calls the functions that it called."""

    def __init__(self, results: Sequence[torch.Tensor | None], calls: Sequence[Any]) -> None:
        made = {id(result): at for at, (_, _, result) in enumerate(calls)}
        self._calls = [(function, tensors) for function, tensors, _ in calls]
        self._results = [
            (None, None if one is None else (tuple(one.shape), one.stride(), one.dtype))
            if id(one) not in made
            else (made[id(one)], None)
            for one in results
        ]

    def __call__(
        self, leading: Sequence[torch.Tensor], saved: list[Any] | None = None
    ) -> tuple[torch.Tensor | None, ...]:
        made: list[torch.Tensor] = []
        for function, tensors in self._calls:
            given = (made[one] if isinstance(one, int) else one for one in tensors)
            made.append(function(*given))
        if saved:
            saved.clear()
        return tuple(
            made[at] if at is not None else None if like is None else _empty(*like)
            for at, like in self._results
        )


class Recorder:
    """Stands for the recorder of a device."""

    def __init__(self) -> None:
        self._calls: list[Any] | None = None

    def call(self, function: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
        result = function(*tensors)
        if self._calls is not None:
            made = {id(one): at for at, (_, _, one) in enumerate(self._calls)}
            given = [made.get(id(one), one) for one in tensors]
            self._calls.append((function, given, result))
        return result

    def record(
        self,
        run: Callable[[], Sequence[torch.Tensor | None]],
        leading: Sequence[torch.Tensor],
        saved: Sequence[torch.Tensor | None] = (),
        constants: Sequence[torch.Tensor] = (),
    ) -> Recording:
        calls: list[Any] = []
        self._calls = calls
        results = run()
        self._calls = None
        return Recording(results, Run(results, calls))


_RECORDER = Recorder()


class RecordingBackend(host_path.HostBackend):
    """The backend of the other benchmark, with runs that are recorded as on a device."""

    def recorder(self, desc: OpDesc, device: torch.device) -> Any:
        if isinstance(desc, AttentionDesc | AttentionBackwardDesc):
            return None
        return _RECORDER


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *given: Any, scale: float) -> Any:
    return torch.empty_like(q), q.new_empty((*q.shape[:-1], 1), dtype=torch.float32), None


def _attention_backward(*given: Any, scale: float) -> Any:
    return tuple(map(torch.empty_like, given[1:4]))


def without_a_device(stack: ExitStack) -> None:
    """Replace what asks for a device, and register the backend for tensors of the CPU."""
    host_path.without_a_device(stack)
    here = SimpleNamespace(**{name: getattr(torch, name) for name in dir(torch)})
    here.device = lambda *name: CPU
    replaced: tuple[tuple[Any, str, Any], ...] = (
        (attention_torch, "torch", here),
        (attention_torch, "cudnn_attention", _attention),
        (attention_torch, "cudnn_attention_backward", _attention_backward),
        (torch.backends.cudnn, "is_available", lambda: True),
        (torch.backends.cudnn, "version", lambda: 91900),
    )
    for owner, name, value in replaced:
        stack.enter_context(patch.object(owner, name, value))
    backends = plugins.load().backends
    factory = "tests.benchmarks.host_of_transformer:RecordingBackend"
    spec = dataclasses.replace(backends["host"], factory=factory)
    stack.enter_context(patch.dict(backends, {"host": spec}))


def of_layer(name: str) -> Step:
    """Return a step of a layer under a recipe."""
    layer = fp8core.TransformerLayer(
        HIDDEN,
        FFN,
        HEADS,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        normalization="RMSNorm",
        activation="swiglu",
        bias=False,
        fuse_qkv_params=True,
        qkv_weight_interleaved=False,
        attn_input_format="bshd",
        params_dtype=torch.bfloat16,
        device=CPU,
    )
    x = torch.randn(TOKENS // LENGTH, LENGTH, HIDDEN).bfloat16().requires_grad_()
    grad = torch.randn_like(x)
    parameters = list(layer.parameters())
    chosen = recipe.by_name(name)

    def step() -> None:
        x.grad = None
        for parameter in parameters:
            parameter.grad = None
        with fp8core.autocast(recipe=chosen):
            y = layer(x)
        y.backward(grad)

    return step


def measure(steps: dict[str, Step], rounds: int) -> dict[str, list[float]]:
    """Return the least 5 % and the median of each contestant's turns, microseconds a step."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for order in orders_of(steps, rounds):
        for name in order:
            for _ in range(CALLS):
                start = time.perf_counter()
                steps[name]()
                times[name].append((time.perf_counter() - start) * 1e6)
    result = {}
    for name, own in times.items():
        least = sorted(own)[: max(1, len(own) // 20)]
        result[name] = [round(statistics.mean(least), 1), round(statistics.median(own), 1)]
    return result


def orders_of(steps: dict[str, Step], rounds: int) -> list[list[str]]:
    """Return an order of the contestants for each round."""
    return list(itertools.islice(orders(list(steps)), rounds))


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's class has no types
    """Counts the operators that torch dispatches."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # likewise
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def calls_of(step: Step) -> int:
    """Return how many functions of Python and of C a step calls."""
    profiler = cProfile.Profile()
    with torch.autograd.set_multithreading_enabled(False):
        profiler.enable()
        for _ in range(CALLS):
            step()
        profiler.disable()
    return round(sum(one.callcount for one in profiler.getstats()) / CALLS)


def operators_of(step: Step) -> Counter[str]:
    """Return how often a step dispatches each operator of torch."""
    operators = Operators()
    with torch.autograd.set_multithreading_enabled(False), operators:
        step()
    return operators.counts


def main() -> None:
    """Print the figures as JSON, or a profile."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--profile", choices=RECIPES)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with ExitStack() as stack, without_collections():
        without_a_device(stack)
        if args.profile is not None:
            host_path.print_profile(of_layer(args.profile))
            return
        steps = {name: of_layer(name) for name in RECIPES}
        for step in steps.values():
            for _ in range(WARM_UP):
                step()
        report = {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "us": measure(steps, args.rounds),
            "calls": {name: calls_of(step) for name, step in steps.items()},
            "operators": {name: operators_of(step) for name, step in steps.items()},
        }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
