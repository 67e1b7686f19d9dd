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

HIDDEN, FFN = 4096, 14336
ROUNDS, COPIED = 9, 2**30


class Measured(NamedTuple):
    """Times in seconds, bytes out, which are those back, and rates in bytes a second."""

    without: float
    with_offload: float
    offloaded: int
    rate_out: float
    rate_back: float
    peak_without: int = 0
    peak_with: int = 0

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
            f"bytes out, and back     {self.offloaded / 2**20:9.1f} MiB each",
            f"PCIe out                {self.rate_out / 1e9:9.1f} GB/s",
            f"PCIe back               {self.rate_back / 1e9:9.1f} GB/s",
            f"copies at these rates   {1e3 * self.copies:9.2f} ms",
            f"ratio to the larger one {self.ratio:9.3f} (bar 1.10, goal 1.03)",
            f"peak without, and with  {self.peak_without / 2**20:9.1f} "
            f"{self.peak_with / 2**20:9.1f} MiB",
        ]


class Stack:
    """Layers, and a step of them in an offload context, or in none."""

    def __init__(self, layers: int, sizes: tuple[int, int], recipe: str, device: str) -> None:
        self.recipe = recipe
        self.layers = [
            fp8core.LayerNormMLP(
                *sizes,
                bias=False,
                normalization="RMSNorm",
                activation="swiglu",
                params_dtype=torch.bfloat16,
                device=device,
            )
            for _ in range(layers)
        ]

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


def seconds(call: Callable[[], Any]) -> float:
    """Return the median time of ``call`` on the device, after two calls that are not counted."""
    times = []
    for at in range(ROUNDS + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        if at > 1:
            times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def rates() -> tuple[float, float]:
    """Return the bytes a second of copies from the device to pinned memory, and back."""
    there = torch.empty(COPIED, dtype=torch.uint8, device="cuda")
    here = torch.empty(COPIED, dtype=torch.uint8, pin_memory=True)
    out = seconds(lambda: here.copy_(there, non_blocking=True))
    back = seconds(lambda: there.copy_(here, non_blocking=True))
    return COPIED / out, COPIED / back


def with_peak(call: Callable[[], Any]) -> tuple[float, int]:
    """Return the median time of ``call``, and the most bytes that it allocates at a time."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    return seconds(call), torch.cuda.max_memory_allocated() - before


def measured(stack: Stack, x: torch.Tensor, *, double_buffering: bool) -> Measured:
    """Measure on the device of ``x``."""
    context, sync = stack.offload(double_buffering=double_buffering)
    without, peak = with_peak(lambda: stack.step(x, contextlib.nullcontext(), lambda y: y))
    with_offload, peak_with = with_peak(lambda: stack.step(x, context, sync))
    offloaded = round(context.synchronizer.get_offloaded_total_size_mb() * 2**20)
    return Measured(without, with_offload, offloaded, *rates(), peak, peak_with)


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
    print(f"{torch.cuda.get_device_name()}, {asked.layers} layers, {asked.tokens} tokens", end=", ")
    found = measured(stack, x, double_buffering=not asked.single)
    print(asked.recipe, *found.lines(), sep="\n")


if __name__ == "__main__":
    main()
