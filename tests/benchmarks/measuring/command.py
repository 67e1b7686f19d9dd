"""Options of the benchmarks' commands, and jobs that travel to other processes as one argument.

Imports no torch, which takes seconds: a command that starts processes does without.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from typing_extensions import Self

__all__ = ["DONE", "HIGH", "Job", "parser_of", "run_ranks"]

HIGH = "bf16"
"""The name of a layer without a recipe."""
DONE = "done"
"""Of a record which says that something was measured to its end."""


def parser_of(
    module: str, description: str | None, /, **choices: Iterable[str]
) -> argparse.ArgumentParser:
    """Return a parser with ``--out``, ``--merge`` and an option for each of ``choices``.

    Such an option takes some of its choices; left out, it has all of them.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m tests.benchmarks.{module}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for name, values in choices.items():
        names = list(values)
        parser.add_argument(f"--{name}", nargs="+", choices=names, default=names)
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--merge", type=Path, nargs="+", metavar="DIR")
    return parser


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What other processes measure.

    ``seconds`` is the most that each measure's turns take, ``width`` the width of intervals at
    which they end earlier.
    """

    size_name: str
    recipes: tuple[str, ...]
    libraries: tuple[str, ...]
    out: str
    seconds: float = 12.0
    width: float = 0.01

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the job that :meth:`to_json` wrote."""
        fields = json.loads(text).items()
        return cls(**{key: tuple(own) if isinstance(own, list) else own for key, own in fields})

    def to_json(self) -> str:
        """Return the job as one line."""
        return json.dumps(asdict(self))


def run_ranks(module: str, arguments: Sequence[str], ranks: int, timeout: float) -> list[int]:
    """Run ``module`` in ``ranks`` processes; return their exit statuses, ``[1]`` after ``timeout``.

    Behind ``arguments`` each gets its rank and the folder in which they meet.
    """
    command = [sys.executable, "-m", f"tests.benchmarks.{module}", *arguments]
    with tempfile.TemporaryDirectory() as folder:
        children = [subprocess.Popen([*command, str(rank), folder]) for rank in range(ranks)]
        try:
            return [child.wait(timeout) for child in children]
        except subprocess.TimeoutExpired:
            return [1]
        finally:
            for child in children:
                child.kill()
                child.wait()
