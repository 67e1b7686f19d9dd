"""The command line: ``fp8core demo``, ``fp8core doctor``, ``fp8core explain``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from fp8core import doctor, explain
from fp8core.demo import cli as demo
from fp8core.errors import Fp8CoreError

__all__ = ["main"]

_COMMANDS = {
    "demo": (demo, "train a small GPT in bf16 and in every recipe, and compare"),
    "doctor": (doctor, "say what is installed, what can be used here, and why not"),
    "explain": (explain, "say which backend runs an operation, and why none of the others"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return its exit status: 0, 1 for an error or a finding, 2 for bad usage."""
    parser = argparse.ArgumentParser(prog="fp8core", description=__doc__)
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module, text) in _COMMANDS.items():
        module.add_arguments(subparsers.add_parser(name, help=text, description=text))
    parsed = parser.parse_args(arguments)
    command, _ = _COMMANDS[parsed.command]
    try:
        status: int = command.run(parsed)
    except Fp8CoreError as error:
        print(f"fp8core {parsed.command}: {error}", file=sys.stderr)
        return 1
    return status


if __name__ == "__main__":
    sys.exit(main())
