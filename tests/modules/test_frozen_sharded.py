"""``frozen_weights`` and ``is_first_microbatch`` where each rank has a part of each weight."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from fp8core import Linear, OperandError, autocast, frozen_weights, recipe
from tests.ranks import run_ranks

KINDS = ["fully_shard", "fully_shard, gathered", "original parameters", "flat parameters"]


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Linear(32, 64), Linear(64, 32))


class Flagged(nn.Module):
    """Hands the flag to its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = model()

    def forward(self, x: torch.Tensor, first: bool) -> torch.Tensor:
        for own in self.layers:
            x = own(x, is_first_microbatch=first)
        return x


def sharded(own: nn.Module, kind: str) -> Any:
    if kind.startswith("fully_shard"):
        mesh = init_device_mesh("cpu", (2,))
        return fully_shard(own, mesh=mesh, reshard_after_forward=kind == "fully_shard")
    whole = kind == "original parameters"
    return FullyShardedDataParallel(own, device_id=torch.device("cpu"), use_orig_params=whole)


def work(rank: int, kind: str) -> None:
    own, whole = sharded(model(), kind), model()
    x = torch.randn(32, 32, generator=torch.Generator().manual_seed(1))
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (own, whole)]
    for _ in range(3):
        evaluated = []
        for one, optimizer in zip((own, whole), optimizers, strict=True):
            with autocast(recipe=recipe.by_name("current")):
                one(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad(), autocast(recipe=recipe.by_name("current")):
                if one is whole:
                    evaluated.append(one(x))
                    continue
                with frozen_weights(one):  # sharded at its start, gathered at its end, or not
                    evaluated += [one(x), one(x)]
        assert torch.equal(*evaluated[:2])
        assert torch.equal(*evaluated[1:])
    if kind == "fully_shard":
        with pytest.raises(OperandError, match=r"0\.weight changed inside"), frozen_weights(own):
            own[0].weight.to_local().data.neg_()
    flagged = sharded(Flagged(), kind)
    for first in (True, False, False, True, False):
        with autocast(recipe=recipe.by_name("current")):
            y = flagged(x, first)
        y.square().mean().backward()


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks(kind: str, tmp_path: Path) -> None:
    run_ranks(work, tmp_path, kind)
