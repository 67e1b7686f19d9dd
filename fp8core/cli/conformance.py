"""``fp8core conformance``: hold an installed backend to the laws, from the command line."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from types import ModuleType

from fp8core.conformance.subject import find
from fp8core.errors import Fp8CoreError, UnsupportedError

USAGE_ERROR = 2
DEADLINE_S = 120.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.epilog = (
        "Exits with 0 if every law holds, 1 if one is broken, 2 if the backend cannot be tested."
    )
    parser.add_argument("backend", help="its name, as `fp8core doctor` lists it")
    parser.add_argument("--device", help="as torch names it; default: the backend's preferred one")
    parser.add_argument("--json", metavar="FILE", help="write the results to FILE")
    parser.add_argument(
        "--xfail", metavar="FILE", help="expected failures: 'PATTERN  # REASON' to a line"
    )
    parser.add_argument(
        "--strict",
        action="store_true",
        help="fail also if an operation has a method but no support, or no judge; "
        "FP8CORE_STRICT=1 does the same",
    )
    parser.add_argument(
        "--processes",
        type=int,
        metavar="N",
        help="instead, start N processes and test what the backend moves between them: the "
        "collectives of their group, rows beside products, and products in parts",
    )
    parser.add_argument(
        "--deadline",
        type=float,
        default=DEADLINE_S,
        metavar="SECONDS",
        help="with --processes: how long a law may take before it counts as hung "
        "(default: %(default)g)",
    )
    parser.add_argument("-k", metavar="WORDS", help="only the checks whose id these words match")


def run(args: argparse.Namespace) -> int:
    """Run the kit; return 0 if every law holds, 1 if one is broken, 2 if it could not run."""
    if args.processes is not None:
        return _over_ranks(args)
    try:
        pytest = _pytest()
        find(args.backend, args.device)
    except Fp8CoreError as error:
        print(f"fp8core conformance: {error}", file=sys.stderr)
        return USAGE_ERROR
    # The configuration and the conftest of the current folder stay out.
    options = ["-p", "fp8core_pytest", "-p", "no:cacheprovider", "-c", os.devnull, "--noconftest"]
    options += ["-p", "no:logging"]  # it costs more than a short check, and there are thousands
    options += [
        f"--rootdir={os.getcwd()}",
        "-q",
        "-rN",  # the report lists the failures by law
        "--no-header",
        "--assert=plain",
        f"--fp8core-backend={args.backend}",
    ]
    for name in ("device", "json", "xfail"):
        value = getattr(args, name)
        options += [f"--fp8core-{name}={value}"] if value else []
    options += ["--fp8core-strict"] if args.strict else []
    options += ["-k", args.k] if args.k else []
    status = pytest.main(options)
    if status == pytest.ExitCode.NO_TESTS_COLLECTED:
        print(
            f"fp8core conformance: -k {args.k!r} matches no check of {args.backend!r}. "
            f"An id is law4_gemm_adds_the_bias/current.fprop.bfloat16.bfloat16, or, of a fused "
            f"operation, law6_fused_equals_its_unfused_pair/mxfp8.rmsnorm.bfloat16; the words are "
            f"parts of it, joined by `and`, `or` and `not`.",
            file=sys.stderr,
        )
    return int(status) if status in (0, 1) else USAGE_ERROR


def _over_ranks(args: argparse.Namespace) -> int:
    # On demand, as the doctor's self-tests are made of the kit's calls.
    from fp8core.cli.doctor import number_of_processes
    from fp8core.doctor import collectives, over_ranks

    try:
        count = number_of_processes(str(args.processes))
        unused = [name for name in ("xfail", "k", "strict") if getattr(args, name)]
        if unused:
            raise UnsupportedError(
                f"--processes takes no --{unused[0]}: all laws run, on every rank at once."
            )
        device = find(args.backend, args.device).device
        device = collectives.device_for(device, count)
        outcomes = over_ranks.apart(args.backend, count, device, args.deadline)
    except (Fp8CoreError, argparse.ArgumentTypeError) as error:
        print(f"fp8core conformance: {error}", file=sys.stderr)
        return USAGE_ERROR
    print(over_ranks.text(args.backend, count, device, outcomes))
    if args.json:
        Path(args.json).write_text(json.dumps(over_ranks.as_json(outcomes), indent=2))
    return int(any(one.failure for one in outcomes))


def _pytest() -> ModuleType:
    try:
        import pytest
    except ImportError:
        raise UnsupportedError(
            "needs pytest, which is not installed; `python -m pip install pytest` installs it."
        ) from None
    return pytest
