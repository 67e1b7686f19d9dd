"""What is found out about one backend, step by step, in this process or in one of its own.

A backend's probe, factory and kernels may crash or hang. In a process of its own that is a finding:
the step that was under way, and the signal or the time-out.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import torch

from fp8core.backend_api import OPS
from fp8core.dispatch import plugins
from fp8core.doctor.matrix import Cell, cells
from fp8core.doctor.selftest import Check, check

__all__ = ["Findings", "absent", "apart", "here", "records"]

Record: TypeAlias = dict[str, Any]

_DECLARING = "asking for its declarations"


@dataclass(slots=True)
class Findings:
    """What is known of one backend.

    Attributes:
        name: the backend's name.
        unusable: why it cannot be used on this machine; None if it can.
        device: where it was asked and tested; None if it is unusable.
        untested: why nothing was run there; None if something was.
        cells: its row of the matrix.
        checks: the self-test, one for each operation that it supports.
    """

    name: str
    unusable: str | None = None
    device: str | None = None
    untested: str | None = None
    cells: list[Cell] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)

    @property
    def failed(self) -> list[str]:
        """The operations whose self-test failed."""
        return [own.op for own in self.checks if own.failure is not None]

    def take(self, record: Record) -> None:
        """Add what one record of :func:`records` says."""
        self.unusable = record.get("unusable", self.unusable)
        self.device = record.get("device", self.device)
        self.untested = record.get("untested", self.untested)
        if "cells" in record:
            self.cells = [
                Cell(own["recipe"], own["op"], own["state"], tuple(own["reasons"]))
                for own in record["cells"]
            ]
        if "check" in record:
            self.checks.append(Check(**record["check"]))


def absent(device: torch.device) -> str | None:
    """Say why ``device`` is not here, or None if it is."""
    if device.type in ("cpu", "meta"):
        return None
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None or found.type != device.type:
        return f"torch finds no {device.type} device here"
    count = torch.accelerator.device_count()
    if device.index is not None and device.index >= count:
        return f"there is no {device}: torch finds {count} {device.type} devices here"
    return None


def records(name: str, asked: torch.device | None, done: Collection[str] = ()) -> Iterator[Record]:
    """Yield what is found out about backend ``name``; each step is announced before it begins.

    ``asked`` None takes the first of the backend's own devices that is here. Operations in ``done``
    are not tested again.
    """
    registry = plugins.load()
    spec = registry.spec(name, "fp8core doctor")
    yield {"begin": "its probe and import"}
    reason = registry.unusable(spec)
    yield {"unusable": reason}
    if reason is not None:
        yield {"end": True}
        return
    own = [torch.device(kind) for kind in spec.device_types if kind != "meta"]
    device = asked or next((one for one in own if absent(one) is None), own[0])
    yield {"begin": _DECLARING, "device": str(device)}
    yield {"cells": [dataclasses.asdict(cell) for cell in cells(spec, device)]}
    reason = absent(device)
    if reason is None and device.type not in spec.device_types and not spec.portable:
        reason = f"runs on {'/'.join(spec.device_types)}, not on {device.type}"
    yield {"untested": reason}
    for op in OPS if reason is None else ():
        if op not in done:
            yield {"begin": f"the self-test of {op}", "op": op}
            found = check(spec, op, device)
            yield {} if found is None else {"check": dataclasses.asdict(found)}
    yield {"end": True}


def here(name: str, asked: torch.device | None) -> Findings:
    """Find out about backend ``name`` in this process: a crash of the backend is one of ours."""
    found = Findings(name)
    for record in records(name, asked):
        found.take(record)
    return found


def apart(name: str, asked: torch.device | None, deadline: float) -> Findings:
    """Find out about backend ``name`` in processes of its own.

    A step that makes no progress for ``deadline`` seconds is ended. After a crash in the test of
    one operation the others are tested in another process; after a time-out they are not.
    """
    found = Findings(name)
    while True:
        tested = [own.op for own in found.checks]
        seen, ending = _run(name, asked, deadline, tested)
        for record in seen:
            found.take(record)
        if ending is None:
            return found
        step = next((own for own in reversed(seen) if "begin" in own), {"begin": "starting"})
        if "op" not in step:
            found.unusable = f"{step['begin']}: {ending.text}"
            return found
        found.checks.append(_failed(step["op"], ending.text))
        if ending.is_timeout:
            left = [op for op in OPS if op not in {own.op for own in found.checks}]
            found.checks += [_failed(op, f"not run, after {step['op']} hung") for op in left]
            return found


def _failed(op: str, reason: str) -> Check:
    return Check(op, 0, None, "", reason)


@dataclass(frozen=True, slots=True)
class _Ending:
    """How a process ended that did not come to its end."""

    text: str
    is_timeout: bool = False


def _run(
    name: str, asked: torch.device | None, deadline: float, done: Collection[str]
) -> tuple[list[Record], _Ending | None]:
    with TemporaryDirectory() as folder:
        output, errors = Path(folder, "records"), Path(folder, "errors")
        output.touch()
        command = [sys.executable, "-m", "fp8core.doctor", name, "--to", str(output)]
        command += ["--device", str(asked)] if asked is not None else []
        command += ["--done", *done] if done else []
        with errors.open("wb") as stream:
            # A session of its own: what the backend starts, a compiler say, is ended with it.
            process = subprocess.Popen(
                command,
                stdout=stream,
                stderr=stream,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            is_timeout = not _wait(process, output, deadline)
        seen = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
        if is_timeout:
            return seen, _Ending(f"no progress for {deadline:g} s, ended", is_timeout=True)
        if process.returncode == 0 and "end" in seen[-1]:
            return seen, None
        return seen, _Ending(_describe(process.returncode, errors.read_text(errors="replace")))


def _wait(process: subprocess.Popen[bytes], output: Path, deadline: float) -> bool:
    """Wait for ``process``; False if it was ended because ``output`` stopped growing."""
    size, since = 0, time.monotonic()
    try:
        while process.poll() is None:
            if (grown := output.stat().st_size) > size:
                size, since = grown, time.monotonic()
            if time.monotonic() - since > deadline:
                return False
            time.sleep(0.02)
        return True
    finally:
        if process.poll() is None:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    if hasattr(os, "killpg"):
        os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
    process.wait()


def _describe(status: int, errors: str) -> str:
    if status >= 0:
        text = f"exited with status {status}"
    else:
        names = {own.value: own.name for own in signal.Signals}
        text = f"killed by {names.get(-status, f'signal {-status}')}"
    said = errors.strip().splitlines()
    return f"{text}: {said[-1]}" if said else text


def write_records(
    write: Callable[[str], object], name: str, asked: torch.device | None, done: Collection[str]
) -> None:
    """Write :func:`records` as lines of JSON, each at once."""
    for record in records(name, asked, done):
        write(json.dumps(record) + "\n")
