"""Lines of Markdown tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["head", "line"]


def head(columns: Sequence[str]) -> list[str]:
    """Return the first two lines of a table."""
    return [line(columns), "|---" * len(columns) + "|"]


def line(values: Iterable[str]) -> str:
    """Return a line of a table."""
    return f"| {' | '.join(value.replace('|', '/') for value in values)} |"
