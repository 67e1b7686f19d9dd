"""Runs a part of the doctor in another process, so that a crash or a hang becomes a finding.

The process writes records, lines of JSON, to a file without delay, and announces every step before
it begins. The last record thus names the step in which the process crashed or hung.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

from fp8core.dispatch.isolation import plain

Record: TypeAlias = dict[str, Any]
"""A finding, or a step that begins: ``{"begin": "the self-test of gemm", ...}``."""

START_S = 60.0  # importing torch is slow on a busy machine

_END: Record = {"end": True}


@dataclass(frozen=True, slots=True)
class Ending:
    """The crash, failure or time-out of a process."""

    text: str
    is_timeout: bool = False


@contextlib.contextmanager
def writing(path: str) -> Iterator[Callable[[Record], None]]:
    """Yield a function that appends a record to the file at ``path`` without delay.

    The last record marks the end, unless an error is raised.
    """
    with open(path, "a", encoding="utf-8", buffering=1) as stream:

        def put(record: Record) -> None:
            stream.write(json.dumps(record) + "\n")

        yield put
        put(_END)


def run(arguments: Sequence[str], deadline: float) -> tuple[list[Record], Ending | None]:
    """Run ``python -m fp8core.doctor`` with ``arguments``; return its records, and its failure.

    The process is killed, with all processes that it started, if it writes nothing for ``deadline``
    seconds; the first record may take longer.
    """
    return run_together([arguments], deadline)[0]


def run_together(
    commands: Sequence[Sequence[str]], deadline: float
) -> list[tuple[list[Record], Ending | None]]:
    """Run a process for each of ``commands`` at the same time, each as :func:`run` does."""
    with TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        children = []
        for number, arguments in enumerate(commands):
            child = _Child(arguments, Path(folder, str(number)), deadline)
            stack.callback(child.end)
            children.append(child)
        running = list(children)
        while running:
            running = [child for child in running if child.is_running()]
            time.sleep(0.02 if running else 0)
        return [child.outcome() for child in children]


def last_step(seen: Sequence[Record]) -> Record:
    """Return the last step that began."""
    steps = (record for record in reversed(seen) if "begin" in record)
    return next(steps, {"begin": "starting"})


class _Child:
    """A process of the doctor, and the file in ``folder`` that it writes its records to."""

    def __init__(self, arguments: Sequence[str], folder: Path, deadline: float) -> None:
        folder.mkdir()
        self._output, self._errors = folder / "records", folder / "errors"
        self._output.touch()
        self._deadline = deadline
        self._size, self._since = 0, time.monotonic()
        self._is_timeout = False
        command = [sys.executable, "-m", "fp8core.doctor", "--to", str(self._output), *arguments]
        with self._errors.open("wb") as stream:
            # In a new session, so that processes of a backend, such as a compiler, are killed too.
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                start_new_session=True,
            )

    def is_running(self) -> bool:
        """Return whether it runs; it is killed if its records have stopped growing."""
        if self._process.poll() is not None:
            return False
        if (grown := self._output.stat().st_size) > self._size:
            self._size, self._since = grown, time.monotonic()
        allowed = self._deadline if self._size else max(self._deadline, START_S)
        if time.monotonic() - self._since <= allowed:
            return True
        self._is_timeout = True
        self.end()
        return False

    def end(self) -> None:
        """Kill the process, and those that it started, if it runs."""
        if self._process.poll() is not None:
            return
        if hasattr(os, "killpg"):
            os.killpg(self._process.pid, signal.SIGKILL)
        else:
            self._process.kill()
        self._process.wait()

    def outcome(self) -> tuple[list[Record], Ending | None]:
        """Return the records of the process, and its failure, once it has ended."""
        lines = self._output.read_text(encoding="utf-8").splitlines()
        seen = [json.loads(line) for line in lines]
        if self._is_timeout:
            return seen, Ending(f"no progress for {self._deadline:g} s, ended", is_timeout=True)
        status = self._process.returncode
        if status == 0 and _END in seen:
            return seen, None
        return seen, Ending(_describe(status, self._errors.read_text(errors="replace")))


def _describe(status: int, errors: str) -> str:
    if status >= 0:
        text = f"exited with status {status}"
    else:
        names = {number.value: number.name for number in signal.Signals}
        text = f"killed by {names.get(-status, f'signal {-status}')}"
    said = errors.strip().splitlines()
    return f"{text}: {plain(said[-1])}" if said else text
