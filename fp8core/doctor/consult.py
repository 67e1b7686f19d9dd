"""The notes of the plug-ins: loads every plug-in, and calls its ``fp8core_doctor`` hook.

Loading a plug-in runs third-party code in this process. So all are loaded in another process first;
a plug-in that crashes or hangs there is set aside, with the reason in its row.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch

from fp8core.backend_api import GemmDesc
from fp8core.dispatch import plugins, process, select
from fp8core.dispatch.isolation import Failure, attempt, plain
from fp8core.dispatch.process import Record
from fp8core.dispatch.registry import Registry
from fp8core.doctor.findings import DTYPE
from fp8core.errors import RecipeError
from fp8core.reporting import logger


def here() -> list[str]:
    """Return the notes of the plug-ins; a hook that raises is a note too."""
    return [note for record in records() for note in record.get("notes", ())]


def records(muted: Collection[str] = ()) -> Iterator[Record]:
    """Yield the notes of each plug-in that is not ``muted``; each hook is announced first."""
    try:
        registry = plugins.load()
    except RecipeError:
        yield {"begin": "reading the environment"}  # the fault is not a plug-in's
        raise
    named_plugins = registry.manager.list_name_plugin()
    deciding = registry.manager.hook.fp8core_select_backend.get_hookimpls()
    for name, plugin in named_plugins:
        if name in muted:
            continue
        if any(hook.plugin is plugin for hook in deciding):
            yield {"begin": "its fp8core_select_backend", "hook": name}
            yield {"notes": _faults_of_policy(registry, plugin)}
        yield {"begin": "its fp8core_doctor", "hook": name}
        rest = [another for _, another in named_plugins if another is not plugin]
        hook = registry.manager.subset_hook_caller("fp8core_doctor", rest)
        yield {"notes": _notes(name, hook)}


def _faults_of_policy(registry: Registry, plugin: object) -> list[str]:
    """Ask a site policy about a GEMM on each type of device; return its first fault, if any."""
    kinds = {kind for spec in registry.by_priority() for kind in spec.device_types}
    desc = GemmDesc(None, None, DTYPE)
    for kind in sorted(kinds):
        names = [spec.name for spec in registry.by_priority() if kind in spec.device_types]
        device = attempt(functools.partial(torch.device, kind))
        if isinstance(device, Failure):  # a type that this torch does not know
            continue
        picked = attempt(
            functools.partial(select.site_pick, registry, desc, device, tuple(names), plugin)
        )
        if isinstance(picked, Failure):
            return [str(picked)]
    return []


def _notes(name: str, hook: Callable[..., Any]) -> list[str]:
    notes: list[str] = []
    said = attempt(lambda: hook(report=lambda topic, text: notes.append(plain(f"{topic}: {text}"))))
    if isinstance(said, Failure):
        notes.append(f"plug-in {name}: its fp8core_doctor failed: {said}")
    return notes


def watch_loading(announce: Callable[[Record], object]) -> None:
    """Call ``announce`` with a record before each plug-in is loaded."""

    class Watch(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.msg == plugins.LOADING:
                assert isinstance(record.args, tuple)
                announce({"begin": "while it was loaded", "plugin": record.args[0]})

    logger.setLevel(logging.DEBUG)
    logger.addHandler(Watch())


def apart(deadline: float) -> tuple[dict[str, str], list[str]]:
    """Load the plug-ins in another process; return why some are to be set aside, and the notes of
    the others."""
    reasons: dict[str, str] = {}
    failures: dict[str, str] = {}
    while True:
        arguments = ["plugins", "--without", *reasons, "--muted", *failures]
        seen, ending = process.run(arguments, deadline)
        if ending is None:
            notes = [note for record in seen for note in record.get("notes", ())]
            return reasons, [*notes, *failures.values()]
        step = process.last_step(seen)
        reason = f"{step['begin']}: {ending.text}"
        if "plugin" in step:
            reasons[step["plugin"]] = reason
        elif "hook" in step:
            failures[step["hook"]] = f"plug-in {step['hook']}: {reason}"
        else:  # the step does not belong to a plug-in: reading the environment, for example
            return reasons, []
