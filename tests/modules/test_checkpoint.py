"""Checkpoints: plain tensors in, the same training out; what does not fit changes nothing."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch

from fp8core import GroupedLinear, Linear, RecipeError, autocast, recipe
from tests.modules.layers import DELAYED, snapshot, train, trained
from tests.pairs import turns

torch.set_num_threads(1)  # on a busy machine a second thread costs small GEMMs 20 times the work

STATE = ("scale_fwd", "amax_history_fwd", "scale_bwd", "amax_history_bwd", "delayed_meta")


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    """Save and load, refusing everything but tensors."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        assert torch.equal(found[key], value), key


def test_a_state_dict_holds_parameters_and_state_as_tensors() -> None:
    state = trained().state_dict()
    assert list(state) == ["weight", "bias", *STATE]
    assert all(isinstance(value, torch.Tensor) for value in state.values())


def test_training_goes_on_bit_for_bit_after_loading() -> None:
    for is_used in [False, True]:
        layer, other = trained(), trained() if is_used else Linear(32, 16)
        missing, unexpected = other.load_state_dict(through_a_file(layer.state_dict()))
        assert not missing, is_used
        assert not unexpected, is_used
        assert_same(other.state_dict(), layer.state_dict())
        for x in torch.randn(3, 4, 32):
            assert torch.equal(train(layer, x), train(other, x)), is_used
        assert_same(other.state_dict(), layer.state_dict())


def test_a_grouped_layer_makes_the_round_trip() -> None:
    layer, other = GroupedLinear(2, 32, 16), GroupedLinear(2, 32, 16)
    for one in (layer, other):
        with autocast(recipe=DELAYED):
            one(torch.randn(4, 32), [1, 3]).sum().backward()
    other.load_state_dict(through_a_file(layer.state_dict()))
    assert_same(other.state_dict(), layer.state_dict())


def test_loading_does_not_alias_the_checkpoint() -> None:
    layer = trained()
    saved = snapshot(layer)
    other = Linear(32, 16)
    other.load_state_dict(saved)
    before = {key: value.clone() for key, value in saved.items()}
    train(other, torch.full((4, 32), 99.0))
    assert_same(saved, before)


def test_loading_leaves_the_given_dict_as_it_was() -> None:
    saved = {**trained().state_dict(), "_extra_state": {"of": "another library"}}
    keys = list(saved)
    Linear(32, 16).load_state_dict(saved)
    assert list(saved) == keys


def test_loading_into_a_bfloat16_layer_keeps_the_state_in_float32() -> None:
    layer = trained()
    other = Linear(32, 16, params_dtype=torch.bfloat16)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other.scale_fwd, layer.scale_fwd)


def test_assigning_to_a_layer_on_meta_makes_it_real() -> None:
    layer, other = trained(), Linear(32, 16, device="meta")
    other.load_state_dict(through_a_file(layer.state_dict()), assign=True)
    x = torch.randn(4, 32)
    assert torch.equal(train(other, x), train(layer, x))


@pytest.mark.parametrize(
    ("extra", "is_nested"),
    turns([torch.zeros(0, dtype=torch.uint8), None, {"of": "another"}], [False, True]),
)
def test_an_extra_state_without_delayed_scales_is_consumed(extra: object, is_nested: bool) -> None:
    layer = Linear(32, 16)
    model = torch.nn.Sequential(layer) if is_nested else layer
    prefix = "0." if is_nested else ""
    saved = {f"{prefix}{key}": value for key, value in Linear(32, 16).state_dict().items()}
    missing, unexpected = model.load_state_dict({**saved, f"{prefix}_extra_state": extra})
    assert not missing
    assert not unexpected
    assert torch.equal(layer.weight, saved[f"{prefix}weight"])


def test_extra_state_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    saved = {**Linear(32, 16).state_dict(), "_extra_state": {"of": "another library"}}
    for _ in range(2):
        Linear(32, 16, name="extra_state_is_reported").load_state_dict(saved)
    assert sum("extra_state_is_reported" in line for line in caplog.messages) == 1


def test_layers_that_load_alike_are_reported_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    layers = [trained(name=f"loads_alike.{at}") for at in range(4)]
    model = torch.nn.Sequential(*layers)
    saved = torch.nn.Sequential(*(Linear(32, 16) for _ in layers)).state_dict()
    model.load_state_dict(saved)
    (line,) = (line for line in caplog.messages if "loads_alike" in line)
    assert line.startswith("4 layers ('loads_alike.0'")
    assert line.endswith(" and 1 more): no delayed state in the checkpoint; it starts fresh")


def test_a_checkpoint_without_state_starts_it_fresh(caplog: pytest.LogCaptureFixture) -> None:
    layer = trained(name="without_state")
    layer.load_state_dict(Linear(32, 16).state_dict())
    assert any("without_state" in line and "starts fresh" in line for line in caplog.messages)
    with autocast(recipe=DELAYED):
        layer(torch.full((4, 32), 7.0))
    assert layer.amax_history_fwd[:, 0].tolist() == [0.0, 0.0, 0.0, 7.0]


def changed(**changes: Any) -> dict[str, torch.Tensor]:
    """Return a checkpoint with some entries changed; None leaves one out."""
    saved = {**trained().state_dict(), **changes}
    return {key: value for key, value in saved.items() if value is not None}


def test_an_error_names_the_layer() -> None:
    layer = Linear(32, 16, name="decoder.3.fc1")
    with pytest.raises(RuntimeError, match=r"'decoder.3.fc1'"):
        layer.load_state_dict(changed(weight=torch.zeros(1, 1)))


OTHER_RECIPES = {
    "length": recipe.DelayedScaling(amax_history_len=6),
    "format": recipe.DelayedScaling(amax_history_len=4, fp8_format=recipe.Format.E4M3),
}


DIFFERENCES = {
    "length": (r"amax_history_len=6", r"amax_history_len=4"),
    "format": (r"grad_output in e4m3", r"grad_output in e5m2"),
}


def test_another_recipe_s_checkpoint_does_not_load_over_a_used_layer() -> None:
    for case in OTHER_RECIPES:
        layer, other = trained(), trained(chosen=OTHER_RECIPES[case])
        before = snapshot(layer)
        theirs, mine = DIFFERENCES[case]
        with pytest.raises(RuntimeError, match=rf"state is for {theirs}, the layer's for {mine}\n"):
            layer.load_state_dict(other.state_dict())
        assert_same(snapshot(layer), before)


def test_another_recipe_s_checkpoint_is_refused_when_it_is_used() -> None:
    for case in OTHER_RECIPES:
        layer = Linear(32, 16, name="decoder.0")
        layer.load_state_dict(trained(chosen=OTHER_RECIPES[case]).state_dict())
        before = snapshot(layer)
        theirs, mine = DIFFERENCES[case]
        with pytest.raises(
            RecipeError,
            match=rf"'decoder.0'.*checkpoint is for {theirs}, the recipe needs {mine}\.",
        ):
            train(layer, torch.randn(4, 32))
        assert_same(snapshot(layer), before)


def test_a_refused_state_can_be_reset() -> None:
    layer = Linear(32, 16)
    layer.load_state_dict(trained(chosen=OTHER_RECIPES["length"]).state_dict())
    layer.reset_delayed_state()
    train(layer, torch.full((4, 32), 7.0))
    assert layer.amax_history_fwd[:, 0].tolist() == [0.0, 0.0, 0.0, 7.0]


def test_a_state_from_a_checkpoint_serves_recipes_without_state() -> None:
    layer = Linear(32, 16)
    layer.load_state_dict(trained().state_dict())
    before = layer.scale_fwd.clone()
    train(layer, torch.randn(4, 32), recipe.MXFP8BlockScaling())
    assert torch.equal(layer.scale_fwd, before)


def test_missing_and_unexpected_keys_are_torch_s_own() -> None:
    saved = {**Linear(32, 16, bias=False).state_dict(), "stranger": torch.zeros(1)}
    missing, unexpected = Linear(32, 16).load_state_dict(saved, strict=False)
    assert (missing, unexpected) == (["bias"], ["stranger"])
    with pytest.raises(RuntimeError, match="stranger"):
        Linear(32, 16).load_state_dict(saved)
