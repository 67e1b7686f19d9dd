"""Masters, quantized parameters, DDP and FSDP1, in two processes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import fp8core
from fp8core import UnsupportedError, recipe
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
from tests.ranks import device, emulated, run_ranks

COLUMNS = 128
CURRENT = recipe.Float8CurrentScaling()
BLOCK = recipe.Float8BlockScaling()
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
    return FullyShardedDataParallel(model, use_orig_params=True, device_id=device())


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
    sizes: dict[str, Any] = {"params_dtype": torch.bfloat16, "device": device(), "bias": False}
    return fp8core.Linear(COLUMNS, 2 * COLUMNS, **sizes)


def work(rank: int) -> dict[str, Any]:
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
    }


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes computed."""
    return run_ranks(work, tmp_path_factory.mktemp("ranks"))


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


MICROBATCHES = 2


class Model(nn.Module):
    """MLPs, each recomputed in backward if ``recomputes``."""

    def __init__(self, recomputes: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = {"device": device(), "params_dtype": torch.bfloat16}
        given = {"normalization": "RMSNorm", "activation": "swiglu", **sizes}
        self.layers = nn.ModuleList(
            [fp8core.LayerNormMLP(COLUMNS, 2 * COLUMNS, **given) for _ in range(2)]
        )
        self.recomputes = recomputes

    def forward(self, x: torch.Tensor, *, first: bool | None = None) -> torch.Tensor:
        """Return the output; ``first`` is ``is_first_microbatch`` of the layers."""
        for layer in self.layers:
            x = self.run(layer, x, first)
        return x

    def run(self, layer: nn.Module, x: torch.Tensor, first: bool | None) -> torch.Tensor:
        if not self.recomputes:
            return layer(x, is_first_microbatch=first)  # type: ignore[no-any-return]  # torch's
        is_reentrant = self.recomputes == "reentrant"
        result: torch.Tensor = fp8core.checkpoint(layer, x, use_reentrant=is_reentrant)
        return result


RECIPES: dict[str, Callable[[], Any]] = {
    "current": recipe.Float8CurrentScaling,
    "delayed": lambda: recipe.DelayedScaling(amax_history_len=4),
    "block": recipe.Float8BlockScaling,
    "mxfp8": recipe.MXFP8BlockScaling,
}
CASES = {
    **{f"recomputes {name}": {"name": name, "recomputes": "not reentrant"} for name in RECIPES},
    "recomputes reentrant": {"name": "delayed", "recomputes": "reentrant"},
    "keeps gathered weights": {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
    "as one parameter": {"use_orig_params": False},
    "as one parameter, recomputes": {"use_orig_params": False, "recomputes": "not reentrant"},
    "microbatches": {"by_microbatch": True},
}


def trained(
    name: str = "current",
    *,
    recomputes: str = "",
    by_microbatch: bool = False,
    use_orig_params: bool = True,
    **options: Any,
) -> list[bool]:
    """Whether each output of three steps is that of the model by itself."""
    model: Any = FullyShardedDataParallel(
        Model(recomputes),
        use_orig_params=use_orig_params,
        device_id=device(),
        auto_wrap_policy=ModuleWrapPolicy({fp8core.LayerNormMLP}),
        **options,
    )
    reference, equal = Model(), []
    recipes = [RECIPES[name]() for _ in range(2)]
    optimizers = [sgd(one.parameters()) for one in (model, reference)]
    for step in range(3):
        for at in range(MICROBATCHES if by_microbatch else 1):
            x, first = batch(10 * step + at, COLUMNS), at == 0 if by_microbatch else None
            with unless_last(model, at) if by_microbatch else contextlib.nullcontext():
                y = stepped(model, recipes[0], x, first)
            equal.append(torch.equal(y, stepped(reference, recipes[1], x, first)))
        average_gradients(reference)
        for one in optimizers:
            one.step()
            one.zero_grad()
        if by_microbatch:
            break  # sums of rounded gradients have another order
    return equal


@contextlib.contextmanager
def unless_last(model: Any, at: int) -> Iterator[None]:
    """Gradients stay on their rank before the last microbatch."""
    with contextlib.nullcontext() if at + 1 == MICROBATCHES else model.no_sync():
        yield


def stepped(model: Any, chosen: Any, x: torch.Tensor, first: bool | None) -> torch.Tensor:
    with fp8core.autocast(recipe=chosen, amax_reduction_group=dist.group.WORLD):
        y: torch.Tensor = model(x.requires_grad_(), first=first)
    y.float().square().mean().backward()
    return y.detach()


def fsdp1_work(rank: int) -> dict[str, Any]:
    found = {}
    for case, options in CASES.items():
        name: Any = options.get("name", "current")
        with emulated(name):
            found[case] = trained(**options)
    for split in (False, True):
        found[f"refused {split}"] = refused(split=split)
    return found


def refused(*, split: bool) -> list[str]:
    """What is said of weight gradients that backward leaves to later, as one parameter and not;
    ``split``: the weight is computed from several."""
    said = []
    for use_orig_params in (True, False):
        sizes: dict[str, Any] = {"device": device(), "params_dtype": torch.bfloat16, "bias": False}
        parts = {"parameters_split": {"a": COLUMNS, "b": COLUMNS}} if split else {}
        late = fp8core.Linear(COLUMNS, 2 * COLUMNS, delay_wgrad_compute=True, **parts, **sizes)
        model = FullyShardedDataParallel(late, use_orig_params=use_orig_params, device_id=device())
        try:
            model(batch(0, COLUMNS))
        except UnsupportedError as error:
            said.append(str(error))
    return said


@pytest.fixture(scope="module")
def fsdp1_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes computed."""
    folder: Path = tmp_path_factory.mktemp("ranks")
    return run_ranks(fsdp1_work, folder)


def test_a_wrapped_model_trains_as_by_itself(fsdp1_ranks: list[dict[str, Any]]) -> None:
    for name in CASES:
        for rank in fsdp1_ranks:
            assert all(rank[name]), rank[name]


def test_weight_gradients_after_backward_are_refused(fsdp1_ranks: list[dict[str, Any]]) -> None:
    for split in [False, True]:
        for rank in fsdp1_ranks:
            first, second = rank[f"refused {split}"]
            assert "Leave out delay_wgrad_compute" in first
            assert "Leave out delay_wgrad_compute" in second
