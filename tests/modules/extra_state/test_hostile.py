"""Files that are made to harm: each ends in one error, and nothing in them is called."""

from __future__ import annotations

import contextlib
import io
import random
import struct
import zipfile
from functools import partial
from pathlib import Path

import pytest
import torch

from fp8core.errors import OperandError
from fp8core.modules.state.extra_state import read_extra_state
from fp8core.modules.state.opcodes import MAX_OPCODES
from tests.modules.extra_state.states import DelayedScaling, as_tensor, content, pickled
from tests.refusals import unrefused


def text(word: str) -> bytes:
    return b"X" + struct.pack("<I", len(word)) + word.encode()


def head(rest: bytes) -> bytes:
    return b"\x80\x04" + rest


RECIPE = b"ctransformer_engine.common.recipe\nDelayedScaling\n"
LOAD = b"ctorch.storage\n_load_from_bytes\n"
TENSOR = b"ctorch._utils\n_rebuild_tensor_v2\n"


def old_file(count: int, data: bytes = b"") -> bytes:
    """Return a storage whose pickle says that it has ``count`` elements."""
    number = b"\x8a\x08" + struct.pack("<q", count)
    identity = text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu") + number + b"N"
    pickles = (
        b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19",
        b"M\xe9\x03",
        b"}" + text("little_endian") + b"\x88s",
        b"(" + identity + b"tQ",
        b"](" + text("0") + b"e",
    )
    return b"".join(b"\x80\x02" + one + b"." for one in pickles) + struct.pack("<q", count) + data


def tensor(storage: bytes, shape: tuple[int, ...], strides: tuple[int, ...]) -> bytes:
    def numbers(values: tuple[int, ...]) -> bytes:
        return b"(" + b"".join(b"\x8a\x08" + struct.pack("<q", v) for v in values) + b"t"

    content = b"B" + struct.pack("<I", len(storage)) + storage
    arguments = b"(" + LOAD + b"(" + content + b"tRK\x00" + numbers(shape) + numbers(strides)
    return head(b"}" + text("scale_fwd") + TENSOR + arguments + b"\x89}tRs.")


def file_bytes(count: int) -> bytes:
    file = old_file(count, bytes(4 * count))
    return b"B" + struct.pack("<I", len(file)) + file


def stored(count: int) -> bytes:
    return LOAD + b"(" + file_bytes(count) + b"tR"


def copies(function: bytes, arguments: bytes, count: int) -> bytes:
    """Return a list of results of one function for one tuple of arguments, written once."""
    first = function + b"q\x01" + arguments + b"q\x02R"
    return head(b"}" + text("a") + b"](" + first + b"h\x01h\x02R" * count + b"es.")


ROW = b"K\x00K\x64\x85K\x01\x85\x89}t"

HOSTILE = {
    "a command": (head(b"cos\nsystem\n" + text("touch HARM") + b"\x85R."), "'os.system'"),
    "a command by stack": (head(text("os") + text("system") + b"\x93."), "'os.system'"),
    "eval": (head(b"cbuiltins\neval\n" + text("1") + b"\x85R."), "'builtins.eval'"),
    "torch.load": (head(b"ctorch\nload\n)R."), "'torch.load'"),
    "an attribute of a class": (
        head(b"cbuiltins\ngetattr\n" + RECIPE + text("__init__") + b"\x86R."),
        "getattr",
    ),
    "a dotted name": (
        head(b"ctorch._utils\n_rebuild_tensor_v2.__globals__\n."),
        "_rebuild_tensor_v2.__globals__",
    ),
    "a call of a record": (head(RECIPE + b")\x81)R."), "calls what is no class"),
    "attributes of a class": (head(RECIPE + b"}b."), "another kind"),
    "an instance": (head(b"(ios\nsystem\n."), "opcode INST"),
    "an extension": (head(b"\x82\x01."), "opcode EXT1"),
    "a persistent id": (head(text("x") + b"Q."), "storage that is not in it"),
    "a persistent line": (b"\x80\x04Pos.system\n.", "opcode PERSID"),
    "an out-of-band buffer": (b"\x80\x05\x97.", "opcode NEXT_BUFFER"),
    "a number with many digits": (head(b"I" + b"9" * 5000 + b"\n."), "damaged|opcode INT"),
    "too many opcodes": (head(b"N0" * MAX_OPCODES + b"N."), "opcode POP"),
    "a long list": (head(b"](" + b"N" * (MAX_OPCODES + 1) + b"e."), "more than"),
    "many marks": (head(b"(" * (MAX_OPCODES + 1) + b"."), "more than"),
    "a huge text": (head(b"\x8d" + struct.pack("<Q", 2**62) + b"a."), "damaged"),
    "huge bytes": (head(b"\x8e" + struct.pack("<Q", 2**63) + b"a."), "damaged"),
    "a huge number": (head(b"\x8b" + struct.pack("<i", 2**31 - 1) + b"a."), "damaged"),
    "a huge frame": (head(b"\x95" + struct.pack("<Q", 2**63) + b"]."), "a list"),
    "a number of the memo": (head(b"j\xff\xff\xff\xff."), "nothing is stored"),
    "an empty stack": (head(b"0."), "opcode POP|not there"),
    "an empty stack at the end": (head(b"."), "0 values|pop from empty|damaged"),
    "a mark at the end": (head(b"(."), "left at its end"),
    "two values": (head(b"NN."), "left at its end"),
    "no end": (head(b"N"), "damaged"),
    "a key that is a list": (head(b"}]Ns."), "a key that is a list"),
    "an odd dict": (head(b"}(Nu."), "without a value"),
    "a list that holds itself": (head(b"]\x94h\x00a."), "a list"),
    "doubled lists": (head(b"]\x94" + b"](h\x00h\x00e\x94" * 1000 + b"."), "left at its end"),
    "a huge tensor": (tensor(old_file(2**40), (2**40,), (1,)), "cut off"),
    "a tensor beyond its storage": (tensor(old_file(1, bytes(4)), (2,), (1,)), "storage of 4"),
    "a negative size": (tensor(old_file(1, bytes(4)), (-1,), (1,)), "the shape"),
    "strides beyond the storage": (
        tensor(old_file(4, bytes(16)), (2,), (9,)),
        "in a storage of 16 bytes",
    ),
    "more elements than the storage": (
        tensor(old_file(4, bytes(16)), (3, 3), (1, 1)),
        "in a storage of 16 bytes",
    ),
    "an expanded tensor": (tensor(old_file(1, bytes(4)), (1000,), (0,)), "strides"),
    "many dimensions": (tensor(old_file(1, bytes(4)), (1,) * 100, (1,) * 100), "the shape"),
    "a storage in a storage": (
        tensor(head(LOAD + b"C\x00\x85R."), (1,), (1,)),
        "_load_from_bytes",
    ),
    "a command in a storage": (tensor(head(b"cos\nsystem\n."), (1,), (1,)), "'os.system'"),
    "a size that torch cannot count": (
        tensor(old_file(1, bytes(4)), (2**47, 2**47, 0), (0, 0, 1)),
        "the shape|strides",
    ),
    "one storage as many tensors": (copies(TENSOR, b"(" + stored(100) + ROW, 50), "more than"),
    "one file as many storages": (copies(LOAD, b"(" + file_bytes(100) + b"t", 50), "more than"),
    "a deep tuple": (head(b")" + b"\x85" * 100_000 + b"."), "a tuple"),
}


def test_a_hostile_file_ends_in_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    table = {
        name: (partial(read_extra_state, as_tensor(data)), OperandError, words)
        for name, (data, words) in HOSTILE.items()
    }
    assert unrefused(table) == {}
    assert not list(tmp_path.iterdir())


def test_a_dict_that_holds_itself_is_no_state_and_harmless() -> None:
    data = head(b"}\x94(" + text("a") + b"h\x00u.")
    assert read_extra_state(as_tensor(data)) == {}


def zipped(names: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> io.BytesIO:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, data in names.items():
            archive.writestr(name, data)
    return file


ZIPS = {
    "a command": (zipped({"a/data.pkl": head(b"cos\nsystem\n.")}), "'os.system'"),
    "a bomb": (zipped({"a/data.pkl": bytes(10**7)}, zipfile.ZIP_DEFLATED), "compressed"),
    "no pickle": (zipped({"a/data/0": b"1"}), "without a data.pkl"),
    "two pickles": (zipped({"a/data.pkl": b"1", "b/data.pkl": b"1"}), "without a data.pkl"),
    "no zip": (io.BytesIO(b"PK\x03\x04" + bytes(30)), "damaged"),
    "another order of bytes": (
        zipped({"a/data.pkl": head(b"}."), "a/byteorder": b"big"}),
        "another order of bytes",
    ),
    "a path": (
        zipped(
            {
                "a/data.pkl": b"\x80\x02("
                + text("storage")
                + b"ctorch\nFloatStorage\n"
                + text("../../etc/passwd")
                + text("cpu")
                + b"K\x01tQ."
            }
        ),
        "damaged",
    ),
}


def test_a_hostile_zip_file_ends_in_one_error() -> None:
    table = {
        name: (partial(read_extra_state, file), OperandError, words)
        for name, (file, words) in ZIPS.items()
    }
    assert unrefused(table) == {}


@pytest.mark.parametrize("is_zip", [False, True])
def test_a_file_cut_anywhere_is_refused(is_zip: bool) -> None:
    data = pickled(content(DelayedScaling()))
    if is_zip:
        file = io.BytesIO()
        torch.save(content(), file)
        data = file.getvalue()
    for end in range(2, len(data), 1 if not is_zip else 17):
        value = io.BytesIO(data[:end]) if is_zip else as_tensor(data[:end])
        with pytest.raises(OperandError, match="refused"):
            read_extra_state(value)


@pytest.mark.parametrize("is_zip", [False, True])
def test_a_changed_byte_ends_in_a_state_or_in_the_error(is_zip: bool) -> None:
    """Nothing else than OperandError may come out of any file."""
    data = pickled(content(DelayedScaling()))
    if is_zip:
        file = io.BytesIO()
        torch.save(content(), file)
        data = file.getvalue()
    generator = random.Random(0)
    for _ in range(1500):
        changed = bytearray(data)
        changed[generator.randrange(2, len(data))] = generator.randrange(256)
        value = io.BytesIO(bytes(changed)) if is_zip else as_tensor(bytes(changed))
        try:
            state = read_extra_state(value)
        except OperandError:
            continue
        assert set(state) <= {*content(), "delayed_meta"}


def test_a_changed_byte_of_a_zip_file_s_directory_ends_in_the_error() -> None:
    file = io.BytesIO()
    torch.save(content(), file)
    data = file.getvalue()
    for at in range(data.index(b"PK\x06\x06"), len(data)):
        with contextlib.suppress(OperandError):
            read_extra_state(io.BytesIO(data[:at] + b"\xff" + data[at + 1 :]))
