"""Discovery: finds plug-ins, loads each in isolation, and keeps what they registered.

A plug-in that cannot be used becomes a row with the reason, never an exception of ``import
fp8core``; asking for it by name raises that reason. After Ctrl-C during loading no plug-in is
loaded: the next use discovers them again.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import pluggy

from fp8core import formats
from fp8core.backend_api import API_VERSION, BackendSpec, FormatSpec, hooks
from fp8core.backend_api.spec import BREAKING_CHANGES
from fp8core.dispatch import settings
from fp8core.dispatch.isolation import Failure, attempt, name_of_class, shown
from fp8core.dispatch.registry import PluginRow, Registry
from fp8core.errors import PluginError, RecipeError, did_you_mean
from fp8core.reporting import logger

ENTRY_POINT_GROUP = "fp8core.backends"
DISABLED = "disabled by FP8CORE_DISABLE_PLUGINS"
"""The reason of the row of a plug-in that the environment leaves out."""
LOADING = "loading plug-in %s"
"""Logged, at level DEBUG, before each plug-in is loaded."""


@dataclass(slots=True)
class _Staged:
    """The registrations of one plug-in, until all of them are known to be valid."""

    formats: list[FormatSpec] = field(default_factory=list)
    backends: dict[str, BackendSpec] = field(default_factory=dict)
    recipes: dict[str, Callable[[], Any]] = field(default_factory=dict)

    def add_format(self, spec: FormatSpec) -> None:
        if not isinstance(spec, FormatSpec):
            raise PluginError(f"registers {shown(spec)} as a format; expected a FormatSpec")
        self.formats.append(spec)

    def add_backend(self, spec: BackendSpec) -> None:
        if not isinstance(spec, BackendSpec):
            raise PluginError(f"registers {shown(spec)} as a backend; expected a BackendSpec")
        if spec.name in self.backends:
            raise PluginError(f"registers backend {spec.name!r} twice")
        self.backends[spec.name] = spec

    def add_recipe(self, name: str, factory: Callable[[], Any]) -> None:
        if not (_is_name(name) and callable(factory)):
            raise PluginError(
                f"registers recipe {shown(name)}, {shown(factory)}; expected a name, a "
                f"factory; names are of letters, digits and ._+-"
            )
        if name in self.recipes:
            raise PluginError(f"registers recipe {name!r} twice")
        self.recipes[name] = factory


# One lock for both: loading looks up formats, and looking up a format loads plug-ins, so that two
# locks would be taken in both orders.
_lock = formats.discovery_lock

_reserved_recipes: set[str] = set()
_set_aside: dict[str, str] = {}


_loaded: list[Registry] = []
# Formats of a registry that Ctrl-C kept from being forgotten; the next load forgets them.
_left_over: list[FormatSpec] = []


def _load() -> Registry:
    if _loaded:
        return _loaded[0]
    chosen = settings.read()  # first, as it may raise, and nothing may count as loaded then
    manager = pluggy.PluginManager("fp8core")
    manager.add_hookspecs(hooks)
    registry = Registry(manager)
    formats.forget(*_left_over)
    _left_over.clear()
    try:
        _loaded.append(registry)  # a plug-in that asks while it loads sees those loaded so far
        _fill(registry, chosen)
    except BaseException:
        _forget(registry)
        raise
    return registry


def _fill(registry: Registry, chosen: settings.Settings) -> None:
    absent: list[str] = []
    for name, source, find in _sources(chosen, absent):
        level = logging.INFO  # somebody wants it so
        if name in chosen.disabled_plugins:
            reason: str | None = DISABLED
        elif name in _set_aside:
            reason = _set_aside[name]
        else:
            logger.debug(LOADING, name)
            reason = _add(registry, name, find)
            level = logging.WARNING  # its backends are not there, and others take their place
        registry.rows.append(PluginRow(name, source, reason))
        if reason is not None:
            logger.log(level, "plug-in %s is not used: %s", name, reason)
    if absent:
        present = [row.name for row in registry.rows if row.name not in absent]
        raise RecipeError(
            f"FP8CORE_PLUGINS names {absent[0]!r}, but there is no module of that name. Plug-ins "
            f"found: {', '.join(present) or 'none'}; installed ones are used without being named "
            f"there.{did_you_mean(absent[0], present)}"
        )
    for complaint in registry.complaints():
        logger.warning("%s", complaint)


def _forget(registry: Registry) -> None:
    _left_over.extend(registry.formats)
    formats.set_discovery(load)  # first, so that a lookup of one of these formats loads again
    _loaded.clear()
    formats.forget(*_left_over)
    _left_over.clear()


def load() -> Registry:
    """Return the registry, discovering the plug-ins the first time. Safe under threads."""
    with _lock:
        return _load()


def reload() -> Registry:
    """Forget the plug-ins and discover them again, with the environment as it is now."""
    with _lock:
        for registry in list(_loaded):
            _forget(registry)
        return _load()


def register(plugin: object, name: str) -> None:
    """Add a plug-in, a module or an object with hookimpls, without an entry point.

    Raises:
        PluginError: it cannot be used; none of its registrations is kept.
    """
    with _lock:
        registry = _load()
        reason = _add(registry, name, lambda: plugin)
        if reason is not None:
            raise PluginError(f"plug-in {name!r}: {reason}")
        registry.rows.append(PluginRow(name, "registered by the program", None))


def set_aside(reasons: Mapping[str, str]) -> None:
    """Have discovery leave out the plug-ins of these names, each with the reason for its row.

    For plug-ins that are known to crash or hang, from which nothing protects this process.
    """
    _set_aside.update(reasons)


def reserve_recipes(names: Iterable[str]) -> None:
    """Refuse plug-ins that register a recipe under one of ``names``, those of fp8core's recipes."""
    _reserved_recipes.update(names)


def _sources(
    chosen: settings.Settings, absent: list[str]
) -> Iterator[tuple[str, str, Callable[[], object]]]:
    """Yield name, source and loader of each plug-in; modules that do not exist go to ``absent``."""
    points: list[EntryPoint] = sorted(
        {
            (point.name, point.value): point for point in entry_points(group=ENTRY_POINT_GROUP)
        }.values(),
        key=lambda point: point.name,
    )
    for point in points:
        yield point.name, f"entry point {point.value}", point.load
    for module in chosen.plugins:
        yield module, f"FP8CORE_PLUGINS={module}", functools.partial(_import, module, absent)


def _import(module: str, absent: list[str]) -> object:
    if not all(module.split(".")):  # a relative or an empty name
        absent.append(module)
        raise PluginError(f"{module!r} is no name of a module")
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        # A module that exists and imports one that does not is broken, not absent.
        if error.name is not None and f"{module}.".startswith(f"{error.name}."):
            absent.append(module)
        raise


def _add(registry: Registry, name: str, find: Callable[[], object]) -> str | None:
    """Load one plug-in; return None, or why it failed, after undoing all that it registered."""
    staged = _Staged()
    with contextlib.ExitStack() as undo:
        failure = attempt(lambda: _take(registry, name, find, staged, undo))
        if not isinstance(failure, Failure):
            undo.pop_all()
            return None
        registry.refused.update(dict.fromkeys(staged.backends, str(failure)))
    return str(failure)


def _take(
    registry: Registry,
    name: str,
    find: Callable[[], object],
    staged: _Staged,
    undo: contextlib.ExitStack,
) -> None:
    """Register one plug-in, each step after the callback in ``undo`` that takes it back."""
    manager = registry.manager
    plugin = find()
    _check_new(manager, name, plugin)
    undo.callback(lambda: manager.is_registered(plugin) and manager.unregister(plugin))
    manager.register(plugin, name=name)
    _check_hook_names(manager, plugin)
    _collect(manager, staged, plugin)
    _check(registry, staged)
    new = formats.unknown(*staged.formats)
    undo.callback(formats.forget, *new)
    formats.register(*staged.formats)
    undo.callback(_withdraw, registry, staged)
    registry.formats += new
    registry.backends.update(staged.backends)
    registry.recipes.update(staged.recipes)


def _withdraw(registry: Registry, staged: _Staged) -> None:
    for name in staged.backends:
        registry.backends.pop(name, None)
    for name in staged.recipes:
        registry.recipes.pop(name, None)


def _check_new(manager: pluggy.PluginManager, name: str, plugin: object) -> None:
    kind = type(plugin)
    if (kind.__eq__, kind.__hash__) != (object.__eq__, object.__hash__) and kind is not type:
        raise PluginError(
            f"is an object of class {name_of_class(plugin)}, which compares by value; plug-ins are "
            f"told apart by identity, as modules, classes and other objects are"
        )
    if manager.has_plugin(name):
        raise PluginError(f"another plug-in is called {name!r}")
    if manager.is_registered(plugin):
        raise PluginError(f"the same plug-in is loaded already, as {manager.get_name(plugin)!r}")


def _check_hook_names(manager: pluggy.PluginManager, plugin: object) -> None:
    names = [name for name in vars(hooks) if name.startswith("fp8core_")]
    callers = manager.get_hookcallers(plugin)
    if not callers:
        raise PluginError(
            f"implements no hook; hooks are {', '.join(names)}, each function of them marked "
            f"with fp8core.backend_api.hookimpl"
        )
    for caller in callers:
        if not caller.has_spec():
            raise PluginError(f"unknown hook {caller.name!r}.{did_you_mean(caller.name, names)}")


def _collect(manager: pluggy.PluginManager, staged: _Staged, plugin: object) -> None:
    rest = [installed for installed in manager.get_plugins() if installed is not plugin]

    def call(hook: str, register: Callable[..., None]) -> None:
        for result in manager.subset_hook_caller(hook, rest)(register=register):
            if inspect.iscoroutine(result):
                result.close()  # Python would warn that it was never awaited
            if inspect.isawaitable(result) or inspect.isgenerator(result):
                raise PluginError(f"its {hook} is async or has a yield, so calling it runs nothing")

    call("fp8core_register_formats", staged.add_format)
    call("fp8core_register_backends", staged.add_backend)
    call("fp8core_register_recipes", staged.add_recipe)


def _is_words(value: object) -> bool:
    return isinstance(value, tuple | list) and all(isinstance(word, str) for word in value)


def _is_name(value: object) -> bool:
    """Whether ``value`` can be written in a command, and in FP8CORE_OP_BACKEND among others."""
    return isinstance(value, str) and re.fullmatch(r"\w[\w.+-]*", value, re.ASCII) is not None


def _is_import_path(value: object) -> bool:
    """Whether ``value`` names a module and an attribute of it, with a colon between them."""
    return isinstance(value, str) and re.fullmatch(r"\w[\w.]*:\w[\w.]*", value) is not None


# The fields of a BackendSpec that are read before the backend is used, in a search for any backend.
_FIELDS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "name": (_is_name, "a name of letters, digits and ._+-"),
    "device_types": (
        lambda value: (
            _is_words(value) and bool(value) and all(re.fullmatch(r"[a-z]\w*", v) for v in value)
        ),
        "a tuple of one or more device types, such as 'cuda'",
    ),
    "factory": (_is_import_path, "'module:Class'"),
    "probe": (callable, "a function"),
    "portable": (lambda value: isinstance(value, bool), "True or False"),
    "transposes": (lambda value: isinstance(value, bool), "True or False"),
    "api_version": (
        lambda value: isinstance(value, tuple) and [*map(type, value)] == [int, int],
        "two whole numbers, as (4, 0)",
    ),
    "priority": (lambda value: isinstance(value, int), "a whole number"),
    "preferred_recipe": (lambda value: isinstance(value, str), "a recipe's name"),
    "environment": (_is_words, "a tuple of variables' names"),
    "operand_fields": (_is_words, "a tuple of fields of OperandSpec"),
    **dict.fromkeys(
        ("builder", "selftest"),
        (
            lambda value: value == "" or _is_import_path(value),
            "'module:function', or an empty text",
        ),
    ),
}


def _check(registry: Registry, staged: _Staged) -> None:
    for spec in staged.backends.values():
        for name, (is_right, expected) in _FIELDS.items():
            value = getattr(spec, name)
            if not is_right(value):
                raise PluginError(
                    f"backend {spec.name!r}: {name}={shown(value)}; expected {expected}"
                )
        _check_version(spec)
    for kind, mine, theirs in (
        ("backend", registry.backends.keys(), staged.backends.keys()),
        ("recipe", registry.recipes.keys(), staged.recipes.keys()),
    ):
        for clash in mine & theirs:
            raise PluginError(f"{kind} {clash!r} is already registered by another plug-in")
    for clash in _reserved_recipes & staged.recipes.keys():
        raise PluginError(f"recipe {clash!r} is fp8core's own")


def _check_version(spec: BackendSpec) -> None:
    major, minor = spec.api_version
    if major == API_VERSION[0] and minor <= API_VERSION[1]:
        return
    changes = [f"{new}.0: {text}" for new, text in BREAKING_CHANGES.items() if new > major]
    remedy = (
        f"Changed since: {'; '.join(changes)}. Install the plug-in for {API_VERSION[0]}.x"
        if changes
        else "Install a newer fp8core"
    )
    raise PluginError(
        f"backend {spec.name!r} is written for backend API {major}.{minor}; "
        f"this fp8core offers {API_VERSION[0]}.{API_VERSION[1]}. {remedy}"
    )


formats.set_discovery(load)
