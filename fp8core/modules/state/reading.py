"""The reader of ``_extra_state``: a pickle's opcodes read into plain values and tensors; nothing is
imported, and nothing of the file is called.

``pickletools.genops`` splits the bytes into opcodes. The few that data needs are carried out on a
stack of plain values, and the classes on the allow-list become :class:`Record` or tensors. Any
other class or opcode is refused by its name. Of torch's three ways to write a storage:

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
import pickletools
import reprlib
import struct
import zipfile
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from fp8core.errors import OperandError
from fp8core.recipe.base import Recipe
from fp8core.recipe.custom import CustomRecipe
from fp8core.recipe.named import NAMED

MAX_OPCODES = 1 << 17
"""Opcodes that one state may have; a layer's has a few hundred."""

# How many times the bytes of a file its storages and tensors may have: each is copied from the file
# inside the file, as a storage, and as a tensor, which may be a part that is read twice.
_COPIES = 8


class ClassName(NamedTuple):
    """A class or function that a pickle names."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class Record:
    """An object of a class on the allow-list: its name, the arguments, and the attributes."""

    __slots__ = ("args", "fields", "kind")

    def __init__(self, kind: ClassName, args: tuple[Any, ...]) -> None:
        self.kind = kind
        self.args = args
        self.fields: dict[str, Any] = {}


Rebuild = Callable[[tuple[Any, ...]], Any]
"""Returns the value that a call of an allowed function stands for."""


class Budget:
    """How many opcodes and bytes may still be read, over a file and the files inside it.

    A pickle of a few bytes can name one storage many times. Tensors of a state do not share
    storages, so that their bytes together are about those of the file.
    """

    def __init__(self, size: int) -> None:
        self._left = MAX_OPCODES
        self._bytes = self._most = _COPIES * size

    def spend(self) -> None:
        """Count one opcode.

        Raises:
            OperandError: there were too many.
        """
        self._left -= 1
        if self._left < 0:
            raise OperandError(f"it has more than {MAX_OPCODES} opcodes")

    def copy(self, size: int) -> None:
        """Count ``size`` bytes that are copied.

        Raises:
            OperandError: there were too many.
        """
        self._bytes -= size
        if self._bytes < 0:
            raise OperandError(f"its tensors and storages have more than {self._most} bytes")


def read_pickle(
    stream: io.BytesIO,
    classes: Mapping[ClassName, Rebuild | None],
    budget: Budget,
    persistent: Rebuild | None = None,
) -> Any:
    """Return the value of the pickle that begins at ``stream``, which is left behind its end.

    Args:
        stream: the bytes.
        classes: the classes that the pickle may name. A call of a class returns the result of its
            function; with None, a :class:`Record`.
        budget: counts the opcodes.
        persistent: resolves the persistent ids that torch writes for storages; None refuses them.

    Raises:
        OperandError: the pickle is damaged, too long, or holds a class or an opcode that is not
            allowed; the message is the end of a sentence about the state.
    """
    machine = _Machine(classes, persistent)
    try:
        for opcode, argument, _ in pickletools.genops(stream):
            budget.spend()
            action = _ACTIONS.get(opcode.name)
            if action is None:
                raise OperandError(f"it has the opcode {opcode.name}, which plain data does not")
            action(machine, argument)
    except OperandError:
        raise
    # pickletools' errors for damaged bytes, and a warning of Python 3.12 that a filter raises
    except (ValueError, OverflowError, DeprecationWarning) as error:
        raise OperandError(f"it is damaged: {error}") from None
    return machine.result()


_MARK = object()


class _Machine:
    """The stack and the memo of one pickle."""

    def __init__(
        self, classes: Mapping[ClassName, Rebuild | None], persistent: Rebuild | None
    ) -> None:
        self._classes = classes
        self._persistent = persistent
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def result(self) -> Any:
        if len(self._stack) != 1 or self._stack[0] is _MARK:
            raise OperandError(f"it is damaged: {len(self._stack)} values are left at its end")
        return self._stack[0]

    def push(self, value: Any) -> None:
        self._stack.append(value)

    def pop(self) -> Any:
        if not self._stack or self._stack[-1] is _MARK:
            raise OperandError("it is damaged: an opcode takes a value that is not there")
        return self._stack.pop()

    def top(self, kind: type) -> Any:
        """Return the value on top, which has to be of ``kind``."""
        if not self._stack or type(self._stack[-1]) is not kind:
            raise OperandError("it is damaged: an opcode changes a value of another kind")
        return self._stack[-1]

    def pop_mark(self) -> list[Any]:
        """Return the values above the last mark, and forget them and it."""
        for at in range(len(self._stack) - 1, -1, -1):
            if self._stack[at] is _MARK:
                values = self._stack[at + 1 :]
                del self._stack[at:]
                return values
        raise OperandError("it is damaged: an opcode takes values up to a mark that is not there")

    def pop_pair(self) -> list[Any]:
        return [self.pop(), self.pop()][::-1]

    def pop_tuple(self, count: int) -> None:
        self.push(tuple([self.pop() for _ in range(count)][::-1]))

    def remember(self, key: int | None) -> None:
        value = self.pop()
        self.push(value)
        self._memo[len(self._memo) if key is None else key] = value

    def recall(self, key: int) -> None:
        if key not in self._memo:
            raise OperandError(f"it is damaged: nothing is stored as number {key}")
        self.push(self._memo[key])

    def name_class(self, module: Any, name: Any) -> None:
        if type(module) is not str or type(name) is not str:
            raise OperandError("it is damaged: a class without a name")
        class_name = ClassName(module, name)
        if class_name not in self._classes:
            raise OperandError(
                f"it names {str(class_name)[:100]!r}, which no state of Transformer Engine needs"
            )
        self.push(class_name)

    def call(self) -> None:
        arguments, function = self.pop(), self.pop()
        if type(function) is not ClassName or type(arguments) is not tuple:
            raise OperandError("it is damaged: it calls what is no class")
        rebuild = self._classes[function]
        self.push(Record(function, arguments) if rebuild is None else rebuild(arguments))

    def build(self) -> None:
        state = self.pop()
        record = self.top(Record)
        parts = state if type(state) is tuple and len(state) == 2 else (state,)
        for part in parts:
            if part is None:
                continue
            if type(part) is not dict or not all(type(key) is str for key in part):
                raise OperandError(f"it is damaged: attributes of {record.kind} without names")
            record.fields.update(part)

    def store(self, items: list[Any]) -> None:
        """Put ``items``, keys and values in turn, into the dict on top."""
        if len(items) % 2:
            raise OperandError("it is damaged: a dict has a key without a value")
        target = self.top(dict)
        for key, value in zip(items[::2], items[1::2], strict=True):
            if type(key) not in (str, int, bool):
                raise OperandError(f"it has a dict with a key that is a {type(key).__name__}")
            target[key] = value

    def resolve(self) -> None:
        identity = self.pop()
        if self._persistent is None or type(identity) is not tuple:
            raise OperandError("it refers to a storage that is not in it")
        self.push(self._persistent(identity))

    def append(self, values: list[Any]) -> None:
        self.top(list).extend(values)


def _constant(value: Any) -> Callable[[_Machine, Any], None]:
    return lambda machine, _: machine.push(value)


_ACTIONS: dict[str, Callable[[_Machine, Any], None]] = {
    # These concern the reader of the bytes alone.
    **dict.fromkeys(("PROTO", "FRAME", "STOP"), lambda machine, _: None),
    **dict.fromkeys(
        (
            *("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT", "BINUNICODE"),
            *("SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
        ),
        lambda machine, argument: machine.push(argument),
    ),
    "NONE": _constant(None),
    "NEWTRUE": _constant(True),
    "NEWFALSE": _constant(False),
    "MARK": _constant(_MARK),
    "EMPTY_TUPLE": _constant(()),
    "EMPTY_LIST": lambda machine, _: machine.push([]),
    "EMPTY_DICT": lambda machine, _: machine.push({}),
    "TUPLE": lambda machine, _: machine.push(tuple(machine.pop_mark())),
    "TUPLE1": lambda machine, _: machine.pop_tuple(1),
    "TUPLE2": lambda machine, _: machine.pop_tuple(2),
    "TUPLE3": lambda machine, _: machine.pop_tuple(3),
    **dict.fromkeys(
        ("BINPUT", "LONG_BINPUT", "MEMOIZE"), lambda machine, key: machine.remember(key)
    ),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), lambda machine, key: machine.recall(key)),
    # pickletools writes the module and the name with a blank between them.
    "GLOBAL": lambda machine, text: machine.name_class(*text.split(" ", 1)),
    "STACK_GLOBAL": lambda machine, _: machine.name_class(*machine.pop_pair()),
    **dict.fromkeys(("REDUCE", "NEWOBJ"), lambda machine, _: machine.call()),
    "BUILD": lambda machine, _: machine.build(),
    "SETITEM": lambda machine, _: machine.store(machine.pop_pair()),
    "SETITEMS": lambda machine, _: machine.store(machine.pop_mark()),
    "APPEND": lambda machine, _: machine.append([machine.pop()]),
    "APPENDS": lambda machine, _: machine.append(machine.pop_mark()),
    "BINPERSID": lambda machine, _: machine.resolve(),
}


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
        OperandError: see :func:`~fp8core.modules.state.reading.read_pickle`.
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
        **_STORAGE_CLASSES,
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
