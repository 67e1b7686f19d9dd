"""The command line: what low precision runs on this machine, how well, and how fast."""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from fp8core import __version__
from fp8core.cli import commands, demo
from fp8core.errors import Fp8CoreError, RecipeError, did_you_mean
from fp8core.inspection import explain


class Command(NamedTuple):
    """How a command declares its arguments, runs, and is described in one line."""

    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    help: str


_COMMANDS = {
    "build": Command(
        commands.build_arguments,
        commands.build,
        "compile a backend's native code now, not on first use",
    ),
    "conformance": Command(
        commands.conformance_arguments,
        commands.conformance,
        "hold an installed backend to the laws of the backend API",
    ),
    "demo": Command(
        demo.add_arguments,
        demo.run,
        "train a small GPT in bf16 and in every recipe, and compare",
    ),
    "doctor": Command(
        commands.doctor_arguments,
        commands.doctor,
        "list the backends and plug-ins, which can be used here, and why others cannot",
    ),
    "explain": Command(
        explain.add_arguments,
        explain.run,
        "say which backend runs an operation, and why none of the others",
    ),
    "run": Command(
        commands.run_arguments,
        commands.run,
        "run a command to which fp8core is Transformer Engine",
    ),
    "selftest": Command(
        commands.selftest_arguments,
        commands.selftest,
        "ask a device the questions that a backend's documentation leaves open",
    ),
    "tune": Command(
        commands.tune_arguments,
        commands.run_tune,
        "find the fastest recipe of each layer whose error stays under a bound",
    ),
}


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(prog="fp8core", description=__doc__)
    parser.add_argument("--version", action="version", version=f"fp8core {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in _COMMANDS.items():
        command.add_arguments(
            subparsers.add_parser(name, help=command.help, description=command.help)
        )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return its exit status: 0, 1 for an error or a finding, 2 for bad usage.

    An unknown name or setting is bad usage, also in an environment variable.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):  # a plug-in's message may not fit the encoding
        sys.stdout.reconfigure(errors="backslashreplace")
    words = sys.argv[1:] if arguments is None else arguments
    parser = make_parser()
    if not words:
        parser.error(f"expected a command: {', '.join(_COMMANDS)}; fp8core -h describes them.")
    command = words[0]
    if not command.startswith("-") and command not in _COMMANDS:
        parser.error(
            f"there is no command {command!r}; commands: {', '.join(_COMMANDS)}."
            f"{did_you_mean(command, _COMMANDS)}"
        )
    parsed = parser.parse_args(words)
    try:
        return _COMMANDS[parsed.command].run(parsed)
    except Fp8CoreError as error:
        print(f"fp8core {parsed.command}: {error}", file=sys.stderr)
        return 2 if isinstance(error, RecipeError) else 1


if __name__ == "__main__":
    sys.exit(main())
