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

__all__ = ["Ending", "Record", "last_step", "run", "writing"]

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

    It is killed, with all processes that it started, if it writes nothing for ``deadline`` seconds;
    its first record may take longer.
    """
    with TemporaryDirectory() as folder:
        output, errors = Path(folder, "records"), Path(folder, "errors")
        output.touch()
        command = [sys.executable, "-m", "fp8core.doctor", "--to", str(output), *arguments]
        with errors.open("wb") as stream:
            # In a new session, so that processes of a backend, such as a compiler, are killed too.
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                start_new_session=True,
            )
            is_timeout = not _wait(child, output, deadline)
        seen = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
        if is_timeout:
            return seen, Ending(f"no progress for {deadline:g} s, ended", is_timeout=True)
        if child.returncode == 0 and _END in seen:
            return seen, None
        return seen, Ending(_describe(child.returncode, errors.read_text(errors="replace")))


def last_step(seen: Sequence[Record]) -> Record:
    """Return the last step that began."""
    steps = (record for record in reversed(seen) if "begin" in record)
    return next(steps, {"begin": "starting"})


def _wait(child: subprocess.Popen[bytes], output: Path, deadline: float) -> bool:
    """Wait for ``child``; return False if it was killed because ``output`` stopped growing."""
    size, since = 0, time.monotonic()
    try:
        while child.poll() is None:
            if (grown := output.stat().st_size) > size:
                size, since = grown, time.monotonic()
            if time.monotonic() - since > (deadline if size else max(deadline, START_S)):
                return False
            time.sleep(0.02)
        return True
    finally:
        if child.poll() is None:
            _end(child)


def _end(child: subprocess.Popen[bytes]) -> None:
    if hasattr(os, "killpg"):
        os.killpg(child.pid, signal.SIGKILL)
    else:
        child.kill()
    child.wait()


def _describe(status: int, errors: str) -> str:
    if status >= 0:
        text = f"exited with status {status}"
    else:
        names = {one.value: one.name for one in signal.Signals}
        text = f"killed by {names.get(-status, f'signal {-status}')}"
    said = errors.strip().splitlines()
    return f"{text}: {plain(said[-1])}" if said else text
