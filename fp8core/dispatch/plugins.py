"""Discovery: finds plug-ins, loads each in isolation, and keeps what they registered.

A plug-in that cannot be used is a row with its reason, never an exception of ``import fp8core``;
asking for it by name raises that reason.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import pluggy
import torch

from fp8core import formats, hookspecs
from fp8core.backend_api import API_VERSION, Backend, BackendSpec, FormatSpec, OpDesc
from fp8core.dispatch import settings
from fp8core.errors import Fp8CoreError, PluginError, RecipeError, did_you_mean
from fp8core.reporting import logger

__all__ = [
    "LOADING",
    "PluginRow",
    "Registry",
    "describe",
    "load",
    "register",
    "reload",
    "reserve_recipes",
    "set_aside",
]

ENTRY_POINT_GROUP = "fp8core.backends"
LOADING = "loading plug-in %s"
"""Logged, at level DEBUG, before each plug-in is loaded."""


@dataclass(frozen=True, slots=True)
class PluginRow:
    """A plug-in that was found: where, and why it cannot be used (None: it can)."""

    name: str
    source: str
    reason: str | None


@dataclass(slots=True, eq=False)
class Registry:
    """Everything that plug-ins brought, and the rows that ``fp8core doctor`` prints."""

    manager: pluggy.PluginManager
    rows: list[PluginRow] = field(default_factory=list)
    backends: dict[str, BackendSpec] = field(default_factory=dict)
    recipes: dict[str, Callable[[], Any]] = field(default_factory=dict)
    _refused: dict[str, str] = field(default_factory=dict)
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
        reason = self._refused.get(name) or failed.get(name)
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
        try:
            reason = spec.probe()
            if reason is None:
                self.instance(spec)
        except Exception as error:  # noqa: BLE001  a third party's probe or factory may raise anything
            return describe(error)
        return reason

    def unsupported(self, spec: BackendSpec, desc: OpDesc, device: torch.device) -> str | None:
        """Say why ``spec``'s backend cannot run ``desc`` on ``device``, or None."""
        reason = self.unusable(spec)
        if reason is not None:
            return reason
        try:
            return self.instance(spec).unsupported(desc, device)
        except Exception as error:  # noqa: BLE001  every backend is asked: one that breaks must not break the others
            return f"its unsupported() failed: {describe(error)}"

    def instance(self, spec: BackendSpec) -> Backend:
        """Return the backend object, importing its factory on first use."""
        if spec.name not in self._instances:
            module, _, attribute = spec.factory.partition(":")
            made = getattr(importlib.import_module(module), attribute)()
            self._instances.setdefault(spec.name, made)
        return self._instances[spec.name]

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


@dataclass(slots=True)
class _Staged:
    """What one plug-in registers, until all of it is known to be right."""

    formats: list[FormatSpec] = field(default_factory=list)
    backends: dict[str, BackendSpec] = field(default_factory=dict)
    recipes: dict[str, Callable[[], Any]] = field(default_factory=dict)

    def add_format(self, spec: FormatSpec) -> None:
        if not isinstance(spec, FormatSpec):
            raise PluginError(f"registers {spec!r} as a format; expected a FormatSpec")
        self.formats.append(spec)

    def add_backend(self, spec: BackendSpec) -> None:
        if not isinstance(spec, BackendSpec):
            raise PluginError(f"registers {spec!r} as a backend; expected a BackendSpec")
        if spec.name in self.backends:
            raise PluginError(f"registers backend {spec.name!r} twice")
        self.backends[spec.name] = spec

    def add_recipe(self, name: str, factory: Callable[[], Any]) -> None:
        if not (isinstance(name, str) and callable(factory)):
            raise PluginError(f"registers recipe {name!r}, {factory!r}; expected a name, a factory")
        if name in self.recipes:
            raise PluginError(f"registers recipe {name!r} twice")
        self.recipes[name] = factory


# Loading asks for formats, and asking for a format loads: two locks would be taken in both orders.
_lock = formats.discovery_lock

_reserved_recipes: set[str] = set()
_set_aside: dict[str, str] = {}


_loaded: list[Registry] = []


def _load() -> Registry:
    if _loaded:
        return _loaded[0]
    wanted = settings.read()  # first: it may raise, and then nothing counts as loaded
    manager = pluggy.PluginManager("fp8core")
    manager.add_hookspecs(hookspecs)
    registry = Registry(manager)
    _loaded.append(registry)  # a plug-in that asks while it loads sees what is there so far
    for name, source, find in _sources(wanted):
        if name in wanted.disabled_plugins:
            reason: str | None = "disabled by FP8CORE_DISABLE_PLUGINS"
        elif name in _set_aside:
            reason = _set_aside[name]
        else:
            logger.debug(LOADING, name)
            reason = _add(registry, name, find)
        registry.rows.append(PluginRow(name, source, reason))
        if reason is not None:
            logger.info("plug-in %s is not used: %s", name, reason)
    for complaint in registry.complaints():
        logger.warning("%s", complaint)
    return registry


def load() -> Registry:
    """Return the registry, discovering the plug-ins the first time. Safe under threads."""
    with _lock:
        return _load()


def reload() -> Registry:
    """Forget the plug-ins and discover them anew, with the environment as it is now."""
    with _lock:
        _loaded.clear()
        return _load()


def register(plugin: object, name: str) -> None:
    """Add a plug-in by hand, as an entry point would: a module or an object with hookimpls.

    Raises:
        PluginError: it cannot be used; nothing of it is kept.
    """
    with _lock:
        registry = _load()
        reason = _add(registry, name, lambda: plugin)
        if reason is not None:
            raise PluginError(f"plug-in {name!r}: {reason}")
        registry.rows.append(PluginRow(name, "registered by the program", None))


def set_aside(reasons: Mapping[str, str]) -> None:
    """Have discovery leave out the plug-ins of these names, each for a reason that its row gives.

    For plug-ins that are known to crash or hang: nothing can isolate those in this process.
    """
    _set_aside.update(reasons)


def reserve_recipes(names: Iterable[str]) -> None:
    """Refuse plug-ins that register a recipe under one of ``names``: those mean fp8core's own."""
    _reserved_recipes.update(names)


def _sources(wanted: settings.Settings) -> Iterator[tuple[str, str, Callable[[], object]]]:
    points: list[EntryPoint] = sorted(
        {
            (point.name, point.value): point for point in entry_points(group=ENTRY_POINT_GROUP)
        }.values(),
        key=lambda point: point.name,
    )
    for point in points:
        yield point.name, f"entry point {point.value}", point.load
    for module in wanted.plugins:
        find = functools.partial(importlib.import_module, module)
        yield module, f"FP8CORE_PLUGINS={module}", find


def _add(registry: Registry, name: str, find: Callable[[], object]) -> str | None:
    """Load one plug-in; return why it failed, leaving nothing of it behind, or None."""
    manager = registry.manager
    staged = _Staged()
    ours: object | None = None
    try:
        plugin = find()
        _check_new(manager, name, plugin)
        ours = plugin
        manager.register(plugin, name=name)
        _check_hook_names(manager, plugin)
        _collect(manager, staged, plugin)
        _check(registry, staged)
        formats.register(*staged.formats)
    except Exception as error:  # noqa: BLE001  isolation: any failure of a third party is its own row
        if ours is not None and manager.is_registered(ours):
            manager.unregister(ours)
        reason = describe(error)
        registry._refused.update(dict.fromkeys(staged.backends, reason))
        return reason
    registry.backends.update(staged.backends)
    registry.recipes.update(staged.recipes)
    return None


def _check_new(manager: pluggy.PluginManager, name: str, plugin: object) -> None:
    if manager.has_plugin(name):
        raise PluginError(f"another plug-in is called {name!r}")
    if manager.is_registered(plugin):
        raise PluginError(f"the same plug-in is loaded already, as {manager.get_name(plugin)!r}")


def _check_hook_names(manager: pluggy.PluginManager, plugin: object) -> None:
    known = [name for name in vars(hookspecs) if name.startswith("fp8core_")]
    callers = manager.get_hookcallers(plugin)
    if not callers:
        raise PluginError(
            f"implements no hook; hooks are {', '.join(known)}, each function of them marked "
            f"with fp8core.backend_api.hookimpl"
        )
    for caller in callers:
        if not caller.has_spec():
            raise PluginError(f"unknown hook {caller.name!r}.{did_you_mean(caller.name, known)}")


def _collect(manager: pluggy.PluginManager, staged: _Staged, plugin: object) -> None:
    others = [other for other in manager.get_plugins() if other is not plugin]

    def call(hook: str, register: Callable[..., None]) -> None:
        manager.subset_hook_caller(hook, others)(register=register)

    call("fp8core_register_formats", staged.add_format)
    call("fp8core_register_backends", staged.add_backend)
    call("fp8core_register_recipes", staged.add_recipe)


def _check(registry: Registry, staged: _Staged) -> None:
    for spec in staged.backends.values():
        major, minor = spec.api_version
        if major != API_VERSION[0] or minor > API_VERSION[1]:
            raise PluginError(
                f"backend {spec.name!r} is written for backend API {major}.{minor}; "
                f"this fp8core offers {API_VERSION[0]}.{API_VERSION[1]}"
            )
        for name, value in (("device_types", spec.device_types), ("environment", spec.environment)):
            if isinstance(value, str):
                raise PluginError(f"backend {spec.name!r}: {name}={value!r}; expected a tuple")
    for kind, mine, theirs in (
        ("backend", registry.backends.keys(), staged.backends.keys()),
        ("recipe", registry.recipes.keys(), staged.recipes.keys()),
    ):
        for taken in mine & theirs:
            raise PluginError(f"{kind} {taken!r} is already registered by another plug-in")
    for taken in _reserved_recipes & staged.recipes.keys():
        raise PluginError(f"recipe {taken!r} is fp8core's own")


def describe(error: Exception) -> str:
    """Return ``error`` as a reason: the text of our own, the class too of anybody else's."""
    text = str(error) or "no message"
    return text if isinstance(error, Fp8CoreError) else f"{type(error).__name__}: {text}"


def _discover_formats() -> None:
    try:
        load()
    except Fp8CoreError:
        formats.set_discovery(_discover_formats)  # so that it is tried again
        raise


formats.set_discovery(_discover_formats)
