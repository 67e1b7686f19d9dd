"""The library's logger, lines that are logged once, and lists of names, shortened and by class."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence

logger = logging.getLogger("fp8core")

_logged: set[str] = set()
_logged_lock = threading.Lock()


def log_once(line: str, level: int = logging.WARNING, *, about: str | None = None) -> None:
    """Log ``line`` once in this process; with ``about``, one line for each value of ``about``."""
    topic = line if about is None else about
    with _logged_lock:
        is_new = topic not in _logged
        _logged.add(topic)
    if is_new:
        logger.log(level, "%s", line)


def tell(line: str) -> None:
    """Log ``line`` at INFO; on stderr, where the program has set up no logging at all."""
    if logger.hasHandlers() or logger.level or logger.disabled:
        logger.info("%s", line)
    elif logger.manager.disable < logging.INFO:
        fields = (logger.name, logging.INFO, __file__, 0, "%s", (line,), None)
        logging.StreamHandler().handle(logger.makeRecord(*fields))


collected: dict[str, dict[str, None]] = {}
"""The layers that say a text, until :func:`log_collected`."""


def collect(layer: str, text: str) -> None:
    """Have the next :func:`log_collected` warn of ``text``, once in this process for each layer."""
    with _logged_lock:
        if (line := f"{layer}: {text}") not in _logged:
            _logged.add(line)
            collected.setdefault(text, {})[layer] = None


def log_collected() -> None:
    """Log a line for each text, with the number and the first of its layers."""
    with _logged_lock:
        texts = dict(collected)
        collected.clear()
    for text, layers in texts.items():
        names = list(layers)
        subject = names[0] if len(names) == 1 else f"{len(names)} layers ({some(names)})"
        logger.warning("%s", f"{subject}: {text}")


def some(names: Sequence[str], shown: int = 3) -> str:
    """Return the first ``shown`` names, and the number of the others.

    >>> some(["a", "b", "c"], shown=2)
    'a, b and 1 more'
    """
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more


def grouped(entries: Iterable[tuple[str, str, str]]) -> list[str]:
    """Return one line for each class and reason, with the names of its entries.

    An entry is ``(name, class, reason)``.

    >>> grouped([("a", "Conv1D", "no linear"), ("b", "Conv1D", "no linear"), ("", "Tiny", "")])
    ['2 Conv1D (a, b): no linear', '1 Tiny (the model itself)']
    """
    groups: dict[tuple[str, str], list[str]] = {}
    for name, layer, reason in entries:
        groups.setdefault((layer, reason), []).append(name or "the model itself")
    return [
        f"{len(names)} {layer} ({some(names)}){f': {reason}' if reason else ''}"
        for (layer, reason), names in groups.items()
    ]
