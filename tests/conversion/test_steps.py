"""Delayed scaling in a converted model: what a step is, what it records, what recompute repeats."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fp8core
from fp8core import UnsupportedError, recipe
from fp8core.context.recompute import keep_scales
from fp8core.conversion import layers

CHOSEN = recipe.DelayedScaling(amax_history_len=4)
NEWEST = recipe.DelayedScaling(amax_history_len=4, amax_compute_algo="most_recent")
E4M3_MAX = 448.0


class Twice(nn.Module):
    """One layer used twice, and one that may raise after it."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.last = nn.Linear(32, 32), nn.Linear(32, 32)
        self.error: BaseException | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.shared(self.shared(x))
        if self.error is not None:
            raise self.error
        made: torch.Tensor = self.last(y)
        return made


def converted(chosen: recipe.Recipe = CHOSEN) -> Twice:
    torch.manual_seed(0)
    own = Twice()
    fp8core.convert(own, chosen)
    return own


def rows(scale: float = 1.0) -> torch.Tensor:
    return torch.randn(8, 32, generator=torch.Generator().manual_seed(4)) * scale


def state(own: nn.Module) -> dict[str, torch.Tensor]:
    buffers = dict(own.named_buffers())
    assert buffers
    return {name: value.clone() for name, value in buffers.items()}


def same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> bool:
    return got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want)


def test_a_forward_of_the_model_is_what_an_autocast_around_it_is() -> None:
    own, other = converted(), converted()
    fp8core.unconvert(other)
    fp8core.convert(other)
    for factor in (1.0, 3.0, 0.5):
        y = own(rows(factor))
        with fp8core.autocast(recipe=CHOSEN):
            want = other(rows(factor))
        assert torch.equal(y, want)
        for made in (y, want):
            made.square().sum().backward()
        assert same(state(own), state(other))
    grads = zip(own.parameters(), other.parameters(), strict=True)
    assert all(torch.equal(a.grad, b.grad) for a, b in grads)


def test_two_uses_in_one_step_take_the_larger_amax_and_one_place_in_the_history() -> None:
    own, x = converted(), rows()
    x2 = nn.functional.linear(x, own.shared.weight, own.shared.bias)
    own(x)
    recorded = own.shared.amax_history_fwd[:, 0]
    assert recorded[-1] >= max(x.abs().max(), 0.9 * x2.abs().max())
    assert torch.count_nonzero(recorded) == 1


def test_a_layer_called_without_its_model_is_a_step_by_itself() -> None:
    own, x = converted(), rows()
    own.last(x)
    assert own.last.amax_history_fwd[-1, 0] == x.abs().max()
    assert own.last.scale_fwd[0] == E4M3_MAX / x.abs().max()
    own.last(2 * x)
    assert own.last.scale_fwd[0] == E4M3_MAX / (2 * x).abs().max()


def test_a_layer_has_no_hooks_but_the_users() -> None:
    own = converted()
    assert not own.last._forward_hooks
    assert not own.last._forward_pre_hooks


def test_a_layer_called_alone_that_raises_records_nothing() -> None:
    own = converted()
    own.last(rows())
    before = state(own)
    with pytest.raises(fp8core.OperandError):
        own.last(rows()[:, :16])
    assert same(state(own), before)
    own.last(2 * rows())
    assert own.last.scale_fwd[0] == E4M3_MAX / (2 * rows()).abs().max()


def test_a_layer_of_fp8core_in_the_model_is_one_too() -> None:
    own, x = nn.Sequential(fp8core.Linear(32, 32), nn.Linear(32, 32)), rows()
    fp8core.convert(own, CHOSEN)
    own[0](x)
    assert own[0].scale_fwd[0] == E4M3_MAX / x.abs().max()
    fp8core.unconvert(own)
    assert not own[0]._forward_hooks
    assert not own[0]._forward_pre_hooks


@pytest.mark.parametrize("chosen", [CHOSEN, NEWEST])
def test_microbatches_in_one_autocast_take_the_largest_amax(chosen: recipe.Recipe) -> None:
    own = converted(chosen)
    with fp8core.autocast(recipe=chosen):
        for factor in (1.0, 8.0, 0.25):
            own(rows(factor)).sum().backward()
    assert own.shared.amax_history_fwd[-1, 0] >= rows(8.0).abs().max()
    assert torch.count_nonzero(own.shared.amax_history_fwd[:, 0]) == 1


def test_microbatches_without_autocast_each_count_in_the_window() -> None:
    own = converted()
    for factor in (1.0, 8.0, 0.25):
        own.last(rows(factor)).sum().backward()
    assert own.last.scale_fwd[0] == E4M3_MAX / rows(8.0).abs().max()


def test_a_forward_that_raises_records_nothing() -> None:
    own = converted()
    own(rows()).sum().backward()
    before = state(own)
    own.error = ValueError("theirs")
    with pytest.raises(ValueError, match="theirs"):
        own(rows(100.0))
    assert same(state(own), before)
    own.error = None
    own(rows())
    assert not same(state(own), before)


def test_a_model_called_while_an_exception_is_handled_is_a_step_all_the_same() -> None:
    own = converted()
    try:
        raise KeyError
    except KeyError:
        own(rows())
    assert own.last.scale_fwd[0] != 1


def test_an_interrupted_forward_is_forgotten_and_stops_nobody() -> None:
    own, other = converted(), converted()
    own(rows())
    before = state(own)
    own.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):  # torch calls no hook for it
        own(rows(100.0))
    other(rows())
    assert same(state(other), before)
    with fp8core.autocast(recipe=CHOSEN):
        other(rows(2.0))
    assert not same(state(other), before)
    own.error = None
    own(rows())
    assert own.shared.amax_history_fwd.max() < rows(100.0).abs().max()


def test_a_model_that_calls_itself_is_one_step() -> None:
    class Tree(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.after = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x: torch.Tensor, depth: int) -> torch.Tensor:
            y: torch.Tensor = self.before(x)
            y = self(y, depth - 1) if depth else y
            made: torch.Tensor = self.after(y)
            return made

    own = Tree()
    fp8core.convert(own, CHOSEN)
    own(rows(), 2)
    for layer in (own.before, own.after):
        assert torch.count_nonzero(layer.amax_history_fwd[:, 0]) == 1
        assert layer.scale_fwd[0] == torch.tensor(E4M3_MAX) / layer.amax_history_fwd[-1, 0]
    assert own.before.amax_history_fwd[-1, 0] >= rows().abs().max()


def test_an_autocast_inside_the_forward_is_a_step_of_its_own() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.a(x)
            with fp8core.autocast(recipe=recipe.MXFP8BlockScaling()):
                z: torch.Tensor = self.b(y)
            assert self.a.scale_fwd[0] == 1
            return z

    own = Outer()
    fp8core.convert(own, CHOSEN)
    own(rows())
    assert own.a.scale_fwd[0] == E4M3_MAX / rows().abs().max()
    assert not hasattr(own.b, "scale_fwd")


def test_evaluation_records_nothing() -> None:
    own = converted()
    own(rows())
    before = state(own)
    with torch.no_grad():
        own(rows(100.0))
    assert same(state(own), before)


def test_threads_have_steps_of_their_own() -> None:
    own, other = converted(), converted()
    own.register_forward_pre_hook(lambda *_: run_in_thread(lambda: other(rows())))
    own(rows())
    assert same(state(own), state(other))


def run_in_thread(function: Callable[[], object]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


class Checkpointed(nn.Module):
    """Blocks that ``checkpoint`` recomputes in backward; ``use_reentrant`` None for none."""

    checkpoint = staticmethod(torch.utils.checkpoint.checkpoint)

    def __init__(self, use_reentrant: bool | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.Linear(64, 32)) for _ in "ab"
        )
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for block in self.blocks:
            if self.use_reentrant is None:
                x = block(x)
            else:
                x = self.checkpoint(block, x, use_reentrant=self.use_reentrant)
        return {"hidden": x, "loss": x.square().mean()}


@pytest.mark.parametrize("name", recipe.names())
def test_recompute_repeats_the_forward_bit_for_bit(name: str) -> None:
    plain, own = Checkpointed(None), Checkpointed(False)
    for module in (plain, own):
        fp8core.convert(module, name)
    for factor in (1.0, 5.0, 0.1):
        for module in (plain, own):
            module.zero_grad()
            torch.manual_seed(1)
            module(rows(factor).requires_grad_())["loss"].backward()
        assert same(dict(own.named_parameters()), dict(plain.named_parameters()))
        grads = zip(own.parameters(), plain.parameters(), strict=True)
        assert all(torch.equal(a.grad, b.grad) for a, b in grads)
        if name == "delayed":
            assert same(state(own), state(plain))
        with torch.no_grad():  # gradients move the weights, so that every step differs
            for parameter in (*own.parameters(), *plain.parameters()):
                parameter.sub_(parameter.grad)


def test_recompute_in_the_order_of_another_forward_finds_its_own_scales() -> None:
    plain, own = Checkpointed(None), Checkpointed(False)
    for module in (plain, own):
        fp8core.convert(module, "delayed")
        losses = [module(rows(factor))["loss"] for factor in (1.0, 5.0)]
        for loss in losses:
            loss.backward()
    grads = zip(own.parameters(), plain.parameters(), strict=True)
    assert all(torch.equal(a.grad, b.grad) for a, b in grads)


def test_scales_are_kept_in_one_operator_whatever_their_number() -> None:
    class Noting(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), named: Any = None
        ) -> Any:
            called.append(str(func))
            return func(*args, **(named or {}))

    called: list[str] = []
    own = converted()
    own(rows())
    states = [
        states.forward for x in (own.shared, own.last) for states in x._bindings.states.values()
    ]
    y = own.last(rows())
    with Noting():
        keep_scales({"y": y}, states)
    assert len(states) == 2
    assert called == ["aten.cat.default"]


def test_a_layer_within_a_step_looks_for_no_step_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[object] = []
    end = layers._end
    own = converted()

    def noting(module: nn.Module, *given: Any) -> None:
        ended.append(module)
        end(module, *given)

    monkeypatch.setattr(layers, "_end", noting)
    own(rows())  # whose own hook is the function of before
    assert ended == []
    own.last(rows())
    assert ended == [own.last]


def test_two_forwards_in_one_backward_cannot_be_told_apart() -> None:
    own = Checkpointed(False)
    fp8core.convert(own, "delayed")
    loss = own(rows())["loss"] + own(rows(5.0))["loss"]
    with pytest.raises(UnsupportedError, match=r"over two forwards.*backward after each forward"):
        loss.backward()


@pytest.mark.parametrize("kind", ["same", "other rows"])
def test_the_whole_model_recomputed_twice_in_one_backward_says_why_not(kind: str) -> None:
    own, factor = converted(), 1.0 if kind == "same" else 9.0
    run = torch.utils.checkpoint.checkpoint
    loss = sum(run(own, x, use_reentrant=False).sum() for x in (rows(), rows(factor)))
    with pytest.raises(UnsupportedError, match="over two forwards") as found:
        loss.backward()
    assert "use_reentrant" not in str(found.value)


def test_a_reentrant_checkpoint_under_delayed_scaling_says_what_works() -> None:
    own = Checkpointed(True)
    fp8core.convert(own, "delayed")
    with pytest.raises(UnsupportedError, match="use_reentrant=False"):
        own(rows().requires_grad_())["loss"].backward()


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("name", ["nvfp4", "delayed"])
def test_fp8core_checkpoint_repeats_two_forwards_in_one_backward(
    name: str, use_reentrant: bool
) -> None:
    plain, own = Checkpointed(None), Checkpointed(use_reentrant)
    own.checkpoint = fp8core.checkpoint  # type: ignore[method-assign]
    for module in (plain, own):
        fp8core.convert(module, name)
        torch.manual_seed(1)
        losses = [module(rows(factor).requires_grad_())["loss"] for factor in (1.0, 5.0)]
        sum(losses).backward()
    grads = zip(own.parameters(), plain.parameters(), strict=True)
    assert all(torch.equal(a.grad, b.grad) for a, b in grads)
    if name == "delayed":
        assert same(state(own), state(plain))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_recompute_under_another_recipe_is_refused(use_reentrant: bool) -> None:
    own = Checkpointed(use_reentrant)
    fp8core.convert(own, "mxfp8")
    own(rows().requires_grad_())["loss"].backward()
    with fp8core.autocast(enabled=False):
        loss = own(rows().requires_grad_())["loss"]
    with pytest.raises(UnsupportedError, match="under another recipe than it ran with"):
        loss.backward()


def test_fp8core_checkpoint_takes_the_recipe_along() -> None:
    for name in recipe.names():
        plain, own = (nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32)) for _ in "ab")
        own.load_state_dict(plain.state_dict())
        for module in (plain, own):
            fp8core.convert(module, name)
        torch.manual_seed(1)
        plain(rows()).sum().backward()
        torch.manual_seed(1)
        fp8core.checkpoint(own, rows().requires_grad_()).sum().backward()
        assert own[0]._bindings.last[1].recipe == recipe.by_name(name)
        grads = zip(own.parameters(), plain.parameters(), strict=True)
        assert all(torch.equal(a.grad, b.grad) for a, b in grads), name


@pytest.mark.parametrize("error", [ValueError("theirs"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("is_used_before", [False, True])
def test_a_forward_that_raises_in_an_autocast_is_forgotten(
    error: BaseException, is_used_before: bool
) -> None:
    own, smooth = converted(), converted()
    with fp8core.autocast(recipe=CHOSEN):
        if is_used_before:
            own(rows())
        own.error = error
        with pytest.raises(type(error)):
            own(rows(100.0))
        own.error = None
        own(rows(2.0))
    with fp8core.autocast(recipe=CHOSEN):
        for factor in (1.0, 2.0)[not is_used_before :]:
            smooth(rows(factor))
    assert same(state(own), state(smooth))


def test_an_autocast_that_raises_in_a_step_leaves_the_step_s_amaxes() -> None:
    class Retrying(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(32, 32)

        def forward(self, x: torch.Tensor, factors: tuple[float, ...]) -> torch.Tensor:
            y: torch.Tensor = self.a(x)
            for factor in factors:
                with contextlib.suppress(KeyError), fp8core.autocast(recipe=CHOSEN):
                    self.a(x * factor)
                    raise KeyError
            return y

    own = Retrying()
    fp8core.convert(own, CHOSEN)
    own(rows(), (100.0, 1000.0))
    assert own.a.scale_fwd[0] == E4M3_MAX / rows().abs().max()
    assert torch.count_nonzero(own.a.amax_history_fwd[:, 0]) == 1


def test_a_step_that_raises_forgets_nothing_of_an_autocast_that_ended_in_it() -> None:
    class Twofold(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.a(x * 100)
            with fp8core.autocast(recipe=CHOSEN):
                self.a(x)
            raise KeyError

    own = Twofold()
    fp8core.convert(own, CHOSEN)
    with pytest.raises(KeyError):
        own(rows())
    assert own.a.amax_history_fwd[:, 0].tolist() == [0, 0, 0, rows().abs().max()]


def interrupted() -> nn.Module:
    own = converted()
    own(rows())
    own.error = KeyboardInterrupt()
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):  # torch calls no hook for it
            own(rows(100.0))
    own.error = None
    return own


def test_a_checkpoint_after_an_interrupt_knows_nothing_of_it() -> None:
    own, smooth = interrupted(), converted()
    smooth(rows())
    assert same(own.state_dict(), smooth.state_dict())


def test_another_model_s_step_forgets_an_interrupted_one() -> None:
    own, other = interrupted(), converted()
    other(rows())
    assert not own.shared.amax_history_fwd[0].any()


def test_a_checkpoint_in_a_step_leaves_the_step_as_it_is() -> None:
    class Saving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = converted()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.inner.shared(x)
            assert self.state_dict()["inner.shared.amax_history_fwd"][0].any()
            return y

    own = Saving()
    fp8core.unconvert(own.inner)
    fp8core.convert(own, CHOSEN)
    own(rows())
    assert own.inner.shared.scale_fwd[0] == E4M3_MAX / rows().abs().max()


def test_a_layer_called_alone_after_an_interrupt_is_a_step_by_itself() -> None:
    own, smooth = interrupted(), converted()
    smooth(rows())
    for model in (own, smooth):
        model.shared(rows(3.0))
    assert own.shared.scale_fwd[0] != 1.0
    assert same(state(own), state(smooth))
