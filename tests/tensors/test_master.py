"""MasterWeights: what a step does, and which models and states it refuses by name."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fp8core
from fp8core import OperandError
from tests.device import DEVICE
from tests.tensors.nets import X, attached, backward, net_of_two, stored, values

# --- the step ---


def test_a_step_clears_the_gradients_that_it_used() -> None:
    # Those of float32 parameters too: a loop without zero_grad() must not sum some of them up.
    net = net_of_two(norm_dtype=torch.float32)
    _, optimizer = attached(torch.nn.ModuleList([*net]))
    net[0](X).sum().backward()
    net[1](X.float()).sum().backward()
    optimizer.step()
    assert [own.grad for own in net.parameters()] == [None] * 4


def test_a_master_written_by_somebody_else_is_noticed() -> None:
    net = net_of_two()
    masters, optimizer = attached(net)
    with torch.no_grad():
        for master in masters.parameters():
            master.clamp_(-0.01, 0.01)
    backward(net)
    with pytest.raises(OperandError, match=r"the forward read an old value.*write_back"):
        optimizer.step()
    masters.write_back()
    backward(net)
    optimizer.step()


def test_a_closure_computes_with_the_masters_of_the_moment() -> None:
    torch.manual_seed(0)
    net = torch.nn.Linear(32, 32, dtype=torch.bfloat16)
    masters = fp8core.MasterWeights(net)
    optimizer = torch.optim.LBFGS(masters.parameters(), lr=0.5, max_iter=8)
    masters.attach(optimizer)
    used = []

    def closure() -> float:
        optimizer.zero_grad()
        used.append([own.detach().clone() for own in net.parameters()])
        wanted = [master.bfloat16() for master in masters.parameters()]
        assert all(map(torch.equal, used[-1], wanted))
        return backward(net)

    first, last = optimizer.step(closure), optimizer.step(closure=closure)
    assert last < 0.5 * first
    assert len(used) > 4
    assert not torch.equal(used[0][0], used[-1][0])


def test_what_a_closure_found_is_checked() -> None:
    net = net_of_two()
    _, optimizer = attached(net)
    net.load_state_dict(net_of_two().state_dict(), assign=True)
    with pytest.raises(OperandError, match=r"'0\.weight' was replaced"):
        optimizer.step(lambda: backward(net))


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")  # of torch, by Dynamo
@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}])
def test_a_compiled_step(options: dict[str, Any]) -> None:
    def train(is_compiled: bool) -> list[torch.Tensor]:
        torch.compiler.reset()
        net = net_of_two()
        _, optimizer = attached(net, **options)
        if is_compiled:
            step = torch.compile(optimizer.step, backend="eager")
            optimizer.step = step  # type: ignore[method-assign]
        for _ in range(3):
            backward(net)
            optimizer.step()
        return values(net)

    assert all(map(torch.equal, train(True), train(False)))


def test_a_step_without_any_gradient_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    class NeverMoves(torch.optim.SGD):
        pass

    masters = fp8core.MasterWeights(net_of_two())
    optimizer = NeverMoves(masters.parameters())
    masters.attach(optimizer)
    with caplog.at_level(logging.WARNING, "fp8core"):
        optimizer.step()
    assert "NeverMoves.step() found no gradient" in caplog.text


def test_a_float32_parameter_with_main_grad_is_refused() -> None:
    net = net_of_two(norm_dtype=torch.float32)
    _, optimizer = attached(net[1])
    net[1].weight.main_grad = torch.ones(32)
    with pytest.raises(OperandError, match="main_grad, where no optimizer looks"):
        optimizer.step()


# --- the model changes ---


def write_by_counter(own: torch.Tensor) -> None:
    with torch.no_grad():
        own.mul_(2)


def write_uncounted(own: torch.Tensor) -> None:
    own.data.mul_(2)


@pytest.mark.parametrize("make", [net_of_two, stored])
@pytest.mark.parametrize("write", [write_by_counter, write_uncounted])
def test_a_model_loaded_after_its_masters_is_refused(
    make: Callable[[], torch.nn.Module], write: Callable[[torch.Tensor], None]
) -> None:
    net = make()
    _, optimizer = attached(net)
    write(next(net.parameters()))
    backward(net)
    with pytest.raises(OperandError, match="was written since"):
        optimizer.step()


def test_parameters_that_were_replaced_are_refused() -> None:
    net = net_of_two()
    _, optimizer = attached(net)
    net.load_state_dict(net_of_two().state_dict(), assign=True)
    backward(net)
    with pytest.raises(OperandError, match=r"parameter '0\.weight' was replaced"):
        optimizer.step()


def test_a_parameter_of_another_shape_is_refused() -> None:
    net = net_of_two()
    _, optimizer = attached(net)
    net[1].bias.data = torch.zeros(16, dtype=torch.bfloat16)
    with pytest.raises(
        OperandError, match=rf"'1\.bias' is now \[16\] on {DEVICE}, its master \[32\]"
    ):
        optimizer.step()


def test_a_parameter_frozen_later_stays_where_it_is() -> None:
    net = net_of_two()
    _, optimizer = attached(net, weight_decay=0.5)
    net[0].weight.requires_grad_(False)
    before = net[0].weight.clone()
    backward(net)
    optimizer.step()
    assert torch.equal(before, net[0].weight)


def test_a_parameter_unfrozen_later_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    net = net_of_two()
    net[0].bias.requires_grad_(False)
    _, optimizer = attached(net)
    net[0].bias.requires_grad_(True)
    backward(net)
    with caplog.at_level(logging.WARNING, "fp8core"):
        optimizer.step()
    assert "0.bias got gradients but no master" in caplog.text


# --- state ---


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_a_training_under_amp_resumes_bit_for_bit(order: tuple[int, ...]) -> None:
    def start() -> list[Any]:
        net = net_of_two()
        masters = fp8core.MasterWeights(net)
        optimizer = torch.optim.AdamW(masters.parameters(), lr=1e-2)
        masters.attach(optimizer)
        return [net, masters, optimizer, torch.amp.GradScaler(DEVICE.type, growth_interval=2)]

    def step(net: Any, masters: Any, optimizer: Any, scaler: Any) -> list[torch.Tensor]:
        optimizer.zero_grad()
        scaler.scale(net(X).float().square().mean()).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        return [own.detach().clone() for own in (*net.parameters(), *masters.parameters())]

    parts = start()
    for _ in range(3):
        step(*parts)
    saved = copy.deepcopy([part.state_dict() for part in parts])
    other = start()
    for index in (*order, 3):
        other[index].load_state_dict(saved[index])
    for _ in range(3):
        assert all(map(torch.equal, step(*parts), step(*other)))


BAD: dict[str, Any] = {
    "a list": [0.0] * 32,
    "another shape": torch.zeros(1),
    "integers": torch.zeros(32, dtype=torch.int32),
    "on meta": torch.zeros(32, device="meta"),
    "sparse": torch.zeros(32).to_sparse(),
}


@pytest.mark.parametrize("name", BAD)
def test_a_state_that_does_not_fit_is_refused_and_nothing_loaded(name: str) -> None:
    masters = fp8core.MasterWeights(net_of_two())
    before = copy.deepcopy(masters.state_dict())
    state = {key: value + 1 for key, value in before.items()}
    with pytest.raises(OperandError, match=r"'1\.bias' is .*Nothing was loaded"):
        masters.load_state_dict({**state, "1.bias": BAD[name]})
    assert all(torch.equal(before[key], value) for key, value in masters.state_dict().items())
