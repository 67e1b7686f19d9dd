"""Which optimizers may step masters: attached ones, and others by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fp8core
from fp8core import OperandError
from tests.tensors.nets import attached, backward, is_moved, net_of_two, stored, values


@pytest.mark.parametrize("make", [net_of_two, stored])
def test_a_forgotten_attach_raises_at_the_first_step(make: Callable[[], torch.nn.Module]) -> None:
    net = make()
    optimizer = torch.optim.AdamW(fp8core.MasterWeights(net).parameters())
    backward(net)
    with pytest.raises(OperandError, match=r"AdamW is not attached.*masters\.attach\(optimizer\)"):
        optimizer.step()


def test_a_second_optimizer_has_to_be_attached_too() -> None:
    net = net_of_two()
    masters, _ = attached(net)
    backward(net)
    with pytest.raises(OperandError, match="not attached"):
        torch.optim.SGD(masters.parameters()).step()


def test_attached_twice_is_attached_once() -> None:
    net = net_of_two()
    masters, optimizer = attached(net)
    hooks = len(optimizer._optimizer_step_pre_hooks)
    masters.attach(optimizer)
    assert len(optimizer._optimizer_step_pre_hooks) == hooks == 1


def test_what_is_no_optimizer_of_torch_is_refused() -> None:
    masters: Any = fp8core.MasterWeights(net_of_two())
    with pytest.raises(OperandError, match="expected a torch optimizer"):
        masters.attach(object())


class Wrapper(torch.optim.Optimizer):
    """Made as Accelerate's: an optimizer of torch by class, whose hooks nobody made."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]  # torch has a field
        return self.optimizer.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


def test_a_wrapper_without_hooks_is_refused_and_not_taken_for_attached() -> None:
    net = net_of_two()
    masters = fp8core.MasterWeights(net)
    optimizer = torch.optim.SGD(masters.parameters(), lr=0.1)
    wrapper = Wrapper(optimizer)
    for _ in range(2):
        with pytest.raises(OperandError, match=r"attach\(Wrapper\).*the optimizer that it wraps"):
            masters.attach(wrapper)
    masters.attach(optimizer)
    backward(net)
    before = values(net)
    wrapper.step()
    assert is_moved(before, net)


def test_an_optimizer_of_the_parameters_is_refused_where_nobody_is_attached() -> None:
    net = net_of_two()
    masters = fp8core.MasterWeights(net)
    optimizer = torch.optim.AdamW(net.parameters())
    backward(net)
    with pytest.raises(OperandError, match=r"'0\.weight' itself.*of masters\.parameters\(\)"):
        optimizer.step()
    masters.attach(torch.optim.SGD(list(masters.parameters())[:1]))
    optimizer.step()  # may be meant: of these parameters nobody steps the master


def test_parameters_are_stepped_as_ever_once_their_masters_are_gone() -> None:
    net = net_of_two()
    fp8core.MasterWeights(net)
    before = values(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    backward(net)
    optimizer.step()
    assert is_moved(before, net)


@pytest.mark.parametrize("model", [None, [torch.zeros(2)]])
def test_what_is_no_model_is_refused(model: Any) -> None:
    with pytest.raises(OperandError, match=r"MasterWeights\(.*expected a torch\.nn\.Module"):
        fp8core.MasterWeights(model)


def test_parameters_added_to_an_attached_optimizer_are_refused() -> None:
    net = net_of_two()
    _, optimizer = attached(net)
    optimizer.add_param_group({"params": [net[0].weight]})
    backward(net)
    with pytest.raises(OperandError, match=r"steps the parameter '0\.weight' itself"):
        optimizer.step()


def test_masters_added_to_an_attached_optimizer_are_stepped() -> None:
    net = net_of_two()
    masters = fp8core.MasterWeights(net)
    named = dict(masters.named_parameters())
    optimizer = torch.optim.SGD([named.pop("0.weight")], lr=0.1)
    masters.attach(optimizer)
    optimizer.add_param_group({"params": list(named.values())})
    backward(net)
    before = values(net)
    optimizer.step()
    assert not any(map(torch.equal, before, values(net)))


def test_parameters_can_be_asked_for_twice() -> None:
    masters = fp8core.MasterWeights(net_of_two())
    assert [*map(id, masters.parameters())] == [*map(id, masters.parameters())]


def test_an_optimizer_inside_an_attached_one_may_step() -> None:
    class Wrapping(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            inner = torch.optim.SGD(self.param_groups[0]["params"], lr=0.1)
            return inner.step(closure)

    net = net_of_two()
    masters = fp8core.MasterWeights(net)
    optimizer = Wrapping(masters.parameters(), lr=0.1)
    masters.attach(optimizer)
    backward(net)
    before = values(net)
    optimizer.step()
    assert is_moved(before, net)


# --- by hand ---


def test_a_step_by_hand_moves_the_parameters() -> None:
    net = net_of_two()
    masters = fp8core.MasterWeights(net)
    optimizer = torch.optim.SGD(masters.parameters(), lr=0.1)
    other = net_of_two()
    _, expected = attached(other)
    for _ in range(3):
        backward(net)
        masters.collect_grads()
        optimizer.step()
        masters.write_back()
        backward(other)
        expected.step()
    assert not is_moved(values(other), net)


def test_a_forgotten_write_back_is_refused() -> None:
    net = net_of_two()
    masters = fp8core.MasterWeights(net)
    optimizer = torch.optim.SGD(masters.parameters(), lr=0.1, fused=True)  # its writes uncounted
    backward(net)
    masters.collect_grads()
    optimizer.step()
    backward(net)
    with pytest.raises(OperandError, match=r"masters\.write_back\(\) after optimizer\.step\(\)"):
        masters.collect_grads()


@pytest.mark.parametrize("fused", [True, False])
def test_a_second_step_by_hand_without_write_back_is_refused(fused: bool) -> None:
    net = net_of_two()
    masters = fp8core.MasterWeights(net)
    optimizer = torch.optim.SGD(masters.parameters(), lr=0.1, fused=fused)
    backward(net)
    masters.collect_grads()  # once, as if that were enough
    optimizer.step()
    backward(net)
    with pytest.raises(OperandError, match=r"stepped before.*masters\.write_back\(\)"):
        optimizer.step()


def test_two_optimizers_step_by_hand_before_one_write_back() -> None:
    net = net_of_two()
    masters = fp8core.MasterWeights(net)
    first, *others = masters.parameters()
    optimizers = [torch.optim.SGD(own, lr=0.1) for own in ([first], others)]
    for _ in range(2):
        before = values(net)
        backward(net)
        masters.collect_grads()
        for optimizer in optimizers:
            optimizer.step()
        masters.write_back()
        assert not any(map(torch.equal, before, values(net)))


def test_an_attached_step_ends_no_step_by_hand() -> None:
    net = net_of_two()
    masters = fp8core.MasterWeights(net)
    first, *others = masters.parameters()
    attached, by_hand = torch.optim.SGD([first], lr=0.1), torch.optim.SGD(others, lr=0.1)
    masters.attach(attached)
    before = values(net)
    backward(net)
    masters.collect_grads()
    attached.step()
    by_hand.step()
    masters.write_back()
    assert not any(map(torch.equal, before, values(net)))


def test_a_step_by_hand_may_call_that_of_its_base_class() -> None:
    class Derived(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            super().step(closure)
            return super().step(closure)

    net = net_of_two()
    masters = fp8core.MasterWeights(net)
    torch.optim.SGD(masters.parameters())  # has torch give hooks to the base class's step
    optimizer = Derived(masters.parameters(), lr=0.1)
    before = values(net)
    backward(net)
    masters.collect_grads()
    optimizer.step()
    masters.write_back()
    assert is_moved(before, net)
