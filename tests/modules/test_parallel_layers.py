"""Parallel layers above the linears, and what a training loop does with them, over two ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fp8core
from fp8core import autocast, ops, recipe
from fp8core.collectives import Communicator, of_group
from tests.ranks import device, emulated, run_ranks

HIDDEN, FFN, HEADS, GROUPS, SEQUENCE, BATCH = 256, 512, 4, 2, 64, 4
BF16 = torch.bfloat16
RECIPES: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "current": recipe.Float8CurrentScaling,
    "block": recipe.Float8BlockScaling,
    "delayed mha": lambda: recipe.DelayedScaling(fp8_dpa=True, fp8_mha=True, amax_history_len=2),
}


def values(*shape: int, seed: int, size: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * size).to(
        device(), BF16
    )


def new_layer(heads: int, ffn: int, groups: int, **arguments: Any) -> Any:
    return fp8core.TransformerLayer(
        HIDDEN,
        ffn,
        heads,
        num_gqa_groups=groups,
        kv_channels=HIDDEN // HEADS,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias=False,
        normalization="RMSNorm",
        params_dtype=BF16,
        device=device(),
        **arguments,
    )


ROWS_SPLIT = ("query_weight", "key_weight", "value_weight", "fc1_weight")


def fill(layer: Any, rank: int, ranks: int) -> None:
    """Fill the share of one rank of the weights of all; norms are the same on all."""
    with torch.no_grad():
        for seed, (name, parameter) in enumerate(layer.named_parameters()):
            if parameter.dim() == 1:
                parameter.copy_(values(*parameter.shape, seed=seed))
                continue
            dim = 0 if name.endswith(ROWS_SPLIT) else 1
            shape = list(parameter.shape)
            shape[dim] *= ranks
            parameter.copy_(values(*shape, seed=seed, size=0.05).chunk(ranks, dim)[rank])


def transformer(communicator: Communicator, name: str) -> dict[str, Any]:
    """Two steps of a layer with sequence parallelism on one rank."""
    rank, size, chosen = communicator.rank, communicator.size, RECIPES[name]()
    layer = new_layer(
        HEADS,
        FFN,
        GROUPS,
        tp_group=communicator,
        sequence_parallel=True,
        set_parallel_mode=True,
    )
    fill(layer, rank, size)
    y = x = None
    for step in range(2):
        x = values(SEQUENCE, BATCH, HIDDEN, seed=100 + step).chunk(size)[rank]
        x = x.clone().requires_grad_()
        layer.zero_grad(set_to_none=True)
        with autocast(enabled=chosen is not None, recipe=chosen):
            y = layer(x)
        y.backward(values(SEQUENCE, BATCH, HIDDEN, seed=200 + step).chunk(size)[rank])
    assert y is not None
    grads = {key: one.grad for key, one in layer.named_parameters() if one.dim() == 2}
    return {"y": y.detach(), **grads}


def blocks_in_one_process(name: str, ranks: int = 2) -> dict[str, Any]:
    """The same steps in one process: attention and MLP of each rank's weights, their results
    added before the residual."""
    chosen = RECIPES[name]()
    layers = [new_layer(HEADS // ranks, FFN // ranks, GROUPS // ranks) for _ in range(ranks)]
    for rank, layer in enumerate(layers):
        fill(layer, rank, ranks)
    residual = torch.empty(0, device=device())
    for step in range(2):
        for layer in layers:
            layer.zero_grad(set_to_none=True)
        x = values(SEQUENCE, BATCH, HIDDEN, seed=100 + step).requires_grad_()
        with autocast(enabled=chosen is not None, recipe=chosen):
            middle = x + added([layer.self_attention(x) for layer in layers])
            residual = middle + added([layer.layernorm_mlp(middle) for layer in layers])
        residual.backward(values(SEQUENCE, BATCH, HIDDEN, seed=200 + step))
    returned: dict[str, Any] = {"y": residual.detach()}
    for key, one in layers[0].named_parameters():
        if one.dim() == 2:
            returned[key] = [layer.get_parameter(key).grad for layer in layers]
    return returned


def added(parts: list[torch.Tensor]) -> torch.Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def new_mlp(communicator: Communicator, **arguments: Any) -> Any:
    torch.manual_seed(communicator.rank)
    return fp8core.LayerNormMLP(
        HIDDEN,
        FFN,
        bias=False,
        params_dtype=BF16,
        device=device(),
        tp_group=communicator,
        sequence_parallel=True,
        set_parallel_mode=True,
        **arguments,
    )


def step(run: Callable[[torch.Tensor], Any], module: torch.nn.Module, rank: int) -> list[Any]:
    """The output and the gradients of one step; a seed for stochastic rounding."""
    module.zero_grad(set_to_none=True)
    x = values(128, HIDDEN, seed=7 + rank).requires_grad_()
    torch.manual_seed(3)
    y = run(x)
    y.backward(values(128, HIDDEN, seed=9 + rank))
    return [y.detach(), x.grad, *(one.grad.clone() for one in module.parameters())]


def same(one: list[Any], other: list[Any]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def loops(communicator: Communicator, chosen: Any) -> dict[str, Any]:
    """Whether the steps of loops give the gradients of a plain one."""
    rank, mlp = communicator.rank, new_mlp(communicator)

    def plain(x: torch.Tensor) -> Any:
        return within(chosen, mlp, x)

    first = step(plain, mlp, rank)
    again = new_mlp(communicator, checkpoint=True)
    again.load_state_dict(mlp.state_dict())
    delayed = new_mlp(communicator, delay_wgrad_compute=True)
    delayed.load_state_dict(mlp.state_dict())

    def microbatches(x: torch.Tensor) -> Any:
        with autocast(recipe=chosen):
            mlp(x, is_first_microbatch=True)
            torch.manual_seed(3)
            return mlp(x, is_first_microbatch=False)

    returned = {
        "recompute": same(first, step(lambda x: fp8core.checkpoint(plain, x), mlp, rank)),
        "checkpoint=True": same(first, step(lambda x: within(chosen, again, x), again, rank)),
        "microbatches": same(first, step(microbatches, mlp, rank)),
    }
    x = values(128, HIDDEN, seed=7 + rank).requires_grad_()
    torch.manual_seed(3)
    within(chosen, delayed, x).backward(values(128, HIDDEN, seed=9 + rank))
    delayed.backward_dw()
    late = [one.grad for one in delayed.parameters()]
    return {**returned, "backward_dw": same(first[2:], late)}


def training(communicator: Communicator) -> dict[str, Any]:
    """What loops do: recompute, microbatches, rules for layers, delayed weight gradients."""
    rank, returned = communicator.rank, {}
    for name in ("current", "nvfp4"):
        with emulated(name):
            cases = loops(communicator, recipe.by_name(name))
        returned |= {f"{name} {case}": is_same for case, is_same in cases.items()}
    rules = recipe.PerLayer([("*.up", recipe.Float8BlockScaling())], default=None)
    model = torch.nn.ModuleDict(
        {
            "up": linear(communicator, HIDDEN, FFN, "column"),
            "down": linear(communicator, FFN, HIDDEN, "row"),
        }
    )
    returned["per layer"] = run_per_layer(model, rules, rank)
    returned["operations"] = operations(communicator)
    return returned


def within(chosen: Any, module: Any, x: torch.Tensor) -> Any:
    with autocast(recipe=chosen):
        return module(x)


def linear(communicator: Communicator, k: int, n: int, mode: str, **arguments: Any) -> Any:
    torch.manual_seed(communicator.rank)
    return fp8core.Linear(
        k,
        n,
        bias=False,
        params_dtype=BF16,
        device=device(),
        tp_group=communicator,
        sequence_parallel=True,
        parallel_mode=mode,
        **arguments,
    )


def run_per_layer(model: Any, rules: Any, rank: int) -> str:
    named = fp8core.prepare(torch.nn.ModuleDict({"block": model}))["block"]
    with autocast(recipe=rules):
        y = named["down"](named["up"](values(128, HIDDEN, seed=rank)))
    return str([tuple(y.shape), "Float8BlockScaling" in repr(named["up"])])


def operations(communicator: Communicator) -> bool:
    """ops.AllGather and ReduceScatter beside linears are the links of parallel layers."""
    column, row = (
        linear(communicator, HIDDEN, FFN, "column"),
        linear(communicator, FFN, HIDDEN, "row"),
    )
    chain = ops.Sequential(
        ops.AllGather(communicator),
        ops.Linear(HIDDEN, FFN // 2, bias=False, dtype=BF16, device=device()),
        ops.Linear(FFN // 2, HIDDEN, bias=False, dtype=BF16, device=device()),
        ops.ReduceScatter(communicator),
    )
    with torch.no_grad():
        chain[1].weight.copy_(column.weight)
        chain[2].weight.copy_(row.weight)
    chosen = recipe.Float8CurrentScaling()
    layers = torch.nn.ModuleList([column, row])
    by_layers = step(lambda x: within(chosen, row, within(chosen, column, x)), layers, 0)
    by_chain = step(lambda x: within(chosen, chain, x), chain, 0)
    return same(by_layers, by_chain)


def program(communicator: Communicator) -> dict[str, Any]:
    returned: dict[str, Any] = {name: transformer(communicator, name) for name in RECIPES}
    return {**returned, "training": training(communicator)}


def any_rows(communicator: Communicator, sequence: bool) -> bool:
    """A graph of a layer with biases for any number of rows computes what eager does."""
    layer = fp8core.LayerNormMLP(
        HIDDEN,
        2 * HIDDEN,
        device=device(),
        tp_group=communicator,
        set_parallel_mode=True,
        sequence_parallel=sequence,
    )
    graph = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    chosen, found = recipe.Float8CurrentScaling(), []
    for rows in (32, 48):
        x = torch.randn(rows, HIDDEN, device=device())
        for call in (graph, layer):
            layer.zero_grad()
            y = within(chosen, call, x)
            y.square().sum().backward()
            found.append([y, *[one.grad for one in layer.parameters()]])
    return all(map(torch.equal, found[0] + found[2], found[1] + found[3]))


def over_gloo(rank: int) -> dict[str, Any]:
    communicator = of_group(None)
    returned = program(communicator)
    returned["compiled"] = {}
    for name in ("current",):
        chosen = recipe.by_name(name)
        mlp = new_mlp(communicator)
        eager = step(lambda x, mlp=mlp, chosen=chosen: within(chosen, mlp, x), mlp, rank)
        graph = partial(within, chosen, torch.compile(mlp, fullgraph=True, backend="aot_eager"))
        compiled = step(graph, mlp, rank)
        returned["compiled"][name] = same(eager, compiled)
    for sequence in (False, True):
        returned["compiled"][f"any rows, sequence={sequence}"] = any_rows(communicator, sequence)
    graph = torch.compile(new_mlp(communicator), fullgraph=True, backend="aot_eager")
    chosen = [recipe.Float8BlockScaling(), recipe.MXFP8BlockScaling()][rank]
    with emulated("mxfp8"), pytest.raises(fp8core.OperandError) as caught:
        within(chosen, graph, values(128, HIDDEN, seed=1))
    returned["differing graphs"] = str(caught.value)
    dist.barrier()
    return returned


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(over_gloo, tmp_path_factory.mktemp("layers"))


def test_a_transformer_layer_equals_its_blocks_in_one_process(ranks: list[dict[str, Any]]) -> None:
    for name in ["none", "current", "block"]:
        judge, found = blocks_in_one_process(name), [one[name] for one in ranks]
        assert torch.equal(torch.cat([one["y"] for one in found]), judge["y"]), name
        for key in ("layernorm_mlp.fc1_weight", "layernorm_mlp.fc2_weight"):
            for one, grad in zip(found, judge[key], strict=True):
                assert torch.equal(one[key], grad), key


def test_attention_between_codes_runs_over_ranks(ranks: list[dict[str, Any]]) -> None:
    judge = blocks_in_one_process("none")["y"]
    found = torch.cat([one["delayed mha"]["y"] for one in ranks]).float()
    error = (found - judge.float()).norm() / judge.float().norm()
    assert error < 0.1


@pytest.mark.parametrize("case", ["recompute", "checkpoint=True", "backward_dw", "microbatches"])
@pytest.mark.parametrize("name", ["current", "nvfp4"])
def test_a_loop_gets_the_same_gradients(ranks: list[dict[str, Any]], name: str, case: str) -> None:
    assert [one["training"][f"{name} {case}"] for one in ranks] == [True, True]


def test_rules_choose_a_recipe_for_each_parallel_layer(ranks: list[dict[str, Any]]) -> None:
    assert [one["training"]["per layer"] for one in ranks] == ["[(128, 256), True]"] * 2


def test_operations_are_the_links_of_parallel_layers(ranks: list[dict[str, Any]]) -> None:
    assert all(one["training"]["operations"] for one in ranks)


def test_one_graph_holds_a_parallel_layer(ranks: list[dict[str, Any]]) -> None:
    for one in ranks:
        assert one["compiled"] == {
            "current": True,
            "any rows, sequence=False": True,
            "any rows, sequence=True": True,
        }


def test_graphs_of_different_recipes_are_told_to_every_rank(ranks: list[dict[str, Any]]) -> None:
    for one in ranks:
        assert "differ in the layer LayerNormMLP" in one["differing graphs"]
