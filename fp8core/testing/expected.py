"""Failures that are known: a file of patterns, each with its reason, held to strictly.

One to a line: a pattern of check ids, in which ``*`` stands for anything, then ``#`` and the reason
why it fails. Blank lines, and lines of a comment alone, are skipped::

    law4_gemm_takes_operands_of_any_strides/mxfp8.*  # the kernel reads packed scales alone
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from fp8core.errors import OperandError

__all__ = ["Expected", "complaints", "find", "read"]


@dataclass(frozen=True, slots=True)
class Expected:
    """One line of the file."""

    pattern: str
    reason: str
    line: int

    def matches(self, check: str) -> bool:
        """Say whether the check of this id is meant."""
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
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        pattern, _, reason = (part.strip() for part in line.partition("#"))
        if pattern:
            found.append(Expected(pattern, reason, number))
    return found


def find(expected: Iterable[Expected], check: str) -> Expected | None:
    """Return the first line that the check of this id matches."""
    return next((line for line in expected if line.matches(check)), None)


def complaints(expected: Iterable[Expected], checks: Iterable[str]) -> list[str]:
    """Return what is wrong with the file: a line without a reason, one that matches no check."""
    ids = list(checks)
    found = []
    for one in expected:
        if not one.reason:
            found.append(f"line {one.line}: {one.pattern!r} gives no reason, after a '#'")
        if not any(map(one.matches, ids)):
            found.append(f"line {one.line}: {one.pattern!r} matches no check")
    return found
