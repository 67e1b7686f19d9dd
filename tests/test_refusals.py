"""What tests are written with: tables of calls that have to be refused, and cases of each pair."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.pairs import pairs, turns
from tests.refusals import unrefused


def test_what_is_not_refused_is_named() -> None:
    call = partial(int, "x")
    table = {
        "refused": (call, ValueError, "invalid literal"),
        "with other words": (call, ValueError, "something else"),
        "with another error": (call, TypeError, "invalid literal"),
        "taken": (dict, ValueError, ""),
    }
    said = "raised ValueError: invalid literal for int() with base 10: 'x'"
    assert unrefused(table) == {
        "with other words": said,
        "with another error": said,
        "taken": "returned dict",
    }


AXES = st.lists(st.integers(1, 4).map(lambda size: [*range(size)]), min_size=1, max_size=5)


def pairs_of(combinations: list[tuple[int, ...]]) -> set[object]:
    return {
        pair
        for combination in combinations
        for pair in itertools.combinations(enumerate(combination), min(2, len(combination)))
    }


@given(axes=AXES, forbidden=st.integers(0, 8))
def test_every_valid_pair_occurs_and_no_invalid_combination(
    axes: list[list[int]], forbidden: int
) -> None:
    def keep(*values: int) -> bool:
        return sum(values) != forbidden or len(set(values)) == 1

    valid = [values for values in itertools.product(*axes) if keep(*values)]
    if any({values[i] for values in valid} != set(axis) for i, axis in enumerate(axes)):
        with pytest.raises(ValueError, match="no combination has"):
            pairs(*axes, keep=keep)
        return
    combinations = pairs(*axes, keep=keep)
    assert set(combinations) <= set(valid)
    assert pairs_of(combinations) == pairs_of(valid)


@given(axes=AXES)
def test_every_value_gets_its_turn(axes: list[list[int]]) -> None:
    combinations = turns(*axes)
    assert len(combinations) == max(map(len, axes))
    assert [{*column} for column in zip(*combinations, strict=True)] == [{*axis} for axis in axes]


def test_far_fewer_than_the_full_cross() -> None:
    assert len(pairs(*[range(3)] * 4)) <= 12  # of 81
    assert len(pairs(*[range(2)] * 10)) <= 10  # of 1,024


def test_the_same_arguments_give_the_same_combinations() -> None:
    assert pairs("abc", [[], {}], "xyz") == pairs("abc", [[], {}], "xyz")
