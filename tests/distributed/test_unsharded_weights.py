"""Weights of ``gather_quantized`` that FSDP2 does not manage: not yet, or as it ignores them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import fp8core
from fp8core import recipe
from fp8core.distributed import gather_quantized

RECIPES: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "current": recipe.Float8CurrentScaling,
    "delayed": recipe.DelayedScaling,
    "block": recipe.Float8BlockScaling,
}


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def model() -> Any:
    torch.manual_seed(0)
    given: dict[str, Any] = {"params_dtype": torch.bfloat16, "device": "cpu"}
    return torch.nn.Sequential(
        fp8core.Linear(64, 128, **given), fp8core.LayerNormMLP(128, 256, **given)
    )


def train(one: Any, chosen: Any) -> list[torch.Tensor]:
    optimizer = torch.optim.AdamW(one.parameters(), lr=0.01)
    results = []
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(32, 64, generator=generator).bfloat16().requires_grad_()
        with fp8core.autocast(enabled=chosen is not None, recipe=chosen):
            y = one(x)
        y.backward(torch.ones_like(y))
        optimizer.step()
        optimizer.zero_grad()
        assert x.grad is not None
        results += [y.detach(), x.grad]
    return results


def test_weights_train_before_they_are_sharded() -> None:
    for name in RECIPES:
        chosen = RECIPES[name]()
        gathered = gather_quantized(model(), chosen or "current")
        pairs = zip(train(gathered, chosen), train(model(), chosen), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs), name


@pytest.mark.usefixtures("alone")
def test_ignored_weights_train_beside_sharded_ones() -> None:
    gathered = gather_quantized(model(), "current")
    fully_shard(gathered, ignored_params=set(gathered[1].parameters()))
    chosen = recipe.Float8CurrentScaling()
    pairs = zip(train(gathered, chosen), train(model(), chosen), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
