"""Delayed scaling of grouped experts moves expert by expert, as Megatron's checkpoints hold it."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fp8core import autocast
from fp8core import transformer_engine as alias
from fp8core.errors import OperandError
from fp8core.integrations.transformer_engine import finder
from fp8core.interchange.checkpoints.transformer_engine import merge_states, split_state
from fp8core.modules.state.extra_state import read_expert_state
from fp8core.recipe import DelayedScaling, Format
from fp8core.tensors.delayed_state import BUFFERS, META, meta_text
from tests.modules.extra_state.states import DelayedScaling as TheirScaling
from tests.modules.extra_state.states import as_tensor, buffers, content, pickled, unpickled

EXPERTS = 3


@pytest.fixture
def te() -> Iterator[Any]:
    finder.put(alias.VERSION)
    yield importlib.import_module("transformer_engine.pytorch")
    alias.uninstall()


def grouped(te: Any) -> Any:
    """A subclass with Megatron's method, which would unpickle the state of Transformer Engine's."""

    class Grouped(te.GroupedLinear):  # type: ignore[misc]  # Any
        def _split_extra_state(self, state: Any) -> list[Any]:
            raise AssertionError("would unpickle")

    return Grouped(EXPERTS, 32, 32, bias=False)


def trained(te: Any, pair: str = "hybrid") -> Any:
    layer = grouped(te)
    recipe = DelayedScaling(amax_history_len=4, fp8_format=Format(pair))
    for number in range(2):
        x = torch.cat([torch.randn(4, 32) * 10.0**expert for expert in range(EXPERTS)])
        with autocast(recipe=recipe):
            y = layer(x * (1 + number), [4] * EXPERTS)
        y.square().sum().backward()
    return layer


def states(layer: Any) -> dict[str, torch.Tensor]:
    """What Megatron puts into a checkpoint, under the names that it loads."""
    full = layer.state_dict(prefix="")
    split = layer._split_extra_state(full["_extra_state"])
    weights = {key: value for key, value in full.items() if key.startswith("weight")}
    return {**weights, **{f"_extra_state{at or ''}": state for at, state in enumerate(split)}}


@pytest.mark.parametrize("pair", ["hybrid", "e4m3"])
def test_a_layer_takes_back_the_states_of_its_experts(te: Any, pair: str) -> None:
    layer, resumed = trained(te, pair), grouped(te)
    assert not any(resumed.load_state_dict(states(layer)))
    for name in BUFFERS:
        assert torch.equal(resumed.get_buffer(name), layer.get_buffer(name)), name


def test_a_state_is_that_of_its_expert_alone(te: Any) -> None:
    layer = trained(te)
    for number, state in enumerate(layer._split_extra_state(None)):
        single, is_own = read_expert_state(state)
        at = slice(3 * number, 3 * number + 3)
        assert is_own
        assert torch.equal(single["scale_fwd"], layer.scale_fwd[at])
        assert torch.equal(single["amax_history_fwd"], layer.amax_history_fwd[:, at])
    inputs = layer.scale_fwd[::3]
    assert len(inputs.unique()) == EXPERTS


def megatron_split(state: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """The tensors that Megatron 0.16.1 saves of each expert, of those of a layer."""
    slots = {"fwd": 3, "bwd": 2}
    experts = []
    for number in range(EXPERTS):
        one = {}
        for way, count in slots.items():
            scale, history = state[f"scale_{way}"], state[f"amax_history_{way}"]
            one[f"scale_{way}"] = scale.view(count, -1)[:, number]
            one[f"amax_history_{way}"] = history.view(len(history), count, -1)[:, :, number]
        experts.append(one)
    return experts


def test_states_that_megatron_saved_from_transformer_engine_go_back_to_their_slots(te: Any) -> None:
    layer, whole = grouped(te), buffers(gemms=EXPERTS)
    split = [pickled(content(TheirScaling(), **one)) for one in megatron_split(whole)]
    layer.load_state_dict(
        {
            **{f"weight{at}": torch.zeros(32, 32) for at in range(EXPERTS)},
            **{f"_extra_state{at or ''}": as_tensor(one) for at, one in enumerate(split)},
        }
    )
    for name, value in whole.items():
        assert torch.equal(layer.get_buffer(name), value), name


def test_megatron_merges_what_is_saved_for_transformer_engine(te: Any) -> None:
    layer = trained(te)
    whole = {name: layer.get_buffer(name) for name in BUFFERS if name != META}
    saved = [unpickled(bytes(one.tolist())) for one in layer._split_extra_state(None)]
    for one, expected in zip(saved, megatron_split(whole), strict=True):
        assert all(torch.equal(one[name], value) for name, value in expected.items())


def test_experts_move_between_one_layer_for_all_and_one_for_each(te: Any) -> None:
    layer, single = trained(te), megatron_s(te.Linear)(32, 32, bias=False)
    split = layer._split_extra_state(None)
    states = []
    for number, one in enumerate(split):
        single.load_state_dict({"weight": torch.zeros(32, 32), "_extra_state": one})
        at = slice(3 * number, 3 * number + 3)
        assert torch.equal(single.scale_fwd, layer.scale_fwd[at])
        states.append(single.state_dict()["_extra_state"])
    merged = merge_states(states)
    assert all(torch.equal(merged[name], layer.get_buffer(name)) for name in BUFFERS)


def test_states_of_two_libraries_are_refused(te: Any) -> None:
    ours = trained(te)._split_extra_state(None)
    theirs = content(TheirScaling(amax_history_len=4), **buffers(gemms=1))
    with pytest.raises(OperandError, match="two libraries"):
        merge_states([*ours[:2], as_tensor(pickled(theirs))])


def test_experts_change_their_rank(te: Any) -> None:
    layer, other = trained(te), grouped(te)
    content = states(layer)
    content["_extra_state"], content["_extra_state2"] = (
        content["_extra_state2"],
        content["_extra_state"],
    )
    other.load_state_dict(content)
    assert torch.equal(other.scale_fwd[:3], layer.scale_fwd[6:])
    assert torch.equal(other.scale_bwd[4:], layer.scale_bwd[:2])


def test_a_layer_without_a_state_has_empty_ones(te: Any) -> None:
    content = states(grouped(te))
    assert all(content[key].numel() == 0 for key in content if "extra" in key)
    layer = grouped(te)
    assert not any(layer.load_state_dict(content))
    assert META not in dict(layer.named_buffers())


def test_a_missing_expert_is_named_and_nothing_is_loaded(te: Any) -> None:
    content, layer = states(trained(te)), grouped(te)
    before = layer.weight0.clone()
    del content["_extra_state1"]
    with pytest.raises(RuntimeError, match=r"no delayed state of the experts \[1\] of 3"):
        layer.load_state_dict(content)
    assert torch.equal(layer.weight0, before)


def test_states_of_several_recipes_are_refused(te: Any) -> None:
    one, other = states(trained(te)), states(trained(te, "e4m3"))
    with pytest.raises(OperandError, match="several recipes"):
        merge_states([one["_extra_state"], other["_extra_state1"], one["_extra_state2"]])


def test_a_damaged_state_is_an_error_of_its_layer(te: Any) -> None:
    content, layer = states(trained(te)), grouped(te)
    content["_extra_state2"] = content["_extra_state2"][:50]
    with pytest.raises(RuntimeError, match="_extra_state is refused"):
        layer.load_state_dict(content)


def test_formats_that_transformer_engine_lacks_are_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    text = meta_text(["hif8", "hif8", None, "hif8", None], 4)
    meta = torch.tensor(list(text.encode()), dtype=torch.uint8)
    with caplog.at_level(logging.WARNING):
        split = split_state({META: meta}, 2)
    assert [state.numel() for state in split] == [0, 0]
    assert "start fresh" in caplog.text


def megatron_s(kind: Any) -> Any:
    return type(kind.__name__, (kind,), {"sharded_state_dict": lambda self: self.state_dict()})


@pytest.mark.parametrize("backward", ["dequantized", "fp8"])
def test_a_layer_of_megatron_saves_what_transformer_engine_does(te: Any, backward: str) -> None:
    recipe = DelayedScaling(amax_history_len=4, fp8_dpa=True, fp8_dpa_backward=backward)
    linear, attention = megatron_s(te.Linear)(32, 32), megatron_s(te.DotProductAttention)(2, 16)
    x = torch.randn(8, 1, 32, requires_grad=True)
    with autocast(recipe=recipe):
        heads = linear(x).view(8, 1, 2, 16)
        y = attention(heads, heads, heads, attn_mask_type="no_mask")
    y.sum().backward()
    for layer, gemms in ((linear, 1), (attention, 3)):
        saved = layer.state_dict()
        assert not set(saved) & set(BUFFERS)
        theirs = unpickled(bytes(saved["_extra_state"].tolist()))
        assert theirs["scale_fwd"].shape == (3 * gemms,)
        assert theirs["recipe"].amax_history_len == 4
    fresh = megatron_s(te.Linear)(32, 32)
    assert not any(fresh.load_state_dict(linear.state_dict()))
    for name in BUFFERS:
        assert torch.equal(fresh.get_buffer(name), linear.get_buffer(name))


def test_a_layer_of_megatron_without_a_state_saves_an_empty_one(te: Any) -> None:
    assert megatron_s(te.Linear)(32, 32).state_dict()["_extra_state"].numel() == 0
