"""Private copies of the checkout, in which a file may be changed, and runs of their tests.

A copy comes first on the import path of its tests and of the processes that they start, before an
installed fp8core. A run whose modules come from elsewhere is an error, not a result.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import json
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "fp8core": "fp8core",
    "fp8core_backends": "backends",
    "fp8core_pytest": "fp8core_pytest",
}
OWN_MODULES = {*PACKAGES, "tests"}
NOT_COPIED = shutil.ignore_patterns(".*", "build", "*.egg-info", "shared")
IMPORT_PATH = "import_path"
PYTEST = ("-q", "-p", "no:cacheprovider", "-p", "no:benchmark", "-p", "no:xdist")
SHARED = ("torch", "torch.distributed", "numpy", "pluggy", "filelock")
"""Modules that are imported once for all runs: not fp8core, nor what pytest rewrites."""
ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "TEST_DEVICE": "cpu"}

POLL_S = 0.02
SLOWER, GRACE_S = 10, 10
"""A test hangs if it takes so many times its usual time, and so many seconds more."""
MEMORY = 8 * 2**30
"""Bytes that a process of a run may hold: a mutant may fill the machine."""
START_S = 60
"""How long a run may take until its first test, and after its last, before it is ended."""


class Copy:
    """A copy of a checkout: ``root`` is its top, ``variables`` put it first on the import path."""

    def __init__(self, source: Path, root: Path) -> None:
        self.root = root.resolve()
        shutil.copytree(source, root, ignore=NOT_COPIED, copy_function=_link, symlinks=True)
        names = self.root / IMPORT_PATH
        if not names.exists():
            names.mkdir()
            for name, folder in PACKAGES.items():
                (names / name).symlink_to(Path("..", folder), target_is_directory=True)
        self.paths = [str(names), str(self.root)]
        paths = [*self.paths, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        self.variables = {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join(paths)}

    def write(self, path: str, text: str) -> None:
        """Replace a file, whose other links stay as they are."""
        file = self.root / path
        for stale in (file, *file.parent.glob(f"__pycache__/{file.stem}.*.pyc")):
            stale.unlink(missing_ok=True)
        file.write_text(text, encoding="utf-8")

    def remove(self) -> None:
        """End what its tests have left running, and delete it."""
        mark = str(self.root).encode()
        for entry in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if mark in entry.read_bytes():
                    os.kill(int(entry.parent.name), signal.SIGKILL)
        shutil.rmtree(self.root, ignore_errors=True)


@contextlib.contextmanager
def copies(source: Path) -> Iterator[tuple[Path, Copy]]:
    """A folder for copies, and one of them, until the end of the block."""
    with tempfile.TemporaryDirectory(prefix="fp8core-mutation-") as folder:
        copy = Copy(source, Path(folder, "control"))
        try:
            yield Path(folder), copy
        finally:
            copy.remove()


@contextlib.contextmanager
def processes(count: int) -> Iterator[ProcessPoolExecutor]:
    """Forks of this process that have imported what they share; an error ends what waits."""
    os.environ.update(ENVIRONMENT)
    for module in SHARED:
        importlib.import_module(module)
    with ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("fork")) as pool:
        try:
            yield pool
        finally:
            pool.shutdown(cancel_futures=True)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # on another file system
        shutil.copy2(source, target)


class Test(NamedTuple):
    """A test's id and its usual time."""

    id: str
    seconds: float

    @property
    def file(self) -> str:
        return self.id.partition("::")[0]


@dataclasses.dataclass(frozen=True)
class Ending:
    """How a run of tests ended.

    Attributes:
        kind: "passed", "failed", "crashed", "hung", or "limit" if the time is up.
        test: the test or file that failed, or the test that ran last; None if none began.
        begun: ids of the tests that began.
        seconds: of wall clock.
    """

    kind: str
    test: str | None
    begun: list[str]
    seconds: float


class WrongTreeError(Exception):
    """A run has not imported, or not found, what it should have."""


def run_tests(copy: Copy, tests: Iterable[Test], limit: float, log: Path) -> Ending:
    """Run tests in a fork of this process until the first fails; none begins after ``limit`` s."""
    tests, log, began = list(tests), log.resolve(), time.monotonic()
    report = log.with_suffix(".json")
    report.unlink(missing_ok=True)
    progress = log.with_suffix(".tests")
    progress.write_text("")
    slowest = max(test.seconds for test in tests) * SLOWER + GRACE_S
    work = functools.partial(_run_here, copy, tests, limit, log)
    status = in_a_fork(work, limit + slowest + 2 * START_S)
    seconds = time.monotonic() - began
    begun = progress.read_text().splitlines()
    last = begun[-1] if begun else None
    if not report.exists():
        hung = status is None or os.waitstatus_to_exitcode(status) == -signal.SIGALRM
        return Ending("hung" if hung else "crashed", last, begun, seconds)
    result = json.loads(report.read_text())
    if result["strays"]:
        raise WrongTreeError(f"a run in {copy.root} has other modules: {result['strays'][:5]}")
    if result["failed"]:
        return Ending("failed", result["failed"], begun, seconds)
    if result["is_late"]:
        return Ending("limit", None, begun, seconds)
    if result["status"] not in (
        0,
        pytest.ExitCode.NO_TESTS_COLLECTED,
    ):  # a conftest.py that cannot be imported, for example
        return Ending("crashed", last, begun, seconds)
    return Ending("passed", None, begun, seconds)


def in_a_fork(work: Callable[[], None], limit: float) -> int | None:
    """The status of a fork of this process that did ``work``; None if there was too little time.

    The fork is ended after ``limit`` s, with what it has started.
    """
    if limit <= 0:
        return None
    pid = os.fork()
    if not pid:
        try:
            work()
        finally:
            if error := sys.exc_info()[1]:
                traceback.print_exception(error)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1 if error else 0)
    with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended
        os.setpgid(pid, pid)
    end = time.monotonic() + limit
    while time.monotonic() < end:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return status
        time.sleep(POLL_S)
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


# --- in the fork ---


def _run_here(copy: Copy, tests: list[Test], limit: float, log: Path) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    signal.alarm(START_S)  # the default action ends the process, wherever it hangs
    enter(copy, log)
    selection = Selection(tests, limit, log.with_suffix(".tests"))
    files = list(dict.fromkeys(test.file for test in tests))
    status = pytest.main([*PYTEST, "-x", *files], plugins=[selection])
    result = {
        "status": int(status),
        "failed": selection.failed,
        "is_late": selection.is_late,
        "strays": list(strays(copy)),
    }
    log.with_suffix(".json").write_text(json.dumps(result))


def enter(copy: Copy, log: Path) -> None:
    """Make this process one of a copy's, as if started in it; its output goes to ``log``."""
    with log.open("ab") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    os.chdir(copy.root)
    os.environ.update(copy.variables)
    for name in [name for name in sys.modules if name.partition(".")[0] in OWN_MODULES]:
        del sys.modules[name]
    sys.path[:] = [*copy.paths, *(path for path in sys.path if path and Path(path) != ROOT)]
    importlib.invalidate_caches()


def strays(copy: Copy) -> Iterator[str]:
    """Files of the project's modules that are not the copy's."""
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file and name.partition(".")[0] in OWN_MODULES:
            path = Path(file).resolve()
            if not path.is_relative_to(copy.root):
                yield f"{name}: {path}"


class Selection:
    """A plug-in of pytest that runs some tests, and says which fails."""

    def __init__(self, tests: list[Test], limit: float, progress: Path) -> None:
        self.tests = {test.id: test for test in tests}
        self.limit, self.progress = limit, progress
        self.began = time.monotonic()
        self.failed: str | None = None
        self.missing: list[str] = []
        self.is_late = False

    def pytest_collection_modifyitems(
        self, session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        items[:] = [item for item in items if item.nodeid in self.tests]
        self.missing = sorted(self.tests.keys() - {item.nodeid for item in items})

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed = self.failed or report.nodeid

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        with self.progress.open("a") as stream:
            stream.write(f"{nodeid}\n")
        signal.alarm(int(self.tests[nodeid].seconds * SLOWER) + GRACE_S)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed = self.failed or report.nodeid

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        returned = yield
        signal.alarm(0)
        if time.monotonic() - self.began > self.limit:
            self.is_late = True
            item.session.shouldstop = f"{self.limit:.0f} s have passed"
        return returned
