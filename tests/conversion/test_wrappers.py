"""Data parallel wrappers around a converted model, or a model converted inside them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import fp8core
from fp8core import OperandError, UnsupportedError
from tests.device import DEVICE

BOTH = pytest.mark.parametrize("chosen", ["mxfp8", "delayed"])
# torch's own, about the output of a linear layer that is a view.
pytestmark = [
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning"),
    pytest.mark.usefixtures("group_of_one"),
]


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.Linear(64, 32))


def grads(own: nn.Module) -> list[torch.Tensor]:
    """Return the gradients of two steps on the same input."""
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        own.zero_grad()
        own(x).square().sum().backward()
    found = [parameter.grad for parameter in own.parameters()]
    return [g.full_tensor() if isinstance(g, dist.tensor.DTensor) else g for g in found]


def wanted(chosen: str) -> list[torch.Tensor]:
    own = model()
    fp8core.convert(own, chosen)
    return grads(own)


@BOTH
def test_ddp_around_a_converted_model(chosen: str) -> None:
    own = model()
    fp8core.convert(own, chosen)
    assert all(map(torch.equal, grads(DistributedDataParallel(own)), wanted(chosen)))


@BOTH
def test_a_model_converted_inside_ddp_has_the_names_of_the_model(chosen: str) -> None:
    own = DistributedDataParallel(model())
    report = fp8core.convert(own, chosen)
    assert [entry.name for entry in report.converted] == ["0", "1", "2"]
    assert all(map(torch.equal, grads(own), wanted(chosen)))
    fp8core.unconvert(own)
    assert type(own.module[0]) is nn.Linear


@BOTH
def test_fully_shard_around_a_converted_model(chosen: str) -> None:
    own = model()
    fp8core.convert(own, chosen)
    for layer in own:
        fully_shard(layer)
    fully_shard(own)
    assert all(map(torch.equal, grads(own), wanted(chosen)))
    with pytest.raises(OperandError, match=r"'0'.*is a FSDPConvertedLinear since"):
        fp8core.unconvert(own)


@BOTH
def test_a_model_sharded_as_a_whole_can_be_converted(chosen: str) -> None:
    own = fully_shard(model())
    fp8core.convert(own, chosen)
    assert all(map(torch.equal, grads(own), wanted(chosen)))
    fp8core.unconvert(own)
    assert type(own[0]) is nn.Linear


def test_layers_sharded_one_by_one_are_left_and_named() -> None:
    own = nn.Sequential(nn.Linear(8, 8), fully_shard(nn.Linear(8, 8)))
    report = fp8core.convert(own)
    assert report.skipped[0].reason == "sharded by itself; convert before fully_shard"


@pytest.mark.filterwarnings("ignore:.*FullyShardedDataParallel:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*FSDP:UserWarning")
def test_the_older_fsdp_is_refused() -> None:
    own = FullyShardedDataParallel(model(), device_id=DEVICE)
    with pytest.raises(UnsupportedError, match="convert the model first, then wrap it"):
        fp8core.convert(own)
