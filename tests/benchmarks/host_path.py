"""The host's own time of a Linear under the CUDA backend: ``python -m tests.benchmarks.host_path``.

Needs no GPU. The front end and the CUDA backend's Python run as they are, on tensors of the CPU;
native calls are replaced by functions that do nothing, so results are what memory held. What is
left is the time to decide, allocate and call, without launches. Medians over interleaved rounds of
a forward and backward, microseconds, next to a bare autograd.Function that allocates the same
results.

``--profile RECIPE`` prints the functions that take most of the time instead.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch

import fp8core
from fp8core.backend_api import API_VERSION, BackendSpec, OpDesc
from fp8core.dispatch import plugins
from fp8core.tensors import scaling
from fp8core_backends.cuda import autotune, backend, gemm, memory, native
from tests.benchmarks.measuring.contest import step_of
from tests.benchmarks.measuring.libraries import under_recipe
from tests.benchmarks.measuring.profiles import print_functions
from tests.benchmarks.measuring.turns import round_us

TOKENS, IN_FEATURES, OUT_FEATURES = 256, 512, 2048
RECIPES = ("current", "delayed", "block", "rowwise")
CALLS, WARM_UP, PROFILED_CALLS = 200, 50, 2000
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def nothing(*arguments: object) -> None:
    """Stand for a native call."""


class Names:
    """An enumeration of the native library: every name stands for itself."""

    class _Members(dict[str, str]):
        def __missing__(self, name: str) -> str:
            return name

    __members__ = _Members()


class Cast:
    """A cast that computes nothing."""

    whole = part = staticmethod(nothing)

    def __init__(self, *arguments: object) -> None: ...
    def __call__(self, *arguments: object) -> None: ...


class Gemm:
    """A problem with one algorithm, which computes nothing."""

    num_candidates, library_version = 1, 1
    run = staticmethod(nothing)

    def __init__(self, *arguments: object) -> None: ...
    def workspace_bytes(self, index: int) -> int:
        return 0


class Kind(Names, Cast):
    """An enumeration, or a descriptor whose call computes nothing and whose sizes are 0."""

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *arguments: 0


class Library:
    """What ``native.load`` returns: of any name it has an enumeration or a descriptor."""

    MAX_PARTIALS, MOST_TWICE_PASSED = 1024, 1 << 16
    Gemm = Gemm

    def __getattr__(self, name: str) -> type[Kind]:
        return Kind


class HostBackend(backend.CudaBackend):
    """The CUDA backend, told that its device is one, on tensors of the CPU."""

    def unsupported(self, desc: OpDesc, device: torch.device) -> str | None:
        return super().unsupported(desc, CUDA)

    def bind(self, desc: OpDesc, device: torch.device) -> Callable[..., Any]:
        run = super().bind(desc, CUDA)
        if hasattr(run, "_device"):  # where results are allocated
            object.__setattr__(run, "_device", CPU)
        return run

    def recorder(self, desc: OpDesc, device: torch.device) -> None:
        """Return None: each call goes through Python, as the first ones do on a device."""


def without_a_device(stack: ExitStack) -> None:
    """Replace what asks for a device, and register the backend for tensors of the CPU."""
    replaced: tuple[tuple[Any, str, Any], ...] = (
        (native, "missing", lambda device: None),
        (native, "load", Library),
        (native, "is_loaded", lambda: True),
        (torch.cuda, "current_device", lambda: 0),
        (torch.cuda, "is_current_stream_capturing", lambda: False),
        (torch.cuda, "get_device_capability", lambda device=None: (9, 0)),
        (gemm, "ALIGNMENT_OF_ALLOCATIONS", 16),  # torch's on a CPU are less aligned
        (memory, "_empty_here", torch._C._dynamo.guards._empty_strided_cpu),
        (memory, "_current_device", lambda: 0),
        (autotune, "choose", lambda *arguments: 0),
        (scaling, "_report_nonfinite", lambda state: None),  # what is in memory may be anything
    )
    for owner, name, value in replaced:
        stack.enter_context(patch.object(owner, name, value))
    for name, module in list(sys.modules.items()):
        if name.startswith("fp8core_backends.cuda.") and hasattr(module, "raw_stream"):
            stack.enter_context(patch.object(module, "raw_stream", lambda index: 0))
    spec = BackendSpec(
        "host",
        ("cpu",),
        "tests.benchmarks.host_path:HostBackend",
        priority=100,
        transposes=True,
        api_version=API_VERSION,
    )
    stack.enter_context(patch.dict(plugins.load().backends, {"host": spec}))


def of_layer(name: str) -> Callable[[], None]:
    """Return a step of a Linear under a recipe."""
    layer = fp8core.Linear(
        IN_FEATURES, OUT_FEATURES, bias=False, params_dtype=torch.bfloat16, device=CPU
    )
    x = torch.randn(TOKENS, IN_FEATURES).bfloat16().requires_grad_()
    grad = torch.randn(TOKENS, OUT_FEATURES).bfloat16()
    return step_of(under_recipe("fp8core", name, layer), x, grad, [layer.weight])


class Bare(torch.autograd.Function):
    """Allocates what a Linear returns."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x.new_empty(len(x), len(weight))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


def of_bare_function() -> Callable[[], None]:
    """Return a step of the bare autograd.Function."""
    x = torch.randn(TOKENS, IN_FEATURES).bfloat16().requires_grad_()
    weight = torch.randn(OUT_FEATURES, IN_FEATURES).bfloat16().requires_grad_()
    grad = torch.randn(TOKENS, OUT_FEATURES).bfloat16()
    return step_of(lambda x: Bare.apply(x, weight), x, grad, [weight])  # type: ignore[no-untyped-call]


def measure(rounds: int) -> dict[str, list[float]]:
    """Return ``[median, least, most]`` of each contestant over rounds, microseconds a step."""
    steps = {"autograd.Function": of_bare_function()} | {name: of_layer(name) for name in RECIPES}
    return round_us(steps, rounds, CALLS)


def main() -> None:
    """Print the figures as JSON, or a profile."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--profile", choices=RECIPES)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with ExitStack() as stack:
        without_a_device(stack)
        if args.profile is not None:
            print_functions(of_layer(args.profile), WARM_UP, PROFILED_CALLS)
            return
        report = {
            "device": f"{platform.machine()} CPU, 1 thread",
            "python": platform.python_version(),
            "torch": torch.__version__,
            "shape": f"{TOKENS} tokens, {IN_FEATURES} -> {OUT_FEATURES}, bfloat16, no bias",
            "us": measure(args.rounds),
        }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
