"""The doctor's report as data: versions, devices, backends, their support and their self-tests."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch

from fp8core import formats, recipe
from fp8core.backend_api import BackendSpec
from fp8core.dispatch import plugins, policy, select, settings
from fp8core.dispatch.registry import Registry
from fp8core.doctor import consult
from fp8core.doctor.collectives import Collective
from fp8core.doctor.findings import Check, Findings, absent
from fp8core.doctor.matrix import Cell
from fp8core.errors import Fp8CoreError, RecipeError

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
    report: Report, results: Sequence[Collective], processes: int, device: str
) -> Report:
    """Return ``report`` with the results of the collectives between ``processes`` processes."""
    group = {"processes": processes, "device": device}
    failed = [one.name for one in results if one.failure is not None]
    problems = [f"the collectives fail between {processes} processes on {device}: "] * bool(failed)
    return dataclasses.replace(
        report,
        collectives=[{**group, **dataclasses.asdict(one)} for one in results],
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
