"""FusedSGD beside torch's SGD."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from fp8core.errors import OperandError, UnsupportedError
from fp8core.optimizers import FusedSGD


def parameters(dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(4)
    return [
        torch.nn.Parameter(torch.randn(s, generator=generator).to(dtype))
        for s in ((7, 5), (33,), (0, 2))
    ]


def train(kind: Any, params: list[Any], **options: Any) -> None:
    optimizer = kind(params, **options)
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        optimizer.step()


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"lr": 0.1},
    "decay": {"lr": 0.1, "weight_decay": 0.01},
    "momentum": {"lr": 0.1, "momentum": 0.9},
    "dampening": {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.01},
    "nesterov": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_steps_are_those_of_torch(name: str) -> None:
    ours, theirs = parameters(), parameters()
    train(FusedSGD, ours, **OPTIONS[name])
    train(torch.optim.SGD, theirs, **OPTIONS[name])
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parameters_of_16_bits(dtype: torch.dtype) -> None:
    ours, theirs = parameters(dtype), parameters()
    train(FusedSGD, ours, lr=0.1, momentum=0.9)
    train(torch.optim.SGD, theirs, lr=0.1, momentum=0.9)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.detach().float(), other.detach(), rtol=0.05, atol=0.05)


def test_parameters_of_any_strides() -> None:
    base, gaps = torch.randn(5, 7), torch.randn(7, 10)
    ours = [torch.nn.Parameter(base.t()), torch.nn.Parameter(gaps[:, ::2])]
    theirs = [torch.nn.Parameter(param.detach().clone().contiguous()) for param in ours]
    between = gaps[:, 1::2].clone()
    train(FusedSGD, ours, lr=0.1, momentum=0.9)
    train(torch.optim.SGD, theirs, lr=0.1, momentum=0.9)
    torch.testing.assert_close(ours, theirs)
    assert torch.equal(gaps[:, 1::2], between)


def test_a_parameter_whose_first_gradient_comes_later() -> None:
    ours, theirs = parameters()[:2], parameters()[:2]
    for kind, params in ((FusedSGD, ours), (torch.optim.SGD, theirs)):
        optimizer = kind(params, lr=0.1, momentum=0.9, dampening=0.5)
        for due in (params[:1], params, params):
            optimizer.zero_grad()
            for param in due:
                param.grad = torch.full_like(param, 0.5)
            optimizer.step()
    torch.testing.assert_close(ours, theirs)


def test_gradients_of_fewer_bits_step_float32_parameters() -> None:
    ours, theirs = parameters(), parameters()
    optimizers = [FusedSGD(ours, 0.1, 0.9), FusedSGD(theirs, 0.1, 0.9)]
    for param, reference in zip(ours, theirs, strict=True):
        param.grad_dtype = torch.bfloat16
        param.grad = torch.randn(param.shape).bfloat16()
        reference.grad = param.grad.float()
    for optimizer in optimizers:
        optimizer.step()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_writes_are_counted() -> None:
    param = parameters()[0]
    optimizer = FusedSGD([param], 0.1, 0.9)
    for _ in range(2):
        before = param._version
        param.grad = torch.ones_like(param)
        optimizer.step()
        assert param._version > before


def test_state_is_loaded() -> None:
    ours = parameters()
    optimizer = FusedSGD(ours, 0.1, 0.9)
    again = parameters()
    other = FusedSGD(again, 0.1, 0.9)
    for step in range(3):
        for params in (ours, again):
            for param in params:
                param.grad = torch.full(param.shape, 0.5 + step)
        optimizer.step()
        if step == 0:
            other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            with torch.no_grad():
                for one, two in zip(again, ours, strict=True):
                    one.copy_(two)
        else:
            other.step()
    torch.testing.assert_close(again, ours, rtol=0, atol=0)


def with_state(change: Any) -> Any:
    """Return an optimizer, and its state with that of the second parameter changed."""
    params = parameters()
    optimizer = FusedSGD(params, 0.1, 0.9)
    for param in params:
        param.grad = torch.full(param.shape, 0.5)
    optimizer.step()
    stored = copy.deepcopy(optimizer.state_dict())
    stored["state"][1] = change(stored["state"][1]["momentum_buffer"])
    return optimizer, stored


NO_STATE: dict[str, Any] = {
    r"is \[66\] in the checkpoint": lambda own: {"momentum_buffer": own.repeat(2)},
    "is torch.int32 in the checkpoint": lambda own: {"momentum_buffer": own.int()},
    r"has the states \['exp_avg'\]": lambda own: {"exp_avg": own},
    "the state of parameter 1 is a list": lambda own: [own],
}


@pytest.mark.parametrize("words", NO_STATE)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(words: str) -> None:
    optimizer, stored = with_state(NO_STATE[words])
    before = copy.deepcopy(optimizer.state_dict())
    stored["param_groups"][0]["lr"] = 3.0
    with pytest.raises(OperandError, match=f"FusedSGD.load_state_dict: .*{words}"):
        optimizer.load_state_dict(stored)
    torch.testing.assert_close(optimizer.state_dict(), before, rtol=0, atol=0)


ERRORS: dict[str, Any] = {
    "lr is missing": lambda: FusedSGD(parameters()),
    "FusedSGD(momentum=-1": lambda: FusedSGD(parameters(), 0.1, -1.0),
    "a dampening of 0": lambda: FusedSGD(parameters(), 0.1, 0.9, 0.5, nesterov=True),
    "a parameter of torch.float64": lambda: FusedSGD(parameters(torch.float64), 0.1),
    "a gradient of torch.float32": lambda: step_by_a_float32_gradient(),
}


def step_by_a_float32_gradient() -> None:
    (param, *_) = parameters(torch.bfloat16)
    param.grad_dtype = torch.float32
    param.grad = torch.ones(param.shape)
    FusedSGD([param], 0.1).step()


@pytest.mark.parametrize("words", ERRORS)
def test_what_does_not_fit_is_named(words: str) -> None:
    with pytest.raises(OperandError) as caught:
        ERRORS[words]()
    assert words in str(caught.value)


def test_a_decay_behind_the_momentum_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="multiply the parameters by 1 - lr"):
        FusedSGD(parameters(), 0.1, weight_decay=0.1, wd_after_momentum=True)


def test_a_refused_gradient_leaves_every_parameter_unstepped() -> None:
    first, second = parameters()[:2]
    optimizer = FusedSGD([{"params": [first]}, {"params": [second]}], lr=0.1)
    first.grad, second.grad = torch.ones_like(first), torch.ones_like(second).to_sparse()
    before = first.detach().clone()
    with pytest.raises(OperandError, match=r"^FusedSGD: .* is sparse"):
        optimizer.step()
    assert torch.equal(first, before)


def test_a_copy_of_the_optimizer_steps_as_the_optimizer() -> None:
    params = parameters()
    optimizer = FusedSGD(params, lr=0.1, momentum=0.9, weight_decay=0.1)
    other = copy.deepcopy(optimizer)
    copies = other.param_groups[0]["params"]
    for param, its_copy in zip(params, copies, strict=True):
        param.grad = torch.ones_like(param)
        its_copy.grad = torch.ones_like(param)
    optimizer.step()
    other.step()
    assert all(torch.equal(a, b) for a, b in zip(params, copies, strict=True))
