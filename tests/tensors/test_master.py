"""MasterWeights: what a step does, and which models and states it refuses by name."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fp8core
from fp8core import OperandError, recipe, reporting
from tests.device import DEVICE

X = torch.randn(16, 32, generator=torch.Generator().manual_seed(0)).bfloat16()


def net_of_two(norm_dtype: torch.dtype = torch.bfloat16) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(32, 32, dtype=torch.bfloat16), torch.nn.LayerNorm(32, dtype=norm_dtype)
    )


def stored() -> torch.nn.Module:
    torch.manual_seed(0)
    with fp8core.quantized_model_init(True, recipe.Float8CurrentScaling(), True):
        return fp8core.Linear(32, 32, params_dtype=torch.bfloat16)


def by_hand(
    net: torch.nn.Module, **options: Any
) -> tuple[fp8core.MasterWeights, torch.optim.Optimizer]:
    """An optimizer of masters that is not attached to them."""
    masters = fp8core.MasterWeights(net)
    return masters, torch.optim.SGD(masters.parameters(), lr=0.1, **options)


def attached(
    net: torch.nn.Module, **options: Any
) -> tuple[fp8core.MasterWeights, torch.optim.Optimizer]:
    masters, optimizer = by_hand(net, **options)
    masters.attach(optimizer)
    return masters, optimizer


def backward(net: torch.nn.Module) -> float:
    loss = (net(X).float() - X.float().roll(1, 1)).square().mean()
    loss.backward()
    return loss.item()


def values(net: torch.nn.Module) -> list[torch.Tensor]:
    return [own.detach().float().clone() for own in net.parameters()]


def is_moved(before: list[torch.Tensor], net: torch.nn.Module) -> bool:
    return not all(map(torch.equal, before, values(net)))


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
@pytest.mark.parametrize(
    ("order", "make"), [((0, 1, 2), net_of_two), ((2, 0, 1), net_of_two), ((0, 1, 2), stored)]
)
def test_a_training_under_amp_resumes_bit_for_bit(
    order: tuple[int, ...], make: Callable[[], torch.nn.Module]
) -> None:
    def start() -> list[Any]:
        net = make()
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


def is_moved_by_a_step(net: torch.nn.Module, masters: fp8core.MasterWeights) -> bool:
    optimizer = torch.optim.SGD(masters.parameters(), lr=0.1)
    masters.attach(optimizer)
    before = values(net)
    backward(net)
    optimizer.step()
    return is_moved(before, net)


def test_a_refused_model_keeps_its_initial_values() -> None:
    net = torch.nn.ModuleList([stored(), torch.nn.LayerNorm(4, dtype=torch.half, device="meta")])
    with pytest.raises(OperandError, match="meta"):
        fp8core.MasterWeights(net)
    assert net[0].weight.get_high_precision_init_val() is not None


def test_masters_made_in_inference_mode_can_be_stepped() -> None:
    net = torch.nn.Linear(32, 32, dtype=torch.bfloat16)
    with torch.inference_mode():
        masters = fp8core.MasterWeights(net)
    assert is_moved_by_a_step(net, masters)


def test_a_model_on_the_meta_device_is_refused() -> None:
    net = torch.nn.Linear(4, 4, dtype=torch.bfloat16, device="meta")
    with pytest.raises(OperandError, match="'weight' on the meta device"):
        fp8core.MasterWeights(net)


def test_a_step_leaves_the_initial_value_that_somebody_holds() -> None:
    with fp8core.quantized_model_init(True, recipe.Float8CurrentScaling(), True):
        net = fp8core.Linear(32, 32, params_dtype=torch.float32)
    held = net.weight.get_high_precision_init_val()
    (master, _) = fp8core.MasterWeights(net).parameters()
    assert master.data_ptr() != held.data_ptr()
    assert type(held) is torch.Tensor


def test_an_initial_value_of_before_the_checkpoint_is_not_taken(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporting, "_logged", set())
    net, other = stored(), stored()
    with torch.no_grad():
        other.weight.mul_(3)
    net.load_state_dict(other.state_dict())
    masters = dict(fp8core.MasterWeights(net).named_parameters())
    assert torch.equal(masters["weight"], other.weight.dequantize(torch.float32))
    assert "written after its initial value was kept" in caplog.text


def test_codes_of_another_scale_are_a_start() -> None:
    # As a checkpoint of delayed scaling has them: quantizing again would give other codes.
    net = stored()
    net.weight._rowwise_data[net.weight._rowwise_data & 0x7F > 0x70] &= 0x8F
    net.weight.clear_high_precision_init_val()
    assert is_moved_by_a_step(net, fp8core.MasterWeights(net))


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
    masters, optimizer = by_hand(net)
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
    masters, optimizer = by_hand(net)
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
    masters, optimizer = by_hand(net, fused=True)  # its writes uncounted
    backward(net)
    masters.collect_grads()
    optimizer.step()
    backward(net)
    with pytest.raises(OperandError, match=r"masters\.write_back\(\) after optimizer\.step\(\)"):
        masters.collect_grads()


@pytest.mark.parametrize("fused", [True, False])
def test_a_second_step_by_hand_without_write_back_is_refused(fused: bool) -> None:
    net = net_of_two()
    masters, optimizer = by_hand(net, fused=fused)
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
