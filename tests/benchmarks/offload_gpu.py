"""Offloading a stack of LayerNormMLPs, against the larger of its step and its copies over PCIe.

    python -m tests.benchmarks.offload_gpu [--layers 4 --tokens 8192 --recipe mxfp8 --single]

The layers are those of an 8B model: hidden 4096, feed-forward 14336, RMSNorm, SwiGLU, bfloat16.
All but the last one are offloaded, with double buffering or, by ``--single``, without. Prints the
step (forward and backward) without and with offloading, the bytes that go out and come back, the
rates of copies between pinned memory and the device measured in this run, the ratio of the step
with offloading to the larger of the step without it and the copies, and the peaks of memory.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import fp8core
from fp8core.cpu_offload import get_cpu_offload_context
from tests.benchmarks.measuring.contest import MIB, Contest
from tests.benchmarks.measuring.device import CUDA, Device, versions
from tests.benchmarks.measuring.libraries import swiglu_mlp
from tests.benchmarks.measuring.turns import Stop

HIDDEN, FFN = 4096, 14336
COPIED = 2**30


class Measured(NamedTuple):
    """Times in seconds, bytes out, which are those back, and rates in bytes a second."""

    without: float
    with_offload: float
    offloaded: int
    rate_out: float
    rate_back: float
    peak_without_mib: float = 0.0
    peak_with_mib: float = 0.0

    @property
    def copies(self) -> float:
        """Seconds that the copies take one after the other, at the rates measured."""
        return self.offloaded / self.rate_out + self.offloaded / self.rate_back

    @property
    def ratio(self) -> float:
        """The step with offloading over the larger of the step without it and the copies."""
        return self.with_offload / max(self.without, self.copies)

    def lines(self) -> list[str]:
        """Return what is printed."""
        return [
            f"step without offloading {1e3 * self.without:9.2f} ms",
            f"step with offloading    {1e3 * self.with_offload:9.2f} ms",
            f"bytes out, and back     {self.offloaded / MIB:9.1f} MiB each",
            f"PCIe out                {self.rate_out / 1e9:9.1f} GB/s",
            f"PCIe back               {self.rate_back / 1e9:9.1f} GB/s",
            f"copies at these rates   {1e3 * self.copies:9.2f} ms",
            f"ratio to the larger one {self.ratio:9.3f} (bar 1.10, goal 1.03)",
            f"peak without, and with  {self.peak_without_mib:9.1f} {self.peak_with_mib:9.1f} MiB",
        ]


class Stack:
    """Layers, and a step of them in an offload context, or in none."""

    def __init__(self, layers: int, sizes: tuple[int, int], recipe: str, device: str) -> None:
        self.recipe = recipe
        kind = torch.device(device)
        self.layers = [swiglu_mlp("fp8core", *sizes, kind) for _ in range(layers)]

    def step(self, x: torch.Tensor, context: Any, sync: Callable[[Any], Any]) -> None:
        """Run forward and backward; gradients of parameters are dropped."""
        y = x
        with fp8core.autocast(recipe=self.recipe):
            for layer in self.layers:
                with context:
                    y = layer(y)
                y = sync(y)
        y.backward(torch.ones_like(y))
        for layer in self.layers:
            layer.zero_grad()
        x.grad = None

    def offload(self, *, double_buffering: bool = True) -> tuple[Any, Callable[[Any], Any]]:
        """Return a context that offloads all layers but the last one."""
        count = len(self.layers)
        context, sync = get_cpu_offload_context(
            True,
            count - 1,
            count,
            double_buffering=double_buffering,
            retain_pinned_cpu_buffers=True,
        )
        return context, sync


def seconds(contest: Contest, calls: dict[str, Callable[[], object]]) -> list[float]:
    """Return the median time of each of ``calls``, which take turns."""
    us = contest.take("eager", calls, Stop(0.0))
    return [statistics.median(times) / 1e6 for times in us.values()]


def rates(contest: Contest) -> list[float]:
    """Return the bytes a second of copies from the device to pinned memory, and back."""
    there = torch.empty(COPIED, dtype=torch.uint8, device=contest.device.torch_device)
    here = torch.empty(COPIED, dtype=torch.uint8, pin_memory=there.is_cuda)
    copies: dict[str, Callable[[], object]] = {
        "out": lambda: here.copy_(there, non_blocking=True),
        "back": lambda: there.copy_(here, non_blocking=True),
    }
    return [COPIED / time for time in seconds(contest, copies)]


def measured(
    stack: Stack, x: torch.Tensor, *, double_buffering: bool, device: Device = CUDA
) -> Measured:
    """Measure on the device of ``x``; the peak without offloading before anything is offloaded."""
    contest = Contest(device)
    context, sync = stack.offload(double_buffering=double_buffering)
    steps: dict[str, Callable[[], object]] = {
        "without": lambda: stack.step(x, contextlib.nullcontext(), lambda y: y),
        "with": lambda: stack.step(x, context, sync),
    }
    before = contest.allocated()
    steps["without"]()
    peak = contest.peak_mib(steps["without"], before)
    times = seconds(contest, steps)
    peak_with = contest.peak_mib(steps["with"], before)
    offloaded = round(context.offload_synchronizer.get_offloaded_total_size_mb() * MIB)
    return Measured(*times, offloaded, *rates(contest), peak, peak_with)


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--recipe", default="delayed")
    parser.add_argument("--single", action="store_true", help="without double buffering")
    asked = parser.parse_args()
    stack = Stack(asked.layers, (HIDDEN, FFN), asked.recipe, "cuda")
    x = torch.randn(asked.tokens, HIDDEN, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    print(versions(), f"{asked.layers} layers, {asked.tokens} tokens", end=", ")
    found = measured(stack, x, double_buffering=not asked.single)
    print(asked.recipe, *found.lines(), sep="\n")


if __name__ == "__main__":
    main()
