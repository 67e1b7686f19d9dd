"""The library's logger, lines that are logged once, and lists of names, shortened and by class."""

from __future__ import annotations

import logging
import math
import re
import threading
from collections.abc import Iterable, Iterator, Sequence

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


def columns(table: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the rows of a table, padded to columns.

    >>> [*columns([["a", "b"], ["long", ""]])]
    ['a     b', 'long']
    """
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        yield "  ".join(map(str.ljust, row, widths)).rstrip()


_NUMBER = re.compile(r"\b\d+\b")


def folded(names: Iterable[str]) -> list[str]:
    """Return ``names`` with those that differ in numbers alone as one, each number as its range.

    Names whose numbers are not all combinations of some are left as they are.

    >>> folded(["layers.0.up", "layers.0.down", "layers.1.up", "layers.1.down", "head"])
    ['layers.0-1.up', 'layers.0-1.down', 'head']
    >>> folded(["0.experts.0", "0.experts.1", "2.experts.0", "2.experts.1"])
    ['0,2.experts.0-1']
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(_NUMBER.sub("*", name), []).append(name)
    texts: list[str] = []
    for members in groups.values():
        numbers = [
            sorted({*map(int, at)}) for at in zip(*map(_NUMBER.findall, members), strict=True)
        ]
        is_product = math.prod(map(len, numbers)) == len(members)
        ranges = map(_ranges, numbers)
        texts += (
            [_NUMBER.sub(lambda _, ranges=ranges: next(ranges), members[0])]  # type: ignore[misc]  # bound now
            if is_product
            else members
        )
    return texts


def _ranges(numbers: Sequence[int]) -> str:
    """Return ascending ``numbers`` as text: ``0-3,5``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
