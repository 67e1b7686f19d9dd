"""CUDA graphs of sequence-parallel layers over NCCL: replays against eager steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fp8core
from fp8core import autocast, recipe
from fp8core.collectives import Communicator, of_group
from tests.modules.test_parallel_layers import HIDDEN, new_mlp, values
from tests.ranks import DEVICE_TYPE, run_ranks

pytestmark = [
    pytest.mark.needs_accelerator("cuda"),
    pytest.mark.skipif(DEVICE_TYPE != "cuda", reason="TEST_DEVICE=cuda starts NCCL ranks"),
]

ROWS = 128
RECIPES: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "current": recipe.Float8CurrentScaling,
    "rowwise": recipe.Float8RowwiseScaling,
    "block": recipe.Float8BlockScaling,
}


def rows_of(seed: int) -> torch.Tensor:
    return values(ROWS, HIDDEN, seed=seed)


def step(run: Callable[[torch.Tensor], Any], mlp: Any, x: Any, dy: torch.Tensor) -> list[Any]:
    x.grad = None
    mlp.zero_grad(set_to_none=True)
    y = run(x)
    y.backward(dy)
    return [y.detach(), x.grad, *(one.grad for one in mlp.parameters())]


def replays(communicator: Communicator, chosen: Any) -> list[bool]:
    """Whether the results of a whole step, captured once, are those of eager steps on new data."""
    mlp = new_mlp(communicator)
    x, dy = rows_of(1).requires_grad_(), rows_of(2)

    def run(x: torch.Tensor) -> Any:
        with autocast(enabled=chosen is not None, recipe=chosen):
            return mlp(x)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(run, mlp, x, dy)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(run, mlp, x, dy)
    equal = []
    for seed in range(3):
        new_x = rows_of(10 + seed + 100 * communicator.rank)
        with torch.no_grad():
            x.copy_(new_x)
        graph.replay()
        torch.cuda.synchronize()
        seen = [one.clone() for one in captured]
        eager = step(run, mlp, new_x.requires_grad_(), dy)
        equal.append(all(torch.equal(a, b) for a, b in zip(seen, eager, strict=True)))
    return equal


def graphed(communicator: Communicator, chosen: Any) -> list[bool]:
    """As :func:`replays`, for the library's own graphs of forward and of backward."""
    mlp, alone = new_mlp(communicator), new_mlp(communicator)
    sample = (rows_of(1).requires_grad_(),)
    run = fp8core.make_graphed_callables(mlp, sample, enabled=chosen is not None, recipe=chosen)
    equal = []
    for seed in range(3):
        x, dy = rows_of(20 + seed), rows_of(30 + seed)
        found = step(run, mlp, x.clone().requires_grad_(), dy)
        with autocast(enabled=chosen is not None, recipe=chosen):
            expected = step(alone, alone, x.clone().requires_grad_(), dy)
        equal.append(all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)))
    return equal


def over_nccl(rank: int) -> dict[str, Any]:
    communicator, returned = of_group(None), {}
    for name, make in RECIPES.items():
        returned[f"{name} step"] = replays(communicator, make())
    for name, make in RECIPES.items():
        returned[f"{name} callables"] = graphed(communicator, make())
    dist.barrier()
    return returned


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(over_nccl, tmp_path_factory.mktemp("graphs"))


@pytest.mark.parametrize("how", ["step", "callables"])
@pytest.mark.parametrize("name", RECIPES)
def test_a_replay_equals_an_eager_step(ranks: list[dict[str, Any]], name: str, how: str) -> None:
    assert [one[f"{name} {how}"] for one in ranks] == [[True] * 3] * 2
