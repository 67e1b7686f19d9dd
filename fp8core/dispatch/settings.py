"""The one module that reads the environment: ``FP8CORE_*`` names, their meaning and their check."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fp8core.backend_api import OPS, OPTIONAL_OPS
from fp8core.errors import RecipeError, did_you_mean

VARIABLES: Mapping[str, str] = {
    "FP8CORE_BACKEND": "name of the backend to use for every operation it supports",
    "FP8CORE_OP_BACKEND": 'a backend for single operations, as in "gemm=cuda,quantize=reference"',
    "FP8CORE_STRICT": "1: a substituted backend is an error instead of a logged line",
    "FP8CORE_DEBUG": "1: check the results of a backend's fused operations",
    "FP8CORE_PLUGINS": "comma-separated modules to load as plug-ins besides the installed ones",
    "FP8CORE_DISABLE_PLUGINS": "comma-separated names of installed plug-ins to leave out",
    "FP8CORE_FIRST_STEP": "0: no line at a model's first step that says what ran",
    "FP8CORE_AS_TRANSFORMER_ENGINE": "set by `fp8core run`: the version of Transformer Engine that "
    "its Python processes claim",
}
"""Every variable that fp8core itself reads; a backend declares its own in its BackendSpec."""

_FLAGS = {"": False, "0": False, "1": True}


@dataclass(frozen=True, slots=True)
class Settings:
    """The environment's settings, parsed; equal settings give equal dispatch."""

    backend: str | None = None
    op_backends: tuple[tuple[str, str], ...] = ()
    strict: bool = False
    debug: bool = False
    plugins: tuple[str, ...] = ()
    disabled_plugins: tuple[str, ...] = ()


def read(environ: Mapping[str, str] | None = None) -> Settings:
    """Parse the environment. Called when an operation is resolved, never when one runs.

    Raises:
        RecipeError: a value cannot be parsed, or FP8CORE_OP_BACKEND names an unknown operation.
    """
    env = os.environ if environ is None else environ
    return Settings(
        backend=env.get("FP8CORE_BACKEND", "").strip() or None,
        op_backends=_op_backends(env.get("FP8CORE_OP_BACKEND", "")),
        strict=_flag(env, "FP8CORE_STRICT"),
        debug=_flag(env, "FP8CORE_DEBUG"),
        plugins=_names(env.get("FP8CORE_PLUGINS", "")),
        disabled_plugins=_names(env.get("FP8CORE_DISABLE_PLUGINS", "")),
    )


def tells_first_step(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether a model's first step is logged where it ran as expected.

    Raises:
        RecipeError: the variable is neither 0 nor 1.
    """
    env = os.environ if environ is None else environ
    return not env.get("FP8CORE_FIRST_STEP") or _flag(env, "FP8CORE_FIRST_STEP")


def in_force(declared: Iterable[str] = ()) -> dict[str, str]:
    """Return the ``FP8CORE_*`` variables that are set, known ones (and ``declared``) only."""
    names = {*VARIABLES, *declared}
    return {name: value for name, value in sorted(os.environ.items()) if name in names}


def unknown_names(declared: Iterable[str]) -> list[str]:
    """Return one complaint for each ``FP8CORE_*`` variable that nobody reads."""
    names = [*VARIABLES, *declared]
    return [
        f"{name} is set, but nothing reads it.{did_you_mean(name, names)}"
        for name in sorted(os.environ)
        if name.startswith("FP8CORE_") and name not in names
    ]


def check_op(op: str, origin: str) -> None:
    """Raise RecipeError unless ``op`` is the name of an operation."""
    operations = (*OPS, *OPTIONAL_OPS)
    if op not in operations:
        raise RecipeError(
            f"{origin} names the operation {op!r}; "
            f"operations are {', '.join(operations)}.{did_you_mean(op, operations)}"
        )


def _flag(env: Mapping[str, str], name: str) -> bool:
    value = env.get(name, "")
    if value not in _FLAGS:
        raise RecipeError(f"{name}={value!r}: expected 0 or 1.")
    return _FLAGS[value]


def _names(text: str) -> tuple[str, ...]:
    return tuple(word for word in (part.strip() for part in text.split(",")) if word)


def _op_backends(text: str) -> tuple[tuple[str, str], ...]:
    pairs = []
    for item in _names(text):
        op, separator, backend = (word.strip() for word in item.partition("="))
        if not (op and separator and backend):
            raise RecipeError(
                f"FP8CORE_OP_BACKEND={text!r}: expected op=backend[,op=backend], found {item!r}."
            )
        check_op(op, "FP8CORE_OP_BACKEND")
        pairs.append((op, backend))
    return tuple(pairs)
