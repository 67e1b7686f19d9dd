"""How descriptors print: the fields without a default, then those that differ from theirs."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

import torch

_LARGEST = {"e4m3": 448.0, "e5m2": 57344.0, "e2m1": 6.0}
"""The targets that are not printed. A table, so that printing does not load plug-ins."""


def text(desc: Any, *words: str) -> str:
    """Return ``Name(word, ..., flag, field=value)``; the words are the fields without a default,
    and the dtype.
    """
    return f"{type(desc).__name__}({', '.join([*words, *_unusual(desc, 'dtype')])})"


def spec_text(spec: Any) -> str:
    """Return the text of an OperandSpec: ``e4m3 block=(1,32) e8m0``."""
    words = [spec.format, f"block={spec.block}".replace(" ", "")]
    words += [spec.scale_format] if spec.scale_format != "float32" else []
    words += [f"target={spec.target}"] if spec.target != _LARGEST.get(spec.format) else []
    return " ".join([*words, *_unusual(spec, "scale_format")])


def dtype_text(dtype: torch.dtype) -> str:
    """Return ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def _unusual(desc: Any, *told: str) -> list[str]:
    """Return the fields that differ from their default, without the ``told`` ones; a flag as its
    name."""
    values = [(field.name, getattr(desc, field.name), field.default) for field in fields(desc)]
    return [
        name if value is True else f"{name}={value}"
        for name, value, default in values
        if name not in told and default is not MISSING and value != default
    ]
