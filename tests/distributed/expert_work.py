"""What the ranks of the tests of expert parallelism run."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils.parametrize import register_parametrization

import fp8core
from fp8core import ops
from fp8core.collectives import of_group
from fp8core.distributed import Experts, TokenExchange
from fp8core.errors import Fp8CoreError
from fp8core.optimizers import FusedAdam
from fp8core.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)

HIDDEN, INNER, EXPERTS, SEED = 128, 128, 4, 7
# Rows by rank and expert.
COUNTS = {
    "aligned": ((128, 256, 0, 128), (128, 0, 128, 256)),
    "ragged": ((5, 0, 31, 12), (17, 9, 0, 2)),
    "one_sided": ((7, 9, 0, 3), (0, 0, 0, 0)),
    "nothing": ((0, 0, 0, 0), (0, 0, 0, 0)),
}
RECIPES: dict[str, Recipe | None] = {
    "none": None,
    "current": Float8CurrentScaling(),
    "delayed": DelayedScaling(),
    "rowwise": Float8RowwiseScaling(),
    "block": Float8BlockScaling(),
    "mxfp8": MXFP8BlockScaling(),
    "nvfp4": NVFP4BlockScaling(),
}
CASES = [
    *((recipe, "aligned") for recipe in RECIPES),
    *((recipe, "ragged") for recipe in RECIPES),
    *((recipe, "one_sided") for recipe in ("none", "current", "block")),
    ("none", "nothing"),
]


def linears(first: int, count: int, *, bias: bool = False) -> list[fp8core.GroupedLinear]:
    """The grouped linears of ``count`` experts; expert number ``first`` and so on of all."""
    layers = [
        fp8core.GroupedLinear(count, *sizes, bias=bias, params_dtype=torch.bfloat16, device="cpu")
        for sizes in ((HIDDEN, 2 * INNER), (INNER, HIDDEN))
    ]
    with torch.no_grad():
        for number, layer in enumerate(layers):
            for name, parameter in layer.named_parameters():
                kind, at = name[:-1], first + int(name[-1])
                generator = torch.Generator().manual_seed(100 * number + 10 * at + len(kind))
                values = torch.randn(parameter.shape, generator=generator) / 8
                parameter.copy_(values)
    return layers


def experts(first: int, count: int, **options: Any) -> Experts:
    fc1, fc2 = linears(first, count, bias=options.pop("bias", False))
    return Experts(fc1, ops.SwiGLU(), fc2, **options)


def rows_of(kind: str, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's rows by expert, whose magnitudes span decades, and the gradient of the results."""
    generator = torch.Generator().manual_seed(SEED + rank)
    count = sum(COUNTS[kind][rank])
    size = 10.0 ** torch.randint(-2, 2, (count, 1), generator=generator)
    x = torch.randn(count, HIDDEN, generator=generator) * size
    grad = torch.randn(count, HIDDEN, generator=generator)
    return x.bfloat16(), grad.bfloat16()


def run(
    layer: Experts, recipe: Recipe | None, x: torch.Tensor, grad: torch.Tensor, counts: Any
) -> dict[str, Any]:
    leaf = x.clone().requires_grad_()
    torch.manual_seed(SEED)
    with fp8core.autocast(recipe=recipe, enabled=recipe is not None):
        out = layer(leaf, counts)
    out.backward(grad)
    return {
        "out": out.detach(),
        "grad": leaf.grad,
        "weights": [parameter.grad for parameter in layer.parameters()],
    }


def moe(group: dist.ProcessGroup | None, first: int, count: int, ranks: list[int]) -> Any:
    """A mixture from tokens to tokens: router, permutation, experts, and back."""
    results = []
    for rank in ranks:
        generator = torch.Generator().manual_seed(SEED + rank)
        tokens = torch.randn(24, HIDDEN, generator=generator).bfloat16().requires_grad_()
        scores = torch.rand(24, EXPERTS, generator=generator)
        chosen = torch.zeros(24, EXPERTS, dtype=torch.bool)
        chosen.scatter_(1, scores.topk(2).indices, value=True)
        rows, row_id_map = fp8core.moe_permute(tokens, chosen, 48)
        results.append((tokens, scores, chosen, rows, row_id_map))
    layer = experts(first, count, group=group)
    if group is not None:
        ((tokens, scores, chosen, rows, row_id_map),) = results
        y = layer(rows, chosen.sum(0))
        out = fp8core.moe_unpermute(y, row_id_map, merging_probs=scores * chosen)
        out.float().square().sum().backward()
        return {"out": out.detach(), "grad": tokens.grad}
    found = []
    for tokens, scores, chosen, rows, row_id_map in results:
        y = layer(rows, chosen.sum(0))
        out = fp8core.moe_unpermute(y, row_id_map, merging_probs=scores * chosen)
        out.float().square().sum().backward()
        found.append({"out": out.detach(), "grad": tokens.grad})
    return found


def raised(call: Callable[[], Any]) -> str:
    try:
        call()
    except Fp8CoreError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def loaded(group: dist.ProcessGroup, rank: int) -> str:
    """An optimizer's state of the first rank, which lacks the experts of the other."""
    layer = experts(rank * 2, 2, group=group)
    optimizer = FusedAdam(layer.parameters())
    run(layer, None, *rows_of("ragged", rank), COUNTS["ragged"][rank])
    optimizer.step()
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_optimizer_state_dict(layer, optimizer, options=options)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    return raised(lambda: set_optimizer_state_dict(layer, optimizer, state, options=options))


def sharded(group: dist.ProcessGroup, rank: int) -> torch.nn.Module:
    """Experts that FSDP2 takes for parts of one layer."""
    layer: torch.nn.Module = experts(rank * 2, 2, group=group)
    return fully_shard(layer, mesh=DeviceMesh.from_group(group, "cpu"))


def parametrized(group: dist.ProcessGroup, rank: int) -> torch.nn.Module:
    layer = experts(rank * 2, 2, group=group)
    linear = layer.get_submodule("0")
    register_parametrization(linear, f"weight{2 * rank}", torch.nn.Identity())
    return layer


def refused(group: dist.ProcessGroup, rank: int) -> dict[str, str]:
    """The errors where one rank's input does not fit."""
    layer = experts(rank * 2, 2, group=group)
    x, _ = rows_of("ragged", rank)
    counts = list(COUNTS["ragged"][rank])
    few = experts(rank, 1 + rank, group=group)
    tokens, meta = TokenExchange(counts, group), torch.tensor(counts, device="meta")
    return {
        "counts": raised(lambda: layer(x, counts if rank else [counts[0] + 1, *counts[1:]])),
        "no integers": raised(lambda: layer(x, counts if rank else [0.5, *counts[1:]])),
        "no counts": raised(lambda: layer(x, counts if rank else None)),  # type: ignore[arg-type]
        "columns": raised(lambda: layer(x if rank else x[:, :-1], counts)),
        "experts": raised(lambda: few(x, counts)),
        "exchange": raised(lambda: TokenExchange(counts if rank else [-1, *counts[1:]], group)),
        "odd": raised(lambda: TokenExchange([1, 2, 3], group)),
        "no number": raised(lambda: TokenExchange(counts if rank else None, group)),  # type: ignore[arg-type]
        "no values": raised(lambda: layer(x, counts if rank else meta)),
        "rows": raised(lambda: tokens.dispatch(x if rank else x[1:])),
        "dtype": raised(lambda: tokens.dispatch(x if rank else x.float())),
        "sharded": raised(lambda: sharded(group, rank)(x, counts)),
        "sharded state": raised(sharded(group, rank).state_dict),
        "parametrized": raised(parametrized(group, rank).state_dict),
        "no group": raised(lambda: experts(rank * 2, 2, group="experts")),
    }


def exchange(group: dist.ProcessGroup, rank: int) -> dict[str, Any]:
    """Rows that name their origin, there and back."""
    counts = COUNTS["ragged"][rank]
    labels = [
        [100.0 * rank + expert, float(at)]
        for expert, count in enumerate(counts)
        for at in range(count)
    ]
    rows = torch.tensor(labels).requires_grad_()
    tokens = TokenExchange(torch.tensor(counts), group)
    arrived = tokens.dispatch(rows)
    back = tokens.combine(arrived * 2)
    back.sum().backward()
    return {
        "arrived": arrived.detach(),
        "splits": tokens.m_splits,
        "is same": bool(torch.equal(back.detach(), rows.detach() * 2)),
        "grad": rows.grad,
    }


def layout(group: dist.ProcessGroup, rank: int) -> dict[str, list[Any]]:
    """Axis, rank, number of ranks, shape, offset and rows of the first linear's state."""
    layer = experts(rank * 2, 2, group=group)
    fp8core.prepare(layer, RECIPES["delayed"])
    parts = fp8core.distributed.shard_layout(layer)
    found = ("scale_fwd", "amax_history_bwd", f"0.weight{2 * rank}")
    return {name.rstrip("02"): [list(part[1:]) for part in parts[name]] for name in found}


def work(rank: int) -> dict[str, Any]:
    group = dist.new_group([0, 1], timeout=timedelta(seconds=60))
    traffic, found = of_group(group).traffic, {}
    for recipe, kind in CASES:
        layer = experts(rank * 2, 2, group=group)
        x, grad = rows_of(kind, rank)
        run(layer, RECIPES[recipe], x, grad, COUNTS[kind][rank])
        layer.zero_grad()
        traffic.clear()
        results = run(layer, RECIPES[recipe], x, grad, torch.tensor(COUNTS[kind][rank]))
        results["bytes"] = {purpose: count.bytes for (_, purpose), count in traffic}
        found[f"{recipe} {kind}"] = results
    with_bias = experts(rank * 2, 2, group=group, bias=True)
    x, grad = rows_of("aligned", rank)
    found["bias"] = run(with_bias, RECIPES["block"], x, grad, COUNTS["aligned"][rank])
    found["moe"] = moe(group, rank * 2, 2, [rank])
    found["refused"] = refused(group, rank)
    found["loaded"] = loaded(group, rank)
    found["exchange"] = exchange(group, rank)
    layer = experts(rank * 2, 2, group=group)
    found["layout"] = layout(group, rank)
    found["explain"] = [str(fp8core.explain(layer, RECIPES[name])) for name in ("block", "current")]
    return found
