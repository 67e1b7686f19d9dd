"""Covering arrays: few combinations of the axes' values in which every pair of values occurs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any


def pairs(*axes: Sequence[Any], keep: Callable[..., bool] | None = None) -> list[tuple[Any, ...]]:
    """Combinations of one value an axis, such that each pair of two axes' values occurs in one.

    ``keep(*values)`` says which combinations are valid; a pair that none of these has is left out.
    The same arguments give the same combinations, in the order of the full cross::

        @pytest.mark.parametrize(("name", "dtype", "rows"), pairs(RECIPES, DTYPES, [1, 32]))

    Faults that need three values at once may go unfound: such a combination is a case of its own.

    Raises:
        ValueError: A value occurs in no valid combination.
    """
    cross = [
        indices
        for indices in itertools.product(*(range(len(axis)) for axis in axes))
        if keep is None or keep(*(axis[index] for axis, index in zip(axes, indices, strict=True)))
    ]
    for axis, values in enumerate(axes):
        if lost := set(range(len(values))) - {indices[axis] for indices in cross}:
            raise ValueError(f"no combination has {[values[index] for index in sorted(lost)]}")
    size = min(2, len(axes))
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
    return [
        tuple(axis[index] for axis, index in zip(axes, indices, strict=True))
        for indices in sorted(chosen)
    ]
