"""Groups whose sizes only the device knows, against a loop of groups and one dense product.

    python -m tests.benchmarks.grouped_gpu [--groups 8 --rows 1024 --features 4096]

Every contestant is captured in a CUDA graph of several calls, whose replays take turns as
measuring/turns.py says: device time without the host's. ``device``: sizes on the device, uneven
ones as well (``ragged``: the same rows, groups of a quarter to twice the mean). ``loop``: a product
of cuBLASLt for each group. ``dense``: one product of all rows, for wgrad of the same number of
operations. Inputs are normal, bfloat16.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from fp8core import GroupedLinear, recipe
from fp8core.backend_api import GemmDesc, GroupedGemmDesc, QuantizeDesc
from fp8core.chain.linear.shape import LinearShape
from fp8core.recipe.plan import LayerRole, TensorPlan
from tests.benchmarks.measuring.contest import Contest, step_of
from tests.benchmarks.measuring.device import CUDA, versions
from tests.benchmarks.measuring.libraries import under_recipe
from tests.benchmarks.measuring.turns import Stop

DEVICE = CUDA.torch_device
NAMES = ("delayed", "current", "block", "rowwise")
CALLS = 8


def microseconds(calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Return the median time of each call; contestants take turns."""
    contest = Contest(CUDA)
    replays = {name: contest.capture([call], CALLS) for name, call in calls.items()}
    us = contest.take("graph", replays, Stop(0.0))
    return {name: statistics.median(times) / CALLS for name, times in us.items()}


def ragged(groups: int, rows: int) -> list[int]:
    """Return sizes of a quarter to twice the mean that add up to ``groups * rows``."""
    torch.manual_seed(0)
    share = 0.25 + 1.75 * torch.rand(groups)
    sizes: list[int] = (share / share.sum() * groups * rows).int().tolist()
    sizes[-1] += groups * rows - sum(sizes)
    return sizes


class Case:
    """Operands of one recipe, made by the CUDA backend."""

    def __init__(self, name: str, groups: int, rows: int, features: int) -> None:
        self.backend = CUDA.backend()
        self.plan = recipe.by_name(name).plan(LayerRole("grouped_linear", "x"), torch.bfloat16)
        self.groups, self.rows, self.features = groups, rows, features
        self.x, self.dy = (
            torch.randn(groups * rows, features, dtype=torch.bfloat16, device=DEVICE)
            for _ in range(2)
        )
        self.weights = [
            torch.randn(features, features, dtype=torch.bfloat16, device=DEVICE)
            for _ in range(groups)
        ]

    def offsets(self, sizes: list[int]) -> torch.Tensor:
        return torch.tensor([0, *sizes], device=DEVICE).cumsum(0)

    def cast(self, tensor: TensorPlan, *where: bool) -> Callable[..., Any]:
        desc = QuantizeDesc(torch.bfloat16, *tensor, *where)
        run = self.backend.bind(desc, DEVICE)
        own = tensor.rowwise or tensor.columnwise
        if own is None or not own.delayed:
            return run
        scale = torch.ones(self.groups if where else 1, device=DEVICE)
        return lambda *given: run(*given, scale=scale, amax_out=torch.zeros_like(scale))

    def casts(self) -> dict[str, Callable[[], Any]]:
        """Return casts of x in both orientations."""
        even, uneven = [self.rows] * self.groups, ragged(self.groups, self.rows)
        device, loop, dense = (
            self.cast(self.plan.input, *where) for where in ((True, True), (True,), ())
        )
        places = self.offsets(even), self.offsets(uneven), self.offsets(even).cpu()
        return {
            "device": lambda: device(self.x, places[0]),
            "ragged": lambda: device(self.x, places[1]),
            "loop": lambda: loop(self.x, places[2]),
            "dense": lambda: dense(self.x),
        }

    def gemms(self, which: str) -> dict[str, Callable[[], Any]]:
        """Return products ``which``: fprop or wgrad."""
        size = self.features
        shape = LinearShape(size, size, torch.bfloat16, None, self.groups)
        desc = shape.gemm_desc(which, self.plan, torch.bfloat16)
        assert isinstance(desc, GroupedGemmDesc)
        run = self.backend.bind(replace(desc, offsets_on_device=True), DEVICE)
        loop = self.backend.bind(desc, DEVICE)
        fields = (desc.a, desc.b, desc.out_dtype, desc.accumulate, desc.fast_accumulation)
        dense = self.backend.bind(GemmDesc(*fields), DEVICE)
        even, uneven = [self.rows] * self.groups, ragged(self.groups, self.rows)
        calls = {}
        for name, sizes in (("device", even), ("ragged", uneven)):
            at, operands = self.offsets(sizes), self.operands(which, sizes, True)
            calls[name] = lambda at=at, own=operands: run(*own, at)
        at, operands = self.offsets(even).cpu(), self.operands(which, even, False)
        calls["loop"] = lambda: loop(*operands, at)
        rows = self.groups * self.rows if which == "fprop" else self.rows
        x, dy = (self.cast(t)(v[:rows]) for t, v in self.pairs())
        weight = self.cast(self.plan.weight)(self.weights[0]).rowwise
        pair = (x.rowwise, weight) if which == "fprop" else (dy.columnwise, x.columnwise)
        times = 1 if which == "fprop" else self.groups
        calls["dense"] = lambda: [dense(*pair) for _ in range(times)]
        return calls

    def pairs(self) -> Iterator[tuple[TensorPlan, torch.Tensor]]:
        yield self.plan.input, self.x
        yield self.plan.grad_output, self.dy

    def operands(self, which: str, sizes: list[int], on_device: bool) -> tuple[Any, Any]:
        at = self.offsets(sizes)
        at = at if on_device else at.cpu()
        x, dy = (self.cast(t, True, on_device)(v, at) for t, v in self.pairs())
        if which == "wgrad":
            return dy.columnwise, x.columnwise
        cast = self.cast(self.plan.weight)
        return x.rowwise, [cast(weight).rowwise for weight in self.weights]


def layer_steps(name: str, groups: int, rows: int, features: int) -> dict[str, Callable[[], Any]]:
    """Return forward and backward of a layer, with sizes on the device and as a list."""
    size, kind = (groups, features, features), torch.bfloat16
    layer = GroupedLinear(*size, bias=False, params_dtype=kind, device="cuda")
    x = torch.randn(groups * rows, features, dtype=kind, device=DEVICE, requires_grad=True)
    grad = torch.randn_like(x)
    even = [rows] * groups
    sizes = {"device": torch.tensor(even, device=DEVICE), "loop": even}

    def step(splits: Any) -> Callable[[], None]:
        forward = under_recipe("fp8core", name, lambda x: layer(x, splits))
        return step_of(forward, x, grad, list(layer.parameters()))

    return {key: step(splits) for key, splits in sizes.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for option, default in (("groups", 8), ("rows", 1024), ("features", 4096)):
        parser.add_argument(f"--{option}", type=int, default=default)
    asked = parser.parse_args()
    size = (asked.groups, asked.rows, asked.features)
    print(versions(), "groups rows k=n:", *size)
    flops = 2 * asked.groups * asked.rows * asked.features**2
    for name in NAMES:
        case = Case(name, *size)
        for which in ("fprop", "wgrad"):
            made = microseconds(case.gemms(which))
            words = (f"{k} {t:.0f} us {flops / t / 1e6:.0f} TFLOP/s" for k, t in made.items())
            print(f"{name} {which}: {', '.join(words)}", flush=True)
        made = microseconds(case.casts())
        moved = 4 * case.x.numel()  # two bytes read, two codes written
        words = (f"{k} {t:.0f} us {moved / t / 1e6:.2f} TB/s" for k, t in made.items())
        print(f"{name} cast: {', '.join(words)}", flush=True)
        made = microseconds(layer_steps(name, *size))
        words = (f"{k} {t:.0f} us" for k, t in made.items())
        print(f"{name} step of the layer: {', '.join(words)}", flush=True)


if __name__ == "__main__":
    main()
