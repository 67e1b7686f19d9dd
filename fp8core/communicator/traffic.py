"""What a rank has sent: calls and bytes, by collective and purpose."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["BESIDE", "IN_PARTS", "PLAIN", "Count", "Traffic"]

PLAIN = "plain"
"""A collective of the process group."""
BESIDE = "beside products"
"""Copies between ranks that a backend runs beside its products."""
IN_PARTS = "in parts"
"""Such copies, of a product's operand or result: each rank's rows are multiplied by themselves,
while others travel."""


class Count(NamedTuple):
    """How many collectives a rank took part in, and how many bytes it sent in them."""

    calls: int = 0
    bytes: int = 0


class Traffic:
    """Counts by ``(collective, purpose)``, such as ``("gather", "input")``.

    Bytes are those that leave one rank of ``p``: of a gather ``p - 1`` times its shard, of a
    scatter the parts of the others, of a sum or maximum what a ring sends, ``2 (p - 1) / p`` of the
    tensor, of an exchange the rows for others. Collectives of a
    captured graph are not counted.
    """

    __slots__ = ("_counts", "_ways")

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], Count] = {}
        self._ways: dict[tuple[str, str], str] = {}

    def add(self, collective: str, purpose: str, num_bytes: int, way: str = PLAIN) -> None:
        """Count one call, which ran in the given ``way``."""
        self._ways[collective, purpose] = way
        calls, total = self._counts.get((collective, purpose), (0, 0))
        self._counts[collective, purpose] = Count(calls + 1, total + num_bytes)

    def way(self, collective: str, purpose: str) -> str:
        """Return how the last collective of that purpose ran: :data:`PLAIN`, :data:`BESIDE` or
        :data:`IN_PARTS`."""
        return self._ways.get((collective, purpose), PLAIN)

    def clear(self) -> None:
        """Start again from zero."""
        self._counts.clear()
        self._ways.clear()

    @property
    def total(self) -> Count:
        """All collectives together."""
        return Count(*(sum(column) for column in zip(Count(), *self._counts.values(), strict=True)))

    def __getitem__(self, key: tuple[str, str]) -> Count:
        """Return the count of one collective and purpose; zeros if there was none."""
        return self._counts.get(key, Count())

    def __iter__(self) -> Iterator[tuple[tuple[str, str], Count]]:
        """Yield ``((collective, purpose), count)`` in the order of the first calls."""
        return iter(list(self._counts.items()))
