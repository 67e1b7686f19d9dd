"""``fp8core run``: run a command to which fp8core answers under another library's name."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from fp8core.errors import RecipeError, UnsupportedError
from fp8core.integrations.transformer_engine import finder, startup


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "--as-transformer-engine",
        action="store_true",
        required=True,
        help="have `import transformer_engine` give fp8core, in the command and the Python "
        "processes that it starts",
    )
    parser.add_argument(
        "--version",
        dest="claimed",
        default=finder.VERSION,
        metavar="VERSION",
        help="the version of Transformer Engine to claim; default: %(default)s",
    )
    parser.add_argument(
        "words", nargs=argparse.REMAINDER, metavar="CMD", help="the command and its arguments"
    )


def run(args: argparse.Namespace) -> int:
    """Run the command in this process's place; return its exit status where it cannot be replaced.

    Raises:
        RecipeError: no command, or no version number.
        UnsupportedError: the environment has another ``transformer_engine``, or there is no such
            command.
    """
    words = args.words[1:] if args.words[:1] == ["--"] else args.words
    problem = finder.version_problem(args.claimed)
    if problem is not None:
        raise RecipeError(f"--version {args.claimed}: {problem}")
    if not words:
        raise RecipeError("--as-transformer-engine needs a command, as in `python train.py`.")
    obstacle = None if finder.installed() else finder.obstacle()
    if obstacle is not None:
        raise UnsupportedError(obstacle)
    if words[0] in ("python", "python3"):  # the environment's, wherever PATH points
        words = [sys.executable, *words[1:]]
    variables = environment(args.claimed)
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        if os.name == "posix":  # the command gets the signals that are sent to this process
            os.execvpe(words[0], words, variables)
        return subprocess.run(words, env=variables, check=False).returncode
    except OSError as error:
        raise UnsupportedError(f"cannot run {words[0]!r}: {error.strerror}.") from None


def environment(version: str, base: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return ``base``, by default this process's environment, in which Python processes begin with
    fp8core as ``transformer_engine``.

    A folder on PYTHONPATH holds a ``sitecustomize``, which Python imports while it starts, unless
    it is told to ignore the environment (``-E``, ``-I``) or the site (``-S``).
    """
    variables = dict(os.environ if base is None else base)
    assert startup.__file__ is not None
    folder = str(Path(startup.__file__).resolve().parent)
    paths = [path for path in variables.get("PYTHONPATH", "").split(os.pathsep) if path]
    variables["PYTHONPATH"] = os.pathsep.join([folder, *(p for p in paths if p != folder)])
    variables[finder.ENVIRONMENT] = version
    return variables
