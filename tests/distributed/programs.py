"""What ranks run in the tests of FSDP2: training beside an unsharded model on all data."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fp8core
from fp8core.collectives import of_group
from fp8core.distributed import gather_quantized
from fp8core.tensors.sharded_weight import ShardedWeight
from tests.ranks import device

BF16 = torch.bfloat16
STEPS = 3

Optimizer = Callable[[Any], torch.optim.Optimizer]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=4.0)


def linears(*sizes: int, bias: bool = False, dtype: torch.dtype = BF16) -> nn.Sequential:
    torch.manual_seed(0)
    pairs = itertools.pairwise(sizes)
    return nn.Sequential(
        *[fp8core.Linear(k, n, bias=bias, device=device(), params_dtype=dtype) for k, n in pairs]
    )


def sharded(model: Any, recipe: Any = None, **keywords: Any) -> Any:
    """``model`` with each child, then itself, sharded; gathered quantized under ``recipe``."""
    mesh = init_device_mesh(device().type, (dist.get_world_size(),))
    if recipe is not None:
        gather_quantized(model, recipe)
    for child in model.children():
        fully_shard(child, mesh=mesh, **keywords)
    return fully_shard(model, mesh=mesh, **keywords)


def batch(step: int, columns: int, rank: int | None = None) -> torch.Tensor:
    """The rows of ``rank``, of this one if None."""
    x = torch.randn(32 * dist.get_world_size(), columns, generator=seeded(step))
    parts = x.to(device(), BF16).chunk(dist.get_world_size())
    return parts[dist.get_rank() if rank is None else rank]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def whole(tensor: Any) -> torch.Tensor:
    """All rows of a DTensor's values; another tensor as it is."""
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach()


def train_step(model: Any, recipe: Any, x: torch.Tensor) -> torch.Tensor:
    with fp8core.autocast(recipe=recipe):
        y = model(x)
    y.float().square().mean().backward()
    return y.detach()


def average_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= dist.get_world_size()
            dist.all_reduce(parameter.grad)


def train_as_one(model: Any, reference: nn.Module, recipe: Any, columns: int) -> bool:
    """Whether each of three steps of ``model`` has the result of ``reference``, of which each rank
    averages the gradients."""
    optimizers = [sgd(one.parameters()) for one in (model, reference)]
    equal = []
    for step in range(3):
        x = batch(step, columns)
        equal.append(torch.equal(*[train_step(one, recipe, x) for one in (model, reference)]))
        average_gradients(reference)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return all(equal)


def compared(
    make: Callable[[], nn.Module],
    recipe: Any,
    columns: int,
    *,
    optimizer: Optimizer = sgd,
    clip: float = 0.0,
    compiled: bool = False,
    **keywords: Any,
) -> dict[str, Any]:
    """Train sharded and unsharded; whether outputs and weights are equal, and what moved."""
    model, reference = sharded(make(), recipe, **keywords), make()
    run = torch.compile(model, backend="eager") if compiled else model
    steps = [optimizer(one.parameters()) for one in (model, reference)]
    traffic = of_group().traffic
    traffic.clear()
    first = [parameter.detach().clone() for parameter in reference.parameters()]
    outputs = []
    with counted_gathers() as gathered:
        for step in range(STEPS):
            x = batch(step, columns)
            y = train_step(run, recipe, x)
            outputs.append(torch.equal(y, train_step(reference, recipe, x)))
            average_gradients(reference)
            if clip:
                for one in (model, reference):
                    torch.nn.utils.clip_grad_norm_(one.parameters(), clip)
            for one in steps:
                one.step()
                one.zero_grad()
    pairs = list(zip(model.parameters(), reference.parameters(), strict=True))
    return {
        "outputs": outputs,
        "weights": [torch.equal(whole(one), other) for one, other in pairs],
        "moved": [
            not torch.equal(a, b) for a, b in zip(first, reference.parameters(), strict=True)
        ],
        "gathered": gathered,
        "reductions": traffic["max", "weight amaxes"].calls,
        "quantized": [type(p.to_local()) is ShardedWeight for p in model.parameters()],
    }


@contextlib.contextmanager
def counted_gathers() -> Iterator[list[int]]:
    """The bytes of each rank's part in each gather of FSDP."""
    counts: list[int] = []
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    original = getattr(dist, name)

    def gather(output_tensor: Any, input_tensor: Any, **keywords: Any) -> Any:
        counts.append(input_tensor.nbytes)
        return original(output_tensor, input_tensor, **keywords)

    setattr(dist, name, gather)
    try:
        yield counts
    finally:
        setattr(dist, name, original)


def raised(call: Callable[[], object]) -> str:
    """The error of the library that a call raises, as text; empty if there is none."""
    try:
        call()
    except fp8core.Fp8CoreError as error:
        return f"{type(error).__name__}: {error}"
    return ""
