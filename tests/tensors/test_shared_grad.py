"""A master's gradient is its parameter's, one float32 tensor for both."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import optimizer as torch_optimizer

import fp8core
from fp8core import OperandError, UnsupportedError
from tests.device import DEVICE

X = torch.randn(8, 32, generator=torch.Generator().manual_seed(0)).bfloat16()


def pair() -> tuple[torch.nn.Module, fp8core.MasterWeights, torch.Tensor]:
    torch.manual_seed(0)
    net = torch.nn.Linear(32, 32, bias=False, dtype=torch.bfloat16)
    masters = fp8core.MasterWeights(net)
    (master,) = masters.parameters()
    return net, masters, master


def test_both_sides_hold_one_tensor() -> None:
    net, _, master = pair()
    net(X).sum().backward()
    grad = master.grad
    assert grad is not None
    assert grad.dtype == torch.float32
    assert net.weight.grad is grad
    net(X).sum().backward()  # adds in place
    assert net.weight.grad is grad is master.grad


def test_before_the_first_look_it_is_as_without_masters() -> None:
    net, _, _ = pair()
    net(X).sum().backward()
    assert isinstance(net.weight.grad, torch.Tensor)
    assert net.weight.grad.dtype == torch.bfloat16


def test_a_float32_gradient_is_not_copied() -> None:
    net, _, master = pair()
    net.weight.grad_dtype = torch.float32  # torch's own way to sum microbatches in float32
    net(X).sum().backward()
    found = net.weight.grad
    assert master.grad is found


def test_a_gradient_given_by_hand_is_seen() -> None:
    net, _, master = pair()
    net.weight.grad = torch.ones_like(net.weight)
    assert torch.equal(torch.ones(32, 32), master.grad)
    net.weight.grad = torch.full_like(net.weight, 2.0, dtype=torch.float32)
    assert torch.equal(torch.full((32, 32), 2.0), master.grad)


def test_a_gradient_given_to_the_master_is_the_parameters() -> None:
    net, _, master = pair()
    master.grad = torch.ones(32, 32)
    assert net.weight.grad is master.grad
    master.grad = None
    assert net.weight.grad is None


def test_sparse_gradients_are_seen() -> None:
    net = torch.nn.Embedding(8, 4, sparse=True, dtype=torch.bfloat16)
    masters = fp8core.MasterWeights(net)
    optimizer = torch.optim.SGD(masters.parameters(), lr=1.0)
    masters.attach(optimizer)
    before = net.weight.detach().clone()
    net(torch.tensor([1, 1])).sum().backward()
    optimizer.step()
    expected = before.clone()
    expected[1] = (before[1].float() - 2).bfloat16()
    assert torch.equal(net.weight, expected)


def with_main_grad() -> tuple[torch.nn.Module, torch.Tensor]:
    net, _, master = pair()
    net.weight.main_grad = torch.ones(32, 32)
    return net, master


def test_main_grad_is_the_gradient() -> None:
    net, master = with_main_grad()
    assert master.grad is net.weight.main_grad


def test_what_autograd_brings_is_added_to_main_grad() -> None:
    net, master = with_main_grad()
    net.weight.grad = torch.ones_like(net.weight)
    assert torch.equal(master.grad, torch.full((32, 32), 2.0))
    assert torch.equal(master.grad, torch.full((32, 32), 2.0))


def test_zeros_that_stand_for_main_grad_do_not_hide_it() -> None:
    torch.manual_seed(0)
    layer = fp8core.Linear(
        32, 32, bias=False, params_dtype=torch.bfloat16, fuse_wgrad_accumulation=True
    )
    layer.weight.main_grad = torch.zeros(32, 32)
    layer.weight.grad_added_to_main_grad = False
    masters = fp8core.MasterWeights(layer)
    optimizer = torch.optim.SGD(masters.parameters(), lr=1.0)
    masters.attach(optimizer)
    before = layer.weight.detach().float()
    with fp8core.autocast(recipe="current"):
        layer(X).sum().backward()
    optimizer.step()
    (master,) = masters.parameters()
    assert torch.equal(master, before - layer.weight.main_grad)
    assert layer.weight.main_grad.any()


@pytest.mark.parametrize(("is_zeroed", "expected"), [(False, 1.0), (True, 3.0)])
def test_megatrons_flags_say_what_autograd_brought(is_zeroed: bool, expected: float) -> None:
    net, master = with_main_grad()
    net.weight.grad_added_to_main_grad, net.weight.zero_out_wgrad = True, is_zeroed
    net.weight.grad = torch.full_like(net.weight, 2.0)  # of an embedding tied to it, or a dummy
    assert torch.equal(master.grad, torch.full((32, 32), expected))


def test_zero_grad_zeroes_main_grad() -> None:
    net, master = with_main_grad()
    net.weight.grad_added_to_main_grad = True
    torch.optim.SGD([master], lr=1.0).zero_grad()
    assert not net.weight.main_grad.any()
    assert not net.weight.grad_added_to_main_grad


def test_a_main_grad_of_another_dtype_is_refused() -> None:
    net, _, master = pair()
    net.weight.main_grad = torch.ones(32, 32, dtype=torch.bfloat16)
    with pytest.raises(OperandError, match=r"main_grad of 'weight' is torch\.bfloat16"):
        _ = master.grad


@pytest.mark.parametrize("name", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_that_would_never_run_are_refused(name: str) -> None:
    _, _, master = pair()
    with pytest.raises(UnsupportedError, match="would never run"):
        getattr(master, name)(lambda grad: None)


def test_a_backward_that_reaches_a_master_is_refused() -> None:
    # As with a penalty on the masters: its gradient would be lost.
    _, _, master = pair()
    with pytest.raises(UnsupportedError, match=r"backward\(\) reached the master of 'weight'"):
        master.square().sum().backward()


def test_hooks_on_the_parameter_run() -> None:
    def fill(own: torch.Tensor) -> None:
        assert own.grad is not None
        own.grad.fill_(3.0)

    net, _, master = pair()
    net.weight.register_post_accumulate_grad_hook(fill)
    net(X).sum().backward()
    assert torch.equal(master.grad, torch.full((32, 32), 3.0))


def test_a_copy_or_a_pickle_of_an_optimizer_is_refused() -> None:
    _, masters, _ = pair()
    optimizer = torch.optim.SGD(masters.parameters())
    for attempt in (copy.deepcopy, copy.copy, lambda own: torch.save(own, io.BytesIO())):
        if attempt is not copy.copy:
            with pytest.raises(UnsupportedError, match="cannot be copied or pickled"):
                attempt(optimizer)
        with pytest.raises(UnsupportedError, match="cannot be copied or pickled"):
            attempt(next(masters.parameters()))


def test_a_copy_of_the_model_is_free() -> None:
    net, _, master = pair()
    net(X).sum().backward()
    _ = master.grad
    other = copy.deepcopy(net)
    assert other.weight.grad is None
    other(X).sum().backward()
    assert other.weight.grad.dtype == torch.bfloat16


def test_optimizers_step_masters_all_at_once() -> None:
    # Their list of types for which `foreach` is the default is private: without it, steps are slow.
    _, _, master = pair()
    assert type(master) in torch_optimizer._foreach_supported_types


def test_what_is_computed_from_a_master_is_plain() -> None:
    _, masters, master = pair()
    assert type(master + 1) is type(master.detach()) is torch.Tensor
    optimizer = torch.optim.AdamW(masters.parameters())
    masters.attach(optimizer)
    master.grad = torch.ones(32, 32)
    optimizer.step()
    assert {type(one) for one in optimizer.state[master].values()} == {torch.Tensor}


def losses(net: torch.nn.Module, forward: Any) -> list[float]:
    masters = fp8core.MasterWeights(net)
    optimizer = torch.optim.AdamW(masters.parameters(), lr=1e-2)
    masters.attach(optimizer)
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=1024.0)
    found = []
    for _ in range(4):
        for _ in range(2):
            loss = forward(X).float().square().mean()
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(masters.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def net_of_two() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(*[torch.nn.Linear(32, 32, dtype=torch.bfloat16) for _ in range(2)])


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("as_view", [False, True])
def test_distributed_data_parallel(as_view: bool) -> None:
    net = net_of_two()
    wrapped = torch.nn.parallel.DistributedDataParallel(net, gradient_as_bucket_view=as_view)
    plain = net_of_two()
    assert losses(net, wrapped) == losses(plain, plain)


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")  # torch's, about views
@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
def test_fully_sharded() -> None:
    net, plain = net_of_two(), net_of_two()
    mesh = init_device_mesh(DEVICE.type, (1,))  # else torch takes the accelerator, if there is one
    for layer in net:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    assert losses(net, net) == losses(plain, plain)
    assert all(isinstance(own, DTensor) for own in net.parameters())
