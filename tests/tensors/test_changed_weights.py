"""A weight that changed is never computed with as it was, however it was written.

Most of these writes move neither the parameter's version counter nor its address, so nothing could
tell them from the outside. What a layer computes after one is compared, bit for bit, with a fresh
layer that holds the same values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import fp8core
from fp8core import Linear, OperandError, recipe
from tests.device import DEVICE
from tests.pairs import turns

# torch's own: about an output that is a view, about one rank, about old parts of its optimizers.
pytestmark = [
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning"),
]

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.needs_accelerator("cuda"))]
STATELESS = [name for name in recipe.names() if name != "delayed"]
Write = Callable[[nn.Linear | Linear], object]


def new_values(own: torch.Tensor) -> torch.Tensor:
    return torch.randn(own.shape, generator=torch.Generator().manual_seed(5)).to(own)


def write_fused(layer: nn.Module) -> None:
    weight = cast(nn.Parameter, layer.weight)
    state = [[torch.zeros_like(weight)] for _ in range(2)]
    steps = [torch.ones(())]
    with torch.no_grad():
        torch._fused_adamw_(
            [weight], [torch.ones_like(weight)], *state, [], steps, amsgrad=False, lr=0.5,
            beta1=0.9, beta2=0.99, weight_decay=0.0, eps=1e-8, maximize=False,
        )  # fmt: skip


def write_vector(layer: nn.Module) -> None:
    vector = parameters_to_vector(layer.parameters()).detach()
    vector_to_parameters(new_values(vector), layer.parameters())


def write_state_dict(layer: nn.Module) -> None:
    layer.load_state_dict({"weight": new_values(cast(nn.Parameter, layer.weight))})


def write_numpy(layer: nn.Module) -> None:
    weight = cast(nn.Parameter, layer.weight)
    weight.detach().numpy()[:] = new_values(weight.detach()).numpy()


def with_weight(write: Callable[[nn.Parameter], object]) -> Write:
    return lambda layer: write(cast(nn.Parameter, layer.weight))


def storage_of(own: torch.Tensor) -> torch.UntypedStorage:
    return own.detach().contiguous().untyped_storage()


WRITES: dict[str, Write] = {
    "in place": with_weight(lambda own: own.detach().copy_(new_values(own))),
    "data": with_weight(lambda own: own.data.copy_(new_values(own))),
    "another data": with_weight(lambda own: setattr(own, "data", new_values(own.data))),
    **({"numpy": write_numpy} if DEVICE.type == "cpu" else {}),  # of the CPU's memory
    "DLPack": with_weight(lambda own: torch.from_dlpack(own.detach()).copy_(new_values(own))),
    "storage": with_weight(lambda own: own.untyped_storage().copy_(storage_of(new_values(own)))),
    "set_": with_weight(lambda own: own.detach_().set_(new_values(own)).requires_grad_()),
    "vector_to_parameters": write_vector,
    "load_state_dict": write_state_dict,
    "fused step": write_fused,
}
COLLECTIVES: dict[str, Write] = {
    "broadcast": with_weight(lambda own: dist.broadcast(own.data.mul_(3), 0)),
    "all_reduce": with_weight(lambda own: dist.all_reduce(own.detach().data.mul_(-2))),
}


def made(name: str | None = None) -> nn.Module:
    """Return a layer of the library; of torch, converted with ``name``, if there is one."""
    torch.manual_seed(0)
    if name is None:
        return Linear(32, 32, bias=False)
    own = nn.Linear(32, 32, bias=False)
    fp8core.convert(own, name)
    return own


def outputs(layer: nn.Module, name: str) -> list[torch.Tensor]:
    """Return what an evaluation and a training step compute, gradients included."""
    x = torch.randn(32, 32, generator=torch.Generator().manual_seed(1)).requires_grad_()
    layer.zero_grad()
    torch.manual_seed(3)  # stochastic rounding draws
    with fp8core.autocast(recipe=recipe.by_name(name)):
        with torch.no_grad():
            evaluated = layer(x)
        y = layer(x)
        y.square().mean().backward()
    weight = cast(nn.Parameter, layer.weight)
    assert x.grad is not None
    assert weight.grad is not None
    return [y.detach(), evaluated, x.grad, weight.grad]


def check_sees(write: Write, name: str, layer: nn.Module) -> None:
    before = outputs(layer, name)
    write(cast(Any, layer))
    fresh = Linear(32, 32, bias=False)
    fresh.load_state_dict({"weight": cast(nn.Parameter, layer.weight).detach().clone()})
    if name == "delayed":  # its scales are those of the step before
        fresh.load_state_dict(layer.state_dict())
    now = outputs(layer, name)
    assert not torch.equal(now[0], before[0])
    for got, want in zip(now, outputs(fresh, name), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("name", "write"),
    [*turns(["current"], WRITES), *turns(sorted({*recipe.names()} - {"current"}), WRITES)],
)
def test_a_layer_sees_a_write(name: str, write: str) -> None:
    check_sees(WRITES[write], name, made())


@pytest.mark.parametrize(("write", "name"), turns(WRITES, STATELESS))
def test_a_converted_layer_sees_a_write(write: str, name: str) -> None:
    check_sees(WRITES[write], name, made(name))


def test_microbatches_in_one_autocast_see_a_write_between_them() -> None:
    layer: Any = nn.Linear(32, 32)
    fp8core.convert(layer, "delayed")
    x = torch.randn(32, 32)
    with fp8core.autocast(recipe=recipe.DelayedScaling()):
        before = layer(x)
        layer.weight.data.zero_()
        layer.bias.data.zero_()
        after = layer(x)
    assert before.any()
    assert not after.any()


def test_layers_of_fp8core_in_a_converted_model_see_a_write() -> None:
    model, x = nn.Sequential(Linear(32, 32)), torch.randn(32, 32)
    fp8core.convert(model, "mxfp8")
    with torch.no_grad():
        model(x)
        model[0].weight.data.zero_()
        assert torch.equal(model(x), model[0].bias.expand(32, 32))


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("write", COLLECTIVES)
def test_a_layer_sees_a_collective(write: str) -> None:
    check_sees(COLLECTIVES[write], "current", made())


def test_a_layer_sees_what_another_holder_of_shared_memory_writes() -> None:
    layer = made()
    weight = cast(nn.Parameter, layer.weight)

    def write(_: nn.Module) -> None:
        weight.share_memory_()
        other = torch.empty(0).set_(weight.untyped_storage(), 0, weight.shape, weight.stride())  # type: ignore[call-overload]  # a storage
        other.copy_(new_values(other))

    check_sees(write, "current", layer)


@pytest.mark.parametrize("name", ["current", "delayed", "mxfp8"])
def test_training_through_a_flat_buffer_learns(name: str) -> None:
    """A plain optimizer steps one flat parameter; the layers' weights are views of its memory."""

    def losses(is_flat: bool) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(Linear(32, 64), Linear(64, 32))
        own = list(model.parameters())
        x = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))
        flat = nn.Parameter(parameters_to_vector(own).detach().clone())
        if is_flat:
            for parameter, part in zip(own, flat.data.split([p.numel() for p in own]), strict=True):
                parameter.data = part.view_as(parameter)
        optimizer = torch.optim.SGD([flat] if is_flat else own, lr=0.3)
        found = []
        for _ in range(6):
            with fp8core.autocast(recipe=recipe.by_name(name)):
                loss = (model(x) - x.flip(1)).square().mean()
            loss.backward()
            flat.grad = parameters_to_vector([cast(torch.Tensor, p.grad) for p in own])
            optimizer.step()
            model.zero_grad()
            found.append(loss.item())
        return found

    assert losses(is_flat=True) == losses(is_flat=False)


@pytest.mark.parametrize("is_converted", [False, True])
def test_the_copy_of_torch_autocast_sees_a_write(is_converted: bool) -> None:
    """Without a recipe, under ``torch.autocast``, a float32 weight is cast in each forward."""
    torch.manual_seed(0)
    layer: Any = nn.Linear(32, 32) if is_converted else Linear(32, 32)
    if is_converted:
        fp8core.convert(layer, None)
    x = torch.randn(4, 32)

    def run() -> torch.Tensor:
        with torch.autocast(DEVICE.type, torch.bfloat16), torch.no_grad():
            y: torch.Tensor = layer(x)
        return y

    run()
    layer.weight.data.copy_(new_values(layer.weight))
    with torch.autocast(DEVICE.type, torch.bfloat16):
        want = nn.functional.linear(x, layer.weight, layer.bias)
    assert torch.equal(run(), want)


# Whole trainings under optimizers and wrappers that write where no counter is


class ThroughData(torch.optim.Optimizer):
    """Writes where no counter is."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for own in group["params"]:
                own.data.sub_(own.grad, alpha=0.1)


def evaluations(
    model: nn.Module, optimizer: torch.optim.Optimizer, name: str, weights: Callable[[], Any]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Train three steps of two microbatches; yield each evaluation, and a fresh model's."""
    device = next(model.parameters()).device
    x = torch.randn(32, 32, generator=torch.Generator().manual_seed(1)).to(device)
    for _ in range(3):
        for _ in range(2):
            with fp8core.autocast(recipe=recipe.by_name(name)):
                (model(x) - 1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        fresh = nn.Sequential(Linear(32, 64), Linear(64, 32)).to(device)
        fresh.load_state_dict(weights())
        found = []
        for own in (model, fresh):
            with fp8core.autocast(recipe=recipe.by_name(name)), torch.no_grad():
                found.append(own(x))
        yield found[0], found[1]


def check_training(
    make: Callable[[list[torch.Tensor]], torch.optim.Optimizer],
    name: str = "current",
    wrap: Callable[[Any], Any] = lambda own: own,
    full: Callable[[Any], Any] = lambda own: own.state_dict(),
) -> None:
    torch.manual_seed(0)
    model = wrap(nn.Sequential(Linear(32, 64), Linear(64, 32)))
    optimizer = make(list(model.parameters()))
    seen = []
    for got, want in evaluations(model, optimizer, name, lambda: full(model)):
        assert torch.equal(got, want)
        seen.append(got.sum().item())
    assert len(set(seen)) == len(seen)  # each step changed something


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["AdamW", "Adam", "SGD", "Adagrad"])
def test_fused_optimizers_of_torch(kind: str, device: str) -> None:
    if (kind, device) == ("Adagrad", "cuda"):
        pytest.skip("torch has no fused one for CUDA")

    def make(own: list[torch.Tensor]) -> torch.optim.Optimizer:
        found: torch.optim.Optimizer = getattr(torch.optim, kind)(own, 0.05, fused=True)
        return found

    check_training(make, wrap=lambda own: own.to(device))


@pytest.mark.parametrize("fused", [False, True])
def test_compiled_steps(fused: bool) -> None:
    def make(own: list[torch.Tensor]) -> torch.optim.Optimizer:
        torch.compiler.reset()  # another optimizer is another graph
        made = torch.optim.AdamW(own, 0.05, fused=fused)
        made.step = torch.compile(made.step, backend="aot_eager")  # type: ignore[method-assign]
        return made

    with torch._dynamo.config.patch(error_on_recompile=True):
        check_training(make)


def test_an_optimizer_that_writes_through_data() -> None:
    check_training(ThroughData)


@pytest.mark.usefixtures("group_of_one")
def test_zero_redundancy() -> None:
    # Imported here: torch warns that a part of it is deprecated, which pytest takes for an error.
    from torch.distributed.optim import ZeroRedundancyOptimizer

    check_training(lambda own: ZeroRedundancyOptimizer(own, torch.optim.AdamW, lr=0.05))


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("frees", [False, True])
def test_layers_under_fully_shard(frees: bool) -> None:
    mesh = init_device_mesh(DEVICE.type, (1,))  # else torch takes the accelerator, if there is one

    def full(model: nn.Module) -> dict[str, torch.Tensor]:
        return {name: own.full_tensor() for name, own in model.state_dict().items()}

    check_training(
        lambda own: torch.optim.AdamW(own, 0.05),
        wrap=lambda own: fully_shard(own, mesh=mesh, reshard_after_forward=frees),
        full=full,
    )


@pytest.mark.usefixtures("group_of_one")
def test_writes_to_the_shards_of_fully_shard() -> None:
    mesh = init_device_mesh(DEVICE.type, (1,))
    torch.manual_seed(0)
    model: Any = fully_shard(Linear(32, 32, bias=False), mesh=mesh, reshard_after_forward=False)
    x = torch.randn(32, 32)
    for value in (1.0, 2.0, 0.0):
        with torch.no_grad():
            model.weight.to_local().fill_(value)
        with fp8core.autocast(recipe=recipe.by_name("current")):
            y = model(x)
        model.reshard()
        want = value * x.sum(1, keepdim=True).expand(32, 32)
        assert (y - want).norm() <= 2**-3 * (value * x).norm() * 32**0.5


def test_a_step_between_forward_and_a_recompute_is_refused() -> None:
    torch.manual_seed(0)
    layer, x = Linear(32, 32), torch.randn(32, 32, requires_grad=True)
    optimizer = torch.optim.AdamW(layer.parameters())
    with fp8core.autocast(recipe=recipe.by_name("current")):
        layer(x).sum().backward()
        y = fp8core.checkpoint(layer, x)
    optimizer.step()
    with pytest.raises(OperandError, match="written between forward and backward"):
        y.sum().backward()


# The one scope in which weights are kept without a flag, and its check


@pytest.mark.parametrize(("write", "is_converted"), turns(WRITES, [False, True]))
def test_frozen_weights_say_at_their_end_what_was_written(write: str, is_converted: bool) -> None:
    layer = made("current") if is_converted else made()
    x = torch.randn(4, 32)

    def run() -> None:
        with fp8core.frozen_weights(layer):
            with fp8core.autocast(recipe=recipe.by_name("current")), torch.no_grad():
                layer(x)
            WRITES[write](cast(Any, layer))

    with pytest.raises(OperandError, match="weight changed inside"):
        run()
    # Afterwards the layer computes with what it has.
    with fp8core.autocast(recipe=recipe.by_name("current")), torch.no_grad():
        got = layer(x)
        fresh = Linear(32, 32, bias=False)
        fresh.load_state_dict({"weight": cast(nn.Parameter, layer.weight).detach().clone()})
        assert torch.equal(got, fresh(x))
