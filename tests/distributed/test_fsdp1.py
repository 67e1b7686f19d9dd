"""FSDP1 around layers, in two processes, against the same training of the model by itself."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
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
from tests.distributed.programs import average_gradients, batch, sgd
from tests.ranks import device, emulated, run_ranks

COLUMNS = 128
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


def work(rank: int) -> dict[str, Any]:
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
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes computed."""
    folder: Path = tmp_path_factory.mktemp("ranks")
    return run_ranks(work, folder)


def test_a_wrapped_model_trains_as_by_itself(ranks: list[dict[str, Any]]) -> None:
    for name in CASES:
        for rank in ranks:
            assert all(rank[name]), rank[name]


def test_weight_gradients_after_backward_are_refused(ranks: list[dict[str, Any]]) -> None:
    for split in [False, True]:
        for rank in ranks:
            first, second = rank[f"refused {split}"]
            assert "Leave out delay_wgrad_compute" in first
            assert "Leave out delay_wgrad_compute" in second
