"""The library's one logger, and lines that are said once."""

from __future__ import annotations

import logging
import threading

__all__ = ["log_once", "logger"]

logger = logging.getLogger("fp8core")

_said: set[str] = set()
_said_lock = threading.Lock()


def log_once(line: str) -> None:
    """Log ``line`` as a warning the first time this process says it."""
    with _said_lock:
        is_new = line not in _said
        _said.add(line)
    if is_new:
        logger.warning("%s", line)
