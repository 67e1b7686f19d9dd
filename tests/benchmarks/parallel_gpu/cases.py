"""What is measured: layers split over ranks, their sizes and recipes, and the job of the ranks.

Imports no torch, which takes seconds: the command itself does without, its ranks import it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from tests.benchmarks.measuring import command
from tests.benchmarks.measuring.command import HIGH

__all__ = ["FILE", "HIGH", "KINDS", "RECIPES", "SIZES", "Job", "Size"]

RECIPES = (HIGH, "delayed", "current", "block")
KINDS = {
    "sequence_parallel": ("trial", "tiny", "8B", "70B"),
    "fsdp": ("trial", "tiny", "8B", "70B"),
    "decoder": ("trial", "tiny", "125M", "8B"),
}
"""The sizes of each kind; ``trial`` is for CPUs."""
FILE = "parallel"
"""The name of the file that rank 0 adds to."""


class Size(NamedTuple):
    """Tokens of all ranks together, features, features inside of the MLP, layers under FSDP."""

    tokens: int
    hidden: int
    ffn: int
    layers: int


SIZES = {
    "tiny": Size(256, 512, 2048, 2),
    "trial": Size(64, 64, 128, 1),
    "125M": Size(32768, 1024, 2688, 10),
    "8B": Size(8192, 4096, 14336, 4),
    "70B": Size(8192, 8192, 28672, 1),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job(command.Job):
    """What the ranks measure: one kind at one size."""

    kind: str
    ranks: int
    device: str

    @property
    def size(self) -> Size:
        """The size."""
        return SIZES[self.size_name]

    @property
    def measures(self) -> tuple[str, ...]:
        """The measures that are taken in turns."""
        has_host = self.size_name == "tiny" or self.kind == "decoder"
        return ("eager", "host") if has_host else ("eager",)
