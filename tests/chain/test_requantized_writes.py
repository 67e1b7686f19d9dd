"""``requantize_weights=True`` of weights that are written, freed or sharded before backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fp8core import Linear, OperandError, autocast
from fp8core.tensors.requantized import RequantizedWeight
from tests.chain.requantizing import (
    BF16,
    CURRENT,
    assert_same,
    forward,
    layer,
    recipes,
    saved_tensors,
    step,
    values,
)
from tests.device import DEVICE
from tests.inspection import models
from tests.inspection.models import make
from tests.pairs import turns

torch.set_num_threads(1)  # on a busy machine a second thread costs small GEMMs 20 times the work


def test_a_step_of_the_optimizer_before_backward_is_refused() -> None:
    for kind, name in turns(models.LAYERS, ["delayed", "current", "nvfp4"]):
        own, (_, again) = make(kind), recipes(name)
        optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
        for parameter in own.parameters():
            parameter.grad = torch.ones_like(parameter)
        x = torch.randn(models.ROWS, 32, dtype=BF16, requires_grad=True)
        with autocast(recipe=again):
            y = models.call(own, x)
        optimizer.step()
        with pytest.raises(OperandError, match=r"\(32, .*written in place .*requantize_weights"):
            y.sum().backward()


def test_a_step_on_a_flat_parameter_is_refused() -> None:
    own, flat = layer(bias=False), nn.Parameter(torch.randn(48 * 32))
    del own._parameters["weight"]
    own.weight = flat.view(48, 32)
    x = values()
    with saved_tensors() as saved:
        y = forward(own, x, CURRENT)
    assert any(one.untyped_storage().data_ptr() == flat.data_ptr() for one in saved)
    y.sum().backward()
    assert flat.grad is not None
    own.weight = flat.view(48, 32)
    y = forward(own, x, CURRENT)
    with torch.no_grad():
        flat.mul_(2)
    with pytest.raises(OperandError, match="written in place"):
        y.sum().backward()


def test_memory_that_is_freed_and_filled_again_before_backward_gives_the_same() -> None:
    """As FSDP gathers a sharded parameter for each use of it."""
    want = step(layer(), CURRENT)
    own, x = layer(), values()
    y = forward(own, x, CURRENT)
    value, storage = own.weight.detach().clone(), own.weight.untyped_storage()
    storage.resize_(0)
    storage.resize_(value.nbytes)
    own.weight.data.copy_(value)
    y.square().sum().backward()
    assert_same([y.detach(), x.grad, own.weight.grad], want[:3])  # type: ignore[list-item]


def test_memory_that_is_still_freed_in_backward_is_refused_by_name() -> None:
    own = layer()
    y = forward(own, values(), CURRENT)
    storage, size = own.weight.untyped_storage(), own.weight.nbytes
    storage.resize_(0)
    try:
        with pytest.raises(OperandError, match=r"Linear\(32, 48\).* no memory.*freed"):
            y.sum().backward()
    finally:
        storage.resize_(size)


OTHER_DATA = {
    "dtype": lambda weight: weight.to(BF16),
    "shape": lambda weight: weight[:24].clone(),
}


def test_other_data_than_in_forward_is_refused_by_name() -> None:
    for what in OTHER_DATA:
        own = layer()
        y = forward(own, values(), CURRENT)
        with torch.no_grad():
            own.weight.data = OTHER_DATA[what](own.weight)
        with pytest.raises(
            OperandError, match=r"Linear\(32, 48\): in backward the weight is .*forward had"
        ):
            y.sum().backward()


def test_a_negation_that_data_got_since_forward_is_carried_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A kernel reads the memory, in which the sign is missing."""
    want = step(layer(), CURRENT)
    own, x, given = layer(), values(), []
    y = forward(own, x, CURRENT)
    weight = own.weight.detach().clone()
    own.weight.data = torch.complex(torch.zeros_like(weight), -weight).conj().imag
    assert own.weight.is_neg()
    requantize = RequantizedWeight.requantize

    def seen(self: Any, saved: Any) -> Any:
        given.append(saved[0].is_neg())
        return requantize(self, saved)

    monkeypatch.setattr(RequantizedWeight, "requantize", seen)
    y.square().sum().backward()
    assert given == [False]
    assert_same([y.detach(), x.grad, own.weight.grad], want[:3])  # type: ignore[list-item]


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")  # of one rank; torch's
@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("reshards", [False, True])
@pytest.mark.parametrize("name", ["delayed", "current"])
def test_layers_under_fully_shard_give_the_same(name: str, reshards: bool) -> None:
    mesh = init_device_mesh(DEVICE.type, (1,))

    def trained(chosen: Any) -> list[torch.Tensor]:
        torch.manual_seed(1)
        model: Any = nn.Sequential(Linear(32, 64), Linear(64, 32))
        for part in model:
            fully_shard(part, mesh=mesh, reshard_after_forward=reshards)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found = []
        for seed in range(3):
            x = values(seed)
            with saved_tensors() as saved:
                y = forward(model, x, chosen)
            y.square().mean().backward()
            floats = [one for one in saved if one.dtype == torch.float32 and one.numel() == 2048]
            assert len(floats) == 2 * chosen.requantize_weights
            found += [y.detach(), x.grad]
            found += [one.grad.full_tensor() for one in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
        return found

    held, again = recipes(name)
    assert_same(trained(again), trained(held))
