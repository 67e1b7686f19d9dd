"""Covering arrays: few combinations of the axes' values that have every pair, or every value."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np


def pairs(*axes: Iterable[Any], keep: Callable[..., bool] | None = None) -> list[tuple[Any, ...]]:
    """Combinations of one value an axis, such that each pair of two axes' values occurs in one.

    ``keep(*values)`` says which combinations are valid; a pair that none of these has is left out.
    The same arguments give the same combinations, in the order of the full cross::

        @pytest.mark.parametrize(("name", "dtype", "rows"), pairs(RECIPES, DTYPES, [1, 32]))

    Faults that need three values at once may go unfound: such a combination is a case of its own.

    Raises:
        ValueError: A value occurs in no valid combination.
    """
    columns = [[*axis] for axis in axes]
    cross = [
        indices
        for indices, values in zip(
            itertools.product(*(range(len(column)) for column in columns)),
            itertools.product(*columns),
            strict=True,
        )
        if keep is None or keep(*values)
    ]
    for axis, values in enumerate(columns):
        if lost := set(range(len(values))) - {indices[axis] for indices in cross}:
            raise ValueError(f"no combination has {[values[index] for index in sorted(lost)]}")
    numbers = np.array(cross).reshape(len(cross), len(columns))
    each = [
        np.equal.outer(numbers[:, axis], range(len(values))) for axis, values in enumerate(columns)
    ]
    together = [
        (one[:, :, None] & other[:, None]).reshape(len(cross), -1)
        for one, other in itertools.combinations(each, 2)
    ]
    chosen = covering(np.concatenate(together or each, 1))
    return [values_at(columns, cross[at]) for at in sorted(chosen)]


def covering(has: np.ndarray) -> list[int]:
    """Few of the rows of ``has [rows, elements]`` in which each element is that a row has."""
    counted, chosen = has.astype(np.float32), list[int]()
    missing = has.any(0).astype(np.float32)
    while missing.any():
        chosen.append(int((counted @ missing).argmax()))
        missing[has[chosen[-1]]] = 0
    return chosen


def values_at(columns: Sequence[Sequence[Any]], indices: Sequence[int]) -> tuple[Any, ...]:
    return tuple(column[index] for column, index in zip(columns, indices, strict=True))


def turns(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """As many combinations as the longest axis has values: those of shorter ones take turns.

    For axes whose values meet in no line of code, as the formats that a call may have and the
    dtypes that it converts to.
    """
    columns = [[*axis] for axis in axes]
    longest = max(map(len, columns))
    return [tuple(column[at % len(column)] for column in columns) for at in range(longest)]
