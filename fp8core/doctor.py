"""``fp8core doctor``: what is installed, what can be used here and why not, what is set."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import sys
from dataclasses import asdict, dataclass
from typing import Any

import torch

from fp8core import formats, recipe
from fp8core.dispatch import plugins, policy, select, settings
from fp8core.errors import Fp8CoreError

__all__ = ["Report", "add_arguments", "examine", "run"]


@dataclass(frozen=True, slots=True)
class Report:
    """What the doctor found; every field is plain data, so that it goes into JSON as it is.

    ``problems`` are what makes the exit status 1: a backend that was asked for and cannot be used.
    """

    versions: dict[str, str]
    devices: list[str]
    backends: list[dict[str, Any]]
    plugins: list[dict[str, Any]]
    formats: list[str]
    recipes: list[str]
    selected: str | None
    environment: dict[str, str]
    notes: list[str]
    problems: list[str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the report; return 1 if a backend that was asked for cannot be used."""
    report = examine()
    print(json.dumps(asdict(report), indent=2) if args.json else render(report))
    return 1 if report.problems else 0


def examine() -> Report:
    """Look at the installation. Imports every backend's factory, touches no device memory."""
    registry = plugins.load()
    notes: list[str] = []
    problems: list[str] = []
    selected: str | None = None
    try:
        spec = select.selected_spec(policy.current())
        selected = spec.name
        reason = registry.unusable(spec)
        problems += [f"backend {spec.name!r} is selected, but: {reason}"] if reason else []
        environment = settings.read()
        for op, name in environment.op_backends:
            chosen = registry.spec(name, f"FP8CORE_OP_BACKEND ({op})")
            reason = registry.unusable(chosen)
            problems += [f"backend {name!r} is selected for {op}, but: {reason}"] if reason else []
        notes += registry.complaints()
    except Fp8CoreError as error:
        problems.append(str(error))
    notes += _plugin_notes(registry)
    return Report(
        versions=_versions(),
        devices=_devices(),
        backends=[
            {
                "name": spec.name,
                "device_types": list(spec.device_types),
                "portable": spec.portable,
                "priority": spec.priority,
                "api_version": ".".join(map(str, spec.api_version)),
                "unusable": registry.unusable(spec),
            }
            for spec in registry.by_priority()
        ],
        plugins=[asdict(row) for row in registry.rows],
        formats=list(formats.names()),
        recipes=list(recipe.names()),
        selected=selected,
        environment=settings.in_force(registry.environment()),
        notes=notes,
        problems=problems,
    )


def render(report: Report) -> str:
    """Return the report as text."""
    lines = ["versions: " + ", ".join(f"{k} {v}" for k, v in report.versions.items())]
    lines += ["devices: " + ", ".join(report.devices), "", "backends"]
    for backend in report.backends:
        state = backend["unusable"] or "ok"
        mark = "*" if backend["name"] == report.selected else " "
        where = "/".join(backend["device_types"])
        where += ", any other device on request" if backend["portable"] else ""
        lines.append(f" {mark} {backend['name']:12} {state}  [{where}]")
    lines += ["", "plug-ins"]
    for plugin in report.plugins:
        state = "ok" if plugin["reason"] is None else f"FAIL: {plugin['reason']}"
        lines.append(f"   {plugin['name']:12} {state}  [{plugin['source']}]")
    lines += ["", f"formats: {', '.join(report.formats)}", f"recipes: {', '.join(report.recipes)}"]
    lines += ["", "environment" if report.environment else "environment: nothing set"]
    lines += [f"   {name}={value}" for name, value in report.environment.items()]
    for title, entries in (("notes", report.notes), ("problems", report.problems)):
        lines += ["", title, *(f"   {entry}" for entry in entries)] if entries else []
    return "\n".join(lines)


def _plugin_notes(registry: plugins.Registry) -> list[str]:
    """Return what each plug-in's own hook reports; one that fails is a note too."""
    notes: list[str] = []
    found = registry.manager.list_name_plugin()
    for name, plugin in found:
        others = [other for _, other in found if other is not plugin]
        try:
            registry.manager.subset_hook_caller("fp8core_doctor", others)(
                report=lambda topic, text: notes.append(f"{topic}: {text}")
            )
        except Exception as error:  # noqa: BLE001  a third party's hook may raise anything
            notes.append(f"plug-in {name}: its fp8core_doctor failed: {plugins.describe(error)}")
    return notes


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "platform": sys.platform}
    for package in ("fp8core", "torch", "pluggy", "numpy"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed as a package"
    found["torch"] = torch.__version__  # names the CUDA version too, which the metadata may not
    return found


def _devices() -> list[str]:
    found = [f"cpu ({torch.get_num_threads()} threads)"]
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            major, minor = torch.cuda.get_device_capability(index)
            found.append(f"cuda:{index} ({torch.cuda.get_device_name(index)}, sm_{major}{minor})")
    return found
