"""Permutation, router, cross entropy and Adam beside Transformer Engine and torch.compile.

    python -m tests.benchmarks.training_gpu [--only permute router cross_entropy adam]

Forward and backward of each, in CUDA graphs whose replays take turns as measuring/turns.py says:
device time without the host's; ``host`` is the time of a call that the host enqueues, the device
idle. Contestants that cannot be recorded, or that are not installed, are left out with the reason.
Inputs are normal.
"""

from __future__ import annotations

import argparse
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fp8core.backend_api import AdamDesc
from fp8core.dispatch import table
from tests.benchmarks.measuring.contest import Contest
from tests.benchmarks.measuring.device import CUDA, versions
from tests.benchmarks.measuring.intervals import median_interval, ratios
from tests.benchmarks.measuring.turns import Stop

DEVICE = CUDA.torch_device
BF16 = torch.bfloat16
CALLS = 3
Call = Callable[[], Any]


def theirs(name: str) -> Any:
    """Return a module of Transformer Engine, None if it is not installed."""
    try:
        return importlib.import_module(f"transformer_engine.pytorch{name}")
    except (ImportError, OSError, AssertionError) as error:
        print(f"transformer_engine.pytorch{name} is left out: {str(error).splitlines()[0]}")
        return None


def compare(title: str, ideal_bytes: float, calls: dict[str, Call]) -> None:
    """Print device and host time of every contestant, and fp8core's rate of the ideal bytes."""
    print(f"{title}: {ideal_bytes / 1e6:.0f} MB", flush=True)
    contest, replays = Contest(CUDA), {}
    for name, call in calls.items():
        replay = contest.enter(name, functools.partial(contest.capture, [call], CALLS))
        if replay is not None:
            replays[name] = replay
    us = contest.take("graph", replays, Stop(0.0))
    hosts = contest.take("host", {name: calls[name] for name in replays}, Stop(0.0))
    for name, times in us.items():
        device, host = (median_interval(own) for own in (times, hosts[name]))
        rate = (
            f", {ideal_bytes * CALLS / device.median / 1e6:.2f} TB/s" if name == "fp8core" else ""
        )
        over = median_interval(ratios(us["fp8core"], times)).text()
        text = (
            f"{device.median / CALLS:8.1f} us, fp8core / it {over}, host {host.median:.1f} us{rate}"
        )
        print(f"    {name:16} {text}", flush=True)


def with_backward(run: Callable[..., torch.Tensor], *leaves: torch.Tensor) -> Call:
    """Return a call of ``run`` and of the gradients of its leaves."""
    grads: list[torch.Tensor] = []

    def call() -> Any:
        y = run(*leaves)
        if not grads:
            grads.append(torch.randn_like(y))
        return torch.autograd.grad(y, leaves, grads[0])

    return call


Comparison = tuple[str, float, dict[str, Call]]


def modules(suffix: str = "") -> dict[str, Any]:
    """Return our module and theirs of one name, by contestant."""
    ours = importlib.import_module(f"fp8core{suffix}")
    other = theirs(suffix)
    return {"fp8core": ours} if other is None else {"fp8core": ours, "te": other}


def permutation(tokens: int, hidden: int, experts: int, topk: int) -> Iterator[Comparison]:
    x = torch.randn(tokens, hidden, device=DEVICE, dtype=BF16).requires_grad_()
    scores = torch.rand(tokens, experts, device=DEVICE)
    routing = torch.zeros_like(scores).scatter(1, scores.topk(topk, 1).indices, 1).bool()
    probs = (scores * routing).requires_grad_()
    rows, size = tokens * topk, tokens * hidden * 2
    title = f"{tokens} x {hidden}, top {topk} of {experts}"

    def permuted_by(module: Any) -> Call:
        return with_backward(lambda x: module.moe_permute(x, routing, rows)[0], x)

    def merged_by(module: Any) -> Call:
        permuted, row_id_map = module.moe_permute(x.detach(), routing, rows)
        leaf = permuted.detach().clone().requires_grad_()
        return with_backward(
            lambda y, w: module.moe_unpermute(y, row_id_map, w, restore_shape=x.shape), leaf, probs
        )

    def plain(x: torch.Tensor) -> torch.Tensor:
        order = torch.argsort(~routing.t().reshape(-1), stable=True)[:rows] % tokens
        return x.index_select(0, order)

    calls = {name: permuted_by(module) for name, module in modules().items()}
    calls["torch.compile"] = with_backward(torch.compile(plain), x)
    yield f"permute {title}", float(2 * (1 + topk) * size), calls
    calls = {name: merged_by(module) for name, module in modules().items()}
    yield f"unpermute {title}", float((2 + 3 * topk) * size), calls


def permutations() -> Iterator[Comparison]:
    yield from permutation(4096, 4096, 8, 2)
    yield from permutation(8192, 7168, 256, 8)


def routing(
    experts: int, topk: int, function: str, groups: int | None, best: int | None
) -> Comparison:
    logits = torch.randn(8192, experts, device=DEVICE).requires_grad_()
    bias = torch.randn(experts, device=DEVICE) if function == "sigmoid" else None

    def routed_by(module: Any) -> Call:
        return with_backward(
            lambda x: module.fused_topk_with_score_function(
                x, topk, False, groups, best, 2.5, function, bias
            )[0],
            logits,
        )

    def plain(x: torch.Tensor) -> torch.Tensor:
        if groups and best:
            scores = x.sigmoid()
            ranked = scores + bias
            sums = ranked.view(len(x), groups, -1).topk(topk // best, dim=-1)[0].sum(-1)
            kept = torch.zeros_like(sums).scatter(1, sums.topk(best, dim=-1)[1], 1)
            kept = kept.repeat_interleave(experts // groups, 1).bool()
            chosen = ranked.masked_fill(~kept, float("-inf")).topk(topk, dim=-1)[1]
            values = scores.gather(1, chosen)
            values = values / (values.sum(-1, keepdim=True) + 1e-20)
        else:
            values, chosen = x.topk(topk, dim=-1)
            values = values.softmax(-1)
        return torch.zeros_like(x).scatter(1, chosen, values * 2.5)

    calls = {name: routed_by(module) for name, module in modules(".router").items()}
    calls["torch.compile"] = with_backward(torch.compile(plain), logits)
    return f"router 8192 x {experts}, top {topk} {function}", 8192.0 * experts * 26, calls


def routers() -> Iterator[Comparison]:
    yield routing(256, 8, "sigmoid", 8, 4)
    yield routing(128, 8, "softmax", None, None)
    yield routing(8, 2, "softmax", None, None)


def cross_entropy(rows: int, classes: int) -> Comparison:
    x = torch.randn(1, rows, classes, device=DEVICE, dtype=BF16).requires_grad_()
    target = torch.randint(0, classes, (1, rows), device=DEVICE)

    def loss_by(module: Any) -> Call:
        return with_backward(lambda x: module.parallel_cross_entropy(x, target, 0.0, True), x)

    def plain(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(x.view(-1, classes).float(), target[0])

    calls = {name: loss_by(module) for name, module in modules().items()}
    calls["torch.compile"] = with_backward(torch.compile(plain), x)
    return f"cross_entropy {rows} x {classes}", 6.0 * rows * classes, calls


def cross_entropies() -> Iterator[Comparison]:
    yield cross_entropy(4096, 32000)
    yield cross_entropy(4096, 128256)


SHAPES = [(4096, 4096)] * 16 + [(14336, 4096)] * 4 + [(4096,)] * 60
WIDTHS = {"float32": 28, "remainder": 26, "none": 28}
"""Bytes that a step reads and writes for each parameter."""


def adam(master: str) -> Comparison:
    dtype = torch.float32 if master == "none" else BF16
    params = [torch.randn(shape, device=DEVICE, dtype=dtype) for shape in SHAPES]
    grads = [torch.randn_like(one) for one in params]
    states = [[torch.zeros(shape, device=DEVICE) for shape in SHAPES] for _ in range(2)]
    kept = torch.int16 if master == "remainder" else torch.float32
    extra = [torch.zeros(shape, device=DEVICE, dtype=kept) for shape in SHAPES]
    lists = [grads, params, *states, [] if master == "none" else extra]
    step = table.resolve(AdamDesc(dtype, dtype, master=master), DEVICE).run
    numbers: dict[str, Any] = {"lr": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
    numbers |= {"weight_decay": 0.1, "step": 3}
    calls: dict[str, Call] = {"fp8core": lambda: step(*lists, **numbers)}
    te = theirs(".optimizers")
    if te is not None:
        native = importlib.import_module("transformer_engine_torch")
        name = "multi_tensor_adam_param_remainder" if master == "remainder" else "multi_tensor_adam"
        kernel, flag = getattr(native, name), torch.zeros(1, dtype=torch.int32, device=DEVICE)
        given = (1e-4, 0.9, 0.95, 1e-8, 3, 1, 1, 0.1)
        calls["te"] = lambda: te.multi_tensor_applier(
            kernel, flag, [list(group) for group in lists if group], *given
        )
    if master == "none":
        steps = [torch.tensor(3.0, device=DEVICE) for _ in SHAPES]
        options: dict[str, Any] = {"lr": 1e-4, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1}
        options |= {"eps": 1e-8, "amsgrad": False, "maximize": False}
        calls["torch fused"] = lambda: torch._fused_adamw_(
            params, grads, *states, [], steps, **options
        )
    count = sum(torch.Size(shape).numel() for shape in SHAPES)
    return f"adam {count / 1e6:.0f}M, masters {master}", float(count * WIDTHS[master]), calls


def adams() -> Iterator[Comparison]:
    for master in WIDTHS:
        yield adam(master)
        torch.cuda.empty_cache()


CASES = {
    "permute": permutations,
    "router": routers,
    "cross_entropy": cross_entropies,
    "adam": adams,
}


def main() -> None:
    """Print the comparisons."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
    chosen = parser.parse_args().only
    print(versions("transformer_engine"))
    for name in chosen:
        for title, size, calls in CASES[name]():
            compare(title, size, calls)


if __name__ == "__main__":
    main()
