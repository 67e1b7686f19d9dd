"""The examination of one backend, step by step, in this process or in another one; and the matrix
of recipes and operations that it supports, generated from its declarations.

A backend's probe, factory and kernels may crash or hang. In another process that becomes a finding:
the step that had begun, and the signal or the time-out.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fp8core import recipe
from fp8core.backend_api import OPS, OPTIONAL_OPS, BackendSpec
from fp8core.conformance.catalogue import CatalogueEntry
from fp8core.conformance.checks import checks
from fp8core.conformance.compare import Broken, Unjudged
from fp8core.conformance.laws import LAWS
from fp8core.conformance.subject import JUDGE, Subject
from fp8core.dispatch import plugins, process, select
from fp8core.dispatch.isolation import Failure, attempt, is_a
from fp8core.dispatch.process import Record
from fp8core.dispatch.registry import Registry
from fp8core.inspection.descriptors import Need, recipe_needs
from fp8core.inspection.explain import NO_RECIPE
from fp8core.recipe import PerLayer, Recipe

DTYPE = torch.bfloat16
"""The dtype of activations and parameters in the matrix and in the self-test."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A backend's answers about one operation under one recipe.

    Attributes:
        recipe: the recipe's name; ``none`` is high precision.
        op: the operation's name.
        state: ``native``; ``emulated`` (in high precision, on request); ``partly``, when some uses
            are refused; ``no``; or ``unused``, when the recipe has no use for the operation.
        reasons: why uses are refused, each with its steps.
    """

    recipe: str
    op: str
    state: str
    reasons: tuple[str, ...] = ()


def cell_from(entry: Mapping[str, Any]) -> Cell:
    """Return the cell that ``dataclasses.asdict`` turned into ``entry``, perhaps through JSON."""
    return Cell(entry["recipe"], entry["op"], entry["state"], tuple(entry["reasons"]))


def needs_by_recipe() -> dict[str, list[Need] | Failure]:
    """Return the uses of all operations under each recipe, or how the recipe fails; the recipe
    ``none`` is high precision."""
    names = (NO_RECIPE, *recipe.names())
    return {name: attempt(functools.partial(_needs, name)) for name in names}


def _needs(name: str) -> list[Need]:
    chosen: Recipe = PerLayer({}) if name == NO_RECIPE else recipe.by_name(name)
    return recipe_needs(chosen, DTYPE)


def cells(
    spec: BackendSpec, device: torch.device, needs: Mapping[str, list[Need] | Failure]
) -> list[Cell]:
    """Ask the backend of ``spec`` about every operation of every recipe on ``device``."""
    registry = plugins.load()
    answers = []
    for (name, uses), op in itertools.product(needs.items(), (*OPS, *OPTIONAL_OPS)):
        if isinstance(uses, Failure):
            answers.append(Cell(name, op, "no", (str(uses),)))
        else:
            of_op = [need for need in uses if need.desc.op == op]
            answers.append(_cell(name, op, of_op, registry, spec, device))
    return answers


def _cell(
    name: str,
    op: str,
    needs: Iterable[Need],
    registry: Registry,
    spec: BackendSpec,
    device: torch.device,
) -> Cell:
    reasons: dict[str, list[str]] = {}
    states = set()
    for step, desc in needs:
        verdict = select.verdict(registry, spec, desc, device)
        if verdict.reason is not None:
            reasons.setdefault(verdict.reason, []).append(step)
        states.add("no" if verdict.reason else "emulated" if verdict.emulated else "native")
    if not states:
        return Cell(name, op, "unused")
    # A portable backend emulates only low precision, so a cell may have native and emulated uses.
    state = "partly" if len(states) > 1 and "no" in states else min(states)
    return Cell(name, op, state, tuple(_reason(text, steps) for text, steps in reasons.items()))


def _reason(text: str, steps: Sequence[str]) -> str:
    named = ", ".join(dict.fromkeys(filter(None, steps)))
    return f"{named}: {text}" if named else text


def rows(answers: Sequence[Cell]) -> list[list[str]]:
    """Arrange one backend's cells as a table: a heading, then a row of states for each operation.

    Optional operations that no recipe can use are left out.
    """
    recipes = list(dict.fromkeys(cell.recipe for cell in answers))
    state = {(cell.op, cell.recipe): cell.state for cell in answers}
    words = {"unused": "-", "no": "no", "partly": "partly"}
    table = [["", *recipes]]
    for op in dict.fromkeys(cell.op for cell in answers):
        line = [words.get(state[op, name], state[op, name]) for name in recipes]
        if op in OPS or set(line) - {"no", "-"}:
            table.append([op, *line])
    return table


def unanswered(answers: Iterable[Cell]) -> list[str]:
    """Return why needed operations are refused: one line a reason, with recipes and operations."""
    uses: dict[str, dict[str, list[str]]] = {}
    for cell in answers:
        if cell.op in OPS:
            for reason in cell.reasons:
                uses.setdefault(reason, {}).setdefault(cell.op, []).append(cell.recipe)
    return [
        f"{op} of {', '.join(names)}: {reason}"
        for reason, ops in uses.items()
        for op, names in ops.items()
    ]


@dataclass(frozen=True, slots=True)
class Check:
    """The result of the test of one operation.

    Attributes:
        op: the operation's name.
        cases: the number of descriptors that were run.
        worst: the largest error as a share of its bound; 0 is equal bit for bit, above 1 fails;
            None if no share is defined: a NaN, another shape, or no result.
        judged_by: what the law with that error, or the first one that is broken, demands.
        failure: why the test failed; None if it passed.
    """

    op: str
    cases: int
    worst: float | None
    judged_by: str
    failure: str | None = None


def check(
    spec: BackendSpec,
    op: str,
    device: torch.device,
    needs: Mapping[str, Sequence[Need] | Failure],
) -> Check | None:
    """Test ``op`` of the backend of ``spec`` on ``device``, None if it supports no use of it.

    ``needs`` are the uses of all operations by recipe, or how a recipe fails, which the matrix
    tells. Of each recipe the first and the last use are tested.
    """
    registry = plugins.load()
    chosen: dict[Need, None] = {}
    for uses in needs.values():
        supported = [
            need
            for need in (() if isinstance(uses, Failure) else uses)
            if need.desc.op == op and registry.unsupported(spec, need.desc, device) is None
        ]
        chosen |= dict.fromkeys((*supported[:1], *supported[-1:]))
    if not chosen:
        return None
    if JUDGE not in registry.backends:
        return Check(op, 0, None, "", f"the judge, backend {JUDGE!r}, is not installed")
    judge = registry.instance(registry.backends[JUDGE])
    return _tested(op, Subject(spec.name, registry.instance(spec), device, judge, spec), [*chosen])


def _tested(op: str, subject: Subject, needs: Sequence[Need]) -> Check:
    """Hold ``subject`` to the core laws for all of ``needs``, until one is broken."""
    laws = [law for law in LAWS.values() if law.is_core]
    entries = [CatalogueEntry(f"{need.step} {need.desc}".strip(), need.desc) for need in needs]
    worst, judged_by, judged = 0.0, "nothing: the judge knows none of its uses", set[str]()
    for each in checks(subject, laws, entries):
        share = attempt(each.run)
        if isinstance(share, Failure) and is_a(share.error, Unjudged):
            continue
        if isinstance(share, Failure):
            amount, text = _broken(share)
            return Check(op, len(judged), amount, each.law.meaning, f"{each.label}: {text}")
        if not judged or (share or 0.0) > worst:
            worst, judged_by = share or 0.0, each.law.meaning
        judged.add(each.label)
    return Check(op, len(judged), worst, judged_by)


def _broken(failure: Failure) -> tuple[float | None, str]:
    """Return the error as a share of its bound, where one is defined, and what is wrong."""
    error = failure.error
    if not isinstance(error, Broken):
        return None, str(failure)
    is_share = error.worst is not None and math.isfinite(error.worst)
    return error.worst if is_share else None, str(error)


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


def records(
    name: str, requested: torch.device | None, done: Collection[str] = ()
) -> Iterator[Record]:
    """Yield the results of examining backend ``name``; each step is announced before it begins.

    ``requested`` None stands for the backend's first device type that this machine has. Operations
    in ``done`` are not tested again.
    """
    registry = plugins.load()
    spec = registry.spec(name, "fp8core doctor")
    yield {"begin": "its probe and import"}
    reason = registry.unusable(spec)
    yield {"unusable": reason}
    if reason is not None:
        return
    devices = [torch.device(kind) for kind in spec.device_types if kind != "meta"]
    device = requested or next((kind for kind in devices if absent(kind) is None), devices[0])
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


def here(name: str, requested: torch.device | None) -> Findings:
    """Examine backend ``name`` in this process, which a crash of the backend ends."""
    findings = Findings(name)
    for record in records(name, requested):
        findings.take(record)
    return findings


def apart(
    name: str, requested: torch.device | None, *, deadline: float, without: Collection[str] = ()
) -> Findings:
    """Examine backend ``name`` in another process, ``without`` some plug-ins.

    A step that makes no progress for ``deadline`` seconds is killed. After a crash in the test of
    one operation the others are tested in a new process; after a time-out they are not.
    """
    findings = Findings(name)
    device = ["--device", str(requested)] if requested is not None else []
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
