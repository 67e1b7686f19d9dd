"""Records which lines of fp8core each test reaches, in its process and in those that it starts.

Every interpreter whose ``sitecustomize`` calls :func:`start` appends lines to a file of a folder:
a test, from pytest with how long it took and whether it passed; a tab; and the lines by file.
PYTEST_DONT_REWRITE: imported before pytest.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
from collections import defaultdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

FOLDER = "FP8CORE_TEST_LINES"
"""Environment variable: the folder of the records."""

_MARK = f"{os.sep}fp8core{os.sep}"
_reached: set[tuple[str, int]] = set()


def start() -> None:
    """Record from now on; what no test reaches is dropped."""
    if FOLDER not in os.environ:
        return
    _watch()
    atexit.register(_end)
    os.register_at_fork(after_in_child=_begin)
    leave = os._exit

    def leave_with_record(status: int) -> None:
        _end()
        leave(status)

    os._exit = leave_with_record  # type: ignore[assignment]


def _watch() -> None:
    """Have the interpreter tell of each line, once after each :func:`_begin`."""
    if sys.version_info < (3, 12):
        sys.settrace(_trace)
        threading.settrace(_trace)
        return
    monitoring = sys.monitoring
    tool, events, again = monitoring.COVERAGE_ID, monitoring.events, monitoring.DISABLE

    def enter(code: Any, _offset: int) -> object:
        if _MARK in code.co_filename:
            monitoring.set_local_events(tool, code, events.LINE)
        return again

    def reach(code: Any, line: int) -> object:
        _reached.add((code.co_filename, line))
        return again

    monitoring.use_tool_id(tool, "fp8core tests")
    monitoring.register_callback(tool, events.PY_START, enter)
    monitoring.register_callback(tool, events.LINE, reach)
    monitoring.set_events(tool, events.PY_START)


def _trace(frame: Any, event: str, _argument: object) -> Any:
    if _MARK not in frame.f_code.co_filename:
        return None
    if event == "line":
        _reached.add((frame.f_code.co_filename, frame.f_lineno))
    return _trace


def _begin() -> None:
    _reached.clear()
    if sys.version_info >= (3, 12):
        sys.monitoring.restart_events()


def _end() -> None:
    """Write what a process of a test reached."""
    test, _, _ = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")
    if test:
        _write({"test": test})


def _write(record: dict[str, Any]) -> None:
    by_file = defaultdict(list)
    for file, line in _reached.copy():
        by_file[f"fp8core/{file.rpartition(_MARK)[2]}"].append(line)
    _reached.clear()
    with open(os.path.join(os.environ[FOLDER], f"{os.getpid()}.jsonl"), "a") as stream:
        stream.write(f"{json.dumps(record)}\t{json.dumps(by_file)}\n")


# --- as a plug-in of pytest ---


class _Tests:
    """Records each test."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.passed = True

    def pytest_runtest_logstart(self) -> None:
        self.seconds, self.passed = 0.0, True
        _begin()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds += report.duration
        self.passed &= report.passed

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        _write({"test": nodeid, "seconds": self.seconds, "passed": self.passed})


def pytest_configure(config: pytest.Config) -> None:
    """Record the tests of this process."""
    config.pluginmanager.register(_Tests())
