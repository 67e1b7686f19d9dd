"""The command: ``fp8core doctor [DEVICE] [--processes N] [--json]``."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import sys

from fp8core.dispatch import plugins
from fp8core.doctor import collectives, consult, findings
from fp8core.doctor.render import render
from fp8core.doctor.report import examine, with_collectives
from fp8core.inspection.arguments import device_argument

MAX_PROCESSES = 64
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
        "--processes",
        type=number_of_processes,
        metavar="N",
        help="also test the collectives of layers over several ranks, between N processes on this "
        "machine: with an accelerator each, if there are so many, else on the CPU",
    )
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
    ranks = None
    if args.processes is not None:
        ranks = collectives.device_for(args.device, args.processes)
    with contextlib.redirect_stdout(sys.stderr):  # plug-ins may print, and the report may be JSON
        reasons, notes = consult.apart(args.deadline)
        plugins.set_aside(reasons)
        examiner = functools.partial(findings.apart, deadline=args.deadline, without=reasons)
        report = examine(examiner, args.device, lambda: notes)
        if ranks is not None:
            results = collectives.apart(args.processes, ranks, args.deadline)
            report = with_collectives(report, results, args.processes, ranks.type)
    print(json.dumps(dataclasses.asdict(report), indent=2) if args.json else render(report))
    if report.bad_names:
        return 2
    return 1 if report.problems else 0


def number_of_processes(text: str) -> int:
    """Return how many processes ``text`` asks for, as the type of an argument."""
    number = int(text) if text.isascii() and text.isdigit() else 0
    if not 2 <= number <= MAX_PROCESSES:
        raise argparse.ArgumentTypeError(
            f"{text!r} processes: expected a number from 2 to {MAX_PROCESSES}; collectives need "
            f"several ranks, and all of them run on this machine."
        )
    return number
