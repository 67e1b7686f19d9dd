"""What a run of the kit found, for people and for scripts."""

from __future__ import annotations

import itertools
import json
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

import fp8core
from fp8core.backend_api import API_VERSION
from fp8core.testing.checks import Support

__all__ = ["OUTCOMES", "Outcome", "Report"]

OUTCOMES = ("passed", "failed", "xfailed", "skipped")
MAX_NAMED = 5
"""Failed checks of a law that the text names; the JSON has them all."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One check's end: ``outcome`` is one of :data:`OUTCOMES`.

    ``worst`` is the largest error as a share of what is allowed, None where that says nothing.
    """

    id: str
    law: int
    name: str
    op: str
    outcome: str
    worst: float | None
    message: str


@dataclass(slots=True)
class Report:
    """Everything that a run found; ``text()`` and ``json()`` say it."""

    backend: str
    device: str
    is_strict: bool
    support: Sequence[Support]
    outcomes: list[Outcome] = field(default_factory=list)

    def rows(self) -> list[dict[str, Any]]:
        """Return one row for each test and operation: how often it ended how, the worst error."""
        rows: dict[tuple[str, str], dict[str, Any]] = {}
        for one in self.outcomes:
            start = {"law": one.law, "name": one.name, "op": one.op, "worst": None}
            row = rows.setdefault((one.name, one.op), start | dict.fromkeys(OUTCOMES, 0))
            row[one.outcome] += 1
            if one.worst is not None:
                row["worst"] = max(one.worst, row["worst"] or 0.0)
        return sorted(rows.values(), key=lambda row: (row["law"], row["name"], row["op"]))

    def counts(self) -> dict[str, int]:
        """Return how many checks ended how."""
        ends = [one.outcome for one in self.outcomes]
        return {name: ends.count(name) for name in OUTCOMES}

    def json(self) -> str:
        """Return all of it as JSON; an infinite error is the string ``"inf"``."""

        def plain(worst: float | None) -> float | str | None:
            return str(worst) if worst is not None and worst == float("inf") else worst

        made = {
            "backend": self.backend,
            "device": self.device,
            "strict": self.is_strict,
            "versions": {
                "backend_api": ".".join(map(str, API_VERSION)),
                "fp8core": fp8core.__version__,
                "torch": str(torch.__version__),
            },
            "counts": self.counts(),
            "support": [one._asdict() for one in self.support],
            "laws": [row | {"worst": plain(row["worst"])} for row in self.rows()],
            "not_passed": [
                {"id": one.id, "outcome": one.outcome, "message": one.message}
                for one in self.outcomes
                if one.outcome != "passed"
            ],
        }
        return json.dumps(made, indent=2, allow_nan=False) + "\n"

    def text(self) -> str:
        """Return what is supported, a table of the tests of each law, and what failed of each."""
        lines = [f"fp8core conformance: {self.backend} on {self.device}", ""]
        lines += list(_support_lines(self.support))
        lines += ["", f"{'passed':>7} {'failed':>7} {'xfailed':>7} {'skipped':>7}   worst  test"]
        for law, rows in itertools.groupby(self.rows(), key=lambda row: row["law"]):
            of_law = list(rows)
            lines.append(_total_line(f"law {law}", of_law))
            for name, own in itertools.groupby(of_law, key=lambda row: row["name"]):
                lines.append(_total_line(f"  {name}", list(own)))
        failed = sorted((one.law, one.id) for one in self.outcomes if one.outcome == "failed")
        lines += ["", "failed, by law"] if failed else []
        for law, found in itertools.groupby(failed, key=lambda one: one[0]):
            ids = [own for _, own in found]
            lines += [f"  law {law}: {len(ids)}", *(f"    {own}" for own in ids[:MAX_NAMED])]
            lines += [f"    and {len(ids) - MAX_NAMED} more"] if len(ids) > MAX_NAMED else []
        return "\n".join(lines)


def _total_line(title: str, rows: Sequence[dict[str, Any]]) -> str:
    found = [row["worst"] for row in rows if row["worst"] is not None]
    worst = f"{max(found):.2g}" if found else ""
    counts = " ".join(f"{sum(row[outcome] for row in rows):>7}" for outcome in OUTCOMES)
    return f"{counts} {worst:>7}  {title}"


def _support_lines(support: Iterable[Support]) -> Iterable[str]:
    for one in support:
        why = max(one.reasons, key=lambda reason: one.reasons[reason], default="")
        because = f"; most often: {textwrap.shorten(why, 60)}" if why else ""
        yield f"{one.op}: supports {one.supported} of {one.known} descriptors{because}"
