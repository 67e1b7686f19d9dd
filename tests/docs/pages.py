"""The Markdown pages of the documentation and the code blocks in them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent.parent
DOCS = ROOT / "docs"
README = ROOT / "README.md"
PAGES = sorted(DOCS.rglob("*.md"))
NO_RUN = "no-run"
"""In a fence's info string, after ``python``: a block that is not meant to run."""

_FENCE = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<code>.*?)^```$", re.DOTALL | re.MULTILINE)


class Block(NamedTuple):
    """A fenced block: its info string, its text, and the line of the page that it begins on."""

    info: str
    code: str
    line: int

    @property
    def runs(self) -> bool:
        """Whether it is Python that the tests run."""
        language, *marks = self.info.split() or [""]
        return language == "python" and NO_RUN not in marks


def blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of ``page`` in order."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(found["info"].strip(), found["code"], text.count("\n", 0, found.start("code")) + 1)
        for found in _FENCE.finditer(text)
    ]


def script(page: Path) -> str:
    """Return the Python of ``page`` that runs, each line where the page has it."""
    lines: list[str] = []
    for block in blocks(page):
        if block.runs:
            lines += [""] * (block.line - 1 - len(lines))
            lines += block.code.splitlines()
    return "\n".join(lines) + "\n"


def commands(page: Path) -> list[str]:
    """Return the command lines of the ``sh`` blocks of ``page``."""
    found = [block.code.splitlines() for block in blocks(page) if block.info == "sh"]
    return [line for lines in found for line in lines if line and not line.startswith("#")]
