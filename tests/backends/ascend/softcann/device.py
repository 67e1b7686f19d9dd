"""The device: turns an operator's descriptors into CPU tensors over the same memory, keeps a record
of the call, and runs the operator's formula."""

from __future__ import annotations

import ctypes
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

__all__ = ["CALLS", "Call", "Described", "formula", "install"]

MAX_DIMS, MAX_ARGUMENTS = 12, 48  # as in operators.c
FAILED = 561103


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("num_dims", ctypes.c_int64),
        ("dims", ctypes.c_int64 * MAX_DIMS),
        ("strides", ctypes.c_int64 * MAX_DIMS),
        ("offset", ctypes.c_int64),
        ("dtype", ctypes.c_int64),
        ("format", ctypes.c_int64),
        ("data", ctypes.c_void_p),
    )


class _Array(ctypes.Structure):
    _fields_ = (("size", ctypes.c_uint64), ("items", ctypes.c_void_p))


class _Scalar(ctypes.Structure):
    _fields_ = (("dtype", ctypes.c_int64), ("bytes", ctypes.c_char * 16))


class _Argument(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_int64),
        ("integer", ctypes.c_int64),
        ("real", ctypes.c_double),
        ("object", ctypes.c_void_p),
    )


class _Call(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("count", ctypes.c_int64),
        ("arguments", _Argument * MAX_ARGUMENTS),
    )


DTYPES = {
    0: torch.float32,
    1: torch.float16,
    2: torch.int8,
    3: torch.int32,
    4: torch.uint8,
    6: torch.int16,
    9: torch.int64,
    11: torch.float64,
    12: torch.bool,
    27: torch.bfloat16,
    34: torch.uint8,
    35: torch.float8_e5m2,
    36: torch.float8_e4m3fn,
    37: torch.uint8,
}
"""The torch dtype that holds each of CANN's dtypes."""
NAMES = {34: "hifloat8", 37: "float8_e8m0"}
"""CANN's dtypes that torch holds as bytes."""


class Described(NamedTuple):
    """A tensor as an operator's descriptor gives it: CPU ``values`` over its memory, and the name
    of its dtype in CANN."""

    values: torch.Tensor
    dtype: str

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes."""
        return tuple(self.values.shape)

    @property
    def is_transposed(self) -> bool:
        """Whether the last two dimensions lie in memory the other way round."""
        *_, rows, cols = self.values.stride()
        return rows == 1 and cols != 1


class Call(NamedTuple):
    """An operator that ran, with its arguments."""

    name: str
    arguments: tuple[Any, ...]


CALLS: list[Call] = []
"""The operators that ran, oldest first. The values of their tensors may have changed since."""

_FORMULAS: dict[str, Callable[..., None]] = {}


def formula(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a function as what the operators compute."""

    def add(function: Callable[..., None]) -> Callable[..., None]:
        _FORMULAS.update(dict.fromkeys(names, function))
        return function

    return add


def install() -> None:
    """Have the operators of ``libopapi.so``, which torch_npu loads, call back here."""
    library = ctypes.CDLL("libopapi.so", mode=ctypes.RTLD_GLOBAL)
    library.softcann_set_callback(_run)


def _described(address: int) -> Described:
    tensor = _Tensor.from_address(address)
    dims = [tensor.dims[i] for i in range(tensor.num_dims)]
    strides = [tensor.strides[i] for i in range(tensor.num_dims)]
    dtype = DTYPES[tensor.dtype]
    name = NAMES.get(tensor.dtype, str(dtype).removeprefix("torch."))
    if 0 in dims:
        return Described(torch.empty(dims, dtype=dtype), name)
    steps = zip(dims, strides, strict=True)
    length = tensor.offset + sum((size - 1) * stride for size, stride in steps) + 1
    memory = (ctypes.c_char * (length * dtype.itemsize)).from_address(tensor.data)
    flat = torch.frombuffer(memory, dtype=dtype, count=length)
    return Described(flat.as_strided(dims, strides, tensor.offset), name)


def _scalar(address: int) -> Any:
    scalar = _Scalar.from_address(address)
    raw = bytearray(ctypes.string_at(address + _Scalar.bytes.offset, 16))
    return torch.frombuffer(raw, dtype=DTYPES[scalar.dtype], count=1)[0].item()


def _array(address: int, item: Any) -> list[Any]:
    array = _Array.from_address(address)
    return list((item * array.size).from_address(array.items)) if array.size else []


def _value(argument: _Argument) -> Any:
    kind = chr(argument.kind)
    if kind in "iIb":
        return argument.integer
    if kind in "fd":
        return argument.real
    if not argument.object:
        return None
    match kind:
        case "t":
            return _described(argument.object)
        case "L":
            return [_described(one) for one in _array(argument.object, ctypes.c_void_p)]
        case "A":
            return _array(argument.object, ctypes.c_int64)
        case "B":
            return [bool(one) for one in _array(argument.object, ctypes.c_uint8)]
        case "S":
            return _scalar(argument.object)
        case "s":
            return ctypes.string_at(argument.object).decode()
    raise AssertionError(f"no argument is of kind {kind!r}")


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(_Call))
def _run(address: Any) -> int:
    """Run one operator; an error is printed, and becomes the operator's status."""
    call = address.contents
    name = call.name.decode()
    try:
        arguments = tuple(_value(call.arguments[at]) for at in range(call.count))
        CALLS.append(Call(name, arguments))
        with torch.no_grad():
            _FORMULAS[name](*arguments)
    except BaseException:  # noqa: BLE001  # C code calls this, which knows no exception
        print(f"software CANN: {name} failed")
        traceback.print_exc()
        return FAILED
    return 0
