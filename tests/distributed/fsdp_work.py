"""What two ranks compute with weights that FSDP2 gathers quantized: see ``test_fsdp.py``."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.utils import checkpoint

import fp8core
from fp8core import OperandError, UnsupportedError, recipe
from fp8core.chain.repeated import Repeated
from fp8core.collectives import of_group
from fp8core.distributed import gather_quantized
from tests import recording_backend
from tests.distributed.programs import (
    batch,
    compared,
    linears,
    sharded,
    train_as_one,
    train_step,
    whole,
)
from tests.ranks import device, emulated

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

    def __init__(self, how: str = "", name: str = "current") -> None:
        super().__init__()
        torch.manual_seed(0)
        given: dict[str, Any] = {"device": device(), "params_dtype": torch.bfloat16}
        self.mlp = fp8core.LayerNormMLP(COLUMNS, 192, activation="swiglu", **given)
        self.last = fp8core.Linear(COLUMNS, COLUMNS, **given)
        self.how = how
        self.name = name

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
        with emulated(self.name), fp8core.autocast(recipe=recipe.by_name(self.name)):
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


def blocks_alone() -> bool:
    """Whether blocks train as one model where none is sharded around them, and ranks have other
    numbers of rows."""
    sizes = (COLUMNS, 129, 129, COLUMNS)
    mesh = init_device_mesh(device().type, (dist.get_world_size(),))
    model, reference = gather_quantized(linears(*sizes), CURRENT), linears(*sizes)
    for block in model:
        fully_shard(block, mesh=mesh)
    return train_as_one(model, reference, CURRENT, COLUMNS)


def written_by_one_rank(rank: int) -> bool:
    """Outputs after rank 1 alone has written its rows, beside a model with the same weights."""
    sizes = (COLUMNS, 256, COLUMNS)
    model, reference = sharded(linears(*sizes), CURRENT), linears(*sizes)
    x = batch(0, COLUMNS)
    train_step(model, CURRENT, x)
    with torch.no_grad():
        reference[1].weight.chunk(dist.get_world_size())[1].mul_(3)
        if rank == 1:
            rows_of(model[1].weight).mul_(3)
    return torch.equal(*[train_step(one, CURRENT, x) for one in (model, reference)])


def unsharded_first() -> bool:
    """Outputs after a write and ``unshard()``, beside a model with the same weights."""
    sizes = (COLUMNS, 256, COLUMNS)
    model, reference = sharded(linears(*sizes), CURRENT), linears(*sizes)
    x = batch(0, COLUMNS)
    train_step(model, CURRENT, x)
    with torch.no_grad():
        for one in (model, reference):
            one[1].weight.mul_(3)
    model[1].unshard()
    return torch.equal(*[train_step(one, CURRENT, x) for one in (model, reference)])


def recomputed(name: str) -> dict[str, bool]:
    gradients, chosen = {}, recipe.by_name(name)
    for how in ("", "fp8core", "torch"):
        model = sharded(Layers(how, name), chosen)
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


KINDS: dict[str, tuple[Any, str]] = {
    "GroupedLinear": (Grouped, "block"),
    "TransformerLayer": (Attending, "mxfp8"),
    "converted layers": (converted, "current"),
}


def of_kind(name: str) -> dict[str, Any]:
    make, chosen = KINDS[name]
    with emulated(chosen):
        return compared(make, recipe.by_name(chosen), COLUMNS)


def replicated() -> bool:
    """Whether two replicas of a mesh with two dimensions train as one model."""
    mesh = init_device_mesh(device().type, (2, 1), mesh_dim_names=("replicas", "shards"))
    model: Any = gather_quantized(linears(COLUMNS, 256), CURRENT)
    model, reference = fully_shard(model, mesh=mesh), linears(COLUMNS, 256)
    return train_as_one(model, reference, CURRENT, COLUMNS)


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


def repeated(name: str) -> list[bool]:
    """Whether steps that are recorded, then repeated, have the results of an unsharded model, and
    whether each layer's forward and backward were."""
    chosen = recipe.by_name(name)
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        if device().type == "cpu":
            recording_backend.install(patch)
            stack.enter_context(fp8core.use_backend(recording_backend.NAME))
        model, reference = sharded(linears(COLUMNS, 256, 128), chosen), linears(COLUMNS, 256, 128)
        found = [train_as_one(model, reference, chosen, COLUMNS)]
    for layer in model:
        (chain,) = layer._bindings.last[1].parts
        programs = [one for one in chain._programs.values() if isinstance(one, Repeated)]
        found += [programs[0].is_recorded == (True, True)]
    return found


def work(rank: int) -> dict[str, Any]:
    return {
        "trained": {name: trained(name) for name in TRAINED},
        "repeated": {name: repeated(name) for name in ("current", "block", "rowwise")},
        "memory": memory(),
        "written": written(),
        "evaluated first": evaluated_first(),
        "replaced": replaced(),
        "microbatches": microbatches(),
        "blocks alone": blocks_alone(),
        "written by one rank": written_by_one_rank(rank),
        "unsharded first": unsharded_first(),
        "recomputed": {name: recomputed(name) for name in ("current", "block", "mxfp8")},
        "frozen": frozen(),
        "clipped": {name: clipped(name) for name in OPTIMIZERS},
        "mixed precision": mixed_precision(),
        "tied": tied(),
        "kinds": {name: of_kind(name) for name in KINDS},
        "replicated": replicated(),
        "tensor parallel": of_tensor_parallel_weights(rank),
        "kept": compared(
            partial(linears, COLUMNS, 256), CURRENT, COLUMNS, reshard_after_forward=False
        ),
        "compiled": compared(partial(linears, COLUMNS, 256), CURRENT, COLUMNS, compiled=True),
        "refused": refused(rank),
    }
