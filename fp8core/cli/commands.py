"""The commands ``build``, ``conformance``, ``doctor``, ``run``, ``selftest`` and ``tune``.

A command is a function that takes the parsed arguments and returns the exit status; a second
function declares the arguments.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from fp8core.backend_api import Finding
from fp8core.conformance.subject import find
from fp8core.dispatch import plugins
from fp8core.dispatch.isolation import Failure, attempt
from fp8core.doctor import collectives, consult, findings
from fp8core.doctor.report import examine, render, with_collectives
from fp8core.errors import Fp8CoreError, OperandError, RecipeError, UnsupportedError
from fp8core.inspection.explain import device_argument
from fp8core.integrations.transformer_engine import finder, startup

USAGE_ERROR = 2
MAX_PROCESSES = 64
DEADLINE_S = 120.0  # a backend may compile its kernels on first use


def build_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``fp8core build``."""
    parser.add_argument("backend", help="name of the backend, such as cuda")
    parser.add_argument(
        "--arch", nargs="+", metavar="ARCH", help="architectures; default: those of this machine"
    )
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="copy the compiled files to this folder as well"
    )


def build(args: argparse.Namespace) -> int:
    """Build, and print the path of the compiled files."""
    spec = plugins.load().spec(args.backend, "fp8core build")
    if not (place := spec.builder):
        raise UnsupportedError(f"backend {spec.name!r} has nothing to compile.")
    path = attempt(lambda: _function(place)(args.arch, output=args.output))
    if isinstance(path, Failure):
        path.fail(f"backend {spec.name!r}: its builder {place!r} failed")
    print(path)
    return 0


def _function(place: str) -> Callable[..., Any]:
    """Return the function at ``place``, as ``module:name``."""
    module, _, name = place.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function


def conformance_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``fp8core conformance``."""
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
    _add_deadline(parser, "with --processes: how long a law")
    parser.add_argument("-k", metavar="WORDS", help="only the checks whose id these words match")


def conformance(args: argparse.Namespace) -> int:
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
    # Logging costs more than a short check, of which there are thousands.
    options += ["-p", "no:logging"]
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
    """Run the laws between processes; return the exit status of :func:`conformance`."""
    try:
        count = number_of_processes(str(args.processes))
        unused = [name for name in ("xfail", "k", "strict") if getattr(args, name)]
        if unused:
            raise UnsupportedError(
                f"--processes takes no --{unused[0]}: all laws run, on every rank at once."
            )
        device = find(args.backend, args.device).device
        device = collectives.device_for(device, count)
        outcomes = collectives.apart(count, device, args.deadline, args.backend)
    except (Fp8CoreError, argparse.ArgumentTypeError) as error:
        print(f"fp8core conformance: {error}", file=sys.stderr)
        return USAGE_ERROR
    print(collectives.laws_text(args.backend, count, device, outcomes))
    if args.json:
        rows = [dataclasses.asdict(outcome) for outcome in outcomes]
        Path(args.json).write_text(json.dumps(rows, indent=2))
    return int(any(outcome.failure for outcome in outcomes))


def _pytest() -> ModuleType:
    try:
        import pytest
    except ImportError:
        raise UnsupportedError(
            "needs pytest, which is not installed; `python -m pip install pytest` installs it."
        ) from None
    return pytest


def doctor_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``fp8core doctor``."""
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
    _add_deadline(parser, "how long a step of a backend")


def _add_deadline(parser: argparse.ArgumentParser, subject: str) -> None:
    text = f"{subject} may take before it counts as hung (default: %(default)g)"
    parser.add_argument("--deadline", type=float, default=DEADLINE_S, metavar="SECONDS", help=text)


def doctor(args: argparse.Namespace) -> int:
    """Print the report; return the exit status.

    The status is 0, 1 if a requested backend or the device cannot be used, or 2 if a name or
    setting is unknown.
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


def run_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``fp8core run``."""
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
    """Replace this process by the command; outside POSIX run the command, and return its status.

    Raises:
        RecipeError: there is no command, or ``--version`` is not the number of a version.
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
    """Return an environment whose Python processes import fp8core as ``transformer_engine``: a copy
    of ``base``, by default of this process's environment, with two variables set.

    PYTHONPATH begins with a folder that holds a ``sitecustomize``, which a starting Python imports
    unless told to ignore the environment (``-E``, ``-I``) or the site (``-S``).
    """
    variables = dict(os.environ if base is None else base)
    assert startup.__file__ is not None
    folder = str(Path(startup.__file__).resolve().parent)
    paths = [path for path in variables.get("PYTHONPATH", "").split(os.pathsep) if path]
    variables["PYTHONPATH"] = os.pathsep.join([folder, *(p for p in paths if p != folder)])
    variables[finder.ENVIRONMENT] = version
    return variables


def selftest_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``fp8core selftest``."""
    parser.add_argument("backend", help="name of the backend, such as ascend")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the findings to this file")


def selftest(args: argparse.Namespace) -> int:
    """Print a line for each finding; return 0 if all assumptions hold, else 1."""
    registry = plugins.load()
    spec = registry.spec(args.backend, "fp8core selftest")
    if not (place := spec.selftest):
        raise UnsupportedError(f"backend {spec.name!r} has no open questions for a device.")
    reason = registry.unusable(spec)
    if reason is not None:
        raise UnsupportedError(f"backend {spec.name!r} cannot be used here: {reason}")
    answers: Failure | list[Finding] = attempt(lambda: list(_function(place)()))
    if isinstance(answers, Failure):
        answers.fail(f"backend {spec.name!r}: its selftest {place!r} failed")
    for answer in answers:
        state = "ok  " if answer.holds else "DIFF"
        print(f"{state}  {answer.name}: {answer.assumption}\n      {answer.answer}")
    if args.json is not None:
        text = json.dumps([dataclasses.asdict(answer) for answer in answers], indent=1)
        try:
            args.json.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise OperandError(f"the findings cannot be written: {error}.") from None
    return 0 if all(answer.holds for answer in answers) else 1


def tune_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``fp8core tune``."""
    parser.add_argument(
        "case",
        metavar="MODULE:FUNCTION",
        help="a function without arguments that returns the model and a few batches, and maybe "
        "loss(model, batch)",
    )
    parser.add_argument(
        "--bound", type=float, required=True, help="the largest relative error, such as 0.1"
    )
    parser.add_argument("--recipes", nargs="+", metavar="NAME", help="to try")
    parser.add_argument(
        "--exclude", nargs="+", default=(), metavar="PATTERN", help="paths left in high precision"
    )
    parser.add_argument("--times", type=Path, metavar="FILE", help="times of an earlier tuning")
    parser.add_argument("--save-times", type=Path, metavar="FILE", help="write the times as JSON")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="write the recipe, for recipe.load(FILE)"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw speed against error, PNG")


def run_tune(args: argparse.Namespace) -> int:
    """Print the table, and write the files that were asked for."""
    from fp8core.inspection.tuning import RECIPES, tune  # which no other command needs

    sys.path.insert(0, os.getcwd())
    try:
        function = _function(args.case)
    except (ImportError, AttributeError, ValueError) as error:
        raise RecipeError(
            f"{args.case!r} is no MODULE:FUNCTION that can be called here: {error}."
        ) from error
    case = function()
    if not isinstance(case, tuple) or len(case) not in (2, 3):
        raise RecipeError(
            f"{args.case} returned {type(case).__name__}, not (model, batches[, loss])."
        )
    model, batches, *loss = case
    tuning = tune(
        model,
        batches,
        bound=args.bound,
        loss=loss[0] if loss else None,
        recipes=args.recipes or RECIPES,
        exclude=args.exclude,
        times=args.times,
    )
    print(tuning.table())
    for path, write in (
        (args.output, tuning.save),
        (args.save_times, tuning.times.save),
        (args.plot, tuning.plot),
    ):
        if path is not None:
            write(path)
    return 0
