"""A Transformer layer and a mixture of experts over two ranks, beside one process that has all.

Tensor and sequence parallelism, context parallelism by either way, and experts of which ranks get
unequal numbers of tokens, or one rank none. For each recipe: the largest relative difference of an
output or gradient to one process, the largest error against torch in float32 over that of one
process and over the bound, and the time of forward and backward beside one process on the tokens of
all ranks, in turns.
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn import functional

import fp8core
from fp8core import ops
from fp8core.distributed import Experts, get_batch_on_this_cp_rank, shard_layout
from tests.benchmarks.measuring import markdown
from tests.benchmarks.measuring.contest import Contest
from tests.benchmarks.measuring.device import CUDA, HOST
from tests.benchmarks.measuring.intervals import median_interval
from tests.benchmarks.measuring.libraries import decoder_layer, under_recipe
from tests.benchmarks.measuring.turns import Stop
from tests.benchmarks.model_gpu.contestants import TorchLayer
from tests.benchmarks.model_gpu.weights import SHAPES, TENSORS
from tests.benchmarks.parallel_gpu.together import Ranks, of_world
from tests.ranks import DEVICE_TYPE, device, run_ranks

__all__ = ["RECIPES", "main", "work"]

RECIPES = ("bf16", "delayed", "current", "block")
IS_TRIAL = DEVICE_TYPE == "cpu"
SHAPE = SHAPES["tiny" if IS_TRIAL else "8B"]
SEQUENCE, BATCH = (32, 2) if IS_TRIAL else (4096, 1)
EXPERTS, TOKENS = 4, 8 if IS_TRIAL else 512
COUNTS = {"unequal": ((1, 2, 0, 4), (3, 0, 1, 0)), "none on a rank": ((2, 5, 0, 1), (0, 0, 0, 0))}
"""Tokens of each rank for each expert, in units of :data:`TOKENS`."""
WARM_UP = 3
RATIO, ROUNDING = 1.25, 2**-9
"""The bound of an error: so many times that of one process, and that of one more rounding to
bfloat16, as sums over ranks have. Scales of context parallelism are those of a rank's tokens."""
BF16 = torch.bfloat16
ALONE = "one process"
COLUMNS = (
    *("recipe", "way", "difference", "error / one process's", "error / bound", "ms"),
    "ms of one process",
)

Tensors = dict[str, torch.Tensor]


class Run:
    """Forward and backward of a layer, and the results of the last ones."""

    def __init__(self, layer: Any, forward: Callable[[Any], Any], x: torch.Tensor, grad: Any):
        self.layer, self.forward = layer, forward
        self.x, self.grad = x.detach().clone().requires_grad_(), grad

    def __call__(self) -> None:
        self.x.grad = None
        self.layer.zero_grad()
        y = self.forward(self.x)
        y.backward(self.grad)
        self.y = y.detach()

    def results(self) -> Tensors:
        """Return the output and all gradients, by name."""
        assert self.x.grad is not None
        grads = {name: own.grad for name, own in self.layer.named_parameters()}
        return {"y": self.y, "x": self.x.grad, **grads}


class Way(NamedTuple):
    """A run over ranks, the part of the results of one process that is this rank's, and the names
    of gradients that are a share of a sum over the ranks."""

    run: Run
    part: Callable[[Tensors], Tensors]
    summed: Callable[[str], bool]

    def results(self) -> Tensors:
        """Return this rank's results."""
        found = self.run.results()
        for name, value in found.items():
            if self.summed(name):
                dist.all_reduce(value)
        return found


def normal(*shape: int, seed: int, size: float = 1.0) -> torch.Tensor:
    """Return normal values that follow from the seed, bfloat16."""
    source = torch.Generator(device()).manual_seed(seed)
    return (torch.randn(*shape, generator=source, device=device()) * size).to(BF16)


def transformer_layer(**options: Any) -> Any:
    """Return the layer, split by ``options``."""
    options = {"self_attn_mask_type": "causal", "device": device(), **options}
    return decoder_layer("fp8core", SHAPE, **options)


def pieces(layer: Any, tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[Any, torch.Tensor]]:
    """Yield each part of a layer's parameters and its rows of the ``tensors`` of their names."""
    for name, parts in shard_layout(layer).items():
        for part in parts if name in tensors else ():
            yield part, tensors[name][part.start : part.start + part.length]


def parts_of(layer: Any, whole: Any, tensors: Tensors) -> Tensors:
    """Return what a rank's ``layer`` has of the ``tensors`` of ``whole``, by its names."""
    named = {part.key: rows for part, rows in pieces(whole, tensors)}
    parts = {name: torch.empty_like(own) for name, own in layer.named_parameters()}
    for part, rows in pieces(layer, parts):
        piece = named[part.key]
        for dim, (first, size) in enumerate(zip(part.offset, rows.shape, strict=True)):
            piece = piece.narrow(dim, first, size)
        rows.copy_(piece)
    return parts


def exact_layer(layer: Any, x: torch.Tensor, grad: torch.Tensor) -> Tensors:
    """Return the results of torch's modules in float32, by the names of ``layer``."""
    names = {name: f"{TENSORS[name]}.weight" for name, _ in layer.named_parameters()}
    with device():
        exact = TorchLayer(SHAPE).float()
        turned = (torch.ones(SEQUENCE, 1, SHAPE.head), torch.zeros(SEQUENCE, 1, SHAPE.head))
    exact.load_state_dict({names[name]: own.float() for name, own in layer.named_parameters()})

    def forward(tokens: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = exact(tokens.transpose(0, 1), turned).transpose(0, 1)
        return y

    run = Run(exact, forward, x.float(), grad.float())
    run()
    found = run.results()
    return {"y": found["y"], "x": found["x"]} | {name: found[own] for name, own in names.items()}


def of_layer(name: str, ranks: Ranks) -> tuple[Run, Tensors, dict[str, Way]]:
    """Return the layer of one process under a recipe, exact results, and the ways over ranks."""
    x = normal(SEQUENCE, BATCH, SHAPE.hidden, seed=1)
    grad = normal(SEQUENCE, BATCH, SHAPE.hidden, seed=2, size=1e-2)
    whole = transformer_layer()
    with torch.no_grad():
        for seed, parameter in enumerate(whole.parameters()):
            if parameter.dim() == 2:
                parameter.copy_(
                    normal(*parameter.shape, seed=seed, size=parameter.shape[1] ** -0.5)
                )
    values = {key: own.detach() for key, own in whole.named_parameters()}

    def rows(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.chunk(ranks.size)[ranks.rank]

    split = transformer_layer(tp_group=ranks.group, sequence_parallel=True, set_parallel_mode=True)
    split.load_state_dict(parts_of(split, whole, values), strict=False)
    ways = {
        "tensor and sequence": Way(
            Run(split, under_recipe("fp8core", name, split, ranks.group), rows(x), rows(grad)),
            lambda found: {
                "y": rows(found["y"]),
                "x": rows(found["x"]),
                **parts_of(split, whole, found),
            },
            lambda key: key.endswith("layer_norm_weight"),
        )
    }
    for kind in ("p2p", "all_gather"):
        layer = transformer_layer()
        layer.load_state_dict(values, strict=False)
        layer.set_context_parallel_group(ranks.group, None, None, kind)

        def tokens(tensor: torch.Tensor) -> torch.Tensor:
            part: torch.Tensor = get_batch_on_this_cp_rank(tensor, ranks.group, seq_dim=0)
            return part

        ways[f"context, {kind}"] = Way(
            Run(layer, under_recipe("fp8core", name, layer, ranks.group), tokens(x), tokens(grad)),
            lambda found: found | {"y": tokens(found["y"]), "x": tokens(found["x"])},
            lambda key: key not in ("y", "x"),
        )
    alone = Run(whole, under_recipe("fp8core", name, whole), x, grad)
    return alone, exact_layer(whole, x, grad), ways


def experts(first: int, count: int, group: Any = None) -> Experts:
    """Return ``count`` experts, number ``first`` and so on of all."""
    sizes = ((SHAPE.hidden, 2 * SHAPE.ffn), (SHAPE.ffn, SHAPE.hidden))
    fc1, fc2 = (
        fp8core.GroupedLinear(count, *size, bias=False, params_dtype=BF16, device=device())
        for size in sizes
    )
    with torch.no_grad():
        for at in range(count):
            for seed, linear in enumerate((fc1, fc2)):
                weight = linear.get_parameter(f"weight{at}")
                size = weight.shape[1] ** -0.5
                weight.copy_(normal(*weight.shape, seed=10 * seed + first + at, size=size))
    return Experts(fc1, ops.SwiGLU(), fc2, **({} if group is None else {"group": group}))


def exact_experts(layer: Experts, x: torch.Tensor, grad: torch.Tensor, counts: Any) -> Tensors:
    """Return the results of torch in float32, by the names of ``layer``."""
    weights = {key: own.detach().float().requires_grad_() for key, own in layer.named_parameters()}
    leaf, results = x.float().requires_grad_(), []
    for at, rows in enumerate(leaf.split(counts)):
        gate, up = functional.linear(rows, weights[f"0.weight{at}"]).chunk(2, -1)
        results.append(functional.linear(functional.silu(gate) * up, weights[f"2.weight{at}"]))
    y = torch.cat(results)
    y.backward(grad.float())
    assert leaf.grad is not None
    grads = {
        key: torch.zeros_like(own) if own.grad is None else own.grad for key, own in weights.items()
    }
    return {"y": y.detach(), "x": leaf.grad, **grads}


def of_experts(name: str, kind: str, ranks: Ranks) -> tuple[Run, Tensors, dict[str, Way]]:
    """Return the same for experts, whose tokens are those of ``kind``."""
    counts = [[count * TOKENS for count in own] for own in COUNTS[kind]]
    sums = [sum(column) for column in zip(*counts, strict=True)]
    by_expert = [counts[rank][at] for at in range(EXPERTS) for rank in range(ranks.size)]
    x = normal(sum(sums), SHAPE.hidden, seed=1)
    grad = normal(sum(sums), SHAPE.hidden, seed=2, size=1e-2)
    each = EXPERTS // ranks.size
    whole, own = experts(0, EXPERTS), experts(ranks.rank * each, each, ranks.group)

    def rows(tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat(tensor.split(by_expert)[ranks.rank :: ranks.size])

    def part(found: Tensors) -> Tensors:
        mine = {key: found[key] for key, _ in own.named_parameters()}
        return {"y": rows(found["y"]), "x": rows(found["x"]), **mine}

    # No group reduces amaxes, which would be those of other experts.
    forward = under_recipe("fp8core", name, lambda x: own(x, counts[ranks.rank]))
    way = Way(Run(own, forward, rows(x), rows(grad)), part, lambda key: False)
    alone = Run(whole, under_recipe("fp8core", name, lambda x: whole(x, sums)), x, grad)
    return alone, exact_experts(whole, x, grad, sums), {f"experts, {kind}": way}


def errors(found: Tensors, wanted: Tensors) -> dict[str, float]:
    """Return the relative Frobenius distance of each tensor, over the parts of all ranks."""
    distances = {}
    for name, value in wanted.items():
        difference = (found[name].double() - value.double()).square().sum()
        sums = torch.stack([difference, value.double().square().sum()])
        dist.all_reduce(sums)
        distances[name] = (sums[0] / sums[1]).sqrt().item()
    return distances


def work(rank: int, name: str) -> list[list[Any]]:
    """Return recipe, way, largest difference, both largest ratios of errors, and both times, ms."""
    place = HOST if IS_TRIAL else dataclasses.replace(CUDA, torch_device=device())
    ranks = of_world(place)
    contest, rows = Contest(ranks.device), []
    cases: list[Callable[[], Any]] = [lambda: of_layer(name, ranks)]
    cases += [lambda kind=kind: of_experts(name, kind, ranks) for kind in COUNTS]
    for case in cases:
        alone, exact, ways = case()
        runs = {ALONE: alone, **{way: own.run for way, own in ways.items()}}
        for run in runs.values():
            for _ in range(WARM_UP):
                run()
        judged = {}
        for way, own in ways.items():
            found, wanted, true = own.results(), own.part(alone.results()), own.part(exact)
            pairs = list(
                zip(errors(found, true).values(), errors(wanted, true).values(), strict=True)
            )
            judged[way] = (
                max(errors(found, wanted).values()),
                max(error / of_one for error, of_one in pairs),
                max(error / (RATIO * of_one + ROUNDING) for error, of_one in pairs),
            )
        us = ranks.slowest(contest.take("eager", dict(runs), Stop(0.0)))
        ms = {way: median_interval(times).median / 1e3 for way, times in us.items()}
        rows += [[name, way, *judged[way], ms[way], ms[ALONE]] for way in ways]
    return rows


def main() -> int:
    """Print the table; return how many ways are less accurate than one process."""
    print(*markdown.head(COLUMNS), sep="\n", flush=True)
    failed = 0
    for name in RECIPES:
        with tempfile.TemporaryDirectory() as folder:
            try:
                rows, _ = run_ranks(work, Path(folder), name)
            except AssertionError as error:
                print(error, file=sys.stderr, flush=True)
                reason = str(error).splitlines()[0][:200]
                print(markdown.line((name, "a rank failed", reason, "", "", "", "")), flush=True)
                failed += 1
                continue
        for recipe, way, difference, ratio, of_bound, *ms in rows:
            failed += not of_bound <= 1
            ratios = (f"{value:.3f}" for value in (ratio, of_bound))
            row = (recipe, way, f"{difference:.2e}", *ratios, *(f"{time:.2f}" for time in ms))
            print(markdown.line(row), flush=True)
    return failed
