"""Results as lines of JSON, one a measurement, in any number of files of a folder.

A line stands by itself: it says which run, case and measure it belongs to. Lines of several runs
are read together; ratios are taken within a line alone, where both sides took turns.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Record", "Run", "append", "read"]

Record = dict[str, Any]
SUFFIX = ".jsonl"


def append(folder: Path, name: str, record: Mapping[str, Any]) -> None:
    """Add a line to file ``name`` of ``folder``, which is there if the process dies later."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{name}{SUFFIX}").open("a") as file:
        file.write(json.dumps(record) + "\n")


@dataclass(frozen=True, slots=True)
class Run:
    """A run, whose records in file ``name`` of ``folder`` begin with its id and ``start``."""

    folder: Path
    name: str
    start: Mapping[str, Any]
    id: str = field(default_factory=lambda: uuid.uuid4().hex[:12])

    def write(self, measure: str, **values: Any) -> None:
        """Add a record."""
        append(self.folder, self.name, {"run": self.id, **self.start, "measure": measure, **values})


def read(*folders: Path) -> list[Record]:
    """Return all records of the folders' files, in the order of files' names and lines.

    A last line without an end was cut off with its process and is left out.

    Raises:
        ValueError: another line is no JSON object.
    """
    return [record for folder in folders for record in _records(folder)]


def _records(folder: Path) -> Iterator[Record]:
    for file in sorted(folder.glob(f"*{SUFFIX}")):
        *whole, _ = file.read_text().split("\n")
        for number, line in enumerate(whole, 1):
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{file}:{number}: {error}") from None
            if not isinstance(record, dict):
                raise ValueError(f"{file}:{number}: expected a JSON object, got {line[:80]!r}")
            yield record
