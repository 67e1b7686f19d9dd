"""A pickle's opcodes read into plain values; nothing is imported and nothing of the file is called.

``pickletools.genops`` splits the bytes into opcodes. The few that data needs are carried out on a
stack of plain values, and the classes on the allow-list become :class:`Record` or, by a function of
the caller, tensors. Any other class or opcode is refused by its name.
"""

from __future__ import annotations

import io
import pickletools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from fp8core.errors import OperandError

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
    except (ValueError, OverflowError) as error:  # pickletools' errors for damaged bytes
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

    def top(self, kind: type | tuple[type, ...]) -> Any:
        """Return the value on top, which has to be of ``kind``."""
        if not self._stack or type(self._stack[-1]) not in (
            kind if isinstance(kind, tuple) else (kind,)
        ):
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
