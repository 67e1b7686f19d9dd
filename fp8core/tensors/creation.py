"""The order in which a process has created its layers, by which ranks know the same layer."""

from __future__ import annotations

import itertools

__all__ = ["new_order", "num_created"]

_orders = itertools.count()
_latest = -1


def new_order() -> int:
    """Return the number of a layer that is created now."""
    global _latest
    _latest = next(_orders)
    return _latest


def num_created() -> int:
    """Return how many layers were created so far, whether they still exist or not."""
    return _latest + 1
