"""A converted layer is the same object with another class: what others hold of it stays valid."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import fp8core
from fp8core import OperandError, UnsupportedError, recipe
from tests.device import DEVICE

# torch's own, about the output of a linear layer that is a view.
pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")
RECIPES = [*recipe.names(), None]
BOTH = pytest.mark.parametrize("chosen", ["mxfp8", "delayed"])


class Block(nn.Module):
    """A residual MLP with both norms and a buffer; sizes that no block of 32 divides included."""

    def __init__(self, width: int = 48, hidden: int = 70) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.mid = nn.RMSNorm(hidden, eps=1e-6)
        self.down = nn.Linear(hidden, width, bias=False)
        self.register_buffer("gain", torch.full((1,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = x + self.gain * self.down(self.mid(self.up(self.norm(x))).relu())
        return made


def model() -> nn.Sequential:
    return nn.Sequential(Block(), Block())


def train(module: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 4) -> list[float]:
    """Return the losses of steps towards the negative of the input."""
    x = torch.randn(16, 48, generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (module(x) + x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("chosen", RECIPES)
def test_objects_names_and_classes_stay(chosen: str | None) -> None:
    own = model().eval()
    modules, parameters = list(own.modules()), list(own.parameters())
    names, state = list(own.state_dict()), copy.deepcopy(own.state_dict())
    fp8core.convert(own, chosen)
    assert all(a is b for a, b in zip(own.modules(), modules, strict=True))
    assert all(a is b for a, b in zip(own.parameters(), parameters, strict=True))
    assert list(own.state_dict()) == names
    assert all(torch.equal(own.state_dict()[name], value) for name, value in state.items())
    assert isinstance(own[0].up, nn.Linear)
    assert isinstance(own[0].up, fp8core.Linear)
    assert isinstance(own[0].norm, nn.LayerNorm)
    assert isinstance(own[0].mid, nn.RMSNorm)
    assert not any(module.training for module in own.modules())
    assert own[1].down.name == "1.down"


@pytest.mark.parametrize("chosen", recipe.names())
def test_it_computes_what_fp8core_own_layers_compute(chosen: str) -> None:
    own, x = nn.Linear(48, 70), torch.randn(16, 48)
    native = fp8core.Linear(48, 70, device=DEVICE)
    native.load_state_dict(own.state_dict())
    fp8core.convert(own, chosen)
    torch.manual_seed(3)
    got = own(x)
    torch.manual_seed(3)
    with fp8core.autocast(recipe=recipe.by_name(chosen)):
        want = native(x)
    assert torch.equal(got, want)
    assert not torch.equal(got, nn.functional.linear(x, own.weight, own.bias))
    grads = [
        torch.autograd.grad(y.square().sum(), list(m.parameters()), retain_graph=True)
        for y, m in ((got, own), (want, native))
    ]
    if chosen != "nvfp4":  # its gradients are rounded by random numbers
        assert all(map(torch.equal, *grads))


def test_without_a_recipe_it_is_torch_linear_bit_for_bit() -> None:
    own, x = nn.Linear(48, 70), torch.randn(3, 5, 48)
    want = own(x)
    fp8core.convert(own)
    assert torch.equal(own(x), want)
    # torch multiplies one row by another kernel.
    slack = 1e-8 if DEVICE.type == "cpu" else 1e-5
    assert torch.allclose(own(x[0, 0]), want[0, 0], atol=slack)


@BOTH
def test_autocast_overrides_the_recipe(chosen: str) -> None:
    own, x = model(), torch.randn(16, 48)
    want = own(x)
    fp8core.convert(own, chosen)
    with fp8core.autocast(enabled=False):
        assert torch.allclose(own(x), want, atol=1e-6)
        assert own[0].up._bindings.last[1].recipe is None
    with fp8core.autocast(recipe=recipe.NVFP4BlockScaling()):
        own(x)
        assert own[0].up._bindings.last[1].recipe == recipe.NVFP4BlockScaling()
    own(x)
    assert own[0].up._bindings.last[1].recipe == recipe.by_name(chosen)


@BOTH
def test_unconvert_gives_back_classes_objects_and_bytes(chosen: str) -> None:
    own = model()
    parameters, names = list(own.parameters()), list(own.state_dict())
    before = [dict(vars(module)) for module in own.modules()]
    classes = [type(module) for module in own.modules()]
    fp8core.convert(own, chosen)
    train(own, torch.optim.SGD(own.parameters(), lr=0.1))
    trained = {name: own.state_dict()[name].clone() for name in names}
    assert fp8core.unconvert(own) is own
    assert [type(module) for module in own.modules()] == classes
    assert [vars(module).keys() for module in own.modules()] == [own.keys() for own in before]
    assert all(a is b for a, b in zip(own.parameters(), parameters, strict=True))
    assert list(own.state_dict()) == names
    assert all(torch.equal(own.state_dict()[name], value) for name, value in trained.items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in own.modules())
    fp8core.convert(own, chosen)  # and again


@BOTH
def test_hooks_of_the_user_run_before_between_and_after(chosen: str) -> None:
    own, calls = nn.Linear(8, 8), []
    own.register_forward_pre_hook(lambda *_: calls.append("pre"))
    own.register_forward_hook(lambda *_: calls.append("post"))
    own.weight.register_hook(lambda _: calls.append("grad"))
    for change in (lambda: fp8core.convert(own, chosen), lambda: fp8core.unconvert(own)):
        change()
        calls.clear()
        own(torch.randn(4, 8)).sum().backward()
        assert calls == ["pre", "post", "grad"]


def test_attributes_of_the_user_come_back() -> None:
    own = nn.Linear(8, 8)
    own.name, own.return_bias, own.mine = "theirs", True, "kept"
    fp8core.convert(own, "current")
    assert own.mine == "kept"
    assert isinstance(own(torch.randn(4, 8)), torch.Tensor)
    fp8core.unconvert(own)
    assert (own.name, own.return_bias, own.mine) == ("theirs", True, "kept")


@BOTH
def test_a_plain_checkpoint_loads_strictly(chosen: str) -> None:
    plain, own = model(), model()
    fp8core.convert(own, chosen)
    own(torch.randn(4, 48)).sum().backward()
    own.load_state_dict(plain.state_dict(), strict=True)
    assert torch.equal(own[0].up.weight, plain[0].up.weight)


def test_a_checkpoint_with_delayed_state_resumes_bit_for_bit() -> None:
    own, other, x = model(), model(), torch.randn(4, 48)
    chosen = recipe.DelayedScaling(amax_history_len=4)
    for module in (own, other):
        fp8core.convert(module, chosen)
    train(own, torch.optim.SGD(own.parameters(), lr=0.1))
    other.load_state_dict(own.state_dict(), strict=True)
    assert torch.equal(own(x), other(x))
    fp8core.unconvert(other)
    assert list(other.state_dict()) == list(model().state_dict())


def saved_and_loaded(module: nn.Module) -> nn.Module:
    stream = io.BytesIO()
    torch.save(module, stream)
    stream.seek(0)
    made: nn.Module = torch.load(stream, weights_only=False)
    return made


@BOTH
@pytest.mark.parametrize("copied", [copy.deepcopy, saved_and_loaded])
def test_a_copy_is_converted_and_lives_by_itself(
    chosen: str, copied: Callable[[nn.Module], nn.Module]
) -> None:
    own, x = model(), torch.randn(4, 48)
    fp8core.convert(own, chosen)
    train(own, torch.optim.SGD(own.parameters(), lr=0.1), steps=2)
    other = copied(own)
    with torch.no_grad():
        want = own(x)
        assert torch.equal(other(x), want)
        fp8core.unconvert(other)
        assert torch.equal(own(x), want)


def test_a_model_on_meta_is_filled_afterwards() -> None:
    with torch.device("meta"):
        own = model()
    fp8core.convert(own, "delayed")
    own.to_empty(device=DEVICE)
    own.load_state_dict(model().state_dict())
    train(own, torch.optim.SGD(own.parameters(), lr=0.1))
    linear = nn.Linear(8, 8, device="meta")
    fp8core.convert(linear)
    linear.to_empty(device=DEVICE).reset_parameters()
    assert 0 < linear.weight.abs().max() <= 8**-0.5  # torch's own initialization


@BOTH
def test_torch_autocast_decides_the_dtype_of_compute_alone(chosen: str) -> None:
    own, x = model(), torch.randn(4, 48, requires_grad=True)
    fp8core.convert(own, chosen)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        assert own[0].up(x).dtype == torch.bfloat16
        assert own[0].norm(x).dtype == torch.bfloat16
        own(x).float().sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.float32
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in own.parameters())


def test_a_layer_made_into_something_else_since_cannot_be_undone() -> None:
    own = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    fp8core.convert(own, "current")
    nn.utils.parametrizations.orthogonal(own[1])
    own(torch.randn(4, 8)).sum().backward()
    with pytest.raises(OperandError, match=r"'1'.*is a ParametrizedConvertedLinear"):
        fp8core.unconvert(own)
    assert isinstance(own[0], fp8core.Linear)
    nn.utils.parametrize.remove_parametrizations(own[1], "weight")
    own[0].forward = own[0].forward
    with pytest.raises(OperandError, match=r"'0'.*has its forward replaced"):
        fp8core.unconvert(own)
    del own[0].forward
    fp8core.unconvert(own)


def test_a_converted_class_is_not_to_be_constructed() -> None:
    own = nn.Linear(8, 8)
    fp8core.convert(own)
    with pytest.raises(UnsupportedError, match=r"construct fp8core\.Linear"):
        type(own)(8, 8)


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
@pytest.mark.parametrize("chosen", ["mxfp8", "nvfp4", None])
def test_it_compiles_whole_before_and_after(chosen: str | None) -> None:
    torch._dynamo.reset()
    x = torch.randn(32, 48)
    own = model()
    fast = torch.compile(own, fullgraph=True, backend="aot_eager")
    plain = fast(x)
    fp8core.convert(fast, chosen)  # a wrapper, compiled before
    for _ in range(2):
        torch.manual_seed(2)
        want = own(x)
        torch.manual_seed(2)
        assert torch.equal(fast(x), want)
    fast(x).sum().backward()
    with fp8core.autocast(enabled=False):
        assert torch.equal(fast(x), own(x))
    fp8core.unconvert(fast)
    assert torch.equal(fast(x), plain)
    torch._dynamo.reset()


def wrapped_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.Linear(64, 32))


def grads(own: nn.Module) -> list[torch.Tensor]:
    """Return the gradients of two steps on the same input."""
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        own.zero_grad()
        own(x).square().sum().backward()
    found = [parameter.grad for parameter in own.parameters()]
    return [g.full_tensor() if isinstance(g, dist.tensor.DTensor) else g for g in found]


def wanted(chosen: str) -> list[torch.Tensor]:
    own = wrapped_model()
    fp8core.convert(own, chosen)
    return grads(own)


@pytest.mark.usefixtures("group_of_one")
@BOTH
def test_ddp_around_a_converted_model(chosen: str) -> None:
    own = wrapped_model()
    fp8core.convert(own, chosen)
    assert all(map(torch.equal, grads(DistributedDataParallel(own)), wanted(chosen)))


@pytest.mark.usefixtures("group_of_one")
@BOTH
def test_a_model_converted_inside_ddp_has_the_names_of_the_model(chosen: str) -> None:
    own = DistributedDataParallel(wrapped_model())
    report = fp8core.convert(own, chosen)
    assert [entry.name for entry in report.converted] == ["0", "1", "2"]
    assert all(map(torch.equal, grads(own), wanted(chosen)))
    fp8core.unconvert(own)
    assert type(own.module[0]) is nn.Linear


@pytest.mark.usefixtures("group_of_one")
@BOTH
def test_fully_shard_around_a_converted_model(chosen: str) -> None:
    own = wrapped_model()
    fp8core.convert(own, chosen)
    for layer in own:
        fully_shard(layer)
    fully_shard(own)
    assert all(map(torch.equal, grads(own), wanted(chosen)))
    with pytest.raises(OperandError, match=r"'0'.*is a FSDPConvertedLinear since"):
        fp8core.unconvert(own)


@pytest.mark.usefixtures("group_of_one")
@BOTH
def test_a_model_sharded_as_a_whole_can_be_converted(chosen: str) -> None:
    own = fully_shard(wrapped_model())
    fp8core.convert(own, chosen)
    assert all(map(torch.equal, grads(own), wanted(chosen)))
    fp8core.unconvert(own)
    assert type(own[0]) is nn.Linear


@pytest.mark.usefixtures("group_of_one")
def test_layers_sharded_one_by_one_are_left_and_named() -> None:
    own = nn.Sequential(nn.Linear(8, 8), fully_shard(nn.Linear(8, 8)))
    report = fp8core.convert(own)
    assert report.skipped[0].reason == "sharded by itself; convert before fully_shard"


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.filterwarnings("ignore:.*FullyShardedDataParallel:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*FSDP:UserWarning")
def test_the_older_fsdp_is_refused() -> None:
    own = FullyShardedDataParallel(wrapped_model(), device_id=DEVICE)
    with pytest.raises(UnsupportedError, match="convert the model first, then wrap it"):
        fp8core.convert(own)
