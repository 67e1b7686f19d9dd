"""The doctor's report as plain text: no colours, so that it can be pasted and piped."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from fp8core.doctor.matrix import cell_from, rows, unanswered
from fp8core.doctor.report import Report

WIDTH = 120
"""Columns of the longest line outside tables: a backend's reasons may be long."""

_INDENT = " " * 6


def render(report: Report) -> str:
    """Return the report as text."""
    lines = ["versions: " + ", ".join(f"{k} {v}" for k, v in report.versions.items())]
    lines += ["devices: " + ", ".join(report.devices)]
    for package in report.neighbours:
        lines.append(f"also installed: {package['name']} {package['version']}; {package['note']}")
    lines += ["", "backends"]
    for backend in report.backends:
        lines += _wrapped(_backend(backend, report.selected))
    lines += ["", "plug-ins"]
    for plugin in report.plugins:
        state = "ok" if plugin["reason"] is None else f"FAIL: {plugin['reason']}"
        lines += _wrapped(f"   {plugin['name']:12} {state}  [{plugin['source']}]")
    lines += ["", f"formats: {', '.join(report.formats)}", f"recipes: {', '.join(report.recipes)}"]
    lines += ["", "environment" if report.environment else "environment: nothing set"]
    lines += [f"   {name}={value}" for name, value in report.environment.items()]
    for backend in report.backends:
        lines += _matrix(backend, report.matrix)
        lines += _selftest(backend, report.selftests)
    lines += _collectives(report.collectives)
    for title, entries in (("notes", report.notes), ("problems", report.problems)):
        lines += ["", title] if entries else []
        for entry in entries:
            lines += _wrapped(f"   {entry}")
    return "\n".join(lines)


def _wrapped(text: str) -> Iterator[str]:
    """Yield the lines of ``text``, broken between words, all but the first indented."""
    first = ""
    for line in text.splitlines():
        yield from textwrap.wrap(
            line,
            WIDTH,
            initial_indent=first,
            subsequent_indent=_INDENT,
            break_long_words=False,
            break_on_hyphens=False,
        )
        first = _INDENT


def _backend(backend: dict[str, Any], selected: str | None) -> str:
    state = backend["unusable"] or "ok"
    mark = "*" if backend["name"] == selected else " "
    where = "/".join(backend["device_types"])
    where += ", any other device on request" if backend["portable"] else ""
    return f" {mark} {backend['name']:12} {state}  [{where}]"


def _matrix(backend: dict[str, Any], matrix: Sequence[dict[str, Any]]) -> Iterator[str]:
    of_backend = [cell_from(entry) for entry in matrix if entry["backend"] == backend["name"]]
    if of_backend:
        yield from ("", f"{backend['name']} on {backend['device']}, by its declarations")
        yield from columns(rows(of_backend))
        for line in unanswered(of_backend):
            yield from _wrapped(f"   {line}")


def columns(table: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the rows of a table, padded to columns."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield ("   " + "  ".join(cells)).rstrip()


def _selftest(backend: dict[str, Any], checks: Sequence[dict[str, Any]]) -> Iterator[str]:
    of_backend = [check for check in checks if check["backend"] == backend["name"]]
    if backend["unusable"] is None and backend["untested"] is not None:
        yield ""
        yield from _wrapped(f"{backend['name']}: no self-test, {backend['untested']}")
    if of_backend:
        yield from ("", f"{backend['name']} on {backend['device']}, self-test")
        for row in columns([_check(check) for check in of_backend]):
            yield from _wrapped(row)


def _check(check: dict[str, Any]) -> list[str]:
    if check["failure"] is not None:
        return [check["op"], "FAIL", f"{check['cases']} cases", check["failure"].replace("\n", " ")]
    error = "exact" if check["worst"] == 0 else f"worst error {check['worst']:.2f} of the bound"
    return [check["op"], "ok", f"{check['cases']} cases", f"{error} ({check['judged_by']})"]


def _collectives(results: Sequence[dict[str, Any]]) -> Iterator[str]:
    if results:
        group = f"{results[0]['processes']} processes on {results[0]['device']}"
        yield from ("", f"collectives between {group}")
        table = [[one["name"], "ok" if one["failure"] is None else "FAIL"] for one in results]
        for row, one in zip(columns(table), results, strict=True):
            failure = "" if one["failure"] is None else "  " + one["failure"].replace("\n", " ")
            yield from _wrapped(row + failure)
