"""``fp8core selftest``: ask a device what a backend's authors could not, and write the answers."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path

from fp8core.backend_api import Finding
from fp8core.dispatch import plugins
from fp8core.dispatch.isolation import Failure, attempt
from fp8core.errors import OperandError, UnsupportedError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("backend", help="name of the backend, such as ascend")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the findings to this file")


def run(args: argparse.Namespace) -> int:
    """Print a line for each finding; return 0 if all assumptions hold, else 1."""
    registry = plugins.load()
    spec = registry.spec(args.backend, "fp8core selftest")
    if not spec.selftest:
        raise UnsupportedError(f"backend {spec.name!r} has no open questions for a device.")
    reason = registry.unusable(spec)
    if reason is not None:
        raise UnsupportedError(f"backend {spec.name!r} cannot be used here: {reason}")
    module, _, name = spec.selftest.partition(":")

    def ask() -> list[Finding]:
        questions: Callable[[], Iterable[Finding]] = getattr(importlib.import_module(module), name)
        return list(questions())

    findings = attempt(ask)
    if isinstance(findings, Failure):
        findings.fail(f"backend {spec.name!r}: its selftest {spec.selftest!r} failed")
    for one in findings:
        state = "ok  " if one.holds else "DIFF"
        print(f"{state}  {one.name}: {one.assumption}\n      {one.answer}")
    if args.json is not None:
        text = json.dumps([dataclasses.asdict(one) for one in findings], indent=1)
        try:
            args.json.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise OperandError(f"the findings cannot be written: {error}.") from None
    return 0 if all(one.holds for one in findings) else 1
