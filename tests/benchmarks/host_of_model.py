"""The host's own time of a model's step under the CUDA backend:
``python -m tests.benchmarks.host_of_model``.

Needs no GPU: as in :mod:`tests.benchmarks.host_path` the front end and the CUDA backend's Python
run as they are, on tensors of the CPU. Native calls are replaced by nothing, recorded runs by the
functions that they call and by allocations of their results, and attention by operators that
allocate its results, in all contestants. A step is forward and backward of the decoders of
:mod:`tests.benchmarks.model_gpu`, with tiny tensors: what is left of torch's operators is about
their dispatch. Launches, which take a GPU's host a few us each, are in no contestant.

Prints for each contestant the least 5 % and the median of interleaved steps, us, and how many
functions of Python a step calls, by library. ``--profile NAME`` prints the functions that take most
of the time instead, ``--own`` the calls of each function.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from fp8core.backend_api import AttentionBackwardDesc, AttentionDesc, OpDesc, Recording
from fp8core.dispatch import plugins
from fp8core_backends.cuda import attention_torch
from tests.benchmarks import host_path
from tests.benchmarks.host_path import CPU
from tests.benchmarks.measuring.command import HIGH
from tests.benchmarks.measuring.device import HOST, without_collections
from tests.benchmarks.measuring.profiles import print_functions
from tests.benchmarks.measuring.turns import orders
from tests.benchmarks.model_gpu import contestants, weights
from tests.benchmarks.model_gpu.contestants import BASE, CONTESTANTS, LOSSES, Bench
from tests.benchmarks.model_gpu.weights import Shape, Shared

ROWS, LENGTH = 2, 8
SHAPE = Shape(hidden=64, ffn=128, heads=4, groups=2, layers=4, vocabulary=64)
ROUNDS, CALLS, WARM_UP, PROFILED_CALLS = 40, 10, 20, 300
NAMES = (
    *(BASE, f"hf {HIGH}"),
    *(f"{kind} {name}" for kind in ("fp8core", "converted") for name in host_path.RECIPES[:3]),
)

Step = Callable[[], None]
_empty = torch._C._dynamo.guards._empty_strided_cpu  # type: ignore[attr-defined]


class Run:
    """Stands for a recorded run: allocates its results, and calls the functions that it called.

    ``given`` are the tensors that each call gives, ``calls`` the functions with what they got and
    returned.
    """

    def __init__(
        self,
        given: Sequence[torch.Tensor | None],
        calls: Sequence[Any],
        results: Sequence[torch.Tensor | None],
    ) -> None:
        places = {id(one): at for at, one in enumerate(given)}
        made = {id(result): at for at, (_, _, result) in enumerate(calls)}
        self._calls = [
            (function, [made.get(id(one), one) for one in tensors])
            for function, tensors, _ in calls
        ]
        self._results: list[tuple[int | None, int | None, Any]] = []
        for one in results:
            like = None if one is None else (tuple(one.shape), one.stride(), one.dtype)
            self._results.append((places.get(id(one)), made.get(id(one)), like))

    def __call__(
        self, leading: Sequence[torch.Tensor], saved: list[Any] | None = None
    ) -> tuple[torch.Tensor | None, ...]:
        made: list[torch.Tensor] = []
        for function, tensors in self._calls:
            arguments = (made[one] if isinstance(one, int) else one for one in tensors)
            made.append(function(*arguments))
        if saved:
            saved.clear()
        return tuple(
            leading[place]
            if place is not None
            else made[at]
            if at is not None
            else None
            if like is None
            else _empty(*like)
            for place, at, like in self._results
        )


class Recorder:
    """Stands for the recorder of a device."""

    def __init__(self) -> None:
        self._calls: list[Any] | None = None

    def call(self, function: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
        result = function(*tensors)
        if self._calls is not None:
            self._calls.append((function, tensors, result))
        return result

    def record(
        self,
        run: Callable[[], Sequence[torch.Tensor | None]],
        leading: Sequence[torch.Tensor],
        saved: Sequence[torch.Tensor | None] = (),
        constants: Sequence[torch.Tensor] = (),
    ) -> Recording:
        self._calls = calls = []
        results = run()
        self._calls = None
        return Recording(results, Run(leading, calls, results))


_RECORDER = Recorder()


class RecordingBackend(host_path.HostBackend):
    """The backend of the other benchmark, with runs that are recorded as on a device."""

    def recorder(self, desc: OpDesc, device: torch.device) -> Any:
        if isinstance(desc, AttentionDesc | AttentionBackwardDesc):
            return None
        return _RECORDER


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *given: Any, scale: float) -> Any:
    out = torch.empty_like(q.transpose(1, 2)).transpose(1, 2)
    return out, q.new_empty((*q.shape[:-1], 1), dtype=torch.float32), None


def _attention_backward(*given: Any, scale: float) -> Any:
    return tuple(map(torch.empty_like, given[1:4]))


class Attention(torch.autograd.Function):
    """Stands for torch's attention ``[b, heads, s, d]``: one node of autograd."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out, stats, _ = _attention(q, k, v, scale=1.0)
        ctx.save_for_backward(q, k, v, out, stats)
        result: torch.Tensor = out
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        q, k, v, *_ = ctx.saved_tensors
        return _attention_backward(grad, q, k, v, scale=1.0)


def _sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    result: torch.Tensor = Attention.apply(q, k, v)
    return result


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
    factory = "tests.benchmarks.host_of_model:RecordingBackend"
    spec = dataclasses.replace(backends["host"], factory=factory)
    stack.enter_context(patch.dict(backends, {"host": spec}))


def of_model(name: str) -> Step:
    """Return a step of the contestant ``name``."""
    # Products of torch on a CPU are slow in bfloat16, and layers of fp8core use none.
    dtype = torch.float32 if name.endswith(HIGH) else torch.bfloat16
    with patch.object(contestants, "BF16", dtype), patch.object(weights, "BF16", dtype):
        bench = Bench(Shared(SHAPE, CPU), HOST, LENGTH, LOSSES["eager"]())
        contestant = CONTESTANTS[name](bench)
    tokens = torch.randint(SHAPE.vocabulary, (ROWS, LENGTH))
    grad = torch.zeros(ROWS, LENGTH, SHAPE.vocabulary, dtype=dtype)
    parameters = [*contestant.model.parameters()]

    function = _sdpa if dtype == torch.float32 else torch.nn.functional.scaled_dot_product_attention

    def step() -> None:
        torch.nn.functional.scaled_dot_product_attention = function  # type: ignore[assignment]
        for parameter in parameters:
            parameter.grad = None
        contestant.logits(tokens).backward(grad)  # type: ignore[no-untyped-call]  # torch's

    return step


def measure(steps: dict[str, Step], rounds: int) -> dict[str, tuple[float, float]]:
    """Return the least 5 % and the median of each contestant's turns, us a step."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for order in itertools.islice(orders([*steps]), rounds):
        for name in order:
            for at in range(CALLS + 2):
                start = time.process_time()
                steps[name]()
                if at > 1:  # the first ones find caches cold
                    times[name].append((time.process_time() - start) * 1e6)
    return {
        name: (
            statistics.mean(sorted(own)[: max(1, len(own) // 20)]),
            statistics.median(own),
        )
        for name, own in times.items()
    }


def calls_of(step: Step) -> Counter[tuple[str, str]]:
    """Return how often a step calls each function of Python, by library and name."""
    counts: Counter[tuple[str, str]] = Counter()

    def note(frame: Any, event: str, argument: object) -> None:
        if event == "call":
            module = frame.f_globals.get("__name__", "")
            if module.startswith("tests."):
                return
            code = frame.f_code
            name = getattr(code, "co_qualname", code.co_name)
            counts[module.split(".")[0], f"{module}.{name}:{code.co_firstlineno}"] += 1

    with torch.autograd.set_multithreading_enabled(False):
        sys.setprofile(note)
        try:
            step()
        finally:
            sys.setprofile(None)
    return counts


def main() -> None:
    """Print the table, or a profile."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--profile", choices=NAMES)
    parser.add_argument("--own", choices=NAMES, help="list the calls of this contestant")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with ExitStack() as stack, without_collections():
        without_a_device(stack)
        chosen = args.profile or args.own
        steps = {name: of_model(name) for name in ([chosen] if chosen else args.only)}
        for step in steps.values():
            for _ in range(WARM_UP):
                step()
        if args.profile:
            print_functions(steps[args.profile], WARM_UP, PROFILED_CALLS)
            return
        if args.own:
            for (_, name), count in calls_of(steps[args.own]).most_common():
                print(f"{count:5} {name}")
            return
        calls = {name: calls_of(step) for name, step in steps.items()}
        times = measure(steps, args.rounds)
    least, median = times.get(BASE, (float("nan"), float("nan")))
    print("| contestant | least us | over torch | median us | over torch | calls | by library |")
    print("|---|---|---|---|---|---|---|")
    for name, (own_least, own_median) in times.items():
        by_library: Counter[str] = Counter()
        for (library, _), count in calls[name].items():
            by_library[library] += count
        shown = ", ".join(f"{library} {count}" for library, count in by_library.most_common(4))
        print(
            f"| {name} | {own_least:.0f} | {own_least / least:.2f} | {own_median:.0f} | "
            f"{own_median / median:.2f} | {by_library.total()} | {shown} |"
        )


if __name__ == "__main__":
    main()
