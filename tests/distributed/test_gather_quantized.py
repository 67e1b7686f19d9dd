"""What gather_quantized refuses, and what its weights are in one process."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.distributed.fake_pg import FakeStore

import fp8core
from fp8core import OperandError, UnsupportedError, reporting
from fp8core.distributed import gather_quantized
from tests.distributed.fsdp_work import (
    COLUMNS,
    CURRENT,
)
from tests.distributed.programs import (
    linears,
    train_step,
)
from tests.ranks import device


@pytest.fixture
def four_ranks_without_transport() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("four_ranks_without_transport")
def test_a_number_of_ranks_to_reshard_to_is_refused() -> None:
    model: Any = gather_quantized(linears(COLUMNS, 256), CURRENT)
    fully_shard(model, mesh=init_device_mesh(device().type, (4,)), reshard_after_forward=2)
    with pytest.raises(UnsupportedError, match="reshard_after_forward=N"):
        train_step(model, CURRENT, torch.randn(32, COLUMNS).to(device(), torch.bfloat16))


@pytest.mark.usefixtures("four_ranks_without_transport")
def test_whole_weights_are_freed_once_they_are_sharded() -> None:
    model: Any = linears(COLUMNS, 256, 256)
    whole = [StorageWeakRef(one.untyped_storage()) for one in model.parameters()]
    gather_quantized(model, CURRENT)
    fully_shard(model, mesh=init_device_mesh(device().type, (4,)))
    assert [one.expired() for one in whole] == [True] * len(whole)


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.usefixtures("four_ranks_without_transport")
def test_a_model_is_freed_after_training(copies: bool) -> None:
    model: Any = gather_quantized(linears(COLUMNS, 256), CURRENT)
    if copies:
        model = copy.deepcopy(model)
        gc.collect()  # the first model: weights of the copy gather without it
    for module in (*model, model):
        fully_shard(module, mesh=init_device_mesh(device().type, (4,)))
    train_step(model, CURRENT, torch.randn(32, COLUMNS).to(device(), torch.bfloat16))
    freed = weakref.ref(model)
    del model, module
    gc.collect()
    assert freed() is None


@pytest.mark.usefixtures("four_ranks_without_transport")
def test_a_sharded_model_is_refused() -> None:
    model: Any = linears(COLUMNS, 256)
    fully_shard(model[0], mesh=init_device_mesh(device().type, (4,)))
    with pytest.raises(OperandError, match=r"0 is a FSDPLinear.* before fully_shard"):
        gather_quantized(model, CURRENT)


@pytest.mark.usefixtures("four_ranks_without_transport")
def test_shards_of_quantized_parameters_without_a_quantized_gather_are_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporting, "_logged", set())
    with fp8core.quantized_model_init(recipe=CURRENT):
        model: Any = fp8core.Linear(COLUMNS, 256, device=device(), params_dtype=torch.bfloat16)
    with caplog.at_level("INFO", logger="fp8core"):
        fully_shard(model, mesh=init_device_mesh(device().type, (4,)))
    assert "gather_quantized(model, recipe) before fully_shard" in caplog.text


@pytest.mark.usefixtures("four_ranks_without_transport")
def test_a_part_of_another_rank_that_blocks_do_not_divide_is_refused() -> None:
    model = linears(COLUMNS, 127)  # 32 rows here, 31 on the last rank
    mesh = init_device_mesh(device().type, (4,))
    part = model[0].weight.detach()[:32]
    placed = DTensor.from_local(
        part, mesh, [Shard(0)], run_check=False, shape=(127, COLUMNS), stride=(COLUMNS, 1)
    )
    model[0].weight = nn.Parameter(placed)
    with pytest.raises(UnsupportedError, match=r"0.weight: .*\[127, 128\].*multiples of 32"):
        gather_quantized(model, "mxfp8")


def test_a_model_without_layers_is_refused() -> None:
    with pytest.raises(OperandError, match=r"no weight of Linear .*fp8core.convert"):
        gather_quantized(nn.Linear(4, 4), CURRENT)


def test_a_recipe_of_4_bits_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"0.weight: .*4-bit format e2m1"):
        gather_quantized(linears(COLUMNS, 256), "nvfp4")


def test_sizes_that_blocks_do_not_divide_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"0.weight: .*multiples of 32.*PerLayer"):
        gather_quantized(linears(48, 256), "mxfp8")


def test_weights_of_other_modules_too_stay_in_high_precision() -> None:
    model = linears(COLUMNS, 256, COLUMNS)
    other = nn.Linear(COLUMNS, 256, dtype=torch.bfloat16)
    other.weight = model[0].weight
    whole_model = nn.Sequential(model, other)
    gather_quantized(whole_model, CURRENT)
    assert type(model[0].weight) is nn.Parameter
    assert type(model[1].weight).__name__ == "ShardedWeight"


def test_a_weight_of_quantized_model_init_becomes_its_value() -> None:
    with fp8core.quantized_model_init(recipe=CURRENT, preserve_high_precision_init_val=True):
        model = linears(COLUMNS, 256)
    initial = model[0].weight.get_high_precision_init_val()
    gather_quantized(model, CURRENT)
    assert torch.equal(model[0].weight.value, initial)


def test_attributes_and_copies_keep_the_weight() -> None:
    model = linears(COLUMNS, 256)
    model[0].weight.mark = 7
    gather_quantized(model, CURRENT)
    weight: Any = model[0].weight
    assert (weight.mark, weight.requires_grad) == (7, True)
    assert type(model.float()[0].weight).__name__ == "ShardedWeight"
    assert type(weight + 1) is torch.Tensor


def test_a_weight_is_saved_as_a_plain_tensor(tmp_path: Any) -> None:
    model = gather_quantized(linears(COLUMNS, 256), CURRENT)
    torch.save(model.state_dict(), tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt", weights_only=True)
    assert type(loaded["0.weight"]) is torch.Tensor
