"""Autocasts that end in another order than they began, and what each leaves behind."""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import AsyncIterator, Iterator
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from fp8core import Linear, OperandError, RecipeError, autocast, recipe
from fp8core.collectives.base import GroupReference
from fp8core.context import scopes
from fp8core.context.autocast import active
from tests.device import DEVICE

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
