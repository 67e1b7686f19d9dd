"""FSDP2 with quantized gathers beside unsharded models, in two processes."""

from __future__ import annotations

import copy
import gc
import re
import weakref
from collections.abc import Callable, Iterator
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
from fp8core import OperandError, UnsupportedError, recipe, reporting
from fp8core.distributed import gather_quantized, gathered_weight
from tests.distributed.fsdp_work import (
    COLUMNS,
    CURRENT,
    KINDS,
    OPTIMIZERS,
    TRAINED,
    work,
)
from tests.distributed.programs import (
    batch,
    linears,
    sharded,
    train_step,
    whole,
)
from tests.ranks import device, run_ranks


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes computed."""
    return run_ranks(work, tmp_path_factory.mktemp("ranks"))


def test_outputs_and_weights_are_those_of_the_unsharded_model(ranks: list[dict[str, Any]]) -> None:
    for name in TRAINED:
        for rank in ranks:
            made = rank["trained"][name]
            assert made["outputs"] == [True] * 3, name
            assert all(made["weights"]), name
            assert all(made["moved"]), name
            assert made["quantized"].count(True) == 2, name


def codes_and_scales(name: str, rows: int, columns: int) -> int:
    """Bytes of a rank's rows: codes of each orientation that is gathered, and scales; those that
    cover all rows come from each rank."""
    blocks = -(-rows // 128) * -(-columns // 128)
    return {
        "current": rows * columns + 4,
        "block": rows * columns + 4 * blocks,
        "mxfp8": 2 * (rows * columns + rows * columns // 32),
        "rowwise": 2 * rows * columns + 4 * rows + 4 * columns,
    }[name]


def test_gathers_move_codes_and_scales(ranks: list[dict[str, Any]]) -> None:
    for name in ["current", "block", "mxfp8", "rowwise"]:
        middle, last = TRAINED[name][1]
        sizes = (middle // 2, COLUMNS), (last // 2, middle)
        forward = [codes_and_scales(name, *size) + 2 * size[0] for size in sizes]  # and biases
        for rank in ranks:
            # Each layer in forward and in backward, in three steps.
            assert rank["trained"][name]["gathered"] == [*forward, *forward[::-1]] * 3, name


def test_all_weights_share_one_reduction_a_forward(ranks: list[dict[str, Any]]) -> None:
    for name, count in [
        ("current", 3),
        ("block", 0),
        ("block, blocks span ranks", 3),
        ("mxfp8", 0),
        ("rowwise", 3),
    ]:
        assert [rank["trained"][name]["reductions"] for rank in ranks] == [count] * 2, (name, count)


FOUND: dict[str, Any] = {
    "microbatches": 3,  # reductions: two, and that of an evaluation
    "blocks alone": True,
    "written by one rank": True,  # and seen by all
    "unsharded first": True,  # gathered before forward, and up to date
    "written": [True] * 6,  # in ways that torch does not count
    "evaluated first": True,  # in inference mode
    "replaced": True,  # by a state, and quantized by its values
    "frozen": [True, True, True, False, True],
    "mixed precision": [True, "torch.float32"],  # rounded once
    "replicated": True,
    "tensor parallel": ["QuantizedTensor", [256, COLUMNS], True],
}


@pytest.mark.parametrize("name", FOUND)
def test_weights_are_those_of_the_unsharded_model_in_other_uses(
    ranks: list[dict[str, Any]], name: str
) -> None:
    assert [rank[name] for rank in ranks] == [FOUND[name]] * 2


def test_gathered_weights_are_freed_after_forward_and_after_backward(
    ranks: list[dict[str, Any]],
) -> None:
    for rank in ranks:
        sizes = rank["memory"]
        assert len(sizes["forward"]) == 2
        assert sum(sizes["forward"]) == 0
        assert sum(sizes["backward"]) == 0


@pytest.mark.parametrize("name", ["current", "block", "mxfp8"])
@pytest.mark.parametrize("how", ["fp8core", "torch"])
def test_a_recompute_gives_equal_gradients(
    ranks: list[dict[str, Any]], name: str, how: str
) -> None:
    assert [rank["recomputed"][name][how] for rank in ranks] == [True, True]


def test_optimizers_and_clipping_do_as_with_a_gather_in_high_precision(
    ranks: list[dict[str, Any]],
) -> None:
    for name in OPTIMIZERS:
        assert [rank["clipped"][name] for rank in ranks] == [True, True], name


def test_layers_of_each_kind_train_as_unsharded(ranks: list[dict[str, Any]]) -> None:
    for name in KINDS:
        for rank in ranks:
            made = rank["kinds"][name]
            assert all(made["outputs"]), name
            assert all(made["weights"]), name
            assert made["quantized"].count(True) == {"TransformerLayer": 4, "GroupedLinear": 2}.get(
                name, 3
            ), name


def test_tied_weights_stay_tied(ranks: list[dict[str, Any]]) -> None:
    assert all(all(rank["tied"]) for rank in ranks)


def test_weights_that_stay_gathered_are_gathered_once_a_step(
    ranks: list[dict[str, Any]],
) -> None:
    for rank in ranks:
        made = rank["kept"]
        assert all(made["outputs"])
        assert all(made["weights"])
        assert len(made["gathered"]) == 3


def test_a_compiled_model_computes_the_same(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        made = rank["compiled"]
        assert all(made["outputs"])
        assert all(made["weights"])
        assert made["gathered"][0] == codes_and_scales("current", 128, 128)


def test_ranks_with_other_recipes_are_refused_on_all_ranks(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        said = rank["refused"]["recipes"]
        for at, format_ in enumerate((r"block=\(0,0\)", r"block=\(128,128\) power_of_two")):
            assert re.search(
                rf"rank {at}: e4m3 {format_} \(plan \w+\): 0.weight \[256, 128\]", said
            )


def test_a_shard_along_another_dimension_is_refused(ranks: list[dict[str, Any]]) -> None:
    assert all("0.weight: a quantized gather" in rank["refused"]["dimension"] for rank in ranks)


def test_an_autocast_with_another_recipe_is_refused(ranks: list[dict[str, Any]]) -> None:
    assert all("the recipe of autocast needs" in r["refused"]["another recipe"] for r in ranks)


def test_steps_of_gathered_weights_are_recorded_and_repeated(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["repeated"] == dict.fromkeys(("current", "block", "rowwise"), [True] * 3)


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


@pytest.mark.usefixtures("four_ranks_without_transport")
def test_scales_outlast_the_layers_that_read_them() -> None:
    """On a GPU a stream of its own casts weights, while layers before them still wait to run."""
    model: Any = linears(*[COLUMNS] * 6)
    with torch.no_grad():
        for at, layer in enumerate(model):
            layer.weight.mul_(4.0**at)
    sharded(model, CURRENT)
    scales = [amax_of_shard(layer) / 448 for layer in model]
    read: list[torch.Tensor] = []

    def read_late(layer: Any, arguments: object) -> None:
        if device().type == "cuda":
            torch.cuda._sleep(10_000_000)  # about 5 ms: the host is ahead
        read.append(layer.weight.stored[0].scale_inv.clone().view(()))

    for layer in model:
        layer.register_forward_pre_hook(read_late)
    for step in range(3):
        train_step(model, CURRENT, batch(step, COLUMNS))
    scales = 3 * scales  # of a step; a cast rounds their reciprocals
    torch.testing.assert_close(torch.stack(read).cpu(), torch.stack(scales), rtol=3e-7, atol=0)


def amax_of_shard(layer: Any) -> torch.Tensor:
    return layer.weight.to_local().value.abs().amax().float().cpu()


@pytest.mark.usefixtures("four_ranks_without_transport")
def test_memory_of_scales_is_tied_to_the_stream_that_reads_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cast: list[torch.Tensor] = []
    tied: list[torch.Tensor] = []
    row_cast = gathered_weight.RowCast.__call__

    def casting(*arguments: Any) -> Any:
        part = row_cast(*arguments)
        cast.append(part.scales)
        return part

    monkeypatch.setattr(gathered_weight.RowCast, "__call__", casting)
    monkeypatch.setattr(gathered_weight, "_outlast_readers", tied.append)
    model = sharded(linears(COLUMNS, 254, 126), CURRENT)  # of even parts FSDP gathers the scales
    for step in range(2):
        train_step(model, CURRENT, batch(step, COLUMNS))
    addresses = [*map(id, cast)]  # of freed tensors, which cannot be shown
    assert len(set(addresses)) == 8  # by two layers in forward and backward of two steps
    assert [*map(id, tied)] == addresses


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


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.usefixtures("four_ranks_without_transport")
def test_a_state_of_shards_can_be_copied_and_loaded(steps: int) -> None:
    model = sharded(linears(COLUMNS, 254, COLUMNS), CURRENT)
    model[0].weight.mark = 7
    for step in range(steps):
        train_step(model, CURRENT, batch(step, COLUMNS))
    of_both = copy.deepcopy((model.state_dict(), [*model.parameters()]))
    values = [one.to_local().value.clone() for one in model.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert of_both[1][0].mark == 7
    for kept, value in zip((*of_both[0].values(), *of_both[1]), 2 * values, strict=True):
        assert torch.equal(kept.to_local().value, value)
    model.load_state_dict(of_both[0])
    assert all(
        torch.equal(one.to_local().value, value)
        for one, value in zip(model.parameters(), values, strict=True)
    )


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
    assert torch.equal(model[0].weight.value.cpu(), initial)  # which is kept on the CPU


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


RECIPES: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "current": recipe.Float8CurrentScaling,
    "delayed": recipe.DelayedScaling,
    "block": recipe.Float8BlockScaling,
}


def model() -> Any:
    torch.manual_seed(0)
    given: dict[str, Any] = {"params_dtype": torch.bfloat16, "device": device()}
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


def test_the_whole_weight_of_one_rank_can_be_read() -> None:
    """Torch gives the shard itself where there is no other."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    model = linears(COLUMNS, 256)
    values = model[0].weight.detach().float().cpu()
    try:
        weight = whole(sharded(model, CURRENT)[0].weight).float().cpu()
    finally:
        dist.destroy_process_group()
    assert weight.tolist() == values.tolist()
    local = gather_quantized(linears(COLUMNS, 256, dtype=torch.float32), CURRENT)[0].weight
    array = local.detach().cpu().numpy()
    assert (array == linears(COLUMNS, 256, dtype=torch.float32)[0].weight.tolist()).all()
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 0.0
    with pytest.raises(RuntimeError, match="requires grad"):
        local.cpu().numpy()
    with pytest.raises(UnsupportedError, match="DLPack of a weight that is gathered"):
        torch.from_dlpack(local.detach())


def test_weights_can_be_shared_with_other_processes() -> None:
    gathered = gather_quantized(model(), CURRENT)
    expected = [parameter.tolist() for parameter in gathered.parameters()]
    gathered.share_memory()
    assert all(parameter.is_shared() for parameter in gathered.parameters())
    assert [parameter.tolist() for parameter in gathered.parameters()] == expected


def test_weights_train_before_they_are_sharded() -> None:
    for name in RECIPES:
        chosen = RECIPES[name]()
        gathered = gather_quantized(model(), chosen or "current")
        pairs = zip(train(gathered, chosen), train(model(), chosen), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs), name


@pytest.mark.usefixtures("group_of_one")
def test_ignored_weights_train_beside_sharded_ones() -> None:
    gathered = gather_quantized(model(), "current")
    fully_shard(gathered, ignored_params=set(gathered[1].parameters()))
    chosen = recipe.Float8CurrentScaling()
    pairs = zip(train(gathered, chosen), train(model(), chosen), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
