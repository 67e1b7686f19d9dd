"""A layer's delayed state: when it exists, what moves it, what may not touch it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fp8core import GroupedLinear, Linear, RecipeError, UnsupportedError, autocast, recipe
from fp8core.modules.calls.bind import bind
from tests.device import DEVICE
from tests.modules.layers import DELAYED, train, trained

torch.set_num_threads(1)  # on a busy machine a second thread costs small GEMMs 20 times the work

STATE = {
    "scale_fwd": ((3,), torch.float32),
    "amax_history_fwd": ((4, 3), torch.float32),
    "scale_bwd": ((2,), torch.float32),
    "amax_history_bwd": ((4, 2), torch.float32),
}


def state(layer: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: getattr(layer, name).clone() for name in STATE}


def assert_same_state(layer: torch.nn.Module, want: dict[str, torch.Tensor]) -> None:
    for name, value in want.items():
        assert torch.equal(getattr(layer, name), value), name


def test_there_is_no_state_before_the_first_use() -> None:
    layer = Linear(32, 16)
    layer(torch.randn(4, 32))
    with autocast(recipe=recipe.MXFP8BlockScaling()):
        layer(torch.randn(4, 32))
    assert list(layer.state_dict()) == ["weight", "bias"]


def test_the_first_use_makes_float32_buffers() -> None:
    layer = trained(params_dtype=torch.bfloat16)
    found = {name: (tuple(b.shape), b.dtype) for name, b in layer.named_buffers()}
    found.pop("delayed_meta")
    assert found == STATE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_buffers_are_float32_whatever_torch_s_default_is(dtype: torch.dtype) -> None:
    torch.set_default_dtype(dtype)
    try:
        layer = Linear(32, 16, params_dtype=torch.float32)
        train(layer, torch.randn(4, 32, dtype=torch.float32))
    finally:
        torch.set_default_dtype(torch.float32)
    assert {getattr(layer, name).dtype for name in STATE} == {torch.float32}


def test_slots_are_transformer_engine_s_for_every_group() -> None:
    layer = GroupedLinear(3, 32, 16)
    with autocast(recipe=DELAYED):
        layer(torch.randn(4, 32), [1, 1, 2])
    assert {name: tuple(getattr(layer, name).shape) for name in STATE} == {
        "scale_fwd": (9,),
        "amax_history_fwd": (4, 9),
        "scale_bwd": (6,),
        "amax_history_bwd": (4, 6),
    }


def test_evaluation_does_not_touch_the_state() -> None:
    for mode in [torch.no_grad, torch.inference_mode]:
        layer = trained()
        before = state(layer)
        with mode(), autocast(recipe=DELAYED):
            layer(torch.full((4, 32), 1e4))
        assert_same_state(layer, before)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_between_steps_changes_no_bit_of_training(mode: Callable[[], Any]) -> None:
    plain = Linear(32, 16)
    evaluated = copy.deepcopy(plain)
    for x in torch.randn(3, 4, 32):
        with mode(), autocast(recipe=DELAYED):
            evaluated(x * 1e4)
        assert torch.equal(train(plain, x), train(evaluated, x))
    assert_same_state(evaluated, state(plain))


def test_evaluation_uses_the_scales_of_training() -> None:
    layer, x = trained(), torch.randn(4, 32)
    with torch.no_grad(), autocast(recipe=DELAYED):
        y = layer(x)
    with autocast(recipe=DELAYED):
        assert torch.equal(y, layer(x))


def test_high_precision_steps_do_not_touch_the_state() -> None:
    layer = trained()
    before = state(layer)
    layer(torch.full((4, 32), 1e4)).sum().backward()
    assert_same_state(layer, before)


MOVES: dict[str, Callable[[Linear], object]] = {
    "bfloat16": lambda layer: layer.bfloat16(),
    "half": lambda layer: layer.half(),
    "to dtype": lambda layer: layer.to(torch.float64).to(torch.bfloat16),
    "to device": lambda layer: layer.to(DEVICE),
}


def test_moving_keeps_the_state_in_float32() -> None:
    for move in MOVES:
        layer = trained()
        before = state(layer)
        MOVES[move](layer)
        assert_same_state(layer, before)
        assert {getattr(layer, name).dtype for name in STATE} == {torch.float32}, move


def test_a_moved_layer_goes_on_updating_its_buffers() -> None:
    layer = trained().bfloat16()
    train(layer, torch.full((4, 32), 7.0).bfloat16())
    assert layer.amax_history_fwd[-1, 0] == 7.0


def test_a_move_that_fails_loses_no_state() -> None:
    layer = trained()
    before = state(layer)

    def fail(tensor: torch.Tensor) -> torch.Tensor:
        raise MemoryError

    with pytest.raises(MemoryError):
        layer._apply(fail)
    assert_same_state(layer, before)


def made_on_meta() -> Linear:
    layer = Linear(32, 16, device="meta")
    with autocast(recipe=DELAYED):
        layer(torch.empty(4, 32, device="meta"))
    return layer


FRESH: dict[str, tuple[Callable[[], Linear], Callable[[Linear], object]]] = {
    "a layer from meta": (made_on_meta, lambda layer: layer.to_empty(device=DEVICE)),
    "a layer emptied through meta": (
        trained,
        lambda layer: layer.to("meta").to_empty(device=DEVICE),
    ),
    "a layer with other memory": (trained, lambda layer: layer.to_empty(device=DEVICE)),
    "a layer without state": (trained, Linear.reset_delayed_state),
}


@pytest.mark.parametrize("case", FRESH)
def test_what_forgets_the_state_has_it_start_fresh(case: str) -> None:
    make, forget = FRESH[case]
    layer = make()
    forget(layer)
    if case not in ("a layer from meta", "a layer with other memory"):
        assert list(layer.state_dict()) == ["weight", "bias"]
    layer.reset_parameters()
    train(layer, torch.full((4, 32), 7.0))
    assert layer.amax_history_fwd[:, 0].tolist() == [0.0, 0.0, 0.0, 7.0]


def test_two_kinds_of_use_work_on_meta() -> None:
    layer = Linear(32, 16, device="meta")
    for mode in (torch.enable_grad, torch.no_grad):
        with mode(), autocast(recipe=DELAYED):
            assert layer(torch.empty(4, 32, device="meta")).shape == (4, 16)


@pytest.mark.parametrize(
    "changed",
    [
        recipe.DelayedScaling(amax_history_len=4, margin=1),
        recipe.DelayedScaling(amax_history_len=4, amax_compute_algo="most_recent"),
    ],
    ids=["margin", "algorithm"],
)
def test_a_change_that_fits_the_history_keeps_it(changed: recipe.Recipe) -> None:
    layer = trained(steps=1)
    before = layer.amax_history_fwd[-1].clone()
    train(layer, torch.full((4, 32), 7.0), changed)
    assert torch.equal(layer.amax_history_fwd[-2], before)
    amax = max(7.0, before[0].item()) if changed.amax_compute_algo == "max" else 7.0
    want = torch.tensor(448.0 * 2.0**-changed.margin) / torch.tensor(amax)
    assert layer.scale_fwd[0] == want


def test_a_change_that_does_not_fit_starts_fresh() -> None:
    for changed in [
        recipe.DelayedScaling(amax_history_len=6),
        recipe.DelayedScaling(amax_history_len=4, fp8_format=recipe.Format.E4M3),
    ]:
        layer = trained()
        with autocast(recipe=changed):
            layer(torch.full((4, 32), 7.0))
            assert torch.equal(layer.scale_fwd, torch.ones(3))
        history = [0.0] * (changed.amax_history_len - 1) + [7.0]
        assert layer.amax_history_fwd[:, 0].tolist() == history


def test_a_recipe_without_state_leaves_it_for_later() -> None:
    layer = trained()
    before = state(layer)
    train(layer, torch.randn(4, 32), recipe.Float8CurrentScaling())
    assert_same_state(layer, before)


def test_equal_recipes_share_what_is_bound() -> None:
    layer = Linear(32, 16)
    bounds = []
    for _ in range(2):
        with autocast(recipe=recipe.DelayedScaling(amax_history_len=4)):
            bounds.append(bind(layer, DEVICE, torch.float32))
    assert bounds[0] is bounds[1]


def test_backward_after_the_state_was_reset_is_harmless() -> None:
    layer = Linear(32, 16)
    with autocast(recipe=DELAYED):
        y = layer(torch.randn(4, 32))
    layer.reset_delayed_state()
    y.sum().backward()
    assert layer.weight.grad.isfinite().all()


def test_an_evaluation_with_another_window_forgets_nothing() -> None:
    layer, x = Linear(32, 32), torch.randn(32, 32)
    with autocast(recipe=recipe.DelayedScaling(amax_history_len=16)):
        layer(x).sum().backward()
    before = {name: own.clone() for name, own in layer.named_buffers()}
    with (
        pytest.raises(RecipeError, match="Evaluate with the recipe of training"),
        torch.no_grad(),
        autocast(recipe=recipe.DelayedScaling()),
    ):
        layer(x)
    assert all(torch.equal(own, before[name]) for name, own in layer.named_buffers())


def test_a_step_that_no_backend_runs_keeps_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = trained()
    train(layer, torch.ones(4, 32))
    before = {name: own.clone() for name, own in layer.named_buffers()}
    with monkeypatch.context() as patch:
        patch.setenv("FP8CORE_BACKEND", "cuda")  # which runs nothing on the CPU
        with pytest.raises(UnsupportedError, match="no backend runs"):
            train(layer, torch.ones(4, 32), recipe.DelayedScaling(amax_history_len=8))
    assert all(torch.equal(own, before[name]) for name, own in layer.named_buffers())
    train(layer, torch.ones(4, 32))
    assert layer.amax_history_fwd.shape == (4, 3)
    assert layer.amax_history_fwd[-2:, 0].tolist() == [1.0, 1.0]
