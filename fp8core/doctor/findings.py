"""The examination of one backend, step by step, in this process or in another one.

A backend's probe, factory and kernels may crash or hang. In another process that becomes a finding:
the step that had begun, and the signal or the time-out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

import torch

from fp8core.backend_api import OPS, OPTIONAL_OPS, BackendSpec
from fp8core.dispatch import plugins, process
from fp8core.dispatch.process import Record
from fp8core.doctor.matrix import Cell, cell_from, cells, needs_by_recipe
from fp8core.doctor.selftest import Check, check

__all__ = ["Findings", "absent", "apart", "here", "records"]

_DECLARING = "asking for its declarations"


@dataclass(slots=True)
class Findings:
    """The results of the examination of one backend.

    Attributes:
        name: the backend's name.
        unusable: why it cannot be used on this machine; None if it can.
        device: the device that it was asked about and tested on; None if it is unusable.
        untested: why it was not tested there; None if it was.
        cells: its cells of the matrix.
        checks: the results of the self-test, one for each operation that it supports.
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
        return [check.op for check in self.checks if check.failure is not None]

    def take(self, record: Record) -> None:
        """Add the results in one record of :func:`records`."""
        self.unusable = record.get("unusable", self.unusable)
        self.device = record.get("device", self.device)
        self.untested = record.get("untested", self.untested)
        if "cells" in record:
            self.cells = [cell_from(entry) for entry in record["cells"]]
        if "check" in record:
            self.checks.append(Check(**record["check"]))


def absent(device: torch.device) -> str | None:
    """Return why this machine has no ``device``, None if it has one."""
    if device.type in ("cpu", "meta"):
        return None
    present = torch.accelerator.current_accelerator(check_available=True)
    if present is None or present.type != device.type:
        return f"torch finds no {device.type} device here"
    count = torch.accelerator.device_count()
    if device.index is not None and device.index >= count:
        return f"there is no {device}: torch finds {count} {device.type} devices here"
    return None


def records(name: str, asked: torch.device | None, done: Collection[str] = ()) -> Iterator[Record]:
    """Yield the results of examining backend ``name``; each step is announced before it begins.

    ``asked`` None stands for the backend's first device type that this machine has. Operations in
    ``done`` are not tested again.
    """
    registry = plugins.load()
    spec = registry.spec(name, "fp8core doctor")
    yield {"begin": "its probe and import"}
    reason = registry.unusable(spec)
    yield {"unusable": reason}
    if reason is not None:
        return
    devices = [torch.device(kind) for kind in spec.device_types if kind != "meta"]
    device = asked or next((one for one in devices if absent(one) is None), devices[0])
    yield {"begin": _DECLARING, "device": str(device)}
    needs = needs_by_recipe()
    yield {"cells": [dataclasses.asdict(cell) for cell in cells(spec, device, needs)]}
    reason = _why_untested(spec, device)
    yield {"untested": reason}
    for op in (*OPS, *OPTIONAL_OPS) if reason is None else ():
        if op not in done:
            yield {"begin": f"the self-test of {op}", "op": op}
            result = check(spec, op, device, needs)
            yield {} if result is None else {"check": dataclasses.asdict(result)}


def _why_untested(spec: BackendSpec, device: torch.device) -> str | None:
    if device.type == "meta":
        return "meta tensors hold no values"
    if device.type not in spec.device_types and not spec.portable:
        return f"it runs on {'/'.join(spec.device_types)}, not on {device.type}"
    return absent(device)


def here(name: str, asked: torch.device | None) -> Findings:
    """Examine backend ``name`` in this process, which a crash of the backend ends."""
    findings = Findings(name)
    for record in records(name, asked):
        findings.take(record)
    return findings


def apart(
    name: str, asked: torch.device | None, *, deadline: float, without: Collection[str] = ()
) -> Findings:
    """Examine backend ``name`` in another process, ``without`` some plug-ins.

    A step that makes no progress for ``deadline`` seconds is killed. After a crash in the test of
    one operation the others are tested in a new process; after a time-out they are not.
    """
    findings = Findings(name)
    device = ["--device", str(asked)] if asked is not None else []
    while True:
        done = [check.op for check in findings.checks]
        arguments = ["backend", name, *device, "--done", *done, "--without", *without]
        seen, ending = process.run(arguments, deadline)
        for record in seen:
            findings.take(record)
        if ending is None:
            return findings
        step = process.last_step(seen)
        if "op" not in step:
            findings.unusable = f"{step['begin']}: {ending.text}"
            return findings
        findings.checks.append(_failed(step["op"], ending.text))
        if ending.is_timeout:
            left = [op for op in OPS if op not in {check.op for check in findings.checks}]
            findings.checks += [_failed(op, f"not run, after {step['op']} hung") for op in left]
            return findings


def _failed(op: str, reason: str) -> Check:
    return Check(op, 0, None, "", reason)
