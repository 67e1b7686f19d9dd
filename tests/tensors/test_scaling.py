"""Delayed scaling: when amaxes become scales, what is recorded, and what cannot go wrong."""

from __future__ import annotations

import contextlib
import math
import threading
from typing import Any

import pytest
import torch

from fp8core import Linear, autocast, recipe
from fp8core.modules.calls.bind import bind
from fp8core.recipe.plan import DelayedPlan
from fp8core.tensors import scaling
from fp8core.tensors.delayed_state import DelayedState
from tests.device import DEVICE

RECIPE = recipe.DelayedScaling(amax_history_len=4)
E4M3_MAX, E5M2_MAX = 448.0, 57344.0
INPUT, WEIGHT, OUTPUT = 0, 1, 2


def forward(layer: torch.nn.Module, *inputs: torch.Tensor, **fields: Any) -> list[torch.Tensor]:
    """Run ``inputs`` through ``layer`` in one autocast; ``fields`` change the recipe."""
    chosen = recipe.DelayedScaling(**{"amax_history_len": 4, **fields})
    with autocast(recipe=chosen):
        return [layer(x) for x in inputs]


def filled(value: float) -> torch.Tensor:
    return torch.full((4, 8), value)


def windows(layer: Linear, *values: float, **fields: Any) -> list[float]:
    """Return the input's scale after each of several steps with these amaxes."""
    scales = []
    for value in values:
        forward(layer, filled(value), **fields)
        scales.append(layer.scale_fwd[INPUT].item())
    return scales


def test_the_first_step_uses_scale_1() -> None:
    layer = Linear(8, 8)
    with autocast(recipe=RECIPE):
        layer(filled(3.0))
        assert torch.equal(layer.scale_fwd, torch.ones(3))


def smallest(history: torch.Tensor) -> torch.Tensor:
    assert history.shape == (4, 3)
    return torch.where(history > 0, history, math.inf).amin(0)


WINDOWS: dict[str, tuple[tuple[float, ...], dict[str, Any], list[float]]] = {
    "the maximum over the amax": ((3.0,), {}, [E4M3_MAX / 3.0]),
    "a margin halves": ((7.0,), {"margin": 1}, [E4M3_MAX / 7.0 / 2]),
    # The window is the length, though one row less stays stored.
    "max remembers for the length of the history": (
        (8.0, 1.0, 1.0, 1.0, 1.0),
        {"amax_history_len": 4},
        [E4M3_MAX / amax for amax in (8.0, 8.0, 8.0, 8.0, 1.0)],
    ),
    "most_recent forgets at once": (
        (8.0, 1.0, 2.0),
        {"amax_compute_algo": "most_recent"},
        [E4M3_MAX / amax for amax in (8.0, 1.0, 2.0)],
    ),
    "a history of one": ((8.0, 1.0), {"amax_history_len": 1}, [E4M3_MAX / 8.0, E4M3_MAX]),
    "a tiny amax": ((1e-40,), {}, [torch.finfo(torch.float32).max]),
    "inf freezes nothing": (
        (2.0, math.inf, 7.0),
        {},
        [E4M3_MAX / 2.0, E4M3_MAX / 2.0, E4M3_MAX / 7.0],
    ),
    "nor does -inf": ((2.0, -math.inf), {}, [E4M3_MAX / 2.0] * 2),
    "nan alone": ((7.0, math.nan), {}, [E4M3_MAX / 7.0] * 2),
    "a function computes the amax": (
        (2.0, 7.0),
        {"amax_compute_algo": smallest},
        [E4M3_MAX / 2.0] * 2,
    ),
    "a function's nonsense": (
        (7.0,),
        {"scaling_factor_compute_algo": lambda amax, *_: torch.full_like(amax, math.nan)},
        [1.0],
    ),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_scales_of_several_steps_follow_from_their_amaxes(name: str) -> None:
    amaxes, fields, scales = WINDOWS[name]
    layer = Linear(8, 8)
    assert windows(layer, *amaxes, **fields) == torch.tensor(scales).tolist()
    assert layer.amax_history_fwd.isfinite().all()


def test_an_amax_of_zero_changes_nothing() -> None:
    layer = Linear(8, 8)
    forward(layer, filled(7.0))
    before = layer.scale_fwd[INPUT].item(), layer.amax_history_fwd[:, INPUT].tolist()
    forward(layer, filled(0.0))
    assert before == (layer.scale_fwd[INPUT].item(), layer.amax_history_fwd[:, INPUT].tolist())


def test_an_empty_batch_changes_nothing() -> None:
    layer = Linear(8, 8)
    forward(layer, filled(7.0))
    before = layer.amax_history_fwd[:, INPUT].tolist()
    forward(layer, torch.empty(0, 8))
    assert before == layer.amax_history_fwd[:, INPUT].tolist()


def test_one_update_over_microbatches_takes_their_maximum() -> None:
    layer = Linear(8, 8)
    forward(layer, filled(2.0), filled(7.0), filled(1.0))
    assert layer.amax_history_fwd[:, INPUT].tolist() == [0.0, 0.0, 0.0, 7.0]


def test_slots_follow_input_weight_and_an_unused_output() -> None:
    layer = Linear(8, 8)
    forward(layer, filled(2.0))[0].sum().backward()
    weight = layer.weight.abs().max().item()
    assert layer.amax_history_fwd[3].tolist() == [2.0, weight, 0.0]
    assert layer.amax_history_bwd[3].tolist() == [1.0, 0.0]
    assert layer.scale_bwd.tolist() == [E5M2_MAX, 1.0]


def test_an_infinite_amax_is_counted() -> None:
    layer = Linear(8, 8)
    forward(layer, filled(math.inf))
    forward(layer, filled(math.inf))
    with autocast(recipe=RECIPE):
        states = bind(layer, DEVICE, torch.float32).states
    assert states.forward.nonfinite.tolist() == [2]


def test_an_infinite_amax_is_counted_after_a_first_use_in_inference_mode() -> None:
    layer = Linear(8, 8)
    with torch.inference_mode():
        forward(layer, filled(1.0))
    forward(layer, filled(math.inf))
    assert torch.isfinite(layer.amax_history_fwd).all()


def test_an_infinite_amax_is_reported_with_the_layer(caplog: pytest.LogCaptureFixture) -> None:
    layer = Linear(8, 8, name="decoder.7.reports_inf")
    forward(layer, filled(math.inf))
    forward(layer, filled(math.inf))
    lines = [line for line in caplog.messages if "not finite" in line]
    assert len(lines) == 1
    assert "decoder.7.reports_inf" in lines[0]


def test_an_infinite_gradient_is_not_recorded() -> None:
    layer = Linear(8, 8)
    (y,) = forward(layer, filled(1.0))
    y.backward(torch.full_like(y, math.inf))
    assert layer.scale_bwd.tolist() == [1.0, 1.0]
    assert not layer.amax_history_bwd.any()


def test_a_nan_is_ignored_by_the_amax() -> None:
    x = filled(7.0)
    x[0, 0] = math.nan
    layer = Linear(8, 8)
    forward(layer, x)
    assert layer.scale_fwd[INPUT] == E4M3_MAX / 7.0


def test_a_function_gets_the_newest_amax_in_row_0_and_older_ones_the_oldest_first() -> None:
    seen = []

    def largest(history: torch.Tensor) -> torch.Tensor:
        seen.append(history[:, INPUT].tolist())
        return history.amax(0)

    windows(Linear(8, 8), 2.0, 3.0, 5.0, amax_compute_algo=largest)
    assert seen == [[2.0, 0.0, 0.0, 0.0], [3.0, 0.0, 0.0, 2.0], [5.0, 0.0, 2.0, 3.0]]


def test_a_function_that_writes_the_history_and_raises_changes_nothing() -> None:
    def fail(history: torch.Tensor) -> torch.Tensor:
        history.fill_(1.0)
        raise ArithmeticError

    layer = Linear(8, 8)
    windows(layer, 2.0)
    before = layer.amax_history_fwd.clone()
    with pytest.raises(ArithmeticError):
        windows(layer, 7.0, amax_compute_algo=fail)
    assert torch.equal(layer.amax_history_fwd, before)


def test_a_function_may_compute_the_scale() -> None:
    seen = []

    def quarter(
        amax: torch.Tensor, scale: torch.Tensor, fp8_max: torch.Tensor, chosen: object
    ) -> torch.Tensor:
        seen.append((amax.tolist(), scale.tolist(), fp8_max.tolist(), chosen))
        return fp8_max / amax / 4

    layer = Linear(8, 8)
    scales = windows(layer, 7.0, scaling_factor_compute_algo=quarter)
    assert scales == [E4M3_MAX / 7.0 / 4]
    amax, scale, fp8_max, chosen = seen[0]
    assert (amax[INPUT], scale, fp8_max[INPUT]) == (7.0, [1.0] * 3, E4M3_MAX)
    assert chosen.scaling_factor_compute_algo is quarter


def test_functions_follow_the_same_rules_as_the_built_in() -> None:
    def newest(history: torch.Tensor) -> torch.Tensor:
        return history[0]

    values = (2.0, math.inf, 0.0, 7.0, 1.0)
    built_in = windows(Linear(8, 8), *values, amax_compute_algo="most_recent")
    assert windows(Linear(8, 8), *values, amax_compute_algo=newest) == built_in


def test_an_update_whose_function_raises_for_one_layer_changes_none() -> None:
    is_failing, calls = [False], []

    def largest(history: torch.Tensor) -> torch.Tensor:
        calls.append(history)
        if is_failing[0] and len(calls) % 2 == 0:
            raise ArithmeticError
        return history.amax(0)

    layers = two_layers()
    chosen = recipe.DelayedScaling(amax_history_len=4, amax_compute_algo=largest)
    before = []
    for is_failing[0] in (False, True):
        before = [own.clone() for layer in layers for own in layer.buffers()]
        with (
            pytest.raises(ArithmeticError) if is_failing[0] else contextlib.nullcontext(),
            autocast(recipe=chosen),
        ):
            layers[1](layers[0](torch.ones(4, 8) * (1.0 + len(before))))
    assert len(calls) == 4
    after = [own for layer in layers for own in layer.buffers()]
    assert all(map(torch.equal, before, after))


def two_layers(seed: int = 0) -> tuple[Linear, Linear]:
    torch.manual_seed(seed)
    return Linear(8, 8), Linear(8, 8)


def test_backward_scales_do_not_depend_on_the_order_of_the_layers() -> None:
    found = []
    x = torch.randn(4, 8)
    for first_runs_first in (True, False):
        first, second = two_layers()
        with autocast(recipe=RECIPE):
            parts = [first(x), second(x)] if first_runs_first else [second(x), first(x)][::-1]
        (parts[0].square().sum() + parts[1].sum()).backward()
        found.append((first.scale_bwd, second.scale_bwd))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_a_layer_without_a_gradient_holds_up_no_other() -> None:
    first, second = two_layers()
    with autocast(recipe=RECIPE):
        first(filled(1.0))
        y = second(filled(1.0))
    y.sum().backward()
    assert first.scale_bwd.tolist() == [1.0, 1.0]
    assert second.scale_bwd.tolist() == [E5M2_MAX, 1.0]


def test_a_layer_used_twice_updates_once_with_the_maximum() -> None:
    layer = Linear(8, 8)
    small, large = forward(layer, filled(1.0), filled(1.0))
    (small.sum() + 7 * large.sum()).backward()
    assert layer.amax_history_bwd[:, 0].tolist() == [0.0, 0.0, 0.0, 7.0]


def test_backward_scales_change_when_the_pass_ends() -> None:
    layer, seen = Linear(8, 8), []
    x = filled(1.0).requires_grad_()
    x.register_hook(lambda grad: seen.append(layer.scale_bwd[0].item()))
    forward(layer, x)[0].sum().backward()
    assert (*seen, layer.scale_bwd[0].item()) == (1.0, E5M2_MAX)


def test_each_backward_over_a_retained_graph_updates() -> None:
    layer = Linear(8, 8)
    y = forward(layer, filled(1.0))[0].sum()
    y.backward(retain_graph=True)
    y.backward()
    assert layer.amax_history_bwd[:, 0].tolist() == [0.0, 0.0, 1.0, 1.0]


def test_backward_in_another_thread_updates_there() -> None:
    layer = Linear(8, 8)
    y = forward(layer, filled(1.0))[0].sum()
    thread = threading.Thread(target=y.backward)
    thread.start()
    thread.join()
    assert layer.scale_bwd.tolist() == [E5M2_MAX, 1.0]


def make_state(*, length: int = 3, margin: float = 0.0, algorithm: str = "max") -> DelayedState:
    plan = DelayedPlan(length, margin, algorithm, None, True)
    history = torch.zeros(length, 2)
    return DelayedState(
        "a layer",
        plan,
        None,
        scale=torch.ones(2),
        amax_history=history,
        maxima=[E4M3_MAX, E5M2_MAX],
        order=(0,),
    )


def test_update_advances_states_of_all_kinds_in_one_call() -> None:
    states = [
        make_state(),
        make_state(length=5, margin=2.0),
        make_state(length=1, algorithm="most_recent"),
    ]
    for state in states:
        state.amax_history[0] = torch.tensor([7.0, 2.0])
    scaling.update(states)
    scales = [state.scale.tolist() for state in states]
    assert scales == [[64.0, 28672.0], [16.0, 7168.0], [64.0, 28672.0]]
    assert not any(state.amax_history[0].any() for state in states)


def test_update_writes_in_place() -> None:
    state = make_state()
    scale, history = state.scale, state.amax_history
    history[0] = 7.0
    scaling.update([state])
    assert (scale[0], history[2, 0]) == (64.0, 7.0)


def test_update_needs_no_group_for_the_world(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        pytest.fail("reduced without a group")

    monkeypatch.setattr(torch.distributed, "all_reduce", refuse)
    state = make_state()
    state.amax_history[0] = 7.0
    scaling.update([state])
    assert state.scale[0] == 64.0


def test_discard_forgets_the_newest_amax_alone() -> None:
    state = make_state()
    state.amax_history[:] = torch.tensor([[9.0, 9.0], [1.0, 2.0], [3.0, 4.0]])
    scaling.discard([state])
    assert state.amax_history.tolist() == [[0.0, 0.0], [1.0, 2.0], [3.0, 4.0]]
