"""The plug-ins' own words: loads every plug-in, and calls its ``fp8core_doctor`` hook.

Loading runs a third party's code, in this process in the end. So it is tried in another one first;
a plug-in that crashes or hangs there is set aside, with the reason in its row.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from typing import Any

from fp8core.dispatch import plugins
from fp8core.doctor import process
from fp8core.doctor.process import Record
from fp8core.reporting import logger

__all__ = ["apart", "here", "records", "watch_loading"]


def here() -> list[str]:
    """Return what the plug-ins report; a hook that raises is reported too."""
    return [note for record in records() for note in record.get("notes", ())]


def records(muted: Collection[str] = ()) -> Iterator[Record]:
    """Yield the notes of each plug-in that is not ``muted``; its hook is announced first."""
    manager = plugins.load().manager
    found = manager.list_name_plugin()
    for name, plugin in found:
        if name not in muted:
            yield {"begin": "its fp8core_doctor", "hook": name}
            others = [other for _, other in found if other is not plugin]
            hook = manager.subset_hook_caller("fp8core_doctor", others)
            yield {"notes": _notes(name, hook)}


def _notes(name: str, hook: Callable[..., Any]) -> list[str]:
    notes: list[str] = []
    try:
        hook(report=lambda topic, text: notes.append(f"{topic}: {text}"))
    except Exception as error:  # noqa: BLE001  a third party's hook may raise anything
        notes.append(f"plug-in {name}: its fp8core_doctor failed: {plugins.describe(error)}")
    return notes


def watch_loading(announce: Callable[[Record], object]) -> None:
    """Have ``announce`` called with a record before each plug-in is loaded."""

    class Watch(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.msg == plugins.LOADING:
                assert isinstance(record.args, tuple)
                announce({"begin": "while it was loaded", "plugin": record.args[0]})

    logger.setLevel(logging.DEBUG)
    logger.addHandler(Watch())


def apart(deadline: float) -> tuple[dict[str, str], list[str]]:
    """Do it in another process: return why plug-ins are to be set aside, and the others' notes."""
    reasons: dict[str, str] = {}
    failures: dict[str, str] = {}
    while True:
        arguments = ["plugins", "--without", *reasons, "--muted", *failures]
        seen, ending = process.run(arguments, deadline)
        if ending is None:
            notes = [note for record in seen for note in record.get("notes", ())]
            return reasons, [*notes, *failures.values()]
        step = process.last_step(seen)
        why = f"{step['begin']}: {ending.text}"
        if "plugin" in step:
            reasons[step["plugin"]] = why
        elif "hook" in step:
            failures[step["hook"]] = f"plug-in {step['hook']}: {why}"
        else:  # nothing of a plug-in's: the environment cannot be read, say
            return reasons, []
