"""The report of a run of the kit, as text for people and as JSON for scripts."""

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
from fp8core.conformance.checks import Support

OUTCOMES = ("passed", "failed", "xfailed", "skipped")
MAX_NAMED = 5
"""Failed checks of a law that the text names; the JSON has them all."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one check: ``outcome`` is one of :data:`OUTCOMES`.

    ``worst`` is the largest error as a share of the allowed error, None if the check allows none.
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
    """The support and the outcomes of a run, which ``text()`` and ``json()`` write out."""

    backend: str
    device: str
    is_strict: bool
    support: Sequence[Support]
    outcomes: list[Outcome] = field(default_factory=list)

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each test and operation: the count of each outcome, the worst error."""
        rows: dict[tuple[str, str], dict[str, Any]] = {}
        for outcome in self.outcomes:
            start = {"law": outcome.law, "name": outcome.name, "op": outcome.op, "worst": None}
            row = rows.setdefault((outcome.name, outcome.op), start | dict.fromkeys(OUTCOMES, 0))
            row[outcome.outcome] += 1
            if outcome.worst is not None:
                row["worst"] = max(outcome.worst, row["worst"] or 0.0)
        return sorted(rows.values(), key=lambda row: (row["law"], row["name"], row["op"]))

    def counts(self) -> dict[str, int]:
        """Return the number of checks by outcome."""
        ends = [outcome.outcome for outcome in self.outcomes]
        return {name: ends.count(name) for name in OUTCOMES}

    def json(self) -> str:
        """Return the report as JSON, in which an infinite error is the string ``"inf"``."""

        def plain(worst: float | None) -> float | str | None:
            return str(worst) if worst is not None and worst == float("inf") else worst

        document = {
            "backend": self.backend,
            "device": self.device,
            "strict": self.is_strict,
            "versions": {
                "backend_api": ".".join(map(str, API_VERSION)),
                "fp8core": fp8core.__version__,
                "torch": str(torch.__version__),
            },
            "counts": self.counts(),
            "support": [support._asdict() for support in self.support],
            "laws": [row | {"worst": plain(row["worst"])} for row in self.rows()],
            "not_passed": [
                {"id": outcome.id, "outcome": outcome.outcome, "message": outcome.message}
                for outcome in self.outcomes
                if outcome.outcome != "passed"
            ],
        }
        return json.dumps(document, indent=2, allow_nan=False) + "\n"

    def text(self) -> str:
        """Return the support, a table of the tests by law, and the failed checks by law."""
        lines = [f"fp8core conformance: {self.backend} on {self.device}", ""]
        lines += list(_support_lines(self.support))
        lines += ["", f"{'passed':>7} {'failed':>7} {'xfailed':>7} {'skipped':>7}   worst  test"]
        for law, rows in itertools.groupby(self.rows(), key=lambda row: row["law"]):
            of_law = list(rows)
            lines.append(_total_line(f"law {law}", of_law))
            for name, of_test in itertools.groupby(of_law, key=lambda row: row["name"]):
                lines.append(_total_line(f"  {name}", list(of_test)))
        failed = sorted(
            (outcome.law, outcome.id) for outcome in self.outcomes if outcome.outcome == "failed"
        )
        lines += ["", "failed, by law"] if failed else []
        for law, failures in itertools.groupby(failed, key=lambda failure: failure[0]):
            ids = [check for _, check in failures]
            lines += [f"  law {law}: {len(ids)}", *(f"    {check}" for check in ids[:MAX_NAMED])]
            lines += [f"    and {len(ids) - MAX_NAMED} more"] if len(ids) > MAX_NAMED else []
        return "\n".join(lines)


def _total_line(title: str, rows: Sequence[dict[str, Any]]) -> str:
    errors = [row["worst"] for row in rows if row["worst"] is not None]
    worst = f"{max(errors):.2g}" if errors else ""
    counts = " ".join(f"{sum(row[outcome] for row in rows):>7}" for outcome in OUTCOMES)
    return f"{counts} {worst:>7}  {title}"


def _support_lines(support: Iterable[Support]) -> Iterable[str]:
    for row in support:
        why = max(row.reasons, key=lambda reason: row.reasons[reason], default="")
        because = f"; most often: {textwrap.shorten(why, 60)}" if why else ""
        yield f"{row.op}: supports {row.supported} of {row.known} descriptors{because}"
