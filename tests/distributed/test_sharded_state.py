"""The parts of tensor-parallel models, and checkpoints on another number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fp8core
from fp8core import UnsupportedError, recipe
from fp8core.collectives import Communicator
from fp8core.distributed import ShardLayout, gather_quantized, shard_layout, sharded_state_dict
from fp8core.tensors.sharded_weight import ShardedWeight, local_part
from tests.in_process import run_in_threads
from tests.ranks import device, run_ranks

HIDDEN, FFN, STEPS = 64, 96, 20
DELAYED = recipe.DelayedScaling(amax_history_len=4)
OPTIONS: dict[str, Any] = {"device": device(), "params_dtype": torch.bfloat16}


def model(group: Any = None) -> nn.Module:
    """A layer of each kind; the values of a rank's parts are those of the whole model."""
    torch.manual_seed(0)
    spread = {"tp_group": group, **OPTIONS}
    attention = fp8core.MultiheadAttention(
        HIDDEN,
        4,
        num_gqa_groups=2,
        set_parallel_mode=True,
        fuse_qkv_params=True,
        qkv_weight_interleaved=False,
        softmax_type="learnable",
        attn_mask_type="causal",
        **spread,
    )
    mlp = fp8core.LayerNormMLP(HIDDEN, FFN, activation="swiglu", set_parallel_mode=True, **spread)
    up = fp8core.Linear(HIDDEN, FFN, parallel_mode="column", **spread)
    down = fp8core.Linear(FFN, HIDDEN, parallel_mode="row", **spread)
    return nn.Sequential(attention, mlp, up, down, fp8core.Linear(HIDDEN, HIDDEN, **OPTIONS))


def fill(filled: nn.Module) -> None:
    """Give each element a value that follows from where it is in the whole model."""
    with torch.no_grad():
        for name, parts in shard_layout(filled).items():
            tensor = dict(filled.named_parameters()).get(name)
            for part in parts if tensor is not None else ():
                whole = torch.arange(float(torch.tensor(part.shape).prod())).view(part.shape)
                rows = tensor[part.start : part.start + part.length]
                for dim, (first, size) in enumerate(zip(part.offset, rows.shape, strict=True)):
                    whole = whole.narrow(dim, first, size)
                rows.copy_((whole + len(part.key)).remainder(7) / 64)


def loads(saved: nn.Module, loaded: nn.Module, folder: str, saves: Any, reads: Any) -> list[bool]:
    """Whether ``loaded`` has the parameters and delayed scales of ``saved`` afterwards."""
    for one in (saved, loaded):
        fp8core.prepare(one, DELAYED)
    fill(saved)
    for buffer in (b for n, b in saved.named_buffers() if "meta" not in n):
        buffer.fill_(0.5)
    dcp.save(sharded_state_dict(saved), checkpoint_id=folder, process_group=saves)
    dist.barrier()
    dcp.load(sharded_state_dict(loaded), checkpoint_id=folder, process_group=reads)
    wanted = model(None if reads is not None else dist.group.WORLD)
    fill(wanted)
    pairs = zip(loaded.parameters(), wanted.parameters(), strict=True)
    scales = [bool((b == 0.5).all()) for n, b in loaded.named_buffers() if "meta" not in n]
    return [*(torch.equal(a, b) for a, b in pairs), *scales]


def work(rank: int, folder: str) -> dict[str, Any]:
    alone = dist.new_group([rank], use_local_synchronization=True)
    everyone = dist.group.WORLD
    found: dict[str, Any] = {
        "to one": loads(model(everyone), model(), f"{folder}/one", None, alone),
    }
    if rank == 0:
        fill(first := model())
        fp8core.prepare(first, DELAYED)
        for buffer in (b for n, b in first.named_buffers() if "meta" not in n):
            buffer.fill_(0.5)
        dcp.save(sharded_state_dict(first), checkpoint_id=f"{folder}/two", process_group=alone)
    dist.barrier()
    second, wanted = model(everyone), model(everyone)
    fp8core.prepare(second, DELAYED)
    dcp.load(sharded_state_dict(second), checkpoint_id=f"{folder}/two")
    fill(wanted)
    found["to two"] = [
        *map(torch.equal, second.parameters(), wanted.parameters()),
        *[bool((b == 0.5).all()) for n, b in second.named_buffers() if "meta" not in n],
    ]
    sharded: Any = nn.Sequential(fp8core.Linear(8, 8, parallel_mode="column", tp_group=everyone))
    fully_shard(sharded, mesh=init_device_mesh(device().type, (2,)))
    with pytest.raises(UnsupportedError) as caught:
        sharded_state_dict(sharded)
    found["refused"] = str(caught.value)
    alone_layer: Any = fully_shard(
        fp8core.Linear(8, 8, device=device()), mesh=init_device_mesh(device().type, (2,))
    )
    with pytest.raises(UnsupportedError, match="shard_layout: weight is a DTensor"):
        shard_layout(alone_layer)
    found["two meshes"] = under_fsdp(rank, f"{folder}/meshes")
    return found


def under_fsdp(rank: int, folder: str) -> list[Any]:
    """What is said of a tensor-parallel layer under ``fully_shard`` over other ranks, and whether
    a checkpoint for each tensor-parallel rank has its parts."""
    mesh = init_device_mesh(device().type, (1, 2), mesh_dim_names=("dp", "tp"))
    of_rank = mesh["dp"].get_group()

    def new(seed: int) -> Any:
        torch.manual_seed(seed + rank)
        layer: Any = fp8core.Linear(
            HIDDEN, FFN, parallel_mode="column", tp_group=mesh["tp"].get_group(), **OPTIONS
        )
        return fully_shard(layer, mesh=mesh["dp"])

    saved, loaded = new(0), new(10)
    with pytest.raises(UnsupportedError) as caught:
        sharded_state_dict(saved)
    mine = {"checkpoint_id": f"{folder}/{rank}", "process_group": of_rank}
    dcp.save(get_model_state_dict(saved), **mine)
    state = get_model_state_dict(loaded)
    dcp.load(state, **mine)
    set_model_state_dict(loaded, state)
    pairs = zip(saved.parameters(), loaded.parameters(), strict=True)
    return [str(caught.value), all(torch.equal(a.full_tensor(), b.full_tensor()) for a, b in pairs)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes found."""
    folder = tmp_path_factory.mktemp("ranks")
    return run_ranks(work, folder, str(folder / "checkpoints"))


def test_a_checkpoint_loads_on_another_number_of_tensor_parallel_ranks(
    ranks: list[dict[str, Any]],
) -> None:
    for way in ["to one", "to two"]:
        for rank in ranks:
            assert all(rank[way]), rank[way]


def test_parameters_that_are_sharded_besides_are_refused(ranks: list[dict[str, Any]]) -> None:
    assert all("is a DTensor" in rank["refused"] for rank in ranks)


def test_parts_under_a_mesh_of_other_ranks_are_saved_by_each(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        said, equal = rank["two meshes"]
        assert "the parts of one of them alone" in said
        assert equal


# In one process
def test_parts_state_axis_and_offset() -> None:
    def layouts(communicator: Communicator) -> Any:
        return shard_layout(model(communicator))

    for rank, layout in enumerate(run_in_threads(layouts, 2)):
        at = rank * FFN // 2
        assert layout["2.weight"] == (
            ShardLayout("2.weight", 0, rank, 2, (FFN, HIDDEN), (at, 0), 0, FFN // 2),
        )
        assert layout["3.weight"][0][1:6] == (1, rank, 2, (HIDDEN, FFN), (0, at))
        assert layout["3.bias"][0][1:3] == (None, 0)
        assert layout["4.weight"][0].axis is None
        gate, value = layout["1.fc1_weight"]
        assert (gate.key, value.key) == ("1.fc1_weight.0", "1.fc1_weight.1")
        assert (gate.shape, gate.offset, gate.start) == ((FFN, HIDDEN), (at, 0), 0)
        assert (value.shape, value.offset, value.start) == ((FFN, HIDDEN), (at, 0), FFN // 2)
        query, key, _ = layout["0.qkv.weight"]
        assert (query.shape, key.shape) == ((HIDDEN, HIDDEN), (HIDDEN // 2, HIDDEN))
        assert layout["0.core_attention.softmax_offset"][0][1:5] == (0, rank, 2, (4,))
        assert (key.start, key.length) == (HIDDEN // 2, HIDDEN // 4)


def test_a_model_of_one_rank_has_the_same_keys_as_several() -> None:
    def keys(communicator: Communicator) -> set[str]:
        return {p.key for parts in shard_layout(model(communicator)).values() for p in parts}

    alone = {part.key for parts in shard_layout(model()).values() for part in parts}
    assert run_in_threads(keys, 2) == [alone, alone]


def test_a_shared_weight_is_there_under_each_of_its_names() -> None:
    first, second = (fp8core.Linear(8, 8, bias=False, device=device()) for _ in range(2))
    second.weight = first.weight
    state = sharded_state_dict(nn.Sequential(first, second, first))
    assert set(state) == {"0.weight", "1.weight", "2.weight"}


def test_an_extra_state_is_in_the_state() -> None:
    class Counting(nn.Module):
        def get_extra_state(self) -> dict[str, int]:
            return {"steps": 3}

    assert sharded_state_dict(Counting()) == {"_extra_state": {"steps": 3}}


def test_a_state_shares_memory_with_its_model() -> None:
    of = model()
    for tensor in sharded_state_dict(of).values():
        tensor.zero_()
    assert not any(bool(parameter.any()) for parameter in of.parameters())


def test_a_layer_without_its_group_is_refused() -> None:
    layer = fp8core.Linear(8, 8, parallel_mode="column", tp_size=2, device=device())
    with pytest.raises(UnsupportedError, match=r"no group yet.*set_tensor_parallel_group"):
        shard_layout(layer)


def test_a_quantized_parameter_of_several_parts_is_refused() -> None:
    with fp8core.quantized_model_init(recipe="current"):
        mlp = fp8core.LayerNormMLP(64, 64, activation="swiglu", **OPTIONS)
    with pytest.raises(UnsupportedError, match="fc1_weight is stored quantized"):
        sharded_state_dict(mlp)


CURRENT = recipe.Float8CurrentScaling()
WIDTH = 64


def new_model(
    seed: int, *, is_gathered: bool = True, dtype: torch.dtype = torch.bfloat16
) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    layers = [
        fp8core.Linear(WIDTH, WIDTH, device=device(), params_dtype=dtype, bias=bias)
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
        y: torch.Tensor = model(torch.ones(32, WIDTH, dtype=torch.bfloat16))
    y.float().sum().backward()
    return y


def shards(model: Any) -> list[ShardedWeight]:
    return [layer.weight.to_local() for layer in model]


@pytest.mark.usefixtures("group_of_one")
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


@pytest.mark.usefixtures("group_of_one")
def test_a_layer_takes_assigned_weights_alone() -> None:
    model, other = new_model(0), new_model(1)
    run(model)
    model[0].load_state_dict(other[0].state_dict(), assign=True)
    model[1].load_state_dict(other[1].state_dict())
    assert torch.equal(run(model), run(new_model(1)))


@pytest.mark.usefixtures("group_of_one")
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
            values["1.weight"] = torch.zeros(WIDTH, WIDTH, dtype=torch.bfloat16)
        with pytest.raises(fp8core.OperandError, match="assign=True") as caught:
            model.load_state_dict(values, assign=True)
        assert message in str(caught.value)
        model.zero_grad()
        assert torch.equal(run(model), before)


@pytest.mark.usefixtures("group_of_one")
def test_shards_are_loaded_where_forward_has_left_whole_weights() -> None:
    model, other = (fp8core.Linear(WIDTH, WIDTH, device=device()) for _ in range(2))
    for layer in (model, other):
        fully_shard(layer, reshard_after_forward=False)
    with torch.no_grad():
        model(torch.ones(1, WIDTH))
    model.load_state_dict({key: own.clone() for key, own in other.state_dict().items()})
    assert torch.equal(*(local_part(layer.weight) for layer in (model, other)))


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("has_run", [False, True])
def test_shards_are_copied_for_an_asynchronous_save(has_run: bool) -> None:
    """``async_save`` writes such a copy while the model goes on."""
    model = new_model(0)
    if has_run:
        run(model)
    state: Any = model.state_dict()
    expected = {key: local_part(part).clone() for key, part in state.items()}
    copied = DefaultStager(StagingOptions(False, False, False, False)).stage(state)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert isinstance(local_part(state["0.weight"]), ShardedWeight)
    for key, value in expected.items():
        assert torch.equal(local_part(copied[key]), value.cpu())  # where such a copy is


def saved_beside_training(_: int, folder: str) -> dict[str, Any]:
    """What a checkpoint has that was written by a group of its own while training went on."""
    group: Any = dist.new_group(backend="gloo")
    model = new_model(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step() -> None:
        run(model)
        optimizer.step()
        optimizer.zero_grad()

    step()
    saved = get_state_dict(model, optimizer)
    expected = tensors_of(saved)
    future: Any = dcp.async_save(dict(enumerate(saved)), checkpoint_id=folder, process_group=group)
    for _ in range(STEPS):
        step()
    future.result()
    went_on = tensors_of(get_state_dict(model, optimizer))
    resumed = new_model(1)
    again = torch.optim.AdamW(resumed.parameters(), lr=0.1)
    loaded = dict(enumerate(get_state_dict(resumed, again)))
    dcp.load(loaded, checkpoint_id=folder)
    set_state_dict(resumed, again, model_state_dict=loaded[0], optim_state_dict=loaded[1])
    read = tensors_of(get_state_dict(resumed, again))
    return {
        "read": [torch.equal(value, read[key]) for key, value in expected.items()],
        "went on": [torch.equal(value, went_on[key]) for key, value in expected.items()],
    }


def tensors_of(state: Any) -> dict[str, torch.Tensor]:
    """Copies of this rank's parts of the tensors in the states of a model and its optimizer."""
    weights, of_optimizer = state
    moments = {
        f"{key} {kind}": value
        for key, values in of_optimizer["state"].items()
        for kind, value in values.items()
    }
    return {key: local_part(value).clone() for key, value in {**weights, **moments}.items()}


def test_a_save_by_a_group_of_its_own_goes_on_beside_training(tmp_path: Path) -> None:
    """Over the default group its thread's collectives would meet those of training."""
    for rank in run_ranks(saved_beside_training, tmp_path, str(tmp_path / "checkpoint")):
        assert len(rank["read"]) == 3 + 3 * 3
        assert all(rank["read"])
        assert not any(rank["went on"])
