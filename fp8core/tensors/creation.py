"""The numbers of the layers of a process, by which ranks know the same layer."""

from __future__ import annotations

import threading
from collections import Counter
from typing import TypeAlias

__all__ = ["Family", "Order", "family_of", "new_order", "num_created", "shown"]

Order: TypeAlias = "tuple[int, ...]"
"""A layer's number in the order of creation, ``(n,)``; of a copy ``(n, m)``: it is the m-th copy of
layer n, as a copy on one rank alone must not change the numbers of layers that all ranks create."""

Family: TypeAlias = "tuple[int, ...]"
"""Layers that are numbered together: ``()`` for those created, ``(n,)`` for copies of layer n."""

_created: Counter[Family] = Counter()
_lock = threading.Lock()


def new_order(original: Order | None = None) -> Order:
    """Return the number of a layer that is created now, or copied from ``original``.

    A copy of a copy is one more of the layer that was created.
    """
    family = () if original is None else original[:1]
    with _lock:
        number = _created[family]
        _created[family] = number + 1
    return (*family, number)


def family_of(order: Order) -> Family:
    """Return the family of a layer."""
    return order[:-1]


def num_created() -> Counter[Family]:
    """Return how many layers of each family there were so far, whether they still exist or not."""
    with _lock:
        return _created.copy()


def shown(order: Order) -> str:
    """Return the number in words."""
    number = f"layer {order[0]} of its process"
    return number if len(order) == 1 else f"copy {order[1]} of {number}"
