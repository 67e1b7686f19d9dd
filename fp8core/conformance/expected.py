"""The file of expected failures: patterns of checks that are known to fail, each with a reason.

Each line holds a pattern of check ids, in which ``*`` stands for anything, then ``#`` and the
reason of the failure. Blank lines, and lines with a comment alone, are skipped::

    law4_gemm_takes_operands_of_any_strides/mxfp8.*  # the kernel reads packed scales alone
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from fp8core.errors import OperandError


@dataclass(frozen=True, slots=True)
class Expected:
    """A line of the file."""

    pattern: str
    reason: str
    line: int

    def matches(self, check: str) -> bool:
        """Whether the pattern matches this check's id."""
        text = ".*".join(map(re.escape, self.pattern.split("*")))
        return re.fullmatch(text, check) is not None


def read(path: Path) -> list[Expected]:
    """Return the lines of the file.

    Raises:
        OperandError: it cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OperandError(f"file of expected failures {str(path)!r}: {error}") from None
    lines = []
    for number, line in enumerate(text.splitlines(), 1):
        pattern, _, reason = (part.strip() for part in line.partition("#"))
        if pattern:
            lines.append(Expected(pattern, reason, number))
    return lines


def find(expected: Iterable[Expected], check: str) -> Expected | None:
    """Return the first line whose pattern matches this check's id, None if there is none."""
    return next((line for line in expected if line.matches(check)), None)


def complaints(expected: Iterable[Expected], checks: Iterable[str]) -> list[str]:
    """Return the faults of the file: lines without a reason, and lines that match no check."""
    ids = list(checks)
    faults = []
    for line in expected:
        if not line.reason:
            faults.append(f"line {line.line}: {line.pattern!r} gives no reason, after a '#'")
        if not any(map(line.matches, ids)):
            faults.append(f"line {line.line}: {line.pattern!r} matches no check")
    return faults
