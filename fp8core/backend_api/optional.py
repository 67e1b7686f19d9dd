"""Optional: operands that are made while they are read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from fp8core.backend_api.operands import Operand

__all__ = ["Parts"]


class Parts(Protocol):
    """A rowwise operand ``[rows, k]`` that is made while it is read, once, some rows at a time.

    Iterating yields ``(start, end, operand)``, the operand of rows ``start`` to ``end``, which is
    good until the next is asked for. Together they are all rows, in order. The columnwise operand
    is whole when there are no more.
    """

    rows: int

    def __iter__(self) -> Iterator[tuple[int, int, Operand]]: ...
