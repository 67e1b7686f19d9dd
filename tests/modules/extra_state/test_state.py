"""Files that are made to harm: each ends in one error, and nothing in them is called."""

from __future__ import annotations

import contextlib
import io
import json
import random
import struct
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fp8core.errors import OperandError
from fp8core.modules.state.extra_state import may_be_transformer_engine_s, read_extra_state
from fp8core.modules.state.reading import MAX_OPCODES
from fp8core.recipe.plan import AttentionPlan
from tests.device import DEVICE
from tests.modules.extra_state.states import (
    NAMES,
    DelayedScaling,
    Format,
    MXFP8BlockScaling,
    UserRecipe,
    as_tensor,
    buffers,
    content,
    pickled,
)
from tests.refusals import unrefused

GOLDEN = Path(__file__).parents[2] / "golden" / "extra_state_seed0.npz"


def meta_of(state: dict[str, torch.Tensor]) -> Any:
    return json.loads(bytes(state["delayed_meta"].tolist()))


def assert_holds(state: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name in NAMES:
        assert torch.equal(state[name], expected[name].cpu())


@pytest.mark.parametrize(
    ("name", "formats"),
    [
        ("linear", ["e4m3", "e4m3", None, "e5m2", None]),
        ("mlp_e4m3", ["e4m3", "e4m3", None, "e4m3", None]),
        ("operation", ["e4m3", "e4m3", None, "e5m2", None]),
    ],
)
def test_transformer_engine_s_own_states_are_read(name: str, formats: list[Any]) -> None:
    with np.load(GOLDEN) as golden:
        state = read_extra_state(torch.from_numpy(golden[f"{name}/pickle"]))
        for key in NAMES:
            expected = torch.from_numpy(golden[f"{name}/{key}"])
            assert torch.equal(state[key][..., : expected.shape[-1]], expected.cpu())
    assert meta_of(state)["formats"] == formats


@pytest.mark.parametrize(("protocol", "gemms"), [(3, 1), (4, 2), (5, 8)])
def test_a_state_has_the_numbers_that_were_pickled(protocol: int, gemms: int) -> None:
    expected = buffers(gemms)
    data = pickled(content(DelayedScaling(), **expected), protocol)
    assert_holds(read_extra_state(as_tensor(data)), expected)


@pytest.mark.parametrize(
    ("member", "forward", "backward"),
    [(Format.HYBRID, "e4m3", "e5m2"), (Format.E4M3, "e4m3", "e4m3")],
)
def test_the_metadata_has_the_formats_of_the_recipe(
    member: Format, forward: str, backward: str
) -> None:
    data = pickled(content(DelayedScaling(fp8_format=member)))
    formats = [forward, forward, None, backward, None]
    assert meta_of(read_extra_state(as_tensor(data))) == {"formats": formats, "history_len": 4}


class ByName:
    """Pickles as Python's pickle_by_enum_name has a member of an enumeration pickled."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return getattr, (Format, "E4M3")


def test_an_enumeration_written_by_name_is_read() -> None:
    state = read_extra_state(as_tensor(pickled(content(DelayedScaling(fp8_format=ByName())))))
    assert meta_of(state)["formats"] == ["e4m3", "e4m3", None, "e4m3", None]


@pytest.mark.parametrize("is_zip", [False, True])
def test_a_state_of_before_version_2_has_no_recipe(is_zip: bool) -> None:
    expected = buffers()
    old = {**content(**expected), "scale_inv_fwd": torch.ones(3)}
    value: Any = as_tensor(pickled(old))
    if is_zip:
        value = io.BytesIO()
        torch.save(old, value)
    state = read_extra_state(value)
    assert_holds(state, expected)
    assert meta_of(state)["formats"] == ["e4m3", "e4m3", None, "e5m2", None]


def test_an_old_state_of_e4m3_is_told_by_its_maxima() -> None:
    old = content()
    old["extra_fp8_variables"]["fp8_max_bwd"] = 448.0
    assert meta_of(read_extra_state(as_tensor(pickled(old))))["formats"][3] == "e4m3"


@pytest.mark.parametrize("value", [None, {}, {"recipe": MXFP8BlockScaling()}])
def test_a_recipe_without_state_has_none(value: Any) -> None:
    assert read_extra_state(as_tensor(pickled(value))) == {}


def test_an_operation_s_state_gets_the_unused_slots() -> None:
    forward = {"scale_fwd": torch.tensor([2.0, 3.0]), "amax_history_fwd": torch.ones(4, 2)}
    backward = {"scale_bwd": torch.tensor([5.0]), "amax_history_bwd": torch.ones(4, 1)}
    parts = {"forward": forward, "backward": backward}
    value = {name: {"recipe": DelayedScaling(), **part} for name, part in parts.items()}
    state = read_extra_state(as_tensor(pickled(value)))
    assert state["scale_fwd"].tolist() == [2.0, 3.0, 1.0]
    assert state["amax_history_fwd"].tolist() == [[1.0, 1.0, 0.0]] * 4
    assert state["scale_bwd"].tolist() == [5.0, 1.0]


def test_an_infinite_amax_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    tensors = buffers()
    tensors["amax_history_fwd"][1, 0] = torch.inf
    state = read_extra_state(as_tensor(pickled(content(DelayedScaling(), **tensors))))
    assert state["amax_history_fwd"][1, 0] == 0
    assert any("infinite amaxes" in line for line in caplog.messages)


def test_a_tensor_that_is_a_view_of_a_larger_one_is_read() -> None:
    tensors = buffers()
    expected = tensors["scale_fwd"]
    tensors["scale_fwd"] = torch.cat([torch.zeros(5), expected])[5:]
    state = read_extra_state(as_tensor(pickled(content(DelayedScaling(), **tensors))))
    assert torch.equal(state["scale_fwd"], expected.cpu())


def test_a_tensor_with_strides_is_read() -> None:
    """As Megatron writes the state of one of several experts."""
    tensors = buffers()
    expected = tensors["amax_history_fwd"]
    wide = torch.zeros(4, 3, 2)
    wide[:, :, 1] = expected
    tensors["amax_history_fwd"] = wide[:, :, 1]
    state = read_extra_state(as_tensor(pickled(content(DelayedScaling(), **tensors))))
    assert torch.equal(state["amax_history_fwd"], expected.cpu())


REFUSED = {
    "a user's recipe": (content(UserRecipe()), "'their.code.UserRecipe'"),
    "a function as algorithm": (content(DelayedScaling(amax_compute_algo=print)), "print"),
    "a missing tensor": ({"recipe": DelayedScaling()}, "lacks scale_fwd"),
    "no dict": ([1, 2], "a list"),
    "four bits": (content(DelayedScaling(fp8_format=Format.E2M1)), "none of E4M3"),
    "float64": (
        content(DelayedScaling(), **{**buffers(), "scale_fwd": torch.ones(3).double()}),
        "scale_fwd is torch.float64",
    ),
}
OLD = content()
OLD["extra_fp8_variables"] = {**OLD["extra_fp8_variables"], "fp8_max_fwd": 2**100_000}
REFUSED["a maximum beyond float64"] = (OLD, "none of E4M3")
OF_ATTENTION = {
    "recipes that are a number": (
        {**content(DelayedScaling(fp8_dpa=True)), "extra_fp8_variables": {"local_recipes": 3}},
        "local_recipes are a int",
    ),
    "a flag that is a tensor": (
        content(DelayedScaling(fp8_mha=torch.ones(2))),
        "fp8_dpa or fp8_mha is a tensor",
    ),
}


def test_another_state_is_refused_by_name() -> None:
    for value, words in REFUSED.values():
        with pytest.raises(OperandError, match=words):
            read_extra_state(as_tensor(pickled(value)))
    for value, words in OF_ATTENTION.values():
        with pytest.raises(OperandError, match=words):
            read_extra_state(as_tensor(pickled(value)), AttentionPlan)


@pytest.mark.parametrize("value", ["text", None, {"of": "another library"}, 3.0])
def test_other_values_than_bytes_and_tensors_are_another_library_s(value: Any) -> None:
    assert not may_be_transformer_engine_s(value)


def freed() -> torch.Tensor:
    value = torch.zeros(7, dtype=torch.uint8)
    value.untyped_storage().resize_(0)
    return value


def closed() -> io.BytesIO:
    file = io.BytesIO(b"PK")
    file.close()
    return file


def test_bytes_that_are_no_pickle_are_refused_by_what_they_are() -> None:
    for value, words in (
        (freed(), "has no memory for its elements"),
        (closed(), "is closed"),
        (torch.zeros(7, dtype=torch.uint8).to_sparse(), "is torch.sparse_coo"),
        (torch.zeros(7, dtype=torch.uint8), "begins with the bytes"),
        (io.BytesIO(b"te"), "begins with the bytes b'te'"),
        (b"te", "begins with the bytes b'te'"),
        (torch.zeros(1, 8, dtype=torch.uint8), rf"torch.uint8 \[1, 8\] on {DEVICE.type}"),
        (torch.zeros(8, dtype=torch.int8), rf"torch.int8 \[8\] on {DEVICE.type}"),
        (torch.zeros(8, dtype=torch.uint8, device="meta"), r"torch.uint8 \[8\] on meta"),
    ):
        with pytest.raises(OperandError, match=words):
            read_extra_state(value)


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
