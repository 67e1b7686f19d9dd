"""What a GPU's owner runs: ``python -m tests --gpu [PART ...]``, all parts one after the other.

Prints whether each part passed, and its row for docs/measured.md. The exit status is 0 if all did,
1 if one failed or ran out of time, 2 on a machine that cannot run them.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from xml.etree import ElementTree

import torch

ROOT = Path(__file__).resolve().parent.parent
PART_LIMIT_S = 8 * 60.0
TOTAL_LIMIT_S = 20 * 60.0
CORES = min(14, max(1, (os.cpu_count() or 1) - 2))  # each takes half a GiB of the GPU for torch
WRITING_S = 40.0
SHOWN_CHARACTERS = 6000
SHOWN_FAILURES = 100
SHOWN_REASONS = 8

PAGES = ("tests/docs/test_pages.py", "tests/test_programs.py")
CUDA_TESTS = "tests/backends/cuda"
LAYERS = (
    *("tests/chain", "tests/context", "tests/conversion", "tests/functional", "tests/inspection"),
    *("tests/modules", "tests/tensors", "tests/training", "tests/test_cpu_offload.py"),
    *("tests/test_cross_entropy.py", "tests/test_op_container.py", "tests/test_op_kinds.py"),
    *("tests/test_ops.py", "tests/test_permutation.py", "tests/test_router.py"),
    *("tests/test_silent_failures.py", "tests/test_te_functions.py", "tests/test_ways.py"),
    "tests/test_user_operation.py",
)
LEFT_OUT = {
    "tests/backend_api": "descriptors and signatures, without a tensor",
    "tests/backends/ascend": "another backend",
    "tests/backends/reference": "its bits, which the conformance kit asks of the cuda backend",
    "tests/benchmarks": "what the benchmarks count and print",
    "tests/cli": "training in processes that choose their device",
    "tests/collectives": "processes joined by gloo",
    "tests/conformance": "the kit itself, with backends of the CPU that break its laws",
    "tests/dispatch": "which backend is chosen, with toys",
    "tests/distributed": "processes joined by gloo, or by NCCL with TEST_DEVICE=cuda and two GPUs",
    "tests/docs/test_architecture.py": "source text, names, and a step of the reference",
    "tests/docs/test_site.py": "pages built by Sphinx",
    "tests/doctor": "reports of broken plug-ins; the part `doctor` is the report of this machine",
    "tests/formats": "encoding in torch's operators, bit for bit against ml_dtypes on the CPU",
    "tests/integrations": "names of Transformer Engine, and frameworks on the CPU",
    "tests/interchange": "files, which are written from and read to the CPU, and programs for it",
    "tests/mutation": "source text, and a toy's tests",
    "tests/recipe": "values without a tensor",
    "tests/thirdparty": "a plug-in for the CPU",
    "tests/torch_ops": "what torch's tracing sees, the same on every device",
    "tests/test_compile.py": "torch.compile; tests/backends/cuda/test_compile.py is about CUDA",
    "tests/test_compile_delayed.py": "the same of delayed scaling",
    "tests/test_device.py": "how tests are put on a device",
    "tests/test_doctests.py": "printed tensors name their device",
    "tests/test_house.py": "source text",
    "tests/test_layering.py": "source text",
    "tests/test_lightning.py": "a framework that is told to use the CPU",
    "tests/test_megatron.py": "a framework that is told to use the CPU",
    "tests/test_on_gpu.py": "this command",
    "tests/test_on_ranks.py": "the command for two GPUs, `python -m tests.on_ranks`",
    "tests/test_op_arguments.py": "arguments, without a device",
    "tests/test_packaging.py": "distributions",
    "tests/test_public_names.py": "names",
    "tests/test_refusals.py": "tables of calls",
    "tests/test_te_surface.py": "names",
    "tests/test_thirdparty.py": "a plug-in for the CPU",
    "tests/test_torchtitan.py": "a framework that is told to use the CPU",
}
"""Tests that the part ``layers`` leaves out, and why."""


@dataclasses.dataclass(frozen=True)
class Part:
    """What a part runs.

    Attributes:
        meaning: one line for the command's help.
        command: the arguments of Python.
        places_tensors: whether the tests' tensors are put on the GPU (:mod:`tests.device`).
    """

    meaning: str
    command: tuple[str, ...]
    places_tensors: bool = False


BUILD = ("-m", "fp8core", "build", "cuda")
_PYTEST = ("-m", "pytest", "-q", "-p", "no:benchmark", "-p", "no:cacheprovider")
_PYTEST += ("-n", str(CORES), "--dist", "loadfile")
_OF_ONE_FILE = (*_PYTEST, "--dist", "load")
_KIT = (*_OF_ONE_FILE, "--fp8core-backend", "cuda")
PARTS = {
    "doctor": Part("the doctor finds no problem", ("-m", "fp8core", "doctor")),
    "pages": Part(
        "code of pages, examples and programs", (*_OF_ONE_FILE, *PAGES), places_tensors=True
    ),
    "layers": Part("the CPU's tests of layers", (*_PYTEST, *LAYERS), places_tensors=True),
    "kit": Part("the laws of every backend", _KIT),
    "cuda": Part("tests of the CUDA backend", (*_PYTEST, CUDA_TESTS)),
    "sanitizer": Part("compute-sanitizer's tools", ("-m", "tests.backends.cuda.sanitize")),
}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a part ended.

    Attributes:
        passed: tests that passed; of a part without tests, 1 if its command did.
        failed: tests that failed, or the command.
        skipped: how many tests were skipped, by reason.
        seconds: of wall clock.
        ending: why not all of it ran, or empty.
    """

    passed: int
    failed: int
    skipped: Mapping[str, int]
    seconds: float
    ending: str = ""

    @property
    def is_success(self) -> bool:
        return not self.failed and not self.ending

    def row(self, part: str, device: str, commit: str) -> str:
        """The outcome as a row of :data:`HEAD`."""
        failed = ", ".join(filter(None, (str(self.failed or ""), self.ending))) or "0"
        reasons = Counter(self.skipped).most_common()
        shown = [f"{count}: {text}" for text, count in reasons[:SHOWN_REASONS]]
        if rest := reasons[SHOWN_REASONS:]:
            shown.append(f"{sum(count for _, count in rest)}: {len(rest)} other reasons")
        cells = (part, str(self.passed), failed, "; ".join(shown) or "0", f"{self.seconds:.0f} s")
        return f"| {' | '.join(cell.replace('|', '/') for cell in (*cells, device, commit))} |"


HEAD = """| part | passed | failed | skipped, by reason | time | device | commit |
|---|---|---|---|---|---|---|"""


_OTHERS = ("failures", "errors", "skipped")


def counted(junit: Path) -> tuple[int, int, dict[str, int]]:
    """How many tests of a JUnit file passed, how many failed, and the others by their reason."""
    tree = ElementTree.parse(junit)
    failed, skipped = 0, Counter[str]()
    for case in tree.iter("testcase"):
        skip = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            failed += 1
        elif skip is not None:
            skipped[" ".join(skip.get("message", "no reason").split())] += 1
    # Not the other cases: a test that was interrupted is one of them, and not in pytest's number.
    passed = sum(
        int(suite.get("tests", 0)) - sum(int(suite.get(name, 0)) for name in _OTHERS)
        for suite in tree.iter("testsuite")
    )
    return passed, failed, dict(skipped)


def failures(junit: Path) -> list[str]:
    """A line for each test of a JUnit file that failed: its name, and how its message begins."""
    lines = []
    for case in ElementTree.parse(junit).iter("testcase"):
        for problem in (*case.iter("failure"), *case.iter("error")):
            message = " ".join(problem.get("message", "").split())
            lines.append(f"{case.get('classname')}::{case.get('name')}: {message[:160]}")
    return lines


def _begin() -> None:
    """Make this process a group of its own that ends by SIGINT, which a job in the background of a
    shell ignores."""
    os.setpgrp()
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def run(part: Part, name: str, folder: Path, limit: float) -> Outcome:
    """Run a part for up to ``limit`` seconds; its output and counts go to files of ``folder``."""
    if limit <= 0:
        return Outcome(0, 0, {}, 0.0, "not run: no time was left")
    junit, variables = folder / f"{name}.xml", dict(os.environ)
    variables["TEST_DEVICE"] = "cuda" if part.places_tensors else "cpu"
    variables["PYTEST_ADDOPTS"] = f"{variables.get('PYTEST_ADDOPTS', '')} --junitxml={junit}"
    junit.unlink(missing_ok=True)
    began, status, ending = time.monotonic(), 1, ""
    with (folder / f"{name}.log").open("wb") as log:
        # A group of its own, so that what it starts ends with it.
        process = subprocess.Popen(
            [sys.executable, *part.command],
            cwd=ROOT,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            preexec_fn=_begin,
        )
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)  # pytest then writes what it has
            ending = f"stopped after {limit:.0f} s"
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(WRITING_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    seconds = time.monotonic() - began
    passed, failed, skipped = counted(junit) if junit.exists() else (int(not status), 0, {})
    if not ending and not failed and (status or not passed):
        ending = f"ended with status {status}" if status else "no test passed"
    return Outcome(passed, failed, skipped, seconds, ending)


def part_named(text: str) -> str:
    """``text`` if it is a part's name, as the type of an argument."""
    if text not in PARTS:
        raise argparse.ArgumentTypeError(f"no part {text!r}; the parts are {', '.join(PARTS)}")
    return text


def why_not_here() -> str | None:
    """Why this machine cannot run the parts, and what would work; None if it can."""
    if not torch.cuda.is_available():
        return (
            f"torch {torch.__version__} finds no CUDA device. These tests need an NVIDIA GPU of "
            f"compute capability 9.0, and a torch for its driver's CUDA; `python -m tests` runs "
            f"every check that needs no GPU."
        )
    missing = [name for name in ("pytest", "xdist", "hypothesis") if not _is_installed(name)]
    if missing:
        return f"{', '.join(missing)} not installed: `python -m pip install -e '.[test]'`"
    return None


def _is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def commit() -> str:
    """The commit of the checkout, with a plus if files differ from it."""
    git = functools.partial(subprocess.run, cwd=ROOT, capture_output=True, text=True, check=False)
    try:
        name = git(["git", "rev-parse", "--short", "HEAD"]).stdout.strip()
        changed = git(["git", "status", "--porcelain", "-uno"]).stdout.strip()
    except FileNotFoundError:
        return "unknown"
    return f"{name}{'+' if changed else ''}" if name else "unknown"


def show(name: str, folder: Path) -> None:
    """Print which tests of a part failed; of a part without counts, the end of its output."""
    junit, log = folder / f"{name}.xml", folder / f"{name}.log"
    if junit.exists():
        lines = failures(junit)
        print(*lines[:SHOWN_FAILURES], sep="\n")
        if len(lines) > SHOWN_FAILURES:
            print(f"and {len(lines) - SHOWN_FAILURES} more, in {junit}")
    elif log.exists():
        print(log.read_text("utf-8", "replace")[-SHOWN_CHARACTERS:])


def main(arguments: list[str]) -> int:
    """Run the parts that ``arguments`` name, or all; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests --gpu",
        description=__doc__,
        epilog="\n".join(f"{name}: {part.meaning}" for name, part in PARTS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("parts", nargs="*", type=part_named, metavar="PART", help="default: all")
    parser.add_argument("--logs", type=Path, metavar="DIR", help="for output and JUnit files")
    options = parser.parse_args(arguments)
    if reason := why_not_here():
        print(f"python -m tests --gpu: {reason}", file=sys.stderr)
        return 2
    folder = (options.logs or Path(tempfile.mkdtemp(prefix="fp8core-gpu-"))).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    # Compiled before the clocks run.
    status = subprocess.run([sys.executable, *BUILD], cwd=ROOT, check=False).returncode
    if status:
        print(f"`fp8core build cuda` ended with status {status}; its output is above.")
        return 1
    outcomes, end = {}, time.monotonic() + TOTAL_LIMIT_S
    for name in options.parts or PARTS:
        outcome = run(PARTS[name], name, folder, min(PART_LIMIT_S, end - time.monotonic()))
        outcomes[name] = outcome
        if not outcome.is_success:
            show(name, folder)
        print(f"{name}: {'passed' if outcome.is_success else 'FAILED'}", flush=True)
    device, at = f"{torch.cuda.get_device_name()}, torch {torch.__version__}", commit()
    print(f"\n{HEAD}", *(one.row(name, device, at) for name, one in outcomes.items()), sep="\n")
    print(f"\noutput and JUnit files: {folder}")
    return int(not all(outcome.is_success for outcome in outcomes.values()))
