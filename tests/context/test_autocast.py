"""``autocast``: what is active where, in which thread, and what an exception leaves behind."""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

import fp8core
from fp8core import Linear, OperandError, RecipeError, autocast, fp8_autocast, recipe
from fp8core.collectives.base import GroupReference
from fp8core.context import scopes
from fp8core.context.autocast import active, request
from fp8core.modules.calls.bind import bind
from tests.device import DEVICE

CURRENT = recipe.Float8CurrentScaling()
MXFP8 = recipe.MXFP8BlockScaling()
DELAYED = recipe.DelayedScaling(amax_history_len=4)
OUTSIDE = request()


def run_in_threads(*functions: Callable[[], None]) -> None:
    """Run every function in a thread of its own; raise the first error of any."""
    errors: list[BaseException] = []

    def guarded(function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException as error:  # noqa: BLE001  raised again below, in the test's thread
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_the_recipe_is_active_inside_and_only_there() -> None:
    with autocast(recipe=CURRENT):
        assert active() == request(quantize=CURRENT)
    assert active() == OUTSIDE


def test_the_alias_does_what_autocast_does() -> None:
    with fp8_autocast(enabled=False, calibrating=True, fp8_recipe=DELAYED):
        assert active() == request(observe=DELAYED)


@pytest.mark.parametrize(
    ("function", "name", "meant"),
    [
        (autocast, "fp8_recipe", "recipe"),
        (autocast, "fp8_group", "amax_reduction_group"),
        (autocast, "recip", "recipe"),
        (fp8_autocast, "recipe", "fp8_recipe"),
        (fp8_autocast, "amax_reduction_group", "fp8_group"),
    ],
)
def test_an_argument_of_another_name_gets_the_one_that_it_means(
    function: Callable[..., object], name: str, meant: str
) -> None:
    said = rf"^{function.__name__} has no argument '{name}'; .* Did you mean '{meant}'\?$"
    with pytest.raises(RecipeError, match=said):
        function(**{name: None})


def test_no_recipe_means_the_default_recipe() -> None:
    with autocast():
        assert active().quantize == fp8core.get_default_recipe()


def test_disabled_computes_in_high_precision() -> None:
    layer, x = Linear(32, 16), torch.randn(4, 32)
    with autocast(enabled=False, recipe=CURRENT):
        assert torch.equal(layer(x), torch.nn.functional.linear(x, layer.weight, layer.bias))


def test_a_layer_quantizes_inside_and_only_there() -> None:
    layer, x = Linear(32, 16), torch.randn(4, 32)
    exact = torch.nn.functional.linear(x, layer.weight, layer.bias)
    with autocast(recipe=CURRENT):
        assert not torch.equal(layer(x), exact)
    assert torch.equal(layer(x), exact)


def test_the_innermost_decides_and_the_outer_returns() -> None:
    seen = []
    with autocast(recipe=CURRENT):
        with autocast(recipe=MXFP8):
            seen.append(active().quantize)
            with autocast(enabled=False):
                seen.append(active().quantize)
        seen.append(active().quantize)
    assert seen == [MXFP8, None, CURRENT]


def test_the_group_of_the_outer_autocast_is_not_inherited() -> None:
    with autocast(recipe=CURRENT), autocast(recipe=MXFP8):
        assert active().group is None


def test_enabled_wins_over_calibrating() -> None:
    with autocast(enabled=True, calibrating=True, recipe=DELAYED):
        assert active() == request(quantize=DELAYED)


def test_one_object_can_be_entered_while_it_is_active() -> None:
    context = autocast(recipe=CURRENT)
    with context:
        with autocast(recipe=MXFP8), context:
            assert active().quantize == CURRENT
        assert active().quantize == CURRENT
    assert active() == OUTSIDE


def test_it_decorates_a_function_that_calls_itself() -> None:
    @autocast(recipe=CURRENT)
    def depth(left: int) -> int:
        assert active().quantize == CURRENT
        return 1 + (depth(left - 1) if left else 0)

    assert depth(3) == 4
    assert active() == OUTSIDE


def test_an_exception_restores_the_outer_recipe() -> None:
    with autocast(recipe=CURRENT):
        with pytest.raises(KeyError), autocast(recipe=MXFP8):
            raise KeyError
        assert active().quantize == CURRENT
    assert active() == OUTSIDE


def test_forward_scales_wait_for_the_outermost_exit() -> None:
    layer = Linear(32, 16)
    with autocast(recipe=DELAYED):
        with autocast(recipe=DELAYED):
            layer(torch.randn(4, 32))
        assert torch.equal(layer.scale_fwd, torch.ones(3))
    assert not torch.equal(layer.scale_fwd, torch.ones(3))


def test_a_thread_starts_with_nothing_active() -> None:
    def check() -> None:
        assert active() == OUTSIDE

    with autocast(recipe=CURRENT):
        run_in_threads(check)


def test_one_object_can_be_active_in_two_threads() -> None:
    context, barrier = autocast(recipe=CURRENT), threading.Barrier(2, timeout=30)

    def enter() -> None:
        with context:
            barrier.wait()
            assert active().quantize == CURRENT
            barrier.wait()
        barrier.wait()
        assert active() == OUTSIDE

    run_in_threads(enter, enter)


def test_two_threads_compute_with_two_recipes_at_once() -> None:
    layer, x = Linear(32, 16), torch.randn(4, 32)
    wanted = {}
    for chosen in (CURRENT, MXFP8):
        with autocast(recipe=chosen), torch.no_grad():
            wanted[chosen] = layer(x)
    barrier = threading.Barrier(2, timeout=30)

    def compute(chosen: recipe.Recipe) -> None:
        for _ in range(20):
            with autocast(recipe=chosen):
                barrier.wait()
                assert torch.equal(layer(x), wanted[chosen])

    run_in_threads(lambda: compute(CURRENT), lambda: compute(MXFP8))


def test_an_exit_in_one_thread_updates_no_scale_of_another() -> None:
    layer, ran, left = Linear(32, 16), threading.Event(), threading.Event()

    def run_layer() -> None:
        with autocast(recipe=DELAYED):
            layer(torch.randn(4, 32))
            ran.set()
            assert left.wait(30)
            assert torch.equal(layer.scale_fwd, torch.ones(3))

    def leave() -> None:
        assert ran.wait(30)
        with autocast(recipe=DELAYED):
            Linear(32, 16)(torch.randn(4, 32))
        left.set()

    run_in_threads(run_layer, leave)
    assert not torch.equal(layer.scale_fwd, torch.ones(3))


def test_the_first_use_of_a_layer_by_two_threads_makes_one_state() -> None:
    for _ in range(50):
        layer, barrier = Linear(8, 8), threading.Barrier(2, timeout=30)

        def use(layer: Linear = layer, barrier: threading.Barrier = barrier) -> None:
            with autocast(recipe=DELAYED):
                barrier.wait()
                layer(torch.randn(4, 8))

        run_in_threads(use, use)
        with autocast(recipe=DELAYED):
            states = bind(layer, DEVICE, torch.float32).states
        assert states.forward.scale is layer.scale_fwd


def test_backward_outside_has_the_bits_of_backward_inside() -> None:
    grads = []
    x = torch.randn(4, 32)
    layer = Linear(32, 16)
    for is_inside in (True, False):
        layer.reset_delayed_state()
        layer.zero_grad()
        with autocast(recipe=DELAYED):
            y = layer(x).sum()
            if is_inside:
                y.backward()
        if not is_inside:
            y.backward()
        grads.append((layer.weight.grad, layer.scale_fwd.clone(), layer.scale_bwd.clone()))
    for inside, outside in zip(*grads, strict=True):
        assert torch.equal(inside, outside)


def calibrated(layer: Linear, x: torch.Tensor) -> torch.Tensor:
    with autocast(enabled=False, calibrating=True, recipe=DELAYED):
        return layer(x)


def test_calibrating_computes_in_high_precision() -> None:
    layer, x = Linear(32, 16), torch.randn(4, 32)
    assert torch.equal(calibrated(layer, x), torch.nn.functional.linear(x, layer.weight))


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_calibrating_gives_the_scales_that_a_step_gives(mode: type) -> None:
    layer, x = Linear(32, 16), torch.randn(4, 32)
    with mode():
        calibrated(layer, x)
    stepped = Linear(32, 16)
    stepped.load_state_dict({"weight": layer.weight, "bias": layer.bias})
    with autocast(recipe=DELAYED):
        stepped(x)
    assert torch.equal(layer.scale_fwd, stepped.scale_fwd)
    assert torch.equal(layer.amax_history_fwd, stepped.amax_history_fwd)


def test_calibrating_takes_the_maximum_over_microbatches() -> None:
    layer = Linear(32, 16)
    with autocast(enabled=False, calibrating=True, recipe=DELAYED):
        for value in (2.0, 7.0, 1.0):
            layer(torch.full((4, 32), value))
    assert layer.amax_history_fwd[:, 0].tolist() == [0.0, 0.0, 0.0, 7.0]


def test_calibrating_observes_no_gradient() -> None:
    layer = Linear(32, 16)
    calibrated(layer, torch.randn(4, 32)).sum().backward()
    assert not layer.amax_history_bwd.any()


def test_calibrating_goes_on_after_inference_mode() -> None:
    layer = Linear(32, 16)
    with torch.inference_mode():
        calibrated(layer, torch.ones(4, 32))
    calibrated(layer, torch.full((4, 32), 7.0)).sum().backward()
    assert layer.amax_history_fwd[:, 0].tolist() == [0.0, 0.0, 1.0, 7.0]


def test_calibrating_a_recipe_without_state_does_nothing() -> None:
    layer, x = Linear(32, 16), torch.randn(4, 32)
    with autocast(enabled=False, calibrating=True, recipe=MXFP8):
        y = layer(x)
    assert torch.equal(y, torch.nn.functional.linear(x, layer.weight))
    assert list(layer.state_dict()) == ["weight", "bias"]


@pytest.mark.parametrize("wrong", [recipe.Float8CurrentScaling, 1])
def test_something_else_than_a_recipe_is_refused(wrong: object) -> None:
    with pytest.raises(RecipeError, match=r"autocast\(recipe=.*expected a Recipe"):
        autocast(recipe=wrong)


def test_recipe_by_name_is_the_recipe() -> None:
    with autocast(recipe="current"):
        by_name = active()
    with autocast(recipe=CURRENT):
        assert active() == by_name


def test_something_else_than_a_process_group_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"amax_reduction_group='world'.*process group"):
        autocast(recipe=DELAYED, amax_reduction_group="world")


def test_calibrating_without_delayed_scales_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    layer = Linear(32, 16, name="calibrating_is_said_once")
    for _ in range(2):
        with autocast(enabled=False, calibrating=True, recipe=CURRENT):
            layer(torch.randn(4, 32))
    lines = [one for one in caplog.messages if "calibrating_is_said_once" in one]
    assert len(lines) == 1
    assert "Float8CurrentScaling" in lines[0]


@pytest.mark.parametrize("given", [recipe.MXFP8BlockScaling(), "mxfp8", None, 1], ids=str)
def test_a_recipe_in_the_place_of_enabled_is_refused(given: object) -> None:
    for make in (autocast, fp8_autocast):
        with pytest.raises(RecipeError, match=r"enabled=.*expected True or False"):
            make(given)  # type: ignore[operator]


@pytest.mark.parametrize("first", ["no", 0, 1])
def test_is_first_microbatch_is_true_false_or_none(first: object) -> None:
    with pytest.raises(fp8core.OperandError, match="expected True, False or None"):
        Linear(32, 32)(torch.ones(4, 32), is_first_microbatch=first)


FIRST = recipe.DelayedScaling(amax_history_len=4)
SECOND = recipe.DelayedScaling(amax_history_len=4, margin=1)


def rows(value: float) -> torch.Tensor:
    return torch.full((4, 32), value)


def state(layer: Linear) -> list[torch.Tensor]:
    return [layer.scale_fwd, layer.amax_history_fwd]


def assert_same(layer: Linear, other: Linear) -> None:
    assert all(map(torch.equal, state(layer), state(other)))


def twins() -> tuple[Linear, Linear]:
    one, other = Linear(32, 16, device=DEVICE), Linear(32, 16, device=DEVICE)
    other.load_state_dict(one.state_dict())
    return one, other


def holding(chosen: recipe.Recipe) -> Iterator[None]:
    """Hold an autocast open between two steps of a generator."""
    with autocast(recipe=chosen):
        yield


def test_what_ends_first_leaves_the_other_active() -> None:
    one, other = autocast(recipe=FIRST), autocast(recipe=SECOND)
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)
    assert active().quantize == SECOND
    other.__exit__(None, None, None)
    assert active().quantize is None


def test_of_three_the_middle_one_may_end_first() -> None:
    all_three = [autocast(recipe=chosen) for chosen in (FIRST, SECOND, FIRST)]
    for one in all_three:
        one.__enter__()
    all_three[1].__exit__(None, None, None)
    assert active().quantize == FIRST
    all_three[2].__exit__(None, None, None)
    assert active().quantize == FIRST
    all_three[0].__exit__(None, None, None)
    assert active().quantize is None


def test_a_generator_that_is_closed_in_an_autocast_changes_nothing_of_it() -> None:
    interrupted, smooth = twins()
    held = holding(SECOND)
    next(held)
    with autocast(recipe=FIRST):
        interrupted(rows(2.0))
        held.close()  # GeneratorExit: an autocast that failed
        assert active().quantize == FIRST
    with autocast(recipe=FIRST):
        smooth(rows(2.0))
    assert_same(interrupted, smooth)


def test_a_generator_may_go_on_after_the_autocast_around_it() -> None:
    layer, held = Linear(32, 16, device=DEVICE), holding(FIRST)
    with autocast(recipe=SECOND):
        next(held)
        layer(rows(2.0))
    assert active().quantize == FIRST
    layer(rows(4.0))
    assert next(held, None) is None
    assert active().quantize is None
    assert layer.scale_fwd[0] == 448.0 / 4.0


def test_amaxes_of_both_become_scales_when_the_last_ends() -> None:
    layer = Linear(32, 16, device=DEVICE)
    first, second = autocast(recipe=FIRST), autocast(recipe=FIRST)
    first.__enter__()
    layer(rows(2.0))
    second.__enter__()
    layer(rows(1.0))
    first.__exit__(None, None, None)
    assert layer.scale_fwd[0] == 1.0
    second.__exit__(None, None, None)
    assert layer.scale_fwd[0] == 448.0 / 2.0


def test_one_that_fails_before_another_ends_forgets_its_own() -> None:
    one, other = Linear(32, 16, device=DEVICE), Linear(32, 16, device=DEVICE)
    first, second = autocast(recipe=FIRST), autocast(recipe=FIRST)
    first.__enter__()
    one(rows(1e6))
    second.__enter__()
    other(rows(2.0))
    first.__exit__(KeyError, None, None)
    second.__exit__(None, None, None)
    assert (one.scale_fwd[0], other.scale_fwd[0]) == (1.0, 224.0)
    assert not one.amax_history_fwd.any()


def test_ending_it_in_another_thread_is_refused_and_changes_nothing_there() -> None:
    opened, errors, seen = autocast(recipe=FIRST), [], []

    def end() -> None:
        with autocast(recipe=SECOND):
            try:
                opened.__exit__(None, None, None)
            except RecipeError as error:
                errors.append(str(error))
            seen.append(active().quantize)

    with opened:
        thread = threading.Thread(target=end)
        thread.start()
        thread.join()
        assert active().quantize == FIRST
    assert "ends in a thread that has not entered it" in errors[0]
    assert seen == [SECOND]


async def waits() -> None:
    """A coroutine."""


def yields() -> Iterator[None]:
    """A generator."""
    yield


async def both() -> AsyncIterator[None]:
    """A generator of coroutines."""
    yield


@pytest.mark.parametrize("function", [waits, yields, both])
def test_a_function_whose_body_would_run_outside_is_refused(function: Any) -> None:
    with pytest.raises(RecipeError, match=f"decorator of {function.__name__}, which is async"):
        autocast(recipe=FIRST)(function)


@pytest.mark.usefixtures("group_of_one")
def test_a_group_is_destroyed_though_layers_have_reduced_over_it() -> None:
    layer, group = Linear(32, 16, device=DEVICE), weakref.ref(dist.group.WORLD)
    with autocast(recipe=FIRST, amax_reduction_group=dist.group.WORLD):
        layer(rows(2.0)).sum().backward()
    dist.destroy_process_group()
    assert group() is None
    with autocast(recipe=FIRST):  # the request without a group is another one
        layer(rows(2.0)).sum().backward()
    assert active().process_group is None


@pytest.mark.usefixtures("group_of_one")
def test_an_autocast_whose_group_was_destroyed_says_so() -> None:
    layer = Linear(32, 16, device=DEVICE)
    context = autocast(recipe=FIRST, amax_reduction_group=dist.group.WORLD)
    with context:
        layer(rows(2.0))
    before = [one.clone() for one in layer.buffers()]
    dist.destroy_process_group()
    with pytest.raises(OperandError, match=r"amax_reduction_group=.* was destroyed"), context:
        layer(rows(4.0))
    for one, kept in zip(layer.buffers(), before, strict=True):
        assert torch.equal(one, kept)


@pytest.mark.parametrize("num_around", [0, 1])
@pytest.mark.parametrize("failed", [False, True])
def test_one_that_fails_leaves_the_group_of_those_before(failed: bool, num_around: int) -> None:
    layer, group = Linear(32, 16, device=DEVICE), cast(GroupReference, object())
    with autocast(recipe=FIRST):
        layer(rows(2.0))
    (states,) = layer._bindings.states.values()
    for _ in range(num_around + 1):
        scopes.open_scope()
    scopes.touch(states.forward, states.backward, group)
    states.forward.plan = dataclasses.replace(states.forward.plan, reduce_amax=False)
    for _ in range(num_around + 1):
        scopes.close_scope(failed=failed)
    assert states.forward.group is states.backward.group is (None if failed else group)
