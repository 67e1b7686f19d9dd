"""Running a part of the doctor in a process of its own: a crash or a hang becomes a finding.

The process writes records, lines of JSON, to a file, each at once, and announces every step before
it begins. So it is known which step was under way when the process died or stopped.
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
"""Something found out, or a step that begins: ``{"begin": "the self-test of gemm", ...}``."""

START_S = 60.0  # for importing torch, which a busy machine makes slow

_END: Record = {"end": True}


@dataclass(frozen=True, slots=True)
class Ending:
    """How a process ended that did not come to its end."""

    text: str
    is_timeout: bool = False


@contextlib.contextmanager
def writing(path: str) -> Iterator[Callable[[Record], None]]:
    """Give a function that writes a record to the file at ``path`` at once; ends with a mark."""
    with open(path, "a", encoding="utf-8", buffering=1) as stream:

        def put(record: Record) -> None:
            stream.write(json.dumps(record) + "\n")

        yield put
        put(_END)


def run(arguments: Sequence[str], deadline: float) -> tuple[list[Record], Ending | None]:
    """Run ``python -m fp8core.doctor`` with ``arguments``; return its records, and how it failed.

    It is ended, with all that it started, if it writes nothing for ``deadline`` seconds; it has
    longer to start.
    """
    with TemporaryDirectory() as folder:
        output, errors = Path(folder, "records"), Path(folder, "errors")
        output.touch()
        command = [sys.executable, "-m", "fp8core.doctor", "--to", str(output), *arguments]
        with errors.open("wb") as stream:
            # A session of its own: what a backend starts, a compiler say, is ended with it.
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
    """Return the step that was under way last."""
    return next((own for own in reversed(seen) if "begin" in own), {"begin": "starting"})


def _wait(child: subprocess.Popen[bytes], output: Path, deadline: float) -> bool:
    """Wait for ``child``; False if it was ended because ``output`` stopped growing."""
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
        names = {own.value: own.name for own in signal.Signals}
        text = f"killed by {names.get(-status, f'signal {-status}')}"
    said = errors.strip().splitlines()
    return f"{text}: {plain(said[-1])}" if said else text
