"""The tensors of a state: torch's three ways to write a storage, rebuilt from plain values.

=============================  =====================================================
written by                     holds
=============================  =====================================================
``pickle.dumps(tensor)``       the storage as bytes of an old ``torch.save`` file:
                               four pickles, then each storage's size and its elements
``torch.save`` into a buffer   a zip file: ``data.pkl``, and a file for each storage
=============================  =====================================================
"""

from __future__ import annotations

import io
import math
import reprlib
import struct
import zipfile
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from fp8core.errors import OperandError
from fp8core.modules.state.opcodes import Budget, ClassName, Rebuild, Record, read_pickle
from fp8core.recipe.base import Recipe
from fp8core.recipe.custom import CustomRecipe
from fp8core.recipe.named import NAMED

MAGIC = 0x1950A86A20F9469CFC6C
"""The number at the start of an old ``torch.save`` file. Source: torch/serialization.py."""

PROTOCOL = 1001
"""The version behind it. Source: torch/serialization.py."""

_STORAGES = {
    "FloatStorage": torch.float32,
    "DoubleStorage": torch.float64,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ByteStorage": torch.uint8,
}

RECIPES = "transformer_engine.common.recipe"
"""The module of Transformer Engine's recipes."""

_KINDS: tuple[type[Recipe], ...] = (*NAMED.values(), CustomRecipe)
RECIPE_CLASSES = {kind.__name__ for kind in _KINDS if kind.family}
"""The recipes of Transformer Engine."""

_CLASSES_OF_RECIPES = (
    *RECIPE_CLASSES,
    *("Format", "_FormatHelper", "MMParams", "QParams", "_OverrideLinearPrecision"),
)

_LONGEST = 2**64 - 1

# The errors of zipfile for files that are damaged, encrypted or of a later version.
_ZIP_ERRORS = (
    *(zipfile.BadZipFile, EOFError, NotImplementedError, OSError, OverflowError, RuntimeError),
    *(ValueError, struct.error),
)


class _Storage(NamedTuple):
    """The elements of a tensor, as bytes."""

    dtype: torch.dtype
    data: bytes


class _Reference(NamedTuple):
    """A storage that a pickle refers to: its dtype, its name, and its number of elements."""

    dtype: torch.dtype
    key: str
    elements: int


def read_values(data: bytes) -> Any:
    """Return the plain values of a state, ``data``: a pickle, or a zip file of ``torch.save``.

    Raises:
        OperandError: see :func:`~fp8core.modules.state.opcodes.read_pickle`.
    """
    budget = Budget(len(data))
    if data.startswith(b"PK"):
        return _read_zip(data, budget)
    return read_pickle(io.BytesIO(data), _classes(budget), budget)


def _classes(budget: Budget) -> Mapping[ClassName, Rebuild | None]:
    """Return the classes that a state may name: torch's rebuilders, and the recipes' classes as
    records."""

    def load_from_bytes(arguments: tuple[Any, ...]) -> _Storage:
        if len(arguments) != 1 or type(arguments[0]) is not bytes:
            raise OperandError("it is damaged: a storage without bytes")
        budget.copy(len(arguments[0]))
        return _read_old_file(io.BytesIO(arguments[0]), budget)

    def tensor(arguments: tuple[Any, ...]) -> torch.Tensor:
        value = _tensor(arguments)
        budget.copy(value.nbytes)
        return value

    return {
        ClassName("torch._utils", "_rebuild_tensor_v2"): tensor,
        ClassName("torch.storage", "_load_from_bytes"): load_from_bytes,
        ClassName("collections", "OrderedDict"): _empty_dict,
        ClassName("builtins", "getattr"): _member,
        **{ClassName("torch", name): None for name in _STORAGES},
        **{ClassName(RECIPES, name): None for name in _CLASSES_OF_RECIPES},
    }


_STORAGE_CLASSES: dict[ClassName, Rebuild | None] = {
    ClassName("torch", name): None for name in _STORAGES
}


def _empty_dict(arguments: tuple[Any, ...]) -> dict[Any, Any]:
    if arguments:
        raise OperandError("it is damaged: an OrderedDict with arguments")
    return {}


def _member(arguments: tuple[Any, ...]) -> Record:
    """Return a member of the enumeration ``Format`` that is written by its name."""
    is_member = len(arguments) == 2 and type(arguments[1]) is str
    if not is_member or arguments[0] != ClassName(RECIPES, "Format"):
        raise OperandError("it names 'builtins.getattr' of something else than Format")
    return Record(ClassName(RECIPES, "Format"), (arguments[1],))


def _tensor(arguments: tuple[Any, ...]) -> torch.Tensor:
    """Return a contiguous copy of the tensor of a storage, an offset, a shape and strides; it has
    at most as many elements as the storage."""
    if len(arguments) < 4 or not isinstance(arguments[0], _Storage):
        raise OperandError("it is damaged: a tensor without a storage")
    storage, offset, shape, strides = arguments[:4]
    if not _are_sizes((offset,)) or not _are_sizes(shape):
        raise OperandError(f"it is damaged: a tensor of the shape {reprlib.repr(shape)}")
    count = math.prod(shape)
    width = storage.dtype.itemsize
    num_stored = len(storage.data) // width
    is_strided = _are_sizes(strides) and len(strides) == len(shape)
    if not is_strided or any(
        size > 1 and not stride for size, stride in zip(shape, strides, strict=True)
    ):
        raise OperandError(f"it holds a tensor {list(shape)} with strides {reprlib.repr(strides)}")
    last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    if count and (last >= num_stored or count > num_stored):
        raise OperandError(
            f"it is damaged: a tensor {list(shape)} in a storage of {len(storage.data)} bytes"
        )
    if math.prod(size or 1 for size in shape) >= 2**48:
        raise OperandError(f"it is damaged: a tensor of the shape {reprlib.repr(shape)}")
    if not count:
        return torch.empty(shape, dtype=storage.dtype, device="cpu")
    whole = torch.frombuffer(bytearray(storage.data[: num_stored * width]), dtype=storage.dtype)
    return whole.as_strided(shape, strides, offset).clone(memory_format=torch.contiguous_format)


def _are_sizes(values: Any) -> bool:
    """Say whether ``values`` are at most 8 numbers that fit a tensor."""
    return (
        type(values) is tuple
        and len(values) <= 8
        and all(type(value) is int and 0 <= value < 2**48 for value in values)
    )


def _reference(identity: tuple[Any, ...]) -> _Reference:
    """Return the storage that ``("storage", class, key, device, count, ...)`` refers to."""
    if len(identity) < 5 or identity[0] != "storage" or type(identity[1]) is not ClassName:
        raise OperandError("it refers to a storage in a way that torch does not")
    dtype, key, count = _STORAGES.get(identity[1].name), identity[2], identity[4]
    if dtype is None or type(key) is not str or type(count) is not int or count < 0:
        raise OperandError("it refers to a storage in a way that torch does not")
    return _Reference(dtype, key, count)


def _read_old_file(stream: io.BytesIO, budget: Budget) -> _Storage:
    """Return the one storage of a file that ``torch.save`` wrote before it wrote zip files."""

    def read(persistent: Rebuild | None = None) -> Any:
        return read_pickle(stream, _STORAGE_CLASSES, budget, persistent)

    if (read(), read()) != (MAGIC, PROTOCOL):
        raise OperandError("it is damaged: a storage that is no file of torch.save")
    system = read()
    if type(system) is not dict or system.get("little_endian") is not True:
        raise OperandError("it was written by a machine with another order of bytes")
    reference = read(_reference)
    keys = read()
    if not isinstance(reference, _Reference) or keys != [reference.key]:
        raise OperandError("it is damaged: a storage that is not the only one of its file")
    header = stream.read(8)
    size = reference.elements * reference.dtype.itemsize
    data = stream.read(size) if size <= stream.getbuffer().nbytes else b""
    is_whole = header == struct.pack("<Q", reference.elements & _LONGEST) and len(data) == size
    if not is_whole:
        raise OperandError(f"it is damaged: a storage of {reference.elements} elements is cut off")
    return _Storage(reference.dtype, data)


def _read_zip(data: bytes, budget: Budget) -> Any:
    """Return the values of a zip file of ``torch.save``."""
    try:
        archive = zipfile.ZipFile(io.BytesIO(data))
    except _ZIP_ERRORS as error:
        raise OperandError(f"it is damaged: {error}") from None
    names = [name for name in archive.namelist() if name.endswith("/data.pkl")]
    if len(names) != 1:
        raise OperandError("it is a zip file without a data.pkl")
    root = names[0].removesuffix("data.pkl")

    def content(name: str) -> bytes:
        try:
            info = archive.getinfo(name)
            is_plain = info.compress_type == zipfile.ZIP_STORED and info.file_size <= len(data)
            if is_plain and not info.flag_bits & 1:
                return archive.read(info)
        except (KeyError, *_ZIP_ERRORS) as error:
            raise OperandError(f"it is damaged: {error}") from None
        raise OperandError(f"it is a zip file with a compressed or encrypted {name!r}")

    def storage(identity: tuple[Any, ...]) -> _Storage:
        dtype, key, count = _reference(identity)
        raw = content(f"{root}data/{key}")
        budget.copy(len(raw))
        if len(raw) < count * dtype.itemsize:
            raise OperandError(f"it is damaged: a storage of {count} elements is cut off")
        return _Storage(dtype, raw)

    if f"{root}byteorder" in archive.namelist() and content(f"{root}byteorder") != b"little":
        raise OperandError("it was written by a machine with another order of bytes")
    return read_pickle(io.BytesIO(content(names[0])), _classes(budget), budget, storage)
