from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fp8core.errors import OperandError
from fp8core.modules.state.extra_state import may_be_transformer_engine_s, read_extra_state
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
