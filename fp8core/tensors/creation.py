"""The order in which a process has created its layers, by which ranks know the same layer."""

from __future__ import annotations

import itertools
from weakref import WeakValueDictionary

__all__ = ["Creation", "orders_of_all"]

_orders = itertools.count()


class Creation:
    """The creation of a layer, which holds this object as long as it exists."""

    __slots__ = ("__weakref__", "order")

    def __init__(self) -> None:
        self.order = next(_orders)
        _existing[self.order] = self


_existing: WeakValueDictionary[int, Creation] = WeakValueDictionary()


def orders_of_all() -> list[int]:
    """Return the orders of all layers that exist, the first created first."""
    return sorted(_existing)
