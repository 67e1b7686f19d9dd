"""What is found out about one backend, step by step, in this process or in one of its own.

A backend's probe, factory and kernels may crash or hang. In a process of its own that is a finding:
the step that was under way, and the signal or the time-out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

import torch

from fp8core.backend_api import OPS, OPTIONAL_OPS, BackendSpec
from fp8core.dispatch import plugins
from fp8core.doctor import process
from fp8core.doctor.matrix import Cell, cells
from fp8core.doctor.process import Record
from fp8core.doctor.selftest import Check, check

__all__ = ["Findings", "absent", "apart", "here", "records"]

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
        return
    own = [torch.device(kind) for kind in spec.device_types if kind != "meta"]
    device = asked or next((one for one in own if absent(one) is None), own[0])
    yield {"begin": _DECLARING, "device": str(device)}
    yield {"cells": [dataclasses.asdict(cell) for cell in cells(spec, device)]}
    reason = _why_untested(spec, device)
    yield {"untested": reason}
    for op in (*OPS, *OPTIONAL_OPS) if reason is None else ():
        if op not in done:
            yield {"begin": f"the self-test of {op}", "op": op}
            found = check(spec, op, device)
            yield {} if found is None else {"check": dataclasses.asdict(found)}


def _why_untested(spec: BackendSpec, device: torch.device) -> str | None:
    if device.type == "meta":
        return "meta tensors hold no values"
    if device.type not in spec.device_types and not spec.portable:
        return f"it runs on {'/'.join(spec.device_types)}, not on {device.type}"
    return absent(device)


def here(name: str, asked: torch.device | None) -> Findings:
    """Find out about backend ``name`` in this process: a crash of the backend is one of ours."""
    found = Findings(name)
    for record in records(name, asked):
        found.take(record)
    return found


def apart(
    name: str, asked: torch.device | None, *, deadline: float, without: Collection[str] = ()
) -> Findings:
    """Find out about backend ``name`` in processes of its own, ``without`` some plug-ins.

    A step that makes no progress for ``deadline`` seconds is ended. After a crash in the test of
    one operation the others are tested in another process; after a time-out they are not.
    """
    found = Findings(name)
    device = ["--device", str(asked)] if asked is not None else []
    while True:
        done = [own.op for own in found.checks]
        arguments = ["backend", name, *device, "--done", *done, "--without", *without]
        seen, ending = process.run(arguments, deadline)
        for record in seen:
            found.take(record)
        if ending is None:
            return found
        step = process.last_step(seen)
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
