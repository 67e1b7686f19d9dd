"""``load_state_dict`` of models that FSDP2 has sharded, on one rank: ``assign=True`` where it
gathers weights quantized, and a load while weights are whole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import fp8core
from fp8core import recipe
from fp8core.distributed import gather_quantized
from fp8core.tensors.sharded_weight import ShardedWeight, local_part

CURRENT = recipe.Float8CurrentScaling()
HIDDEN = 64


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def new_model(
    seed: int, *, is_gathered: bool = True, dtype: torch.dtype = torch.bfloat16
) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    layers = [
        fp8core.Linear(HIDDEN, HIDDEN, device="cpu", params_dtype=dtype, bias=bias)
        for bias in (True, False)
    ]
    model = torch.nn.Sequential(*layers)
    if is_gathered:
        gather_quantized(model, CURRENT)
    for layer in (*model, model):
        fully_shard(layer)
    return model


def run(model: torch.nn.Module) -> torch.Tensor:
    with fp8core.autocast(recipe=CURRENT):
        y: torch.Tensor = model(torch.ones(32, HIDDEN, dtype=torch.bfloat16))
    y.float().sum().backward()
    return y


def shards(model: Any) -> list[ShardedWeight]:
    return [layer.weight.to_local() for layer in model]


@pytest.mark.parametrize("has_run", [False, True])
@pytest.mark.parametrize("is_gathered", [False, True])
def test_assigned_weights_are_gathered_quantized(has_run: bool, is_gathered: bool) -> None:
    model, other = new_model(0), new_model(1, is_gathered=is_gathered)
    if has_run:
        run(model)
    given = other.state_dict()
    assert model.load_state_dict(given, assign=True).missing_keys == []
    model.zero_grad()
    expected = run(new_model(1))
    assert torch.equal(run(model), expected)
    for shard, value in zip(shards(model), (given["0.weight"], given["1.weight"]), strict=True):
        assert type(shard) is ShardedWeight
        assert shard.gathering is not getattr(value.to_local(), "gathering", None)


def test_a_layer_takes_assigned_weights_alone() -> None:
    model, other = new_model(0), new_model(1)
    run(model)
    model[0].load_state_dict(other[0].state_dict(), assign=True)
    model[1].load_state_dict(other[1].state_dict())
    assert torch.equal(run(model), run(new_model(1)))


def test_what_does_not_fit_is_refused_before_anything_is_assigned() -> None:
    for given, message in [
        ("dtype", "1.weight is a shard torch.float32"),
        ("whole", "1.weight is a Tensor; the parameter is a DTensor"),
    ]:
        model = new_model(0)
        before = run(model)
        values = new_model(1).state_dict()
        if given == "dtype":
            values["1.weight"] = new_model(1, dtype=torch.float32).state_dict()["1.weight"]
        else:
            values["1.weight"] = torch.zeros(HIDDEN, HIDDEN, dtype=torch.bfloat16)
        with pytest.raises(fp8core.OperandError, match="assign=True") as caught:
            model.load_state_dict(values, assign=True)
        assert message in str(caught.value)
        model.zero_grad()
        assert torch.equal(run(model), before)


def test_shards_are_loaded_where_forward_has_left_whole_weights() -> None:
    model, other = (fp8core.Linear(HIDDEN, HIDDEN, device="cpu") for _ in range(2))
    for layer in (model, other):
        fully_shard(layer, reshard_after_forward=False)
    with torch.no_grad():
        model(torch.ones(1, HIDDEN))
    model.load_state_dict({key: own.clone() for key, own in other.state_dict().items()})
    assert torch.equal(*(local_part(layer.weight) for layer in (model, other)))
