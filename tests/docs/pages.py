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


def prose(page: Path) -> str:
    """Return the text of ``page`` with empty lines for its fenced blocks."""
    return _without_blocks(page.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """Return the anchors of the headings of ``page``, as GitHub and MyST name them."""
    headings = re.findall(r"^#{1,6} (.+)$", prose(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


class Row(NamedTuple):
    """A row of a table: its line on the page, its text, and its cells."""

    line: int
    text: str
    cells: list[str]


def tables(text: str) -> list[list[Row]]:
    """Return the tables of Markdown ``text``: rows that follow each other, outside of fences."""
    found: list[list[Row]] = []
    previous = -1
    for number, line in enumerate(_without_blocks(text).splitlines(), 1):
        if line.lstrip().startswith("|"):
            if previous != number - 1:
                found.append([])
            found[-1].append(Row(number, line, _cells(line)))
            previous = number
    return found


def malformed_rows(text: str) -> list[str]:
    """Return the rows of ``text`` whose table has no head, or a head of another number of cells."""
    wrong: list[str] = []
    for head, *rest in tables(text):
        is_ruled = bool(rest) and all(re.fullmatch(r":?-+:?", cell) for cell in rest[0].cells)
        if not is_ruled:
            wrong += [f"line {row.line}, no head: {row.text}" for row in (head, *rest)]
            continue
        wrong += [
            f"line {row.line}, {len(row.cells)} cells below a head of {len(head.cells)}: {row.text}"
            for row in rest
            if len(row.cells) != len(head.cells)
        ]
    return wrong


def _cells(line: str) -> list[str]:
    """Return the cells of a table's row, in which an escaped bar is no border."""
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip())[1:-1]]


def _without_blocks(text: str) -> str:
    return _FENCE.sub(lambda fence: "\n" * fence[0].count("\n"), text)
