"""The public signatures of the backend API as text: ``python -m tests.backend_api.snapshot``.

Writes ``contract.txt`` beside this file, which ``test_contract.py`` compares with the code.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import re
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fp8core import backend_api
from fp8core.backend_api import OPS, hooks
from fp8core_backends.reference.backend import ReferenceBackend

FILE = Path(__file__).with_name("contract.txt")


def describe() -> str:
    """Every public name of the backend API, and every hook, a line for each part of it."""
    lines = [f"API_VERSION = {backend_api.API_VERSION}", ""]
    for name in sorted(backend_api.__all__):
        if name != "API_VERSION":
            lines += [*_name(name, getattr(backend_api, name)), ""]
    lines.append("operations: what each backend method takes, the descriptor first")
    for op, text in operations().items():
        lines.append(f"    {op}: {text}")
    lines += ["", "hooks"]
    for name, hook in vars(hooks).items():
        if name.startswith("fp8core_"):
            options = {k: v for k, v in getattr(hook, "fp8core_spec").items() if v}  # noqa: B009  set by pluggy, unknown to type checkers
            lines.append(f"    {name}{_signature(hook)} {options or ''}".rstrip())
    return "\n".join(lines) + "\n"


def descriptors() -> list[type]:
    """The classes of descriptors."""
    return [*typing.get_args(backend_api.OpDesc), backend_api.GroupedGemmDesc]


def documented(desc: type) -> dict[str, str]:
    """The calls that a descriptor's docstring spells out, by operation."""
    text = " ".join((desc.__doc__ or "").split())
    calls = re.findall(r"``(\w+)(\([^`]*?\)(?: -> [^`]+?)?)``", text)
    return {name: call for name, call in calls if name in (*OPS, *backend_api.OPTIONAL_OPS)}


def operations() -> dict[str, str]:
    """By operation: the call as its descriptor's docstring says it."""
    found: dict[str, str] = {}
    for desc in descriptors():
        found |= documented(desc)
    return dict(sorted(found.items()))


def implemented(op: str) -> list[str]:
    """Names of the parameters of the reference's method for ``op``, without the descriptor."""
    method: Callable[..., Any] = getattr(ReferenceBackend, op)
    return list(inspect.signature(method).parameters)[1:]


def _name(name: str, value: Any) -> Iterator[str]:
    if isinstance(value, type):
        bases = [base.__name__ for base in value.__bases__ if base is not object]
        yield f"class {name}({', '.join(bases)})"
        yield from (f"    {line}" for line in _members(value))
    elif isinstance(value, types.FunctionType):
        yield f"def {name}{_signature(value)}"
    elif isinstance(value, types.UnionType) or typing.get_origin(value) is typing.Union:
        members = sorted(member.__name__ for member in typing.get_args(value))
        yield f"{name}: union of"  # a line each, so that a new one is an added line
        yield from (f"    {member}" for member in members)
    elif isinstance(value, frozenset | tuple):
        yield f"{name}: {type(value).__name__} of"
        yield from (f"    {entry!r}" for entry in _in_order(value))
    elif typing.get_origin(value) is not None:
        yield f"{name} = {value}"
    else:
        yield f"{name}: {type(value).__name__}"


def _in_order(value: tuple[Any, ...] | frozenset[Any]) -> list[Any]:
    return list(value) if isinstance(value, tuple) else sorted(value)


def _members(cls: type) -> Iterator[str]:
    if dataclasses.is_dataclass(cls):
        for field in dataclasses.fields(cls):
            keyword = " (keyword only)" if field.kw_only else ""
            yield f"{field.name}: {field.type}{_default(field.default)}{keyword}"
        for name, annotation in vars(cls).get("__annotations__", {}).items():
            if "ClassVar" in str(annotation):
                yield f"{name}: {annotation} = {getattr(cls, name)!r}"
    elif hasattr(cls, "_fields"):
        for name, annotation in cls.__annotations__.items():
            default = cls._field_defaults.get(name, dataclasses.MISSING)
            text = getattr(annotation, "__forward_arg__", annotation)
            yield f"{name}: {text}{_default(default)}"
    elif getattr(cls, "_is_protocol", False):
        for name, annotation in vars(cls).get("__annotations__", {}).items():
            yield f"{name}: {annotation}"
    for name, value in sorted(vars(cls).items()):
        is_call = name in ("__call__", "__iter__") and getattr(cls, "_is_protocol", False)
        if name.startswith("_") and not is_call:
            continue
        if isinstance(value, property):
            yield f"property {name}"
        elif isinstance(value, types.FunctionType):
            yield f"def {name}{_signature(value)}"


def _default(value: Any) -> str:
    if value is dataclasses.MISSING:
        return ""
    return " = <function>" if callable(value) else f" = {value!r}"


def _signature(function: Callable[..., Any]) -> str:
    # annotations are strings, so they come in quotes
    return re.sub(r"(: |-> )'([^']*)'", r"\1\2", str(inspect.signature(function)))


def advice(before: str, now: str) -> str:
    """What to do about a difference of two descriptions; empty if there is none."""
    old, new = before.splitlines(), now.splitlines()
    if old == new:
        return ""
    changes = list(
        difflib.unified_diff(old, new, "tests/backend_api/contract.txt", "the code", lineterm="")
    )
    body = [line for line in changes[2:] if line[0] in "+-" and line[1:].strip()]
    removed = [line for line in body if line[0] == "-" and "API_VERSION" not in line]
    part = "major" if removed else "minor"
    why = (
        "lines are gone or changed, so a backend that relied on them breaks"
        if removed
        else "lines are only added, which an old backend can ignore; if it cannot, the major"
    )
    return "\n".join(
        (
            "The public backend API changed:",
            *changes,
            f"If that is meant, raise the {part} part of API_VERSION in fp8core/backend_api "
            f"({why}), say so in CHANGELOG.md, and run `python -m tests.backend_api.snapshot`.",
        )
    )


if __name__ == "__main__":
    FILE.write_text(describe(), encoding="utf-8")
