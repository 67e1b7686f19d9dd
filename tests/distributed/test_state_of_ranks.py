"""Every kind of state that a rank holds, saved by one number of ranks and loaded by another."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as torch_state
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module

import fp8core
from fp8core import ops, recipe
from fp8core.distributed import (
    ColwiseParallel,
    Experts,
    RowwiseParallel,
    gather_quantized,
    sharded_state_dict,
)
from fp8core.optimizers import FusedAdam, FusedSGD
from tests.ranks import device, run_ranks

WIDTH, RANKS, EXPERTS = 96, 4, 12
BF16: dict[str, Any] = {"params_dtype": torch.bfloat16, "device": device()}
HALF = torch.float16


class Case(NamedTuple):
    """What is saved by ``saves`` ranks and loaded by ``loads``."""

    build: Callable[[DeviceMesh, Any], nn.Module]
    saves: int
    loads: int
    recipe: str | None = None
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None
    options: Mapping[str, bool] = MappingProxyType({})  # of torch's StateDictOptions
    has_masters: bool = False
    # Each rank's scale is that of its part, so that values move by a rounding on other ranks.
    is_scaled: bool = False
    # How many of the next steps have the same loss: sums over other ranks are rounded otherwise.
    steps: int = 2
    # One file of whole tensors, which the first rank writes, reads and sends to the others.
    is_one_file: bool = False


class Tied(nn.Module):
    """An MLP between two linears that share a weight."""

    def __init__(self, **spread: Any) -> None:
        super().__init__()
        row, column = ({"parallel_mode": mode} if spread else {} for mode in ("row", "column"))
        self.up = fp8core.Linear(WIDTH, WIDTH, **column, **spread, **BF16)
        self.down = fp8core.Linear(WIDTH, WIDTH, **row, **spread, **BF16)
        parallel = {"set_parallel_mode": True, **spread} if spread else {}
        self.mlp = fp8core.LayerNormMLP(WIDTH, 2 * WIDTH, activation="swiglu", **parallel, **BF16)
        self.again = fp8core.Linear(WIDTH, WIDTH, bias=False, **column, **spread, **BF16)
        self.again.weight = self.up.weight
        self.last = fp8core.Linear(WIDTH, WIDTH, **row, **spread, **BF16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.last(self.again(self.mlp(self.down(self.up(x)))))
        return y


# By number of ranks; those of two dimensions by its negative.
MESHES: dict[int, DeviceMesh] = {}


def folded(mesh: DeviceMesh) -> DeviceMesh:
    """The ranks of ``mesh`` in two dimensions."""
    return MESHES[-mesh.size()]


def fsdp(mesh: DeviceMesh, chosen: Any, *, gathered: bool = False, dim: int = 1) -> nn.Module:
    """Sharded over the ranks; with ``dim`` 2 over half of them, and replicated."""
    model: Any = Tied()
    if gathered:
        gather_quantized(model, chosen)
    if mesh.size() > 1:
        for one in (model.mlp, model):
            fully_shard(one, mesh=folded(mesh) if dim == 2 else mesh)
            one.set_gradient_divide_factor(1.0)
            one.set_force_sum_reduction_for_comms(True)
    return model


def both_ways(mesh: DeviceMesh, chosen: Any) -> nn.Module:
    """Split by features over some ranks, and sharded over the others."""
    model: Any = Tied()
    model.again.weight = nn.Parameter(model.again.weight.detach().clone())
    model.mlp = nn.Identity()
    if mesh.size() > 1:
        names = {"up": ColwiseParallel(), "down": RowwiseParallel(), "again": ColwiseParallel()}
        parallelize_module(model, folded(mesh)["tp"], {**names, "last": RowwiseParallel()})
        fully_shard(model, mesh=folded(mesh)["dp"])
        model.set_gradient_divide_factor(1.0)
        model.set_force_sum_reduction_for_comms(True)
    return model


def tensor_parallel(mesh: DeviceMesh, chosen: Any) -> nn.Module:
    return Tied(tp_group=mesh.get_group()) if mesh.size() > 1 else Tied()


def stored(mesh: DeviceMesh, chosen: Any) -> nn.Module:
    """Weights stored quantized, all of them on each rank."""
    with fp8core.quantized_model_init(recipe=chosen):
        return nn.Sequential(*[fp8core.Linear(128, 128, **BF16) for _ in range(2)])


class Mixture(nn.Module):
    """Experts behind a layer that all ranks have."""

    def __init__(self, group: Any, size: int) -> None:
        super().__init__()
        self.first = fp8core.Linear(WIDTH, WIDTH, **BF16)
        count = EXPERTS // size
        fc1 = fp8core.GroupedLinear(count, WIDTH, 2 * WIDTH, **BF16)
        fc2 = fp8core.GroupedLinear(count, WIDTH, WIDTH, bias=False, **BF16)
        self.experts = Experts(fc1, ops.SwiGLU(), fc2, group=group)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.experts(self.first(x), [len(x) // EXPERTS] * EXPERTS)
        return y


def experts(mesh: DeviceMesh, chosen: Any) -> nn.Module:
    return Mixture(mesh.get_group(), mesh.size())


def adam(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    return FusedAdam(parameters, lr=1e-2, **options)


few_bits = partial(
    adam,
    master_weights=True,
    master_weight_dtype=HALF,
    exp_avg_dtype=torch.uint8,
    exp_avg_sq_dtype=HALF,
)
masters = partial(adam, master_weights=True)
remainders = partial(masters, store_param_remainders=True)
adamw = partial(torch.optim.AdamW, lr=1e-2)
sgd = partial(FusedSGD, lr=1e-2, momentum=0.9)
gathered = partial(fsdp, gathered=True)
hybrid = partial(fsdp, dim=2)
FLAT = {"flatten_optimizer_state_dict": True}
CPU = {"cpu_offload": True}
CASES: dict[str, Case] = {
    "delayed, remainders": Case(fsdp, 2, 3, "delayed", remainders),
    "delayed, gathered, masters": Case(gathered, 3, 4, "delayed", masters, FLAT),
    "averages in uint8, masters in float16": Case(
        fsdp, 4, 2, "current", few_bits, is_scaled=True, steps=1
    ),
    "the same on as many ranks": Case(fsdp, 3, 3, None, few_bits, CPU),
    "the same from two to one": Case(fsdp, 2, 1, None, few_bits, FLAT, is_scaled=True, steps=1),
    "averages in bfloat16": Case(
        fsdp, 3, 1, "block", partial(adam, exp_avg_dtype=torch.bfloat16), FLAT | CPU
    ),
    "capturable": Case(gathered, 4, 3, "current", partial(adam, capturable=True)),
    "momentum": Case(fsdp, 4, 1, None, sgd),
    "MasterWeights": Case(gathered, 2, 4, "current", adamw, has_masters=True),
    "hybrid": Case(hybrid, 4, 4, "current", remainders),
    "hybrid, delayed": Case(hybrid, 4, 3, "delayed", few_bits, is_scaled=True, steps=1),
    "two dimensions, as many": Case(both_ways, 4, 4, None, masters),
    "two dimensions": Case(both_ways, 4, 2, "current", remainders, FLAT, steps=0),
    "two dimensions, to one": Case(both_ways, 4, 1, "delayed", masters, steps=0),
    "tensor parallel": Case(tensor_parallel, 2, 4, "delayed", steps=0),
    "tensor parallel, three": Case(tensor_parallel, 3, 2, "current", steps=0),
    "tensor parallel, to one": Case(tensor_parallel, 4, 1, "delayed", steps=0),
    "experts": Case(experts, 2, 4, "delayed", masters, FLAT),
    "experts, three": Case(experts, 3, 2, "current", remainders),
    "experts, to one": Case(experts, 4, 1, "delayed", few_bits, FLAT),
    "experts, as many": Case(experts, 2, 2, None, adamw),
    "experts, in one file": Case(experts, 2, 4, "delayed", is_one_file=True),
    "in one file": Case(fsdp, 3, 4, "delayed", masters, is_one_file=True),
    "stored, current": Case(stored, 2, 1, "current", masters),
    "stored, delayed": Case(stored, 3, 4, "delayed", masters, FLAT),
    "stored, block": Case(stored, 4, 2, "block", masters),
    "stored, mxfp8": Case(stored, 2, 3, "mxfp8", masters),
    "stored, nvfp4": Case(stored, 3, 2, "nvfp4", masters),
    "stored, rowwise": Case(stored, 4, 3, "rowwise", adamw, has_masters=True),
}


class Job:
    """A model in training, and its state as ``torch.distributed.checkpoint`` takes it."""

    def __init__(self, case: Case, mesh: DeviceMesh, seed: int) -> None:
        torch.manual_seed(seed)
        self.case, self.mesh = case, mesh
        self.chosen = None if case.recipe is None else recipe.by_name(case.recipe)
        self.model: Any = case.build(mesh, self.chosen)
        if self.chosen is not None:
            fp8core.prepare(self.model, self.chosen)
        self.masters = fp8core.MasterWeights(self.model) if case.has_masters else None
        stepped: Any = self.model if self.masters is None else self.masters
        self.optimizer: Any = (
            None if case.optimizer is None else case.optimizer(stepped.parameters())
        )
        if self.masters is not None:
            self.masters.attach(self.optimizer)
        self.is_sharded = hasattr(self.model, "set_gradient_divide_factor")
        # Of gradients that ranks sum only those of the first count, so that each number of ranks
        # has the same.
        self.is_summed = self.is_sharded or isinstance(self.model, Mixture)
        is_two_dimensional = case.build is both_ways and self.is_sharded
        self.num_counted = folded(mesh)["tp"].size() if is_two_dimensional else 1

    def step(self, number: int) -> float:
        """Train on one batch; the loss."""
        torch.manual_seed(number)  # of stochastic rounding
        columns = next(self.model.parameters()).shape[1]
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(48, columns, generator=generator).bfloat16()
        with fp8core.autocast(
            enabled=self.chosen is not None,
            recipe=self.chosen,
            amax_reduction_group=self.mesh.get_group() if self.is_sharded else None,
        ):
            y = self.model(x)
        loss = y.float().square().mean()
        (loss * float(not self.is_summed or dist.get_rank() < self.num_counted)).backward()
        if isinstance(self.model, Mixture):
            for parameter in self.model.first.parameters():
                dist.all_reduce(parameter.grad, group=self.mesh.get_group())
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()
        return float(loss.detach())

    def state(self, **options: bool) -> dict[str, Any]:
        """Parts by name; those of ranks as DTensors."""
        chosen = torch_state.StateDictOptions(**options)
        is_spread = self.case.build is tensor_parallel
        state = {
            "model": sharded_state_dict(self.model)
            if is_spread
            else torch_state.get_model_state_dict(self.model, options=chosen)
        }
        if self.masters is not None:
            state["masters"] = self.masters.state_dict()
            state["optimizer"] = self.optimizer.state_dict()
        elif self.optimizer is not None:
            state["optimizer"] = torch_state.get_optimizer_state_dict(
                self.model, self.optimizer, options=chosen
            )
        return state

    def save(self, folder: str) -> None:
        group = self.mesh.get_group()
        if not self.case.is_one_file:
            dcp.save(self.state(**self.case.options), checkpoint_id=folder, process_group=group)
            return
        state = self.state(full_state_dict=True, cpu_offload=True)
        if dist.get_rank() == 0:
            torch.save(state, f"{folder}.pt")

    def load_one_file(self, file: str) -> None:
        options = torch_state.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        is_first = dist.get_rank() == 0
        state = torch.load(file) if is_first else {"model": {}, "optimizer": {}}
        torch_state.set_model_state_dict(self.model, state["model"], options=options)
        if self.optimizer is not None:
            torch_state.set_optimizer_state_dict(
                self.model, self.optimizer, state["optimizer"], options=options
            )

    def load(self, folder: str) -> None:
        if self.case.is_one_file:
            self.load_one_file(f"{folder}.pt")
            return
        state = self.state(**self.case.options)
        dcp.load(state, checkpoint_id=folder, process_group=self.mesh.get_group())
        if self.case.build is not tensor_parallel:
            torch_state.set_model_state_dict(self.model, state["model"])
        if self.masters is not None:
            self.masters.load_state_dict(state["masters"])
            self.optimizer.load_state_dict(state["optimizer"])
        elif self.optimizer is not None:
            torch_state.set_optimizer_state_dict(
                self.model,
                self.optimizer,
                state["optimizer"],
                options=torch_state.StateDictOptions(**self.case.options),
            )

    def values(self) -> dict[str, torch.Tensor]:
        """All values of all ranks, by name; on the first rank."""
        state = self.state(flatten_optimizer_state_dict=True)
        mine = {name: coded(plain(value)) for name, value in tensors("", state)}
        everyone: list[Any] = [None] * self.mesh.size()
        is_first = dist.get_rank() == 0
        dist.gather_object(mine, everyone if is_first else None, 0, self.mesh.get_group())
        found = {name: value for values in everyone if values for name, value in values.items()}
        return {name: decoded(*value) for name, value in found.items()}


def coded(value: torch.Tensor) -> tuple[Any, torch.dtype, torch.Size]:
    """Bytes of numpy, which are pickled in a fraction of the time of a tensor."""
    return value.reshape(-1).view(torch.uint8).numpy(), value.dtype, value.shape


def decoded(held: Any, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    return torch.from_numpy(held).view(dtype).view(shape)


def plain(value: Any) -> torch.Tensor:
    """The whole of a DTensor; the values of a quantized tensor."""
    whole = value.full_tensor() if hasattr(value, "full_tensor") else value
    return whole.dequantize() if isinstance(whole, fp8core.QuantizedTensor) else whole.detach()


def tensors(path: str, state: Any) -> Iterator[tuple[str, Any]]:
    """The tensors of a state, by where they are."""
    if isinstance(state, torch.Tensor):
        yield path, state
    elif isinstance(state, dict):
        for name, one in state.items():
            yield from tensors(f"{path}/{name}", one)
    elif isinstance(state, int | float) and "step" in path:
        yield path, torch.tensor(state)


def differences(case: Case, folder: str) -> list[str]:
    """What is not as it was in the model that loads; on the first rank."""
    gc.collect()  # models of other cases, whose layers ranks would compare with those of this one
    rank, losses, values = dist.get_rank(), [], []
    if rank < case.saves:
        job = Job(case, MESHES[case.saves], seed=0)
        for number in range(2):
            job.step(number)
        job.save(folder)
        values.append(job.values())
        losses.append([job.step(number) for number in range(2, 2 + case.steps)])
    dist.barrier()
    if rank < case.loads:
        job = Job(case, MESHES[case.loads], seed=1)
        job.step(9)  # another state, all of which is replaced
        job.load(folder)
        values.append(job.values())
        losses.append([job.step(number) for number in range(2, 2 + case.steps)])
    if rank:
        return []
    saved, loaded = values
    names = saved.keys() & loaded.keys()
    found = [*(saved.keys() ^ loaded.keys())]
    found += [name for name in names if not equal(saved[name], loaded[name], case.is_scaled)]
    return found if losses[0] == losses[1] else [*found, f"losses {losses}"]


def equal(one: torch.Tensor, other: torch.Tensor, is_scaled: bool) -> bool:
    """Whether values are the same; with ``is_scaled``, but for a rounding to e4m3, whose values
    below 2^-6 are 2^-9 apart, at a scale of amax / 448."""
    if not is_scaled or not one.numel() or one.shape != other.shape:
        return torch.equal(one, other)
    amax = float(one.abs().max())
    return torch.allclose(one, other, rtol=2.0**-4, atol=amax / 448 * 2.0**-10)


def work(rank: int, folder: str, *names: str) -> dict[str, list[str]]:
    gc.freeze()  # what was imported, which the collections between cases leave out then
    for size in (1, 2, 3, 4):
        MESHES[size] = DeviceMesh(device().type, list(range(size)))
    for ranks in ([[0, 1], [2, 3]], [[0], [1], [2]], [[0, 1]]):
        mesh = DeviceMesh(device().type, ranks, mesh_dim_names=("dp", "tp"))
        MESHES[-mesh.size()] = mesh
    return {name: differences(CASES[name], f"{folder}/{name}") for name in names}


ALWAYS = {
    *("delayed, gathered, masters", "averages in uint8, masters in float16"),
    *("averages in bfloat16", "capturable", "momentum", "MasterWeights"),
    *("hybrid", "two dimensions"),
    *("tensor parallel, three", "experts, three", "experts, in one file"),
    *("stored, delayed", "stored, nvfp4"),
}
"""Cases with each model, each optimizer and each way to save: the others are slow."""


@pytest.fixture(scope="module")
def found_by_case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[str]]:
    """By chosen case what differs after the load, as the first of four processes finds it."""
    folder = tmp_path_factory.mktemp("ranks")
    names = [
        item.callspec.params["name"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.path == request.path
    ]
    found: dict[str, list[str]] = run_ranks(
        work, folder, str(folder / "checkpoints"), *names, world_size=RANKS
    )[0]
    return found


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in ALWAYS else pytest.mark.slow) for name in CASES]
)
def test_state_is_whole_on_another_number_of_ranks(
    found_by_case: dict[str, list[str]], name: str
) -> None:
    assert found_by_case[name] == []
