"""The command: ``fp8core doctor [DEVICE] [--json]``."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import sys

from fp8core.commands.arguments import device_argument
from fp8core.dispatch import plugins
from fp8core.doctor import consult, findings
from fp8core.doctor.render import render
from fp8core.doctor.report import examine

__all__ = ["add_arguments", "run"]

DEADLINE_S = 120.0  # a backend may compile its kernels on first use


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "device",
        nargs="?",
        type=device_argument,
        metavar="DEVICE",
        help="as torch names it; default: for each backend, its first device type that is present",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument(
        "--deadline",
        type=float,
        default=DEADLINE_S,
        metavar="SECONDS",
        help="how long a step of a backend may take before it counts as hung "
        "(default: %(default)g)",
    )


def run(args: argparse.Namespace) -> int:
    """Print the report; return the exit status.

    0, or 1 if a requested backend or the device cannot be used, or 2 if a name or setting is
    unknown.
    """
    with contextlib.redirect_stdout(sys.stderr):  # plug-ins may print, and the report may be JSON
        reasons, notes = consult.apart(args.deadline)
        plugins.set_aside(reasons)
        examiner = functools.partial(findings.apart, deadline=args.deadline, without=reasons)
        report = examine(examiner, args.device, lambda: notes)
    print(json.dumps(dataclasses.asdict(report), indent=2) if args.json else render(report))
    if report.bad_names:
        return 2
    return 1 if report.problems else 0
