"""What a rank has sent: calls and bytes, by collective and purpose."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["BESIDE", "IN_PARTS", "PLAIN", "READ", "Count", "Traffic"]

PLAIN = "plain"
"""A collective of the process group."""
BESIDE = "beside products"
"""Copies between ranks that a backend runs beside its products."""
IN_PARTS = "in parts"
"""Such copies, of a product's operand or result: each rank's rows are multiplied by themselves,
while others travel."""
READ = "read by each rank"
"""Numbers that a backend reads from the memory of the other ranks."""


class Count(NamedTuple):
    """How many collectives a rank took part in, and how many bytes it sent in them."""

    calls: int = 0
    bytes: int = 0


class _Entry:
    """A count that grows, and the way of the last call: a step of training makes no new ones."""

    __slots__ = ("bytes", "calls", "way")

    def __init__(self) -> None:
        self.calls = self.bytes = 0
        self.way = PLAIN

    @property
    def count(self) -> Count:
        """What it has come to."""
        return Count(self.calls, self.bytes)


class Traffic:
    """Counts by ``(collective, purpose)``, such as ``("gather", "input")``.

    Bytes are those that leave one rank of ``p``: of a gather ``p - 1`` times its shard, of a
    scatter the parts of the others, of a sum or maximum what a ring sends, ``2 (p - 1) / p`` of the
    tensor, of an exchange the rows for others. Collectives of a
    captured graph are not counted.
    """

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], _Entry] = {}

    def add(self, collective: str, purpose: str, num_bytes: int, way: str = PLAIN) -> None:
        """Count one call, which ran in the given ``way``."""
        key = collective, purpose
        entry = self._counts.get(key)
        if entry is None:
            entry = self._counts[key] = _Entry()
        entry.calls += 1
        entry.bytes += num_bytes
        entry.way = way

    def note_way(self, collective: str, purpose: str, way: str) -> None:
        """Note that the latest call of that purpose ran in another way than was counted."""
        self._counts[collective, purpose].way = way

    def way(self, collective: str, purpose: str) -> str:
        """Return how the last collective of that purpose ran: :data:`PLAIN`, :data:`BESIDE`,
        :data:`IN_PARTS` or :data:`READ`."""
        entry = self._counts.get((collective, purpose))
        return PLAIN if entry is None else entry.way

    def clear(self) -> None:
        """Start again from zero."""
        self._counts.clear()

    @property
    def total(self) -> Count:
        """All collectives together."""
        counts = [one.count for one in self._counts.values()]
        return Count(*(sum(column) for column in zip(Count(), *counts, strict=True)))

    def __getitem__(self, key: tuple[str, str]) -> Count:
        """Return the count of one collective and purpose; zeros if there was none."""
        entry = self._counts.get(key)
        return Count() if entry is None else entry.count

    def __iter__(self) -> Iterator[tuple[tuple[str, str], Count]]:
        """Yield ``((collective, purpose), count)`` in the order of the first calls."""
        return iter([(key, one.count) for key, one in self._counts.items()])
