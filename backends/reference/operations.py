"""The functions that compute the operations, and the reasons for which they refuse descriptors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from fp8core import formats
from fp8core.backend_api import TRANSFORMS, OperandSpec

_Function = TypeVar("_Function", bound=Callable[..., Any])

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_SCALE_FORMATS = ("float32", "e8m0", "e4m3")

FUNCTIONS: dict[str, Callable[..., Any]] = {}
"""The functions by the name of the operation."""

REFUSALS: dict[type, Callable[[Any], str | None]] = {}
"""By class of descriptor, what returns the reason why one cannot run, or None."""


def computes(
    *descs: type, refuses: Callable[[Any], str | None]
) -> Callable[[_Function], _Function]:
    """Have the decorated function compute the operation of its name, for these descriptors."""

    def add(function: _Function) -> _Function:
        FUNCTIONS[function.__name__] = function
        REFUSALS.update(dict.fromkeys(descs, refuses))
        return function

    return add


def spec_problem(spec: OperandSpec | None) -> str | None:
    """Return why no operand of ``spec`` is computed, or None."""
    if spec is None:
        return None
    if spec.format not in formats.names():
        return f"unknown format {spec.format!r}"
    if spec.scale_format not in _SCALE_FORMATS:
        return f"unknown scale format {spec.scale_format!r}"
    if spec.transform is not None and spec.transform not in TRANSFORMS:
        return f"unknown transform {spec.transform!r}"
    if spec.stochastic and not formats.by_name(spec.format).rounds_stochastically:
        return f"no stochastic rounding of {spec.format}"
    return None


def float_problem(dtype: torch.dtype, *more: torch.dtype) -> str | None:
    """Return why nothing is computed from or to ``dtype``; of ``more`` dtypes it is."""
    return None if dtype in (*FLOATS, *more) else f"no low precision from or to {dtype}"


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which ``dtype`` is computed: float32, or float64 of float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32
