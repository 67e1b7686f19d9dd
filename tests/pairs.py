"""Covering arrays: few combinations of the axes' values that have every pair, or every value."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any


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
        for indices in itertools.product(*(range(len(column)) for column in columns))
        if keep is None or keep(*values_at(columns, indices))
    ]
    for axis, values in enumerate(columns):
        if lost := set(range(len(values))) - {indices[axis] for indices in cross}:
            raise ValueError(f"no combination has {[values[index] for index in sorted(lost)]}")
    size = min(2, len(columns))
    bits: dict[object, int] = {}
    covers = {
        indices: sum(
            1 << bits.setdefault(pair, len(bits))
            for pair in itertools.combinations(enumerate(indices), size)
        )
        for indices in cross
    }
    missing = (1 << len(bits)) - 1
    chosen = []
    while missing:
        best = max(covers, key=lambda indices: (covers[indices] & missing).bit_count())
        missing &= ~covers.pop(best)
        chosen.append(best)
    return [values_at(columns, indices) for indices in sorted(chosen)]


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
