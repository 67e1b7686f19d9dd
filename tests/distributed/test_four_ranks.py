"""Four processes: checkpoints that go on on two of them, weights offloaded to the host, and layers
over groups of two ranks that are no neighbours."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

import fp8core
from fp8core import recipe
from fp8core.communicator import of_group
from fp8core.distributed import gather_quantized
from fp8core.optimizers import FusedAdam
from tests.modules import test_parallel
from tests.ranks import run_ranks

HIDDEN = 128
WAIT = timedelta(seconds=60)
RECIPES = {
    "current": recipe.Float8CurrentScaling(),
    "delayed": recipe.DelayedScaling(amax_history_len=4),
    "block": recipe.Float8BlockScaling(),
    "mxfp8": recipe.MXFP8BlockScaling(),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "FusedAdam": lambda parameters: FusedAdam(parameters, lr=1e-2, master_weights=True),
}
RESUMED = [("delayed", "AdamW"), ("block", "FusedAdam")]
OFFLOADED = ("current", "mxfp8")


class Run:
    """A sharded model and its optimizer; all ranks have the same data, so that a mean over them is
    the same number for any number of ranks."""

    def __init__(self, mesh: DeviceMesh, name: str, optimizer: str, **options: Any) -> None:
        torch.manual_seed(0)
        self.recipe = RECIPES[name]
        sizes: dict[str, Any] = {"device": "cpu", "params_dtype": torch.bfloat16}
        layers = [fp8core.LayerNormMLP(HIDDEN, 2 * HIDDEN, **sizes) for _ in range(2)]
        self.model = torch.nn.Sequential(*layers)
        gather_quantized(self.model, self.recipe)
        for layer in (*self.model, self.model):
            fully_shard(layer, mesh=mesh, **options)
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())

    def step(self, number: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(32, HIDDEN, generator=generator).bfloat16()
        with fp8core.autocast(recipe=self.recipe):
            y: torch.Tensor = self.model(x)
        y.float().square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return y.detach()

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def is_like(self, other: Run, steps: range) -> bool:
        outputs = [torch.equal(self.step(at), other.step(at)) for at in steps]
        pairs = zip(self.model.parameters(), other.model.parameters(), strict=True)
        weights = [torch.equal(a.full_tensor(), b.full_tensor()) for a, b in pairs]
        return all(outputs + weights)


def resumes(four: DeviceMesh, two: DeviceMesh, name: str, optimizer: str, folder: str) -> bool:
    first = Run(four, name, optimizer)
    for at in range(2):
        first.step(at)
    dcp.save(first.state(), checkpoint_id=folder)
    second = Run(two, name, optimizer)
    state = second.state()
    dcp.load(state, checkpoint_id=folder, process_group=two.get_group())
    set_state_dict(
        second.model,
        second.optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    return second.is_like(first, range(2, 4))


def work(rank: int, folder: str) -> dict[str, Any]:
    groups = [dist.new_group(members, timeout=WAIT) for members in ([0, 2], [1, 3])]
    mine = groups[rank % 2]
    four, two = init_device_mesh("cpu", (4,)), DeviceMesh.from_group(mine, "cpu")
    found: dict[str, Any] = {}
    for name, optimizer in RESUMED:
        at = f"{folder}/{name}"
        found[f"{name} {optimizer}"] = resumes(four, two, name, optimizer, at)
    for name in OFFLOADED:
        policy = CPUOffloadPolicy(pin_memory=False)
        offloaded = Run(four, name, "AdamW", offload_policy=policy)
        found[f"{name} offloaded"] = offloaded.is_like(Run(four, name, "AdamW"), range(3))
    found["pair"] = test_parallel.parallel_mlp(of_group(mine), "block", sequence=True)
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("four")
    return run_ranks(work, folder, str(folder / "checkpoints"), world_size=4)


@pytest.mark.parametrize(("name", "optimizer"), RESUMED)
def test_a_run_on_four_ranks_continues_on_two(
    ranks: list[dict[str, Any]], name: str, optimizer: str
) -> None:
    assert [one[f"{name} {optimizer}"] for one in ranks] == [True] * 4


@pytest.mark.parametrize("name", OFFLOADED)
def test_weights_offloaded_to_the_host_are_gathered_quantized(
    ranks: list[dict[str, Any]], name: str
) -> None:
    assert [one[f"{name} offloaded"] for one in ranks] == [True] * 4


def test_ranks_of_a_group_need_not_be_neighbours(ranks: list[dict[str, Any]]) -> None:
    judge = test_parallel.one_process("block")
    for pair in (ranks[::2], ranks[1::2]):
        test_parallel.check([one["pair"] for one in pair], "", judge, split=True)
