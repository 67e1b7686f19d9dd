"""torch's GradScaler and an inf that a cast hides: the step is skipped where a model is watched."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

import fp8core as te
from fp8core import recipe
from tests.device import DEVICE
from tests.pairs import pairs, turns

RECIPES = ("delayed", "current", "block", "nvfp4", "rowwise")
SCALE = 1024.0
Copy = Callable[[torch.amp.GradScaler], torch.amp.GradScaler]
X = torch.randn(32, 64, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)


class Loop:
    """A training loop of a bias-free layer, as the documentation of torch has it."""

    def __init__(self, name: str = "current", *, watched: bool = True, **optimizer: object) -> None:
        torch.manual_seed(0)
        self.model = te.Linear(64, 32, bias=False, params_dtype=torch.float32)
        made = {"lr": 0.01, **optimizer}
        self.optimizer = torch.optim.Adam(self.model.parameters(), **made)
        self.scaler = torch.amp.GradScaler(DEVICE.type, init_scale=SCALE)
        self.recipe = recipe.by_name(name)
        self.watch = te.watch_grad_scaler(self.scaler, self.model) if watched else None

    def backward(self, value: float | None = None) -> None:
        with te.autocast(recipe=self.recipe):
            y = self.model(X.float())
        loss = self.scaler.scale(y.square().mean())
        handle = y.register_hook(lambda grad: _with(grad, value)) if value is not None else None
        loss.backward()
        if handle is not None:
            handle.remove()

    def step(self, value: float | None = None, *, unscales: bool = False) -> bool:
        """Return whether the weight moved."""
        before = self.model.weight.detach().clone()
        self.optimizer.zero_grad()
        self.backward(value)
        if unscales:
            self.scaler.unscale_(self.optimizer)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return not torch.equal(before, self.model.weight)


def _with(grad: torch.Tensor, value: float | None) -> torch.Tensor:
    made = grad.clone()
    made[3, 5] = value
    return made


def test_without_a_watch_the_step_is_applied() -> None:
    for name in RECIPES:
        loop = Loop(name, watched=False)
        loop.step()
        assert loop.step(math.inf), name
        assert loop.model.weight.isfinite().all(), name
        assert loop.scaler.get_scale() == SCALE, name


def test_with_a_watch_the_step_is_skipped() -> None:
    for name, fused, unscales in pairs(RECIPES, [False, True], [False, True]):
        loop = Loop(name, fused=fused)
        assert loop.step(unscales=unscales), (name, fused)
        assert not loop.step(math.inf, unscales=unscales), (name, fused)
        assert loop.scaler.get_scale() == SCALE / 2, (name, fused)
        assert loop.step(unscales=unscales), (name, fused)
        assert loop.scaler.get_scale() == SCALE / 2, (name, fused)


def test_nan_that_a_format_has_not_is_met() -> None:
    loop = Loop("nvfp4")
    assert not loop.step(math.nan)


@pytest.mark.parametrize(("name", "fused"), turns(RECIPES, [False, True]))
def test_finite_gradients_train_bit_for_bit_as_without(name: str, fused: bool) -> None:
    found = []
    for watched in (False, True):
        loop = Loop(name, watched=watched, fused=fused)
        torch.manual_seed(5)
        moved = [loop.step() for _ in range(5)]
        assert all(moved)
        found.append((loop.model.weight.detach().clone(), loop.scaler.state_dict()))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


def test_gradients_are_not_changed() -> None:
    loop = Loop()
    loop.backward(math.inf)
    before = loop.model.weight.grad.clone()
    loop.scaler.unscale_(loop.optimizer)
    assert torch.equal(loop.model.weight.grad, before / SCALE)


def test_a_layer_that_joins_counts_from_the_next_update_on() -> None:
    loop = Loop(watched=False)
    weight, loop.model = loop.model.weight, torch.nn.Sequential(loop.model)
    loop.model.weight = weight  # that the loop compares
    te.watch_grad_scaler(loop.scaler, loop.model)
    assert loop.step()
    loop.model.append(te.Linear(32, 16, bias=False))
    assert loop.step()
    assert loop.model[1]._bindings.nonfinite == {}
    assert not loop.step(math.inf)
    assert loop.model[1]._bindings.nonfinite[DEVICE].tolist() == [1, 0]


def test_gradients_that_accumulate_are_one_step() -> None:
    loop = Loop()
    loop.backward(math.inf)
    loop.backward()
    before = loop.model.weight.detach().clone()
    loop.scaler.step(loop.optimizer)
    loop.scaler.update()
    assert torch.equal(before, loop.model.weight)
    assert loop.step()


def test_two_optimizers_of_a_step_are_both_skipped() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(te.Linear(64, 64, bias=False), te.Linear(64, 32, bias=False))
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model]
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=SCALE)
    te.watch_grad_scaler(scaler, model)
    before = [layer.weight.detach().clone() for layer in model]
    with te.autocast(recipe=recipe.Float8CurrentScaling()):
        y = model(X.float())
    scaler.scale(y).backward(_with(torch.ones_like(y), math.inf))
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert all(torch.equal(a, layer.weight) for a, layer in zip(before, model, strict=True))


def test_an_evaluation_between_steps_is_no_part_of_one() -> None:
    loop = Loop()
    loop.step()
    with torch.no_grad(), te.autocast(recipe=loop.recipe):
        loop.model(torch.full((32, 64), math.nan))
    assert loop.step()


def test_what_was_met_before_the_watch_is_no_part_of_a_step() -> None:
    loop = Loop(watched=False)
    loop.step(math.inf)
    te.watch_grad_scaler(loop.scaler, loop.model)
    assert loop.step()


def test_a_compiled_layer_is_watched() -> None:
    loop = Loop()
    eager, loop.model = loop.model, torch.compile(loop.model, backend="aot_eager")
    loop.model.weight = eager.weight
    assert loop.step()
    assert not loop.step(math.inf)
    assert loop.step()


def test_a_watch_that_is_removed_looks_no_more() -> None:
    loop = Loop()
    assert loop.watch is not None
    loop.watch.remove()
    assert loop.step(math.inf)


def test_a_scaler_that_is_not_enabled_steps() -> None:
    loop = Loop(watched=False)
    loop.scaler = torch.amp.GradScaler(DEVICE.type, enabled=False)
    te.watch_grad_scaler(loop.scaler, loop.model)
    assert loop.step(math.inf)


@pytest.mark.usefixtures("group_of_one")
def test_every_rank_skips_what_one_has_met(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop()
    with monkeypatch.context() as patch:
        patch.setattr(dist, "get_world_size", lambda group: 2)
        patch.setattr(dist, "all_reduce", lambda met, op, group: met.fill_(1.0))  # another rank's
        assert not loop.step()
    assert loop.step()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda own: pickle.loads(pickle.dumps(own))])
def test_a_copy_of_the_scaler_is_of_its_own_and_watches_nothing(copied: Copy) -> None:
    loop = Loop()
    loop.step()
    made = copied(loop.scaler)
    loop.step(math.inf)
    assert (made.get_scale(), loop.scaler.get_scale()) == (SCALE, SCALE / 2)
    loop.scaler, original = made, loop.scaler
    assert loop.step(math.inf)
    assert (made.get_scale(), original.get_scale()) == (SCALE, SCALE / 2)


def test_a_watch_that_was_removed_keeps_no_model() -> None:
    loop = Loop()
    loop.watch.remove()
    model = weakref.ref(loop.model)
    del loop.model, loop.optimizer
    gc.collect()
    assert model() is None


def test_another_scaler_is_refused() -> None:
    with pytest.raises(te.OperandError, match=r"expected a torch.amp.GradScaler, found dict"):
        te.watch_grad_scaler({}, te.Linear(32, 32))  # type: ignore[arg-type]


def test_a_model_without_layers_is_refused() -> None:
    with pytest.raises(te.OperandError, match="Linear has no layer of fp8core"):
        te.watch_grad_scaler(torch.amp.GradScaler(DEVICE.type), torch.nn.Linear(4, 4))


def test_a_torch_that_names_it_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.amp.GradScaler, "_unscale_grads_")
    with pytest.raises(te.UnsupportedError, match="has no _unscale_grads_"):
        te.watch_grad_scaler(torch.amp.GradScaler(DEVICE.type), te.Linear(32, 32))
