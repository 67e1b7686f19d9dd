"""The delayed-scaling update against a loop over slots, and each of its edges."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from fp8core.backend_api import ScaleUpdateDesc
from fp8core_backends.reference.backend import ReferenceBackend
from fp8core_backends.reference.scaling import scale_update

INF, NAN = math.inf, math.nan
FLOAT32_MAX = float(np.finfo(np.float32).max)
ALGORITHMS = ["max", "most_recent"]
each_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS)


def update(
    algorithm: str,
    histories: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    targets: Sequence[torch.Tensor],
) -> None:
    run = ReferenceBackend().bind(ScaleUpdateDesc(algorithm), torch.device("cpu"))
    assert run(histories, scales, targets) is None


def update_one(
    algorithm: str, history: list[float], scale: float = 2.0, target: float = 448.0
) -> tuple[list[float], float]:
    """Update one state of one slot; returns its history and scale."""
    histories, scales = torch.tensor([history]).t().clone(), torch.tensor([scale])
    update(algorithm, [histories], [scales], [torch.tensor([target])])
    return histories[:, 0].tolist(), scales.item()


def slow_update(
    algorithm: str, history: list[float], scale: float, target: float
) -> tuple[list[float], float]:
    """numerics.md 3.1, one slot, in words; a non-finite newest amax is not recorded."""
    newest, older = history[0], history[1:]
    if not (math.isfinite(newest) and newest > 0):
        return [0.0, *older], scale
    amax = max([*older, newest]) if algorithm == "max" else newest
    if math.isfinite(amax):
        with np.errstate(over="ignore"):
            scale = min(float(np.float32(target) / np.float32(amax)), FLOAT32_MAX)
    return [0.0, *[*older, newest][1:]], scale


AMAXES = st.sampled_from((0.0, 1e-45, 1e-3, 0.7, 3.0, 448.0, 1e38, INF, NAN)) | st.floats(
    0, width=32
)
STATES = st.tuples(st.integers(1, 5), st.integers(1, 4)).flatmap(
    lambda shape: st.lists(
        st.lists(AMAXES, min_size=shape[1], max_size=shape[1]),
        min_size=shape[0],
        max_size=shape[0],
    )
)


@given(algorithm=st.sampled_from(ALGORITHMS), states=st.lists(STATES, max_size=4))
def test_all_states_at_once_equal_a_loop_over_their_slots(
    algorithm: str, states: list[list[list[float]]]
) -> None:
    # Older entries are finite: a non-finite amax is never recorded.
    histories = [torch.tensor(state, dtype=torch.float32) for state in states]
    for history in histories:
        history[1:] = history[1:].nan_to_num(nan=5.0, posinf=7.0)
    scales = [torch.arange(1.0, 1 + history.shape[1]) for history in histories]
    targets = [scale * 100 for scale in scales]
    expected = [
        [
            slow_update(algorithm, history[:, slot].tolist(), *pair)
            for slot, pair in enumerate(zip(scale.tolist(), target.tolist(), strict=True))
        ]
        for history, scale, target in zip(histories, scales, targets, strict=True)
    ]
    update(algorithm, histories, scales, targets)
    made = [
        [(history[:, slot].tolist(), value) for slot, value in enumerate(scale.tolist())]
        for history, scale in zip(histories, scales, strict=True)
    ]
    assert made == expected


def test_max_takes_the_oldest_into_account_before_it_is_dropped() -> None:
    assert update_one("max", [2.0, 7.0, 1.0, 3.0]) == ([0.0, 1.0, 3.0, 2.0], 64.0)


def test_max_takes_the_newest_into_account() -> None:
    assert update_one("max", [7.0, 2.0, 1.0]) == ([0.0, 1.0, 7.0], 64.0)


def test_most_recent_takes_the_newest_alone() -> None:
    assert update_one("most_recent", [2.0, 7.0, 1.0]) == ([0.0, 1.0, 2.0], 224.0)


def test_window_rolls_oldest_first_over_several_updates() -> None:
    history, scale = torch.zeros(3, 1), torch.ones(1)
    seen = []
    for newest in (8.0, 4.0, 2.0, 1.0):
        history[0] = newest
        update("max", [history], [scale], [torch.tensor([8.0])])
        seen.append((history[:, 0].tolist(), scale.item()))
    assert seen == [
        ([0.0, 0.0, 8.0], 1.0),
        ([0.0, 8.0, 4.0], 1.0),
        ([0.0, 4.0, 2.0], 1.0),  # 8 was taken into account once more, then dropped
        ([0.0, 2.0, 1.0], 2.0),
    ]


@each_algorithm
def test_zero_amax_leaves_everything(algorithm: str) -> None:
    assert update_one(algorithm, [0.0, 7.0, 1.0]) == ([0.0, 7.0, 1.0], 2.0)


@each_algorithm
@pytest.mark.parametrize("newest", [INF, NAN])
def test_newest_amax_that_is_not_finite_is_not_recorded(algorithm: str, newest: float) -> None:
    assert update_one(algorithm, [newest, 7.0, 1.0]) == ([0.0, 7.0, 1.0], 2.0)


def test_inf_that_was_imported_freezes_the_scale_only_while_it_is_in_the_window() -> None:
    history, scale = update_one("max", [4.0, INF, 1.0])
    assert (history, scale) == ([0.0, 1.0, 4.0], 2.0)
    assert update_one("max", [7.0, *history[1:]], scale) == ([0.0, 4.0, 7.0], 64.0)


@each_algorithm
def test_history_of_length_1_has_the_newest_alone(algorithm: str) -> None:
    assert update_one(algorithm, [7.0]) == ([0.0], 64.0)
    assert update_one(algorithm, [0.0]) == ([0.0], 2.0)
    assert update_one(algorithm, [INF]) == ([0.0], 2.0)


@each_algorithm
def test_scale_that_overflows_is_the_largest_float32(algorithm: str) -> None:
    assert update_one(algorithm, [1e-40, 0.0])[1] == FLOAT32_MAX


def test_scale_is_the_correctly_rounded_quotient() -> None:
    amax = torch.rand(1, 5000) + 0.5
    scale, target = torch.ones(5000), torch.full((5000,), 448.0)
    expected = np.float32(448) / amax[0].numpy()  # numpy divides float32 as IEEE 754 says
    update("max", [amax], [scale], [target])
    assert np.array_equal(scale.numpy(), expected)


def test_slot_without_amax_is_left_while_its_neighbour_is_updated() -> None:
    history, scale = torch.tensor([[0.0, 2.0], [5.0, 6.0]]), torch.tensor([3.0, 3.0])
    update("most_recent", [history], [scale], [torch.tensor([448.0, 448.0])])
    assert history.tolist() == [[0.0, 0.0], [5.0, 2.0]]
    assert scale.tolist() == [3.0, 224.0]


def test_views_are_updated_in_place() -> None:
    buffer, scales = torch.ones(4, 3), torch.ones(6)
    update("max", [buffer[1:, ::2]], [scales[1:6:3]], [torch.tensor([8.0, 16.0])])
    assert buffer.tolist() == [[1, 1, 1], [0, 1, 0], [1, 1, 1], [1, 1, 1]]
    assert scales.tolist() == [1, 8, 1, 1, 16, 1]


def test_targets_are_not_written() -> None:
    target = torch.tensor([448.0])
    update("max", [torch.ones(2, 1)], [torch.ones(1)], [target])
    assert target.tolist() == [448.0]


def test_no_state_is_no_work() -> None:
    update("max", [], [], [])


class FailingAt(TorchDispatchMode):
    """Has the operator of that number raise."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.left = number

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.left -= 1
        if self.left == 0:
            raise torch.OutOfMemoryError
        return func(*args, **(kwargs or {}))


@each_algorithm
def test_out_of_memory_anywhere_changes_no_state(algorithm: str) -> None:
    number, is_failing = 0, True
    while is_failing:
        number, is_failing = number + 1, False
        own = [torch.ones(length, 3) for length in (4, 5)] + [torch.ones(3) for _ in range(2)]
        before = [each.clone() for each in own]
        targets, counts = [torch.ones(3)] * 2, [torch.zeros(1, dtype=torch.int64)] * 2
        try:
            with FailingAt(number):
                scale_update(ScaleUpdateDesc(algorithm), own[:2], own[2:], targets, counts)
        except torch.OutOfMemoryError:
            is_failing = True
            assert all(map(torch.equal, before, own)), number
    assert number > 10
