"""What is measured: layers split over ranks, their sizes and recipes, and the job of the ranks.

Imports no torch, which takes seconds: the command itself does without, its ranks import it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import NamedTuple

__all__ = ["DONE", "FILE", "HIGH", "KINDS", "RECIPES", "SIZES", "Job", "Size"]

HIGH = "bf16"
"""The name of a layer without a recipe."""
RECIPES = (HIGH, "delayed", "current", "block")
KINDS = ("sequence_parallel", "fsdp")
FILE = "parallel"
"""The name of the file that rank 0 adds to."""
DONE = "done"
"""Of the record which says that a cell was measured to its end."""


class Size(NamedTuple):
    """Tokens of all ranks together, features, features inside of the MLP, layers under FSDP."""

    tokens: int
    hidden: int
    ffn: int
    layers: int


SIZES = {
    "tiny": Size(256, 512, 2048, 2),
    "8B": Size(8192, 4096, 14336, 4),
    "70B": Size(8192, 8192, 28672, 1),
}


@dataclass(frozen=True, slots=True)
class Job:
    """What the ranks measure: one kind at one size.

    ``seconds`` is the most that each measure's turns take, ``width`` the width of intervals at
    which they end.
    """

    kind: str
    size_name: str
    recipes: tuple[str, ...]
    libraries: tuple[str, ...]
    ranks: int
    device: str
    out: str
    seconds: float = 12.0
    width: float = 0.01

    @property
    def size(self) -> Size:
        """The size."""
        return SIZES[self.size_name]

    @classmethod
    def from_json(cls, text: str) -> Job:
        """Return the job that :meth:`to_json` wrote."""
        fields = json.loads(text)
        for name in ("recipes", "libraries"):
            fields[name] = tuple(fields[name])
        return cls(**fields)

    def to_json(self) -> str:
        """Return the job as one line."""
        return json.dumps(asdict(self))
