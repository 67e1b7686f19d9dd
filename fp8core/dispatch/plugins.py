"""Discovery: finds plug-ins, loads each in isolation, and keeps what they registered.

A plug-in that cannot be used is a row with its reason, never an exception of ``import fp8core``;
asking for it by name raises that reason.
"""

from __future__ import annotations

import functools
import importlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import pluggy

from fp8core import formats, hookspecs
from fp8core.backend_api import API_VERSION, Backend, BackendSpec
from fp8core.dispatch import settings
from fp8core.errors import Fp8CoreError, PluginError, RecipeError, did_you_mean
from fp8core.reporting import logger

__all__ = ["PluginRow", "Registry", "load", "register", "reload"]

ENTRY_POINT_GROUP = "fp8core.backends"


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
    _instances: dict[str, Backend] = field(default_factory=dict)

    def spec(self, name: str, asked_by: str) -> BackendSpec:
        """Return the backend called ``name``, or raise why there is none.

        Raises:
            PluginError: a plug-in of that name exists but failed to load.
            RecipeError: nothing of that name is installed.
        """
        if name in self.backends:
            return self.backends[name]
        for row in self.rows:
            if row.name == name and row.reason is not None:
                raise PluginError(f"{asked_by} asks for backend {name!r}: {row.reason}")
        known = ", ".join(sorted(self.backends)) or "none (is fp8core installed with pip?)"
        raise RecipeError(
            f"{asked_by} asks for backend {name!r}, which is not installed; "
            f"installed: {known}.{did_you_mean(name, self.backends)}"
        )

    def by_priority(self) -> list[BackendSpec]:
        """Return every backend, the highest priority first, names in order among equals."""
        return sorted(self.backends.values(), key=lambda spec: (-spec.priority, spec.name))

    def unusable(self, spec: BackendSpec) -> str | None:
        """Say why ``spec`` cannot be used on this machine at all, or None."""
        try:
            reason = spec.probe()
            if reason is None:
                self.instance(spec)
        except Exception as error:  # noqa: BLE001  a third party's probe or factory may raise anything
            return _describe(error)
        return reason

    def instance(self, spec: BackendSpec) -> Backend:
        """Return the backend object, importing its factory on first use."""
        if spec.name not in self._instances:
            module, _, attribute = spec.factory.partition(":")
            self._instances[spec.name] = getattr(importlib.import_module(module), attribute)()
        return self._instances[spec.name]

    def environment(self) -> list[str]:
        """Return the variable names that the backends declare."""
        return [name for spec in self.backends.values() for name in spec.environment]


_lock = threading.RLock()


_loaded: list[Registry] = []


def _load() -> Registry:
    if _loaded:
        return _loaded[0]
    manager = pluggy.PluginManager("fp8core")
    manager.add_hookspecs(hookspecs)
    registry = Registry(manager)
    _loaded.append(registry)  # a plug-in that asks while it loads sees what is there so far
    wanted = settings.read()
    for name, source, find in _sources(wanted):
        if name in wanted.disabled_plugins:
            reason: str | None = "disabled by FP8CORE_DISABLE_PLUGINS"
        else:
            reason = _add(registry, name, find)
        registry.rows.append(PluginRow(name, source, reason))
        if reason is not None:
            logger.info("plug-in %s is not used: %s", name, reason)
    for complaint in settings.unknown_names(registry.environment()):
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
    staged = Registry(manager)
    plugin: object | None = None
    try:
        plugin = find()
        manager.register(plugin, name=name)
        _check_hook_names(manager, plugin)
        _collect(staged, plugin)
        _check(registry, staged)
    except Exception as error:  # noqa: BLE001  isolation: any failure of a third party is its own row
        if plugin is not None and manager.get_plugin(name) is plugin:
            manager.unregister(plugin)
        return _describe(error)
    registry.backends.update(staged.backends)
    registry.recipes.update(staged.recipes)
    return None


def _check_hook_names(manager: pluggy.PluginManager, plugin: object) -> None:
    known = [name for name in vars(hookspecs) if name.startswith("fp8core_")]
    for caller in manager.get_hookcallers(plugin) or []:
        if not caller.has_spec():
            raise PluginError(f"unknown hook {caller.name!r}.{did_you_mean(caller.name, known)}")


def _collect(staged: Registry, plugin: object) -> None:
    others = [other for other in staged.manager.get_plugins() if other is not plugin]

    def call(hook: str, register: Callable[..., None]) -> None:
        staged.manager.subset_hook_caller(hook, others)(register=register)

    def register_backend(spec: BackendSpec) -> None:
        if spec.name in staged.backends:
            raise PluginError(f"registers backend {spec.name!r} twice")
        staged.backends[spec.name] = spec

    call("fp8core_register_formats", formats.register)
    call("fp8core_register_backends", register_backend)
    call("fp8core_register_recipes", staged.recipes.__setitem__)


def _check(registry: Registry, staged: Registry) -> None:
    for spec in staged.backends.values():
        major, minor = spec.api_version
        if major != API_VERSION[0] or minor > API_VERSION[1]:
            raise PluginError(
                f"backend {spec.name!r} is written for backend API {major}.{minor}; "
                f"this fp8core offers {API_VERSION[0]}.{API_VERSION[1]}"
            )
    for kind, mine, theirs in (
        ("backend", registry.backends, staged.backends),
        ("recipe", registry.recipes, staged.recipes),
    ):
        for taken in mine.keys() & theirs.keys():
            raise PluginError(f"{kind} {taken!r} is already registered by another plug-in")


def _describe(error: Exception) -> str:
    text = str(error) or "no message"
    return text if isinstance(error, Fp8CoreError) else f"{type(error).__name__}: {text}"


formats.set_discovery(load)
