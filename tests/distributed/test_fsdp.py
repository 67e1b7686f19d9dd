"""FSDP2 with quantized gathers beside unsharded models, in two processes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import checkpoint

import fp8core
from fp8core import OperandError, UnsupportedError, recipe, reporting
from fp8core.communicator import of_group
from fp8core.distributed import gather_quantized
from tests.distributed.programs import (
    average_gradients,
    batch,
    compared,
    linears,
    sgd,
    sharded,
    train_step,
    whole,
)
from tests.ranks import device, emulated, run_ranks

COLUMNS = 128
# The recipe, the sizes of two linears, and how many amaxes are reduced a step and weight.
TRAINED: dict[str, tuple[str, tuple[int, int]]] = {
    "current": ("current", (256, 128)),
    "current, uneven, and no rows on one rank": ("current", (129, 1)),
    "block": ("block", (256, 256)),
    "block, blocks span ranks": ("block", (320, 128)),
    "block, uneven": ("block", (129, 128)),
    "mxfp8": ("mxfp8", (256, 128)),
    "mxfp8, blocks span ranks": ("mxfp8", (96, 128)),
    "rowwise": ("rowwise", (256, 128)),
    "rowwise, uneven": ("rowwise", (129, 128)),
}
CURRENT = recipe.Float8CurrentScaling()


class Layers(nn.Module):
    """A block with more layers than one linear, recomputed by ``how``."""

    def __init__(self, how: str = "", chosen: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        given: dict[str, Any] = {"device": device(), "params_dtype": torch.bfloat16}
        self.mlp = fp8core.LayerNormMLP(COLUMNS, 192, activation="swiglu", **given)
        self.last = fp8core.Linear(COLUMNS, COLUMNS, **given)
        self.how = how
        self.chosen = chosen

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "fp8core":
            x = fp8core.checkpoint(self.mlp, x, use_reentrant=False)
        elif self.how == "torch":
            x = checkpoint.checkpoint(self.recomputed, x, use_reentrant=False)
        else:
            x = self.mlp(x)
        out: torch.Tensor = self.last(x)
        return out

    def recomputed(self, x: torch.Tensor) -> Any:
        """Under autocast again on a GPU, whose backward runs in a thread without one."""
        if x.is_cpu:
            return self.mlp(x)
        with fp8core.autocast(recipe=self.chosen):
            return self.mlp(x)


def trained(name: str) -> dict[str, Any]:
    chosen, sizes = TRAINED[name]
    make = partial(linears, COLUMNS, *sizes, bias="uneven" not in name)
    with emulated(chosen):
        return compared(make, recipe.by_name(chosen), COLUMNS)


def memory() -> dict[str, list[int]]:
    """Bytes of the weights that backward reads: after forward, and after backward."""
    model = sharded(linears(COLUMNS, 256, COLUMNS), CURRENT)
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if set(tensor.shape) == {256, COLUMNS}:
            storage = tensor.untyped_storage()
            saved[storage._cdata] = storage
        return tensor

    with fp8core.autocast(recipe=CURRENT):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            y = model(batch(0, COLUMNS).requires_grad_())
        first = [storage.nbytes() for storage in saved.values()]
    y.sum().backward()
    return {"forward": first, "backward": [storage.nbytes() for storage in saved.values()]}


def written() -> list[bool]:
    """Outputs after writes that torch does not count, beside a model with the same weights."""
    model, reference = (
        sharded(linears(COLUMNS, 256, COLUMNS), CURRENT),
        linears(COLUMNS, 256, COLUMNS),
    )
    train_step(model, CURRENT, batch(0, COLUMNS))
    equal = []
    writes = [
        lambda weight: weight.mul_(3),
        lambda weight: torch._foreach_mul_([weight], 2.0),
        lambda weight: weight.data.add_(1),
        lambda weight: weight.copy_(weight * 0.25),
        lambda weight: weight.t().mul_(5),
        lambda weight: rows_of(weight)[0].fill_(9),
    ]
    for write in writes:
        with torch.no_grad():
            for one in (model, reference):
                write(one[1].weight)
        x = batch(1, COLUMNS)
        equal.append(torch.equal(*[train_step(one, CURRENT, x) for one in (model, reference)]))
    return equal


def rows_of(weight: Any) -> torch.Tensor:
    """The rows that this rank keeps; of an unsharded weight those of all ranks, by number."""
    rows: torch.Tensor
    if hasattr(weight, "to_local"):
        rows = weight.to_local()
    else:
        rows = weight.unflatten(0, (dist.get_world_size(), -1)).transpose(0, 1)
    return rows


def evaluated_first() -> bool:
    """Whether a first gather in inference mode computes what the unsharded model does."""
    model, reference = (linears(COLUMNS, 256, COLUMNS) for _ in range(2))
    x, model = batch(0, COLUMNS), sharded(model, CURRENT)
    with torch.inference_mode(), fp8core.autocast(recipe=CURRENT):
        return torch.equal(model(x), reference(x))


def replaced() -> bool:
    """A state that is assigned, not copied, takes the place of the shards."""
    model, reference = (linears(COLUMNS, 256, COLUMNS) for _ in range(2))
    model = sharded(model, CURRENT)
    train_step(model, CURRENT, batch(0, COLUMNS))
    state = {name: value.clone() * 2 for name, value in model.state_dict().items()}
    state = {
        name: old.detach().clone().copy_(state[name]) for name, old in model.state_dict().items()
    }
    model.load_state_dict(state, assign=True)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.mul_(2)
    x = batch(1, COLUMNS)
    return torch.equal(*[train_step(one, CURRENT, x) for one in (model, reference)])


def microbatches() -> int:
    """How often amaxes are reduced in a step of two microbatches and an evaluation."""
    model = sharded(linears(COLUMNS, 256, COLUMNS), CURRENT)
    of_group().traffic.clear()
    for step in range(2):
        train_step(model, CURRENT, batch(step, COLUMNS))
    with torch.no_grad(), fp8core.autocast(recipe=CURRENT):
        model(batch(2, COLUMNS))
    return of_group().traffic["max", "weight amaxes"].calls


def recomputed(name: str) -> dict[str, bool]:
    gradients, chosen = {}, recipe.by_name(name)
    for how in ("", "fp8core", "torch"):
        model = sharded(Layers(how, chosen), chosen)
        with (
            emulated(name),
            fp8core.autocast(recipe=chosen),
        ):  # torch's checkpoint recomputes in backward
            model(batch(0, COLUMNS)).float().square().mean().backward()
        gradients[how] = [whole(parameter.grad) for parameter in model.parameters()]
    return {
        how: all(map(torch.equal, gradients[how], gradients[""])) for how in ("fp8core", "torch")
    }


def frozen() -> list[bool]:
    def make() -> nn.Module:
        model = linears(COLUMNS, 256, COLUMNS)
        return model[0].requires_grad_(False) and model

    made = compared(make, CURRENT, COLUMNS)
    return [all(made["outputs"]), *made["weights"], *made["moved"]]


def clipped(name: str) -> bool:
    """Whether weights are those of a gather in high precision, with clipping and moments."""
    optimizers = {
        "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1.0, momentum=0.9),
        "adamw, all at once": lambda parameters: torch.optim.AdamW(parameters, 0.1, foreach=True),
        "adamw, one by one": lambda parameters: torch.optim.AdamW(parameters, 0.1, foreach=False),
        "adamw, fused": lambda parameters: torch.optim.AdamW(parameters, 0.1, fused=True),
        "FusedAdam": lambda parameters: fp8core.optimizers.FusedAdam(parameters, 0.1),
        "FusedAdam, masters": lambda parameters: fp8core.optimizers.FusedAdam(
            parameters, 0.1, master_weights=True
        ),
        "FusedSGD": lambda parameters: fp8core.optimizers.FusedSGD(parameters, 1.0, momentum=0.9),
    }
    weights = []
    for chosen in (None, CURRENT):
        model = sharded(linears(COLUMNS, 320, COLUMNS, bias=True), chosen)
        optimizer = optimizers[name](model.parameters())
        for step in range(3):
            train_step(model, CURRENT, batch(step, COLUMNS))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()
        weights.append([whole(parameter) for parameter in model.parameters()])
    first = [whole(one) for one in linears(COLUMNS, 320, COLUMNS, bias=True).parameters()]
    assert not any(map(torch.equal, first, weights[0]))
    return all(map(torch.equal, *weights))


OPTIMIZERS = (
    *("sgd", "adamw, all at once", "adamw, one by one", "adamw, fused"),
    *("FusedAdam", "FusedAdam, masters", "FusedSGD"),
)


def mixed_precision() -> list[Any]:
    """Float32 weights, gathered with bfloat16 as their nominal dtype."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    make = partial(linears, COLUMNS, 256, COLUMNS, dtype=torch.float32)
    model, reference = sharded(make(), CURRENT, mp_policy=policy), make()
    x = batch(0, COLUMNS)
    y = train_step(model, CURRENT, x)
    with torch.autocast(device().type, dtype=torch.bfloat16):
        equal = torch.equal(y, train_step(reference, CURRENT, x))
    return [equal, str(next(model.parameters()).grad.dtype)]


def tied() -> list[bool]:
    def make() -> nn.Module:
        model = linears(COLUMNS, COLUMNS, COLUMNS)
        model[1].weight = model[0].weight
        return nn.Sequential(model)

    made = compared(make, CURRENT, COLUMNS)
    return [len(made["weights"]) == 1, *made["quantized"], *made["weights"], *made["outputs"]]


class Grouped(nn.Module):
    """Two experts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts = fp8core.GroupedLinear(
            2, COLUMNS, 160, device=device(), params_dtype=torch.bfloat16
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.experts(x, [12, 20])
        return y


class Attending(nn.Module):
    """A Transformer layer over 16 tokens of 2 texts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = fp8core.TransformerLayer(
            COLUMNS,
            256,
            4,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            fuse_qkv_params=True,
            device=device(),
            params_dtype=torch.bfloat16,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.view(16, 2, COLUMNS)).flatten(0, 1).clone()


def converted() -> nn.Module:
    torch.manual_seed(0)
    sizes = ((COLUMNS, 192), (192, COLUMNS), (COLUMNS, 16))
    model = nn.Sequential(*[nn.Linear(*size, dtype=torch.bfloat16) for size in sizes])
    fp8core.convert(model, CURRENT)
    return model


KINDS: dict[str, tuple[Any, Any]] = {
    "GroupedLinear": (Grouped, recipe.Float8BlockScaling()),
    "TransformerLayer": (Attending, recipe.MXFP8BlockScaling()),
    "converted layers": (converted, CURRENT),
}


def replicated() -> bool:
    """Whether two replicas of a mesh with two dimensions train as one model."""
    mesh = init_device_mesh(device().type, (2, 1), mesh_dim_names=("replicas", "shards"))
    model: Any = gather_quantized(linears(COLUMNS, 256), CURRENT)
    model, reference = fully_shard(model, mesh=mesh), linears(COLUMNS, 256)
    optimizers = [sgd(one.parameters()) for one in (model, reference)]
    equal = []
    for step in range(3):
        x = batch(step, COLUMNS)
        equal.append(torch.equal(*[train_step(one, CURRENT, x) for one in (model, reference)]))
        average_gradients(reference)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return all(equal)


def of_tensor_parallel_weights(rank: int) -> list[Any]:
    """The gathered weight of a rank's part of a DTensor, on a mesh with two dimensions."""
    mesh = init_device_mesh(device().type, (1, 2), mesh_dim_names=("data", "tensor"))
    model: Any = linears(COLUMNS, 256)
    part = model[0].weight.detach().chunk(2)[rank].clone()
    placed = DTensor.from_local(part, mesh["tensor"], [Shard(0)], run_check=False)
    model[0].weight = nn.Parameter(placed)
    fully_shard(gather_quantized(model, CURRENT), mesh=mesh["data"])
    model.unshard()
    gathered = model[0].weight.to_local()
    plan = gathered.plan
    expected = fp8core.QuantizedTensor.quantize(part, plan)
    equal = map(torch.equal, gathered.tensors(), expected.tensors())
    return [type(gathered).__name__, list(model[0].weight.shape), all(equal)]


def refused(rank: int) -> dict[str, str]:
    """What each rank raises."""
    errors = {}
    chosen = recipe.by_name(["current", "block"][rank])
    model = sharded(linears(COLUMNS, 256, COLUMNS), chosen)
    with pytest.raises(OperandError) as caught:
        train_step(model, chosen, batch(0, COLUMNS))
    errors["recipes"] = str(caught.value)
    model = sharded(linears(COLUMNS, 256), CURRENT, shard_placement_fn=lambda parameter: Shard(1))
    with pytest.raises(UnsupportedError) as other:
        train_step(model, CURRENT, batch(0, COLUMNS))
    errors["dimension"] = str(other.value)
    model = sharded(linears(COLUMNS, 256), CURRENT)
    with pytest.raises(OperandError) as stored:
        train_step(model, recipe.Float8BlockScaling(), batch(0, COLUMNS))
    errors["another recipe"] = str(stored.value)
    return errors


def work(rank: int) -> dict[str, Any]:
    return {
        "trained": {name: trained(name) for name in TRAINED},
        "memory": memory(),
        "written": written(),
        "evaluated first": evaluated_first(),
        "replaced": replaced(),
        "microbatches": microbatches(),
        "recomputed": {name: recomputed(name) for name in ("current", "block", "mxfp8")},
        "frozen": frozen(),
        "clipped": {name: clipped(name) for name in OPTIMIZERS},
        "mixed precision": mixed_precision(),
        "tied": tied(),
        "kinds": {name: compared(*given, COLUMNS) for name, given in KINDS.items()},
        "replicated": replicated(),
        "tensor parallel": of_tensor_parallel_weights(rank),
        "kept": compared(
            partial(linears, COLUMNS, 256), CURRENT, COLUMNS, reshard_after_forward=False
        ),
        "compiled": compared(partial(linears, COLUMNS, 256), CURRENT, COLUMNS, compiled=True),
        "refused": refused(rank),
    }


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes computed."""
    return run_ranks(work, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", TRAINED)
def test_outputs_and_weights_are_those_of_the_unsharded_model(
    ranks: list[dict[str, Any]], name: str
) -> None:
    for rank in ranks:
        made = rank["trained"][name]
        assert made["outputs"] == [True] * 3
        assert all(made["weights"])
        assert all(made["moved"])
        assert made["quantized"].count(True) == 2


def codes_and_scales(name: str, rows: int, columns: int) -> int:
    """Bytes of a rank's rows: codes of each orientation that is gathered, and scales."""
    blocks = -(-rows // 128) * -(-columns // 128)
    return {
        "current": rows * columns,
        "block": rows * columns + 4 * blocks,
        "mxfp8": 2 * (rows * columns + rows * columns // 32),
        "rowwise": 2 * rows * columns + 4 * rows,
    }[name]


@pytest.mark.parametrize("name", ["current", "block", "mxfp8", "rowwise"])
def test_gathers_move_codes_and_scales(ranks: list[dict[str, Any]], name: str) -> None:
    middle, last = TRAINED[name][1]
    sizes = (middle // 2, COLUMNS), (last // 2, middle)
    forward = [codes_and_scales(name, *size) + 2 * size[0] for size in sizes]  # and biases
    for rank in ranks:
        # Each layer in forward and in backward, in three steps.
        assert rank["trained"][name]["gathered"] == [*forward, *forward[::-1]] * 3


@pytest.mark.parametrize(
    ("name", "count"),
    [("current", 3), ("block", 0), ("block, blocks span ranks", 3), ("mxfp8", 0), ("rowwise", 3)],
)
def test_all_weights_share_one_reduction_a_step(
    ranks: list[dict[str, Any]], name: str, count: int
) -> None:
    assert [rank["trained"][name]["reductions"] for rank in ranks] == [count] * 2


def test_microbatches_and_evaluations_reduce_nothing_again(ranks: list[dict[str, Any]]) -> None:
    assert [rank["microbatches"] for rank in ranks] == [1, 1]


def test_gathered_weights_are_freed_after_forward_and_after_backward(
    ranks: list[dict[str, Any]],
) -> None:
    for rank in ranks:
        sizes = rank["memory"]
        assert len(sizes["forward"]) == 2
        assert sum(sizes["forward"]) == 0
        assert sum(sizes["backward"]) == 0


def test_writes_that_torch_does_not_count_are_seen(ranks: list[dict[str, Any]]) -> None:
    assert [rank["written"] for rank in ranks] == [[True] * 6] * 2


def test_the_first_gather_may_be_in_inference_mode(ranks: list[dict[str, Any]]) -> None:
    assert [rank["evaluated first"] for rank in ranks] == [True, True]


def test_shards_that_a_state_replaces_are_quantized_by_their_values(
    ranks: list[dict[str, Any]],
) -> None:
    assert [rank["replaced"] for rank in ranks] == [True, True]


@pytest.mark.parametrize("name", ["current", "block", "mxfp8"])
@pytest.mark.parametrize("how", ["fp8core", "torch"])
def test_a_recompute_gives_equal_gradients(
    ranks: list[dict[str, Any]], name: str, how: str
) -> None:
    assert [rank["recomputed"][name][how] for rank in ranks] == [True, True]


def test_a_frozen_weight_stays_among_others(ranks: list[dict[str, Any]]) -> None:
    assert [rank["frozen"] for rank in ranks] == [[True, True, True, False, True]] * 2


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_and_clipping_do_as_with_a_gather_in_high_precision(
    ranks: list[dict[str, Any]], name: str
) -> None:
    assert [rank["clipped"][name] for rank in ranks] == [True, True]


def test_float32_weights_are_rounded_once_under_mixed_precision(
    ranks: list[dict[str, Any]],
) -> None:
    assert [rank["mixed precision"] for rank in ranks] == [[True, "torch.float32"]] * 2


@pytest.mark.parametrize("name", KINDS)
def test_layers_of_each_kind_train_as_unsharded(ranks: list[dict[str, Any]], name: str) -> None:
    for rank in ranks:
        made = rank["kinds"][name]
        assert all(made["outputs"])
        assert all(made["weights"])
        assert made["quantized"].count(True) == {"TransformerLayer": 4, "GroupedLinear": 2}.get(
            name, 3
        )


def test_replicas_of_shards_train_as_one_model(ranks: list[dict[str, Any]]) -> None:
    assert [rank["replicated"] for rank in ranks] == [True, True]


def test_parts_of_tensor_parallel_weights_are_gathered(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["tensor parallel"] == ["QuantizedTensor", [256, COLUMNS], True]


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
        assert "rank 0: 0.weight [256, 128] as" in rank["refused"]["recipes"]
        assert "rank 1: 0.weight [256, 128] as" in rank["refused"]["recipes"]


def test_a_shard_along_another_dimension_is_refused(ranks: list[dict[str, Any]]) -> None:
    assert all("0.weight: a quantized gather" in rank["refused"]["dimension"] for rank in ranks)


def test_an_autocast_with_another_recipe_is_refused(ranks: list[dict[str, Any]]) -> None:
    assert all("the recipe of autocast needs" in r["refused"]["another recipe"] for r in ranks)


# In one process


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
