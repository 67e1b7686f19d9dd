"""The library's one logger, and lines that are said once."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

__all__ = ["log_once", "logger", "some"]

logger = logging.getLogger("fp8core")

_said: set[str] = set()
_said_lock = threading.Lock()


def log_once(line: str, level: int = logging.WARNING, *, about: str | None = None) -> None:
    """Log ``line`` the first time this process says it, or says anything ``about`` the same."""
    said = line if about is None else about
    with _said_lock:
        is_new = said not in _said
        _said.add(said)
    if is_new:
        logger.log(level, "%s", line)


def some(names: Sequence[str], shown: int = 3) -> str:
    """Return the first ``shown`` names, and how many more there are.

    >>> some(["a", "b", "c"], shown=2)
    'a, b and 1 more'
    """
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more
