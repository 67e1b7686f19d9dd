"""Values as source code: what torch writes into the code of a graph for one (``__fx_repr__``)."""

from __future__ import annotations

import copyreg
import functools
import math
import operator
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch

from fp8core.errors import UnsupportedError

_LITERALS = (type(None), type(...), bool, int, float, str, bytes, torch.dtype)
_NAMED = (type, types.FunctionType, types.BuiltinFunctionType)


def expression_of(value: object) -> tuple[str, dict[str, Any]]:
    """Return an expression that makes an equal value, and the names in it, as torch writes a value
    into the code of a graph (``__fx_repr__``).

    Objects are made again as :mod:`copy` does. The names are classes and functions, which torch
    imports where it reads a graph from its cache; those of torch itself need no name but ``torch``.

    Raises:
        UnsupportedError: it refers to what has no such name, as a class inside of a function, or to
            itself.
    """
    names: dict[str, Any] = {}
    try:
        return _written(value, names), names
    except (AttributeError, TypeError, RecursionError) as error:
        raise UnsupportedError(
            f"{value!r} cannot be a value in a graph: {error}. Define what it refers to at the top "
            f"of a module."
        ) from None


def _written(value: Any, names: dict[str, Any]) -> str:
    kind = type(value)
    write = functools.partial(_written, names=names)
    if kind is float and not math.isfinite(value):
        return f"float('{value}')"
    if kind in _LITERALS:
        return repr(value)
    if kind in (tuple, list):
        items = "".join(f"{write(item)}, " for item in value)
        return f"({items})" if kind is tuple else f"[{items}]"
    if kind is dict:
        return "{" + ", ".join(f"{write(key)}: {write(value[key])}" for key in value) + "}"
    if isinstance(value, _NAMED):
        return _name_of(value, value.__module__, value.__qualname__, names)
    reduce = copyreg.dispatch_table.get(kind)
    reduced: Any = value.__reduce_ex__(4) if reduce is None else reduce(value)
    if isinstance(reduced, str):
        return _name_of(value, value.__module__, reduced, names)
    parts: list[Any] = [*reduced, None, None, None][:5]
    parts[3:] = [list(items or ()) for items in parts[3:]]
    return f"{write(rebuilt)}({', '.join(map(write, parts))})"


def _name_of(value: object, module: str, path: str, names: dict[str, Any]) -> str:
    """Return what ``value`` is called in the expression; its module's part of it goes to names."""
    try:
        named = operator.attrgetter(path)(sys.modules[module])
    except (AttributeError, KeyError):
        named = None
    if named is not value:
        raise TypeError(f"{module}.{path} is not found by its name")
    if module == "builtins":
        return path
    if module.partition(".")[0] == "torch":
        return f"{module}.{path}"
    first, *rest = path.split(".")
    name = f"{module}.{first}".replace(".", "__")
    names[name] = getattr(sys.modules[module], first)
    return ".".join([name, *rest])


def rebuilt(
    create: Callable[..., Any],
    arguments: Iterable[Any],
    state: Any,
    items: Iterable[Any],
    pairs: Iterable[tuple[Any, Any]],
) -> Any:
    """Return the object whose ``__reduce_ex__`` returned these parts."""
    instance = create(*arguments)
    if hasattr(instance, "__setstate__") and state is not None:
        instance.__setstate__(state)
    elif state is not None:
        of_dict, of_slots = state if isinstance(state, tuple) else (state, None)
        instance.__dict__.update(of_dict or {})
        for name, attribute in (of_slots or {}).items():
            setattr(instance, name, attribute)
    for item in items:
        instance.append(item)
    for key, item in pairs:
        instance[key] = item
    return instance
