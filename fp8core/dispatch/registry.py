"""Registrations of plug-ins: backends, formats, recipes, and a row for each plug-in."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pluggy
import torch

from fp8core.backend_api import (
    Alignment,
    Backend,
    BackendSpec,
    FormatSpec,
    GemmDesc,
    MovesBeside,
    OpDesc,
    OperandSpec,
    Ranks,
    Recorder,
    RecordsCalls,
    Transfers,
)
from fp8core.dispatch import settings
from fp8core.dispatch.isolation import Failure, answered, attempt, is_a, name_of_class, shown
from fp8core.errors import PluginError, RecipeError, did_you_mean
from fp8core.reporting import some

_METHODS = ("unsupported", "alignment", "bind")


@dataclass(frozen=True, slots=True)
class PluginRow:
    """A discovered plug-in: its source, and why it cannot be used (None: it can)."""

    name: str
    source: str
    reason: str | None


class Bound(NamedTuple):
    """A callable that a backend has bound, and what records its calls, None if nothing does."""

    run: Callable[..., Any]
    recorder: Recorder | None = None


@dataclass(slots=True, eq=False)
class Registry:
    """The registrations of all plug-ins, and the rows that ``fp8core doctor`` prints.

    ``refused`` holds the reason for each backend whose plug-in cannot be used.
    """

    manager: pluggy.PluginManager
    rows: list[PluginRow] = field(default_factory=list)
    formats: list[FormatSpec] = field(default_factory=list)
    backends: dict[str, BackendSpec] = field(default_factory=dict)
    recipes: dict[str, Callable[[], Any]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    _instances: dict[str, Backend] = field(default_factory=dict)

    def spec(self, name: str, origin: str) -> BackendSpec:
        """Return the backend called ``name``, or raise why there is none.

        Raises:
            PluginError: a plug-in of that name, or the one that brings it, failed to load.
            RecipeError: nothing of that name is installed.
        """
        if name in self.backends:
            return self.backends[name]
        failed = {row.name: row.reason for row in self.rows if row.reason is not None}
        reason = self.refused.get(name) or failed.get(name)
        if reason is not None:
            raise PluginError(f"{origin} asks for backend {name!r}: {reason}")
        installed = ", ".join(sorted(self.backends)) or "none (is fp8core installed with pip?)"
        unused = f" Plug-ins not used, see `fp8core doctor`: {', '.join(failed)}." if failed else ""
        raise RecipeError(
            f"{origin} asks for backend {name!r}, which is not installed; "
            f"installed: {installed}.{did_you_mean(name, self.backends)}{unused}"
        )

    def by_priority(self) -> list[BackendSpec]:
        """Return every backend, the highest priority first; among equals portable ones last."""
        return sorted(
            self.backends.values(), key=lambda spec: (-spec.priority, spec.portable, spec.name)
        )

    def unusable(self, spec: BackendSpec) -> str | None:
        """Say why ``spec`` cannot be used on this machine at all, or None."""
        reason = attempt(spec.probe)
        if isinstance(reason, Failure):
            return f"its probe() failed: {reason}"
        if reason is not None:
            return answered("its probe()", reason)
        if not devices_of_kinds(spec.device_types):  # after the probe, whose imports may add one
            return f"this torch knows no type of device called {'/'.join(spec.device_types)}"
        backend = attempt(lambda: self.instance(spec))
        return str(backend) if isinstance(backend, Failure) else None

    def unsupported(self, spec: BackendSpec, desc: OpDesc, device: torch.device) -> str | None:
        """Say why ``spec``'s backend cannot run ``desc`` on ``device``, or None."""
        reason = self.unusable(spec)
        if reason is not None:
            return reason
        unknown = unknown_fields(spec, desc)
        if unknown is not None:
            return unknown
        answer = attempt(lambda: self.instance(spec).unsupported(desc, device))
        if isinstance(answer, Failure):
            return f"its unsupported() failed: {answer}"
        return answered("its unsupported()", answer)

    def instance(self, spec: BackendSpec) -> Backend:
        """Return the backend object, importing its factory on first use.

        Raises:
            PluginError: the factory failed, or its result is no backend.
        """
        if spec.name not in self._instances:
            backend = attempt(lambda: _backend_of(spec))
            if isinstance(backend, Failure):
                backend.fail(f"its factory {spec.factory!r} failed")
            self._instances.setdefault(spec.name, backend)
        return self._instances[spec.name]

    def bind(self, spec: BackendSpec, desc: OpDesc, device: torch.device) -> Bound:
        """Return the callable with which ``spec``'s backend runs ``desc`` on ``device``.

        Raises:
            PluginError: its ``bind()`` or its ``recorder()`` raised, or ``bind()`` returned
                something that is no callable.
        """
        backend = self.instance(spec)
        method = f"{spec.name} says that it runs {desc}, but its bind()"
        run: object = attempt(lambda: backend.bind(desc, device))
        if isinstance(run, Failure):
            run.fail(f"{method} failed")
        if not callable(run):
            raise PluginError(f"{method} returned {shown(run)}; expected a function")
        if not isinstance(backend, RecordsCalls):
            return Bound(run)
        recorder = attempt(lambda: backend.recorder(desc, device))
        if isinstance(recorder, Failure):
            recorder.fail(f"{spec.name} runs {desc}, but its recorder(desc, device) failed")
        return Bound(run, recorder)

    def transfers(self, spec: BackendSpec, ranks: Ranks, device: torch.device) -> Transfers | None:
        """Return what ``spec``'s backend moves rows between ``ranks`` by, None if nothing does.

        Raises:
            PluginError: its ``transfers()`` raised.
        """
        backend = self.instance(spec)
        if not isinstance(backend, MovesBeside):
            return None
        transfers = attempt(lambda: backend.transfers(ranks, device))
        if isinstance(transfers, Failure):
            transfers.fail(f"{spec.name} has transfers(ranks, device), which failed")
        return transfers

    def alignment(self, spec: BackendSpec, desc: GemmDesc) -> Alignment:
        """Return the numbers of which ``spec``'s backend wants multiples as sizes of ``desc``.

        Raises:
            PluginError: its ``alignment()`` raised, or returned no Alignment of positive numbers.
        """
        backend = self.instance(spec)
        alignment = attempt(lambda: backend.alignment(desc))
        method = f"{spec.name} says that it runs {desc}, but its alignment()"
        if isinstance(alignment, Failure):
            alignment.fail(f"{method} failed")
        if not is_a(alignment, Alignment):
            raise PluginError(f"{method} returned {shown(alignment)}; expected an Alignment")
        if not all(type(size) is int and size > 0 for size in alignment):
            raise PluginError(
                f"{method} returned {shown(alignment)}; expected whole numbers from 1 on"
            )
        return alignment

    def environment(self) -> list[str]:
        """Return the variable names that the backends declare."""
        return [name for spec in self.backends.values() for name in spec.environment]

    def complaints(self) -> list[str]:
        """Return one line for each variable that nobody reads and each name of no plug-in."""
        names = [row.name for row in self.rows]
        return settings.unknown_names(self.environment()) + [
            f"FP8CORE_DISABLE_PLUGINS names {name!r}, but no plug-in found is called that."
            f"{did_you_mean(name, names)}"
            for name in settings.read().disabled_plugins
            if name not in names
        ]


class Kernels(NamedTuple):
    """The kernel that runs an operation, and the backend's other kernels with the reasons against
    each."""

    name: str
    rejected: tuple[tuple[str, str], ...]


def named_kernels(run: Callable[..., Any], who: str) -> Kernels:
    """Return the kernels that ``run`` names, the callable that ``who`` has bound; the name of the
    callable itself if it names none.

    Raises:
        PluginError: a name is no text, or reading it failed.
    """
    named = attempt(lambda: (getattr(run, "kernel", None), getattr(run, "other_kernels", None)))
    if isinstance(named, Failure):
        named.fail(f"{who} names its kernels, but reading them failed")
    name, rejected = named[0], named[1] or ()
    if not isinstance(name, str | None):
        raise PluginError(
            f"{who} has kernel={shown(name)}; expected a text, the name of what runs on the device"
        )
    if not _is_text_pairs(rejected):
        raise PluginError(
            f"{who} has other_kernels={shown(rejected)}; expected pairs of texts, each the name of "
            f"a kernel that does not run and why not"
        )
    if name is None:
        while isinstance(run, functools.partial):
            run = run.func
        callee = run if hasattr(run, "__qualname__") else type(run)
        name = f"{callee.__module__}.{callee.__qualname__}"
    return Kernels(name, tuple(map(tuple, rejected)))


def _is_text_pairs(value: Any) -> bool:
    return isinstance(value, tuple | list) and all(
        isinstance(pair, tuple | list)
        and len(pair) == 2
        and all(isinstance(text, str) for text in pair)
        for pair in value
    )


@functools.lru_cache(maxsize=4096)
def unknown_fields(spec: BackendSpec, desc: OpDesc) -> str | None:
    """Say which fields of ``desc`` the backend of ``spec`` does not know; None if it knows all.

    Such a descriptor is not passed to the backend, which would compute something else.
    """
    unknown = sorted(name for name in _later_fields(desc) if name not in spec.operand_fields)
    return f"it does not know {some(unknown)} of an OperandSpec" if unknown else None


def _later_fields(desc: object) -> frozenset[str]:
    """Return the later fields that the specs of ``desc``, a descriptor, use."""
    if isinstance(desc, OperandSpec):
        return frozenset(desc.later_fields)
    if not dataclasses.is_dataclass(desc):
        return frozenset()
    parts = [getattr(desc, part.name) for part in dataclasses.fields(desc)]
    return frozenset().union(*map(_later_fields, parts))


def devices_of_kinds(kinds: Sequence[str]) -> list[torch.device]:
    """Return the devices of those ``kinds`` that torch knows, with the modules imported so far."""
    devices = [attempt(functools.partial(torch.device, kind)) for kind in kinds]
    return [device for device in devices if not isinstance(device, Failure)]


def _backend_of(spec: BackendSpec) -> Backend:
    module, _, attribute = spec.factory.partition(":")
    backend: Backend = getattr(importlib.import_module(module), attribute)()
    for method in _METHODS:
        if not callable(getattr(backend, method, None)):
            raise PluginError(
                f"its factory {spec.factory!r} returned a {name_of_class(backend)}, which has no "
                f"{method}(); a backend has {', '.join(_METHODS)}"
            )
    return backend
