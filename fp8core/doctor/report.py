"""The doctor's report: versions, devices, backends, their support and their self-tests.

As data, and as plain text without colours, so that it can be pasted and piped.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import platform
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch

from fp8core import formats, recipe
from fp8core.backend_api import BackendSpec
from fp8core.dispatch import plugins, policy, select, settings
from fp8core.dispatch.registry import Registry
from fp8core.doctor import consult
from fp8core.doctor.collectives import Outcome
from fp8core.doctor.findings import Cell, Check, Findings, absent, cell_from, rows, unanswered
from fp8core.errors import Fp8CoreError, RecipeError
from fp8core.reporting import columns

WIDTH = 120
"""Columns of the longest line outside tables: a backend's reasons may be long."""

_INDENT = " " * 6

Examiner: TypeAlias = Callable[[str, torch.device | None], Findings]
"""A function that examines the named backend on a device; None stands for the backend's default."""

NEIGHBOURS = {
    "transformer_engine": "neither autocast reaches the other's layers; imported before torch, it "
    "may load an older cuDNN, with which fewer kinds of attention run on cuda: import torch or "
    "fp8core first",
    "torchao": "does not interfere: convert a layer with one of the two, not with both",
    "mindspeed": "its adaptor replaces modules called transformer_engine; fp8core imports none",
}
"""Packages with the same purpose, and their effect on fp8core."""


@dataclass(frozen=True, slots=True)
class Report:
    """The doctor's report; every field is plain data, which JSON can hold.

    ``problems`` name requested backends and devices that cannot be used; with any, the exit status
    is 1. ``bad_names``: one of them is an unknown name or setting, and the exit status is 2.
    ``collectives`` are tested on request alone.
    """

    versions: dict[str, str]
    devices: list[str]
    backends: list[dict[str, Any]]
    plugins: list[dict[str, Any]]
    neighbours: list[dict[str, str]]
    formats: list[str]
    recipes: list[str]
    selected: str | None
    environment: dict[str, str]
    matrix: list[dict[str, Any]]
    selftests: list[dict[str, Any]]
    notes: list[str]
    problems: list[str]
    bad_names: bool
    collectives: list[dict[str, Any]] = dataclasses.field(default_factory=list)


def with_collectives(
    report: Report, results: Sequence[Outcome], processes: int, device: str
) -> Report:
    """Return ``report`` with the results of the collectives between ``processes`` processes."""
    group = {"processes": processes, "device": device}
    failed = [result.name for result in results if result.failure is not None]
    problems = [f"the collectives fail between {processes} processes on {device}: "] * bool(failed)
    return dataclasses.replace(
        report,
        collectives=[
            {**group, "name": result.name, "failure": result.failure} for result in results
        ],
        problems=[*report.problems, *(text + ", ".join(failed) for text in problems)],
    )


def examine(
    examiner: Examiner,
    device: torch.device | None = None,
    notes_of_plugins: Callable[[], Sequence[str]] = consult.here,
) -> Report:
    """Examine the installation; ``examiner`` examines each backend, on ``device`` if it is given.

    Raises:
        RecipeError: the environment cannot be read.
    """
    registry = plugins.load()
    specs = registry.by_priority()
    findings = {spec.name: examiner(spec.name, device) for spec in specs}
    requests = _requests(registry, findings)
    problems = list(requests.problems)
    if device is not None:
        problems += _device_problems(device, specs, findings, requests)
    notes = [*registry.complaints(), *notes_of_plugins()]
    return Report(
        versions=_versions(),
        devices=_devices(),
        backends=[_backend(spec, findings[spec.name]) for spec in specs],
        plugins=[dataclasses.asdict(row) for row in registry.rows],
        neighbours=_neighbours(),
        formats=list(formats.names()),
        recipes=list(recipe.names()),
        selected=None if requests.selected is None else requests.selected.name,
        environment=settings.in_force(registry.environment()),
        matrix=[_entry(of, cell) for of in findings.values() for cell in of.cells],
        selftests=[_entry(of, check) for of in findings.values() for check in of.checks],
        notes=notes,
        problems=problems,
        bad_names=requests.bad_names,
    )


def _backend(spec: BackendSpec, findings: Findings) -> dict[str, Any]:
    return {
        "name": spec.name,
        "device_types": list(spec.device_types),
        "portable": spec.portable,
        "priority": spec.priority,
        "api_version": ".".join(map(str, spec.api_version)),
        "unusable": findings.unusable,
        "device": findings.device,
        "untested": findings.untested,
    }


def _entry(findings: Findings, result: Cell | Check) -> dict[str, Any]:
    return {"backend": findings.name, "device": findings.device, **dataclasses.asdict(result)}


class _Requests(NamedTuple):
    """The selected backend, whether a user named it, and the problems of the requests.

    ``bad_names``: one of them is an unknown name or setting.
    """

    selected: BackendSpec | None
    is_named: bool
    problems: list[str]
    bad_names: bool = False


def _requests(registry: Registry, findings: dict[str, Findings]) -> _Requests:
    """Examine the requested backends: the selected one, and those for single operations."""
    usable = [spec for spec in registry.by_priority() if findings[spec.name].unusable is None]
    selected: BackendSpec | None = None
    by_op: dict[str, str] = {}
    try:
        named = select.named_spec(policy.current())
        selected = named or next(iter(usable), None)
        if selected is None:
            return _Requests(None, False, ["no backend can be used here; the reasons are above"])
        for op, name in settings.read().op_backends:
            chosen = registry.spec(name, f"FP8CORE_OP_BACKEND ({op})")
            by_op.setdefault(chosen.name, f"is selected for {op}")
    except Fp8CoreError as error:
        return _Requests(selected, False, [str(error)], isinstance(error, RecipeError))
    problems = []
    for name, how in {**by_op, selected.name: "is selected"}.items():
        reason = findings[name].unusable
        if reason is not None:
            problems.append(f"backend {name!r} {how}, but: {reason}")
        elif findings[name].failed:
            failed = ", ".join(findings[name].failed)
            problems.append(f"backend {name!r} {how}, but its self-test fails: {failed}")
    return _Requests(selected, named is not None, problems)


def _device_problems(
    device: torch.device,
    specs: Sequence[BackendSpec],
    findings: dict[str, Findings],
    requests: _Requests,
) -> list[str]:
    reason = absent(device)
    if reason is not None:
        return [reason]
    of_type = [spec for spec in specs if device.type in spec.device_types]
    usable = [spec for spec in of_type if findings[spec.name].unusable is None]
    named = requests.selected if requests.is_named else None
    if usable or (named is not None and named.portable):  # the user asked for emulation
        return []
    reasons = [f"{spec.name}: {findings[spec.name].unusable}" for spec in of_type]
    reasons += [
        f"{spec.name}: emulates it; choose it with FP8CORE_BACKEND={spec.name}"
        for spec in specs
        if spec.portable and spec not in of_type
    ]
    return ["; ".join([f"no backend can be used on {device}", *reasons])]


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "platform": sys.platform}
    for package in ("fp8core", "torch", "pluggy", "numpy"):
        versions[package] = _version(package) or "not installed as a package"
    versions["torch"] = torch.__version__  # names the CUDA version too, which the metadata may not
    return versions


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _neighbours() -> list[dict[str, str]]:
    return [
        {"name": name, "version": version, "note": note}
        for name, note in NEIGHBOURS.items()
        if (version := _version(name)) is not None
    ]


def _devices() -> list[str]:
    devices = [f"cpu ({torch.get_num_threads()} threads)"]
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return devices
    module = torch.get_device_module(accelerator)
    for index in range(torch.accelerator.device_count()):
        facts = [module.get_device_name(index)] if hasattr(module, "get_device_name") else []
        if accelerator.type == "cuda":
            facts.append("sm_{}{}".format(*torch.cuda.get_device_capability(index)))
        devices.append(f"{accelerator.type}:{index} ({', '.join(facts)})")
    return devices


def render(report: Report) -> str:
    """Return the report as text."""
    lines = ["versions: " + ", ".join(f"{k} {v}" for k, v in report.versions.items())]
    lines += ["devices: " + ", ".join(report.devices)]
    for package in report.neighbours:
        lines.append(f"also installed: {package['name']} {package['version']}; {package['note']}")
    lines += ["", "backends"]
    for backend in report.backends:
        lines += _wrapped(_backend_text(backend, report.selected))
    lines += ["", "plug-ins"]
    for plugin in report.plugins:
        state = "ok" if plugin["reason"] is None else f"FAIL: {plugin['reason']}"
        lines += _wrapped(f"   {plugin['name']:12} {state}  [{plugin['source']}]")
    lines += ["", f"formats: {', '.join(report.formats)}", f"recipes: {', '.join(report.recipes)}"]
    lines += ["", "environment" if report.environment else "environment: nothing set"]
    lines += [f"   {name}={value}" for name, value in report.environment.items()]
    for backend in report.backends:
        lines += _matrix(backend, report.matrix)
        lines += _selftest(backend, report.selftests)
    lines += _collectives(report.collectives)
    for title, entries in (("notes", report.notes), ("problems", report.problems)):
        lines += ["", title] if entries else []
        for entry in entries:
            lines += _wrapped(f"   {entry}")
    return "\n".join(lines)


def _wrapped(text: str) -> Iterator[str]:
    """Yield the lines of ``text``, broken between words, all but the first indented."""
    first = ""
    for line in text.splitlines():
        yield from textwrap.wrap(
            line,
            WIDTH,
            initial_indent=first,
            subsequent_indent=_INDENT,
            break_long_words=False,
            break_on_hyphens=False,
        )
        first = _INDENT


def _backend_text(backend: dict[str, Any], selected: str | None) -> str:
    state = backend["unusable"] or "ok"
    mark = "*" if backend["name"] == selected else " "
    where = "/".join(backend["device_types"])
    where += ", any other device on request" if backend["portable"] else ""
    return f" {mark} {backend['name']:12} {state}  [{where}]"


def _matrix(backend: dict[str, Any], matrix: Sequence[dict[str, Any]]) -> Iterator[str]:
    of_backend = [cell_from(entry) for entry in matrix if entry["backend"] == backend["name"]]
    if of_backend:
        yield from ("", f"{backend['name']} on {backend['device']}, by its declarations")
        yield from (f"   {row}" for row in columns(rows(of_backend)))
        for line in unanswered(of_backend):
            yield from _wrapped(f"   {line}")


def _selftest(backend: dict[str, Any], checks: Sequence[dict[str, Any]]) -> Iterator[str]:
    of_backend = [check for check in checks if check["backend"] == backend["name"]]
    if backend["unusable"] is None and backend["untested"] is not None:
        yield ""
        yield from _wrapped(f"{backend['name']}: no self-test, {backend['untested']}")
    if of_backend:
        yield from ("", f"{backend['name']} on {backend['device']}, self-test")
        for row in columns([_check(check) for check in of_backend]):
            yield from _wrapped(f"   {row}")


def _check(check: dict[str, Any]) -> list[str]:
    if check["failure"] is not None:
        return [check["op"], "FAIL", f"cases {check['cases']}", check["failure"].replace("\n", " ")]
    error = "exact" if check["worst"] == 0 else f"worst error {check['worst']:.2f} of the bound"
    return [check["op"], "ok", f"cases {check['cases']}", f"{error} ({check['judged_by']})"]


def _collectives(results: Sequence[dict[str, Any]]) -> Iterator[str]:
    if results:
        group = f"{results[0]['processes']} processes on {results[0]['device']}"
        yield from ("", f"collectives between {group}")
        failures = [result["failure"] for result in results]
        states = ["ok" if failure is None else "FAIL" for failure in failures]
        names = [result["name"] for result in results]
        for row, failure in zip(columns([*zip(names, states, strict=True)]), failures, strict=True):
            failure = "" if failure is None else "  " + failure.replace("\n", " ")
            yield from _wrapped(f"   {row}{failure}")
