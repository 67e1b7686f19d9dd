"""What the plug-ins brought: backends, formats, recipes, and a row for each plug-in."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pluggy
import torch

from fp8core.backend_api import Alignment, Backend, BackendSpec, FormatSpec, GemmDesc, OpDesc
from fp8core.dispatch import settings
from fp8core.dispatch.isolation import Failure, answered, attempt, is_a, name_of_class, shown
from fp8core.dispatch.optional import Offers, offers_of
from fp8core.errors import PluginError, RecipeError, did_you_mean

__all__ = ["Bound", "PluginRow", "Registry", "known_devices"]

_METHODS = ("unsupported", "alignment", "bind")


@dataclass(frozen=True, slots=True)
class PluginRow:
    """A plug-in that was found: where, and why it cannot be used (None: it can)."""

    name: str
    source: str
    reason: str | None


class Bound(NamedTuple):
    """A callable that a backend has bound, and what it offers besides its call."""

    run: Callable[..., Any]
    offers: Offers


@dataclass(slots=True, eq=False)
class Registry:
    """Everything that plug-ins brought, and the rows that ``fp8core doctor`` prints.

    ``refused`` says of each backend of a plug-in that is not used why.
    """

    manager: pluggy.PluginManager
    rows: list[PluginRow] = field(default_factory=list)
    formats: list[FormatSpec] = field(default_factory=list)
    backends: dict[str, BackendSpec] = field(default_factory=dict)
    recipes: dict[str, Callable[[], Any]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    _instances: dict[str, Backend] = field(default_factory=dict)

    def spec(self, name: str, asked_by: str) -> BackendSpec:
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
            raise PluginError(f"{asked_by} asks for backend {name!r}: {reason}")
        known = ", ".join(sorted(self.backends)) or "none (is fp8core installed with pip?)"
        unused = f" Plug-ins not used, see `fp8core doctor`: {', '.join(failed)}." if failed else ""
        raise RecipeError(
            f"{asked_by} asks for backend {name!r}, which is not installed; "
            f"installed: {known}.{did_you_mean(name, self.backends)}{unused}"
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
        if not known_devices(spec.device_types):  # after the probe, whose imports may add one
            return f"this torch knows no type of device called {'/'.join(spec.device_types)}"
        made = attempt(lambda: self.instance(spec))
        return str(made) if isinstance(made, Failure) else None

    def unsupported(self, spec: BackendSpec, desc: OpDesc, device: torch.device) -> str | None:
        """Say why ``spec``'s backend cannot run ``desc`` on ``device``, or None."""
        reason = self.unusable(spec)
        if reason is not None:
            return reason
        said = attempt(lambda: self.instance(spec).unsupported(desc, device))
        if isinstance(said, Failure):
            return f"its unsupported() failed: {said}"
        return answered("its unsupported()", said)

    def instance(self, spec: BackendSpec) -> Backend:
        """Return the backend object, importing its factory on first use.

        Raises:
            PluginError: the factory failed, or what it returned is no backend.
        """
        if spec.name not in self._instances:
            made = attempt(lambda: _make(spec))
            if isinstance(made, Failure):
                made.fail(f"its factory {spec.factory!r} failed")
            self._instances.setdefault(spec.name, made)
        return self._instances[spec.name]

    def bind(self, spec: BackendSpec, desc: OpDesc, device: torch.device) -> Bound:
        """Return the callable with which ``spec``'s backend runs ``desc`` on ``device``.

        Raises:
            PluginError: the backend failed at that, and what it raised is the cause; or what it
                returned is no callable, or has an optional method that cannot be called.
        """
        backend = self.instance(spec)
        what = f"{spec.name} says that it runs {desc}, but its bind()"
        run: object = attempt(lambda: backend.bind(desc, device))
        if isinstance(run, Failure):
            run.fail(f"{what} failed")
        if not callable(run):
            raise PluginError(f"{what} returned {shown(run)}; expected a function")
        return Bound(run, offers_of(run, desc, f"{what} returned a callable which"))

    def alignment(self, spec: BackendSpec, desc: GemmDesc) -> Alignment:
        """Return what ``spec``'s backend says that the sizes of ``desc`` must be multiples of.

        Raises:
            PluginError: the backend failed at that; what it raised is the cause.
        """
        backend = self.instance(spec)
        found = attempt(lambda: backend.alignment(desc))
        what = f"{spec.name} says that it runs {desc}, but its alignment()"
        if isinstance(found, Failure):
            found.fail(f"{what} failed")
        if not is_a(found, Alignment):
            raise PluginError(f"{what} returned {shown(found)}; expected an Alignment")
        if not all(type(size) is int and size > 0 for size in found):
            raise PluginError(f"{what} returned {shown(found)}; expected whole numbers from 1 on")
        return found

    def environment(self) -> list[str]:
        """Return the variable names that the backends declare."""
        return [name for spec in self.backends.values() for name in spec.environment]

    def complaints(self) -> list[str]:
        """Return one line for each variable that nobody reads and each name that fits nothing."""
        names = [row.name for row in self.rows]
        return settings.unknown_names(self.environment()) + [
            f"FP8CORE_DISABLE_PLUGINS names {name!r}, but no plug-in found is called that."
            f"{did_you_mean(name, names)}"
            for name in settings.read().disabled_plugins
            if name not in names
        ]


def known_devices(kinds: Sequence[str]) -> list[torch.device]:
    """Return the devices of those ``kinds`` that torch, with what is imported, knows."""
    found = [attempt(functools.partial(torch.device, kind)) for kind in kinds]
    return [device for device in found if not isinstance(device, Failure)]


def _make(spec: BackendSpec) -> Backend:
    module, _, attribute = spec.factory.partition(":")
    made: Backend = getattr(importlib.import_module(module), attribute)()
    for method in _METHODS:
        if not callable(getattr(made, method, None)):
            raise PluginError(
                f"its factory {spec.factory!r} returned a {name_of_class(made)}, which has no "
                f"{method}(); a backend has {', '.join(_METHODS)}"
            )
    return made
