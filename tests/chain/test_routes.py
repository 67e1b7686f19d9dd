"""Where rows go whose experts are on several ranks."""

from __future__ import annotations

import torch

from fp8core.chain.routes import Routes
from tests.device import DEVICE

COUNTS = ((4, 0, 8, 2), (6, 10, 0, 2))


def test_each_rank_sends_the_rows_of_the_others_experts() -> None:
    first, second = (Routes.of(COUNTS, rank) for rank in (0, 1))
    assert (first.sent, second.sent) == ((4, 10), (16, 2))
    assert (first.received, second.received) == ((4, 16), (10, 2))


def test_the_rows_of_an_expert_come_from_all_ranks() -> None:
    assert [Routes.of(COUNTS, rank).splits for rank in (0, 1)] == [(10, 10), (8, 4)]


def test_rows_are_ordered_by_expert_then_by_rank() -> None:
    order = Routes.of(COUNTS, 1).order(DEVICE)
    # Expert 2 has 8 rows from rank 0 and none from rank 1, expert 3 two from each.
    assert order.tolist() == [*range(8), 8, 9, 10, 11]
    order = Routes.of(COUNTS, 0).order(DEVICE)
    assert order.tolist() == [*range(4), *range(4, 10), *range(10, 20)]
    swapped = Routes.of(((1, 2), (3, 1)), 0)
    assert swapped.order(DEVICE).tolist() == [0, 1, 2, 3]
    both = Routes.of(((1, 2, 0, 0), (3, 1, 0, 0)), 0)
    assert both.order(DEVICE).tolist() == [0, 3, 4, 5, 1, 2, 6]


def test_the_default_device_is_not_that_of_the_order() -> None:
    with torch.device("meta"):
        order = Routes.of(COUNTS, 1).order(torch.device("cpu"))
    assert order.tolist() == list(range(12))


def test_entries_of_several_rows_have_the_same_order() -> None:
    routes = Routes.of(COUNTS, 0)
    assert routes.unit == 2
    rows, pairs = (routes.order(DEVICE, step) for step in (1, 2))
    assert torch.equal(rows[::2] // 2, pairs)
