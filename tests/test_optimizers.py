"""Optimizers whose writes torch's version counters do not tell: no kept weight may outlive them.

Every training is compared with itself when all kept weights are thrown away before each call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fp8core
from fp8core import Linear, OperandError, recipe, weights

# torch's own: about an output that is a view, and about one rank.
pytestmark = [
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning"),
]

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.needs_accelerator("cuda"))]
STATELESS = [name for name in recipe.names() if name != "delayed"]
Make = Callable[[list[torch.Tensor]], torch.optim.Optimizer]


@pytest.fixture
def group_of_one(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class ThroughData(torch.optim.Optimizer):
    """Writes where no counter is."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for own in group["params"]:
                own.data.sub_(own.grad, alpha=0.1)


def train(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, name: str, *, forgets: bool
) -> list[float]:
    """Return the losses of each microbatch and evaluation of three steps."""
    x = torch.randn(32, 32, generator=torch.Generator().manual_seed(1))
    x = x.to(next(model.parameters()).device).requires_grad_()
    layers = [own for own in model.modules() if isinstance(own, Linear)]
    losses = []

    def loss() -> torch.Tensor:
        for layer in layers if forgets else ():
            layer.invalidate_weight_cache()
        with fp8core.autocast(recipe=recipe.by_name(name)):
            found: torch.Tensor = (model(x) - 1).square().mean()
        losses.append(found.item())
        return found

    for _ in range(3):
        for _ in range(2):
            loss().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            loss()
    return losses


def both(make: Make, name: str, wrap: Callable[[Any], Any] = lambda own: own) -> list[list[float]]:
    found = []
    for forgets in (False, True):
        torch.manual_seed(0)
        model = wrap(torch.nn.Sequential(Linear(32, 64), Linear(64, 32)))
        found.append(train(model, make(list(model.parameters())), name, forgets=forgets))
    return found


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["AdamW", "Adam", "SGD", "Adagrad"])
def test_fused_optimizers_of_torch(kind: str, device: str) -> None:
    if (kind, device) == ("Adagrad", "cuda"):
        pytest.skip("torch has no fused one for CUDA")

    def make(own: list[torch.Tensor]) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = getattr(torch.optim, kind)(own, 0.05, fused=True)
        return made

    kept, forgotten = both(make, "current", lambda own: own.to(device))
    assert kept == forgotten
    assert len(set(kept[2::3])) == 3  # each evaluation has other weights


@pytest.mark.parametrize("fused", [False, True])
def test_compiled_steps(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def make(own: list[torch.Tensor]) -> torch.optim.Optimizer:
        torch.compiler.reset()  # another optimizer is another graph
        made = torch.optim.AdamW(own, 0.05, fused=fused)
        made.step = torch.compile(made.step, backend="aot_eager")  # type: ignore[method-assign]
        return made

    monkeypatch.setattr(weights, "_writers", weights._Writers())
    with torch._dynamo.config.patch(error_on_recompile=True):
        kept, forgotten = both(make, "current")
    assert kept == forgotten


@pytest.mark.parametrize("name", STATELESS)
def test_every_recipe_sees_a_fused_step(name: str) -> None:
    kept, forgotten = both(lambda own: torch.optim.AdamW(own, 0.05, fused=True), name)
    assert kept == forgotten


def test_an_optimizer_that_writes_through_data() -> None:
    kept, forgotten = both(ThroughData, "current")
    assert kept == forgotten


@pytest.mark.usefixtures("group_of_one")
def test_zero_redundancy() -> None:
    # Imported here: torch warns that a part of it is deprecated, which pytest takes for an error.
    from torch.distributed.optim import ZeroRedundancyOptimizer

    def make(own: list[torch.Tensor]) -> torch.optim.Optimizer:
        return ZeroRedundancyOptimizer(own, torch.optim.AdamW, lr=0.05)

    kept, forgotten = both(make, "current")
    assert kept == forgotten


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("frees", [False, True])
def test_layers_under_fully_shard(frees: bool) -> None:
    mesh = init_device_mesh("cpu", (1,))  # else torch takes the accelerator, if there is one

    def wrap(own: torch.nn.Module) -> Any:
        return fully_shard(own, mesh=mesh, reshard_after_forward=frees)

    kept, forgotten = both(lambda own: torch.optim.AdamW(own, 0.05), "current", wrap)
    assert kept == forgotten


def test_a_fused_step_between_forward_and_a_recompute_is_refused() -> None:
    torch.manual_seed(0)
    layer, x = Linear(32, 32), torch.randn(32, 32, requires_grad=True)
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
    with fp8core.autocast(recipe=recipe.by_name("current")):
        layer(x).sum().backward()
        y = fp8core.checkpoint(layer, x)
    optimizer.step()
    with pytest.raises(OperandError, match="written between forward and backward"):
        y.sum().backward()
