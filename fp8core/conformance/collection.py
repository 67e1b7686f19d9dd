"""The kit's checks as pytest items, their report as text and as JSON, and the file of expected
failures; the pytest plug-in imports this module if its option is used.

A line of that file holds a pattern of check ids, in which ``*`` stands for anything, then ``#`` and
the reason of the failure. Blank lines, and lines with a comment alone, are skipped::

    law4_gemm_takes_operands_of_any_strides/mxfp8.*  # the kernel reads packed scales alone
"""

from __future__ import annotations

import itertools
import json
import re
import textwrap
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import fp8core
from fp8core.backend_api import API_VERSION
from fp8core.conformance.checks import Check, Support, checks, supported
from fp8core.conformance.compare import Broken, Unjudged
from fp8core.conformance.laws import LAWS
from fp8core.conformance.subject import Subject, find
from fp8core.dispatch import settings
from fp8core.errors import Fp8CoreError, OperandError


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


def read_expected(path: Path) -> list[Expected]:
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


def matching(expected: Iterable[Expected], check: str) -> Expected | None:
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


PROPERTY = "fp8core"
NO_CONTEXT = "ignore:Attempting to run cuBLAS, but there was no current CUDA context:UserWarning"
"""What torch warns of where a product is the first that a thread asks of CUDA, as in law 7."""

MAX_LINES, MAX_COLUMNS = 20, 400
"""Of the text of one failure: the report of a backend that breaks every law is still readable."""


def excerpt(lines: Sequence[str]) -> str:
    """Return the first lines, each cut to :data:`MAX_COLUMNS`, and the number of omitted lines."""
    shown = [line if len(line) <= MAX_COLUMNS else f"{line[:MAX_COLUMNS]}..." for line in lines]
    if len(shown) > MAX_LINES:
        shown[MAX_LINES - 1 :] = [f"  ... and {len(shown) - MAX_LINES + 1} more lines"]
    return "\n".join(shown)


class CheckItem(pytest.Item):
    """A check, named by its id; ``expected`` is the line that says it fails."""

    def __init__(
        self, *, check: Check, expected: Expected | None, is_strict: bool, **node: Any
    ) -> None:
        super().__init__(**node)
        self._check = check
        self._expected = expected
        self._is_strict = is_strict

    def runtest(self) -> None:
        """Run the check on one thread; a pass against its expected failure is a failure."""
        threads = torch.get_num_threads()
        # On a busy machine a second thread costs small operations many times their work.
        torch.set_num_threads(1)
        try:
            self._judge()
        finally:
            torch.set_num_threads(threads)

    def _judge(self) -> None:
        try:
            worst = self._check.run()
        except Unjudged as error:
            if self._is_strict:
                raise Broken(f"cannot be judged: {error}") from None
            pytest.skip(str(error))
        except Exception as error:  # a third party's backend may raise anything
            self._record(getattr(error, "worst", None))
            if self._expected is not None:
                pytest.xfail(self._expected.reason)
            raise
        self._record(worst)
        if self._expected is not None:
            raise Broken(
                f"passes, but line {self._expected.line} of the expected failures says that it "
                f"fails: {self._expected.reason or 'no reason given'}"
            )

    def _record(self, worst: float | None) -> None:
        self.user_properties.append((PROPERTY, worst))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """Return the law and the failure, in at most :data:`MAX_LINES` lines.

        Any error but :class:`Broken` is followed by the end of its traceback.
        """
        law, error = self._check.law, excinfo.value
        is_broken = isinstance(error, Broken)
        text = str(error) if is_broken else f"raised {type(error).__name__}: {error}"
        lines = f"{self._check.id}\n  law {law.number}: {law.meaning}\n  {text}".splitlines()
        if not is_broken:
            frames = "".join(traceback.format_tb(error.__traceback__)).splitlines()
            free = max(MAX_LINES - len(lines), 0)
            lines += frames[-free:] if free else []
        return excerpt(lines)

    def reportinfo(self) -> tuple[Path, int, str]:
        """Return file and line of the law's function."""
        code = self._check.law.test.__code__
        return Path(code.co_filename), code.co_firstlineno - 1, self.name


class FileItem(pytest.Item):
    """The check of the file of expected failures."""

    def __init__(self, *, complaints: list[str], **node: Any) -> None:
        super().__init__(**node)
        self._complaints = complaints

    def runtest(self) -> None:
        """Fail if a line gives no reason or matches nothing."""
        if self._complaints:
            raise Broken("; ".join(self._complaints))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """Return the complaints."""
        return f"expected failures: {excinfo.value}"


class KitCollector(pytest.Collector):
    """The parent of the kit's items."""

    def collect(self) -> list[pytest.Item]:
        """Return nothing: the plug-in adds the items."""
        return []


class Kit:
    """The plug-in that adds the checks of one backend to a pytest run, and reports on them."""

    def __init__(
        self, subject: Subject, expected: list[Expected], *, is_strict: bool, json: Path | None
    ) -> None:
        self._subject = subject
        self._expected = expected
        self._is_strict = is_strict
        self._json = json
        self._is_selected = False
        laws = [law for law in LAWS.values() if is_strict or not law.is_strict]
        self._checks = {check.id: check for check in checks(subject, laws)}
        self._report = Report(subject.name, str(subject.device), is_strict, supported(subject))

    @classmethod
    def from_options(cls, options: Any) -> Kit:
        """Return the plug-in that the pytest options ask for.

        Raises:
            pytest.UsageError: the backend, the device or the file cannot be used.
        """
        try:
            subject = find(options.fp8core_backend, options.fp8core_device)
            path = options.fp8core_xfail
            expected = read_expected(Path(path)) if path else []
            is_strict = options.fp8core_strict or settings.read().strict
        except Fp8CoreError as error:
            raise pytest.UsageError(str(error)) from None
        json = Path(options.fp8core_json) if options.fp8core_json else None
        return cls(subject, expected, is_strict=is_strict, json=json)

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(
        self, session: pytest.Session, items: list[pytest.Item]
    ) -> None:
        """Add the checks, before -k and -m choose among the items."""
        # -k reads names, where the backend's would match every check; the ids have it.
        nodeid = f"fp8core[{self._subject.name}]"
        parent = KitCollector.from_parent(session, name="fp8core", nodeid=nodeid)
        parent.add_marker(pytest.mark.filterwarnings(NO_CONTEXT))
        for check in self._checks.values():
            line = matching(self._expected, check.id)
            item = CheckItem.from_parent(
                parent, name=check.id, check=check, expected=line, is_strict=self._is_strict
            )
            items.append(item)
        if self._expected:
            faults = complaints(self._expected, self._checks)
            items.append(FileItem.from_parent(parent, name="expected_failures", complaints=faults))

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Record whether -k and -m have left any item of the kit."""
        self._is_selected = any(isinstance(item, CheckItem | FileItem) for item in session.items)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record the outcome of a check."""
        check = self._checks.get(report.nodeid.partition("::")[2])
        if check is None or report.when != "call":
            return
        outcome: str = report.outcome
        message = "" if report.passed else report.longreprtext
        if hasattr(report, "wasxfail"):
            outcome, message = "xfailed", report.wasxfail
        elif report.skipped and isinstance(report.longrepr, tuple):
            message = report.longrepr[2]
        worst = dict(report.user_properties).get(PROPERTY)
        law = check.law
        self._report.outcomes.append(
            Outcome(check.id, law.number, law.full_name, check.op, outcome, worst, message)  # type: ignore[arg-type]  # user_properties hold objects
        )

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print the report and write the JSON file, if any item of the kit was selected."""
        if not self._is_selected:
            return
        terminalreporter.write_line("")
        terminalreporter.write_line(self._report.text())
        if self._json is not None:
            self._json.write_text(self._report.json(), encoding="utf-8")
