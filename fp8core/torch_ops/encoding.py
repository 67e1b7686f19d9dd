"""A descriptor and its backend as a string, which a graph holds as an argument of its operators.

JSON and a list of known classes: nothing is evaluated, and another process reads the same value.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from typing import Any, NamedTuple, get_args

import torch

from fp8core import backend_api
from fp8core.backend_api import FusedDesc, OpDesc, OperandSpec
from fp8core.errors import RecipeError

# Descriptors of operations, those that extend one of them, and what they hold.
_KINDS = (*get_args(OpDesc), OperandSpec)
_FACE = vars(backend_api).values()
_CLASSES = {x.__name__: x for x in _FACE if isinstance(x, type) and issubclass(x, _KINDS)}


class Operation(NamedTuple):
    """A descriptor and the backend that runs it; ``transposes`` is that of the BackendSpec.

    ``slot``, of a cast by a delayed scale: the start, end and step of its entries in the scale
    ``[slots]`` and in row 0 of the amax history ``[length, slots]``, which it is called with; of a
    split one, those of both halves, one after the other.
    """

    backend: str
    desc: OpDesc
    transposes: bool = False
    slot: tuple[int, ...] | None = None


def encode(operation: Operation) -> str:
    """Return ``operation`` as text; :func:`decode` reads it.

    >>> from fp8core.backend_api import ScaleUpdateDesc
    >>> encode(Operation("reference", ScaleUpdateDesc("max")))
    '["reference",{"ScaleUpdateDesc":{"algorithm":"max","prepared":false}},false]'
    """
    fields = operation[:-1] if operation.slot is None else operation
    return json.dumps(_plain(tuple(fields)), separators=(",", ":"))


@functools.lru_cache(maxsize=4096)
def decode(text: str) -> Operation:
    """Return the operation that :func:`encode` wrote as ``text``.

    Raises:
        RecipeError: ``text`` is something else, or of a version that knew other descriptors.

    >>> decode('["reference",{"ScaleUpdateDesc":{"algorithm":"max"}},false]').desc
    ScaleUpdateDesc(algorithm='max', prepared=False)
    """
    try:
        backend, desc, transposes, *slot = _value(json.loads(text))
        return Operation(backend, desc, transposes, *slot)
    except (ValueError, TypeError, KeyError) as error:
        raise RecipeError(f"{text!r} is no operation that this fp8core knows: {error}") from None


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        fields = {field.name: _plain(getattr(value, field.name)) for field in _fields(value)}
        return {type(value).__name__: fields}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


def _fields(value: Any) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(value)


def _value(plain: Any) -> Any:
    if isinstance(plain, list):
        return tuple(_value(item) for item in plain)
    if not isinstance(plain, dict):
        return plain
    ((name, content),) = plain.items()
    if name == "dtype":
        dtype = getattr(torch, content)
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"{content} is no dtype")
        return dtype
    fields = {field: _value(item) for field, item in content.items()}
    if name == FusedDesc.__name__ and "sums" in fields:  # until 6.0 of the backend API
        fields["quantize"] = dataclasses.replace(fields["quantize"], sums=fields.pop("sums"))
    return _CLASSES[name](**fields)
