"""Masters, quantized parameters, DDP, FSDP1 and checkpoints of sharded models, in two processes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import fp8core
from fp8core import recipe
from fp8core.distributed import gather_quantized
from tests.distributed.programs import (
    average_gradients,
    batch,
    linears,
    sgd,
    sharded,
    train_as_one,
    train_step,
    whole,
)
from tests.ranks import run_ranks

COLUMNS = 128
CURRENT = recipe.Float8CurrentScaling()
BLOCK = recipe.Float8BlockScaling()
DELAYED = recipe.DelayedScaling(amax_history_len=4)
make = partial(linears, COLUMNS, 129, COLUMNS, bias=True)


def quantized() -> nn.Sequential:
    with fp8core.quantized_model_init(recipe=CURRENT, preserve_high_precision_init_val=True):
        return linears(COLUMNS, 256, COLUMNS)


# Wrappers and masters


def wrapped(wrap: Callable[[nn.Module], Any]) -> bool:
    """Whether a wrapper trains as the module by itself does on the average of the gradients."""
    model, reference = wrap(make()), make()
    return train_as_one(model, reference, CURRENT, COLUMNS)


def fsdp1(model: nn.Module) -> Any:
    return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))


def refused_by_fsdp1() -> str:
    try:
        fsdp1(quantized())
    except (fp8core.Fp8CoreError, RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def with_masters(wrap: Callable[[], Any], alone: Callable[[], nn.Module]) -> list[bool]:
    """Whether masters of the wrapped model train as those of ``alone`` do."""
    model, reference = wrap(), alone()
    masters = [fp8core.MasterWeights(one) for one in (model, reference)]
    optimizers = [torch.optim.AdamW(one.parameters(), 0.05) for one in masters]
    for one, optimizer in zip(masters, optimizers, strict=True):
        one.attach(optimizer)
    equal = []
    for step in range(3):
        x = batch(step, COLUMNS)
        equal.append(torch.equal(*[train_step(one, CURRENT, x) for one in (model, reference)]))
        average_gradients(reference)
        for optimizer in optimizers:
            optimizer.step()
    pairs = zip(masters[0].parameters(), masters[1].parameters(), strict=True)
    equal += [torch.equal(whole(one), whole(other)) for one, other in pairs]
    return [*equal, all(whole(one).dtype == torch.float32 for one in masters[0].parameters())]


def ddp_of_quantized() -> nn.Module:
    return nn.parallel.DistributedDataParallel(quantized())


QUANTIZED = {
    "current": CURRENT,
    "block": BLOCK,
    "mxfp8": recipe.MXFP8BlockScaling(),
    "rowwise": recipe.Float8RowwiseScaling(),
    "nvfp4": recipe.NVFP4BlockScaling(),
}


def sent_by_ddp(chosen: Any, layers: int) -> list[bool]:
    """Whether quantized weights of all ranks are rank 0's once DDP has wrapped them; a single one
    is sent by itself, as large ones are."""
    torch.manual_seed(dist.get_rank())
    with fp8core.quantized_model_init(recipe=chosen):
        model = nn.Sequential(*[new_linear() for _ in range(layers)])
    before = [one.dequantize() for one in model.parameters()]
    nn.parallel.DistributedDataParallel(model)
    equal = []
    for one, was in zip(model.parameters(), before, strict=True):
        first = was.clone()
        dist.broadcast(first, 0)
        equal += [
            torch.equal(one.dequantize(), first),
            (dist.get_rank() == 0) == bool(torch.equal(was, first)),
        ]
    return equal


def new_linear() -> nn.Module:
    sizes: dict[str, Any] = {"params_dtype": torch.bfloat16, "device": "cpu", "bias": False}
    return fp8core.Linear(COLUMNS, 2 * COLUMNS, **sizes)


# Checkpoints

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, 0.1),
    "FusedAdam": lambda parameters: fp8core.optimizers.FusedAdam(parameters, 0.1),
    "FusedAdam, masters": lambda parameters: fp8core.optimizers.FusedAdam(
        parameters, 0.1, master_weights=True
    ),
}


def all_rows(step: int, columns: int) -> torch.Tensor:
    return torch.cat([batch(step, columns, rank) for rank in range(2)])


def steps(
    model: Any,
    optimizer: Any,
    chosen: Any,
    numbers: range,
    rows: Callable[[int, int], torch.Tensor] = batch,
) -> list[torch.Tensor]:
    """Train; the outputs. Delayed amaxes are reduced over the ranks."""
    outputs = []
    for step in numbers:
        with fp8core.autocast(recipe=chosen, amax_reduction_group=dist.group.WORLD):
            y = model(rows(step, COLUMNS))
        y.float().square().mean().backward()
        outputs.append(y.detach())
        optimizer.step()
        optimizer.zero_grad()
    return outputs


def resumed(name: str, chosen: Any, folder: str) -> bool:
    """Whether a fresh model continues a run from its checkpoint, bit for bit."""

    def begin() -> tuple[Any, Any]:
        model = sharded(make(), chosen)
        return model, OPTIMIZERS[name](model.parameters())

    model, optimizer = begin()
    steps(model, optimizer, chosen, range(2))
    saved = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(saved, checkpoint_id=folder)
    fresh, own = begin()
    steps(fresh, own, chosen, range(5, 6))  # another state, all of which is replaced
    state = dict(zip(("model", "optimizer"), get_state_dict(fresh, own), strict=True))
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(fresh, own, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    pairs = [steps(one, by, chosen, range(2, 4)) for one, by in ((model, optimizer), (fresh, own))]
    return all(map(torch.equal, *pairs))


def moved(chosen: Any, folder: str, *, from_all: bool) -> list[bool]:
    """A checkpoint of two ranks on one, or the other way: whether both compute the same."""
    one = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    alone = DeviceMesh.from_group(one, "cpu")
    everyone = init_device_mesh("cpu", (2,))

    def on(mesh: DeviceMesh) -> Any:
        return fully_shard(gather_quantized(make(), chosen), mesh=mesh)

    first, second = (everyone, alone) if from_all else (alone, everyone)
    saved, loaded = on(first), on(second)
    steps(saved, sgd(saved.parameters()), chosen, range(2), rows=batch if from_all else all_rows)
    mine = f"{folder}/{'all' if from_all else dist.get_rank()}"
    dcp.save(get_model_state_dict(saved), checkpoint_id=mine, process_group=first.get_group())
    dist.barrier()
    mine = mine if from_all else f"{folder}/0"
    state = get_model_state_dict(loaded)
    dcp.load(state, checkpoint_id=mine, process_group=second.get_group())
    set_model_state_dict(loaded, state)
    return [
        *[
            torch.equal(whole(a), whole(b))
            for a, b in zip(saved.parameters(), loaded.parameters(), strict=True)
        ],
        *[torch.equal(a, b) for a, b in zip(saved.buffers(), loaded.buffers(), strict=True)],
        any(bool((b != 1).any()) for n, b in loaded.named_buffers() if n.endswith("scale_fwd"))
        or chosen is not DELAYED,
        torch.equal(*steps_of_both(saved, loaded, chosen)),
    ]


def steps_of_both(saved: Any, loaded: Any, chosen: Any) -> list[torch.Tensor]:
    with torch.no_grad(), fp8core.autocast(recipe=chosen):
        return [one(batch(9, COLUMNS)) for one in (saved, loaded)]


def work(rank: int, folder: str) -> dict[str, Any]:
    return {
        "ddp": wrapped(nn.parallel.DistributedDataParallel),
        "fsdp1": wrapped(fsdp1),
        "quantized, fsdp1": refused_by_fsdp1(),
        "sent by ddp": {
            f"{name} {layers}": sent_by_ddp(chosen, layers)
            for name, chosen in QUANTIZED.items()
            for layers in (1, 2)
        },
        "masters": {
            "gathered quantized": with_masters(lambda: sharded(make(), CURRENT), make),
            "gathered in bfloat16": with_masters(lambda: sharded(make()), make),
            "quantized": with_masters(
                lambda: sharded(quantized(), CURRENT), partial(linears, COLUMNS, 256, COLUMNS)
            ),
            "quantized, ddp": with_masters(ddp_of_quantized, quantized),
        },
        "resumed": {
            f"{name}, {label}": resumed(name, chosen, f"{folder}/{name}-{label}")
            for name, label, chosen in RESUMED
        },
        "moved": {
            f"{label}, {way}": moved(chosen, f"{folder}/{label}-{way}", from_all=way == "to one")
            for label, chosen in (("block", BLOCK), ("delayed", DELAYED))
            for way in ("to one", "to two")
        },
    }


RESUMED = (
    ("AdamW", "block", BLOCK),
    ("AdamW", "delayed", DELAYED),
    ("FusedAdam", "current", CURRENT),
    ("FusedAdam, masters", "current", CURRENT),
)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes computed."""
    folder = tmp_path_factory.mktemp("ranks")
    return run_ranks(work, folder, str(folder / "checkpoints"))


def test_other_wrappers_train_as_the_module_by_itself(ranks: list[dict[str, Any]]) -> None:
    for name in ["ddp", "fsdp1"]:
        assert [rank[name] for rank in ranks] == [True, True], name


def test_masters_train_as_those_of_the_unsharded_model(ranks: list[dict[str, Any]]) -> None:
    for name in ["gathered quantized", "gathered in bfloat16", "quantized", "quantized, ddp"]:
        for rank in ranks:
            assert all(rank["masters"][name]), rank["masters"][name]


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("name", QUANTIZED)
def test_ddp_sends_quantized_weights(ranks: list[dict[str, Any]], name: str, layers: int) -> None:
    for rank in ranks:
        assert all(rank["sent by ddp"][f"{name} {layers}"]), rank["sent by ddp"]


def test_fsdp1_refuses_quantized_parameters(ranks: list[dict[str, Any]]) -> None:
    assert all("Quantized" in rank["quantized, fsdp1"] for rank in ranks)


def test_a_run_continues_from_a_distributed_checkpoint(ranks: list[dict[str, Any]]) -> None:
    for name in [f"{name}, {label}" for name, label, _ in RESUMED]:
        assert [rank["resumed"][name] for rank in ranks] == [True, True], name


@pytest.mark.parametrize("way", ["to one", "to two"])
@pytest.mark.parametrize("name", ["block", "delayed"])
def test_a_checkpoint_loads_on_another_number_of_ranks(
    ranks: list[dict[str, Any]], name: str, way: str
) -> None:
    for rank in ranks:
        assert all(rank["moved"][f"{name}, {way}"]), rank["moved"][f"{name}, {way}"]
