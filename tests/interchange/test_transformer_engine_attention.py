"""The delayed scaling of FP8 attention moves to Transformer Engine's form and back."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from fp8core import DotProductAttention, autocast
from fp8core.checkpoints import transformer_engine_state_dict
from fp8core.errors import RecipeError
from fp8core.modules.state.extra_state import from_three_gemms, to_three_gemms
from fp8core.recipe import DelayedScaling, Float8CurrentScaling
from tests.modules.extra_state.states import (
    DelayedScaling as TheirScaling,
)
from tests.modules.extra_state.states import (
    MXFP8BlockScaling,
    as_tensor,
    buffers,
    content,
    pickled,
    unpickled,
)

RECIPE = DelayedScaling(amax_history_len=4, fp8_dpa=True, fp8_dpa_backward="fp8")
FORWARD_ONLY = DelayedScaling(amax_history_len=4, fp8_dpa=True)
THEIRS = TheirScaling(fp8_dpa=True, amax_history_len=4)


def attend(layer: Any, recipe: DelayedScaling, seed: int) -> list[torch.Tensor]:
    """Return the output and the gradients of a step."""
    torch.manual_seed(seed)
    q, k, v = ((torch.randn(8, 2, 2, 16) * size).requires_grad_() for size in (1.0, 2.0, 5.0))
    with autocast(recipe=recipe):
        y = layer(q, k, v, qkv_format="sbhd", attn_mask_type="no_mask")
    return [y.detach(), *torch.autograd.grad(y.square().sum(), (q, k, v))]


def trained(recipe: DelayedScaling = RECIPE) -> DotProductAttention:
    layer = DotProductAttention(2, 16)
    for seed in range(2):
        attend(layer, recipe, seed)
    return layer


def state_of(recipe: Any, gemms: int = 3, **extra: Any) -> dict[str, torch.Tensor]:
    """A checkpoint with the state of attention as Transformer Engine writes it."""
    value = content(recipe, **buffers(gemms=gemms))
    value["extra_fp8_variables"] |= extra
    return {"_extra_state": as_tensor(pickled(value))}


def test_transformer_engine_reads_one_scale_of_queries_keys_and_values() -> None:
    layer = trained()
    written = transformer_engine_state_dict(layer, RECIPE)["_extra_state"]
    theirs = unpickled(bytes(written.tolist()))
    ours = layer.state_dict()
    assert theirs["recipe"].fp8_dpa is True
    assert theirs["extra_fp8_variables"]["num_gemms"] == 3
    assert theirs["scale_fwd"][2] == ours["scale_fwd"][:3].min()
    assert torch.equal(theirs["amax_history_fwd"][:, 2], ours["amax_history_fwd"][:, :3].amax(1))
    assert theirs["scale_fwd"][3] == ours["scale_fwd"][2]  # the result has that of the values
    assert theirs["scale_fwd"][8] == ours["scale_fwd"][3]
    assert theirs["scale_bwd"].tolist() == [1, 1, 1, ours["scale_bwd"][0], 1, ours["scale_bwd"][1]]
    history = theirs["amax_history_bwd"]
    assert torch.equal(history[:, [3, 5]], ours["amax_history_bwd"])
    assert not history[:, [0, 1, 2, 4]].any()


def test_attention_takes_the_state_of_transformer_engine() -> None:
    layer, expected = DotProductAttention(2, 16), buffers(gemms=3)
    assert not any(layer.load_state_dict(state_of(THEIRS)))
    ours = layer.state_dict()
    forward, backward = [2, 2, 2, 8], [3, 5]
    assert torch.equal(ours["scale_fwd"][:4], expected["scale_fwd"][forward])
    assert torch.equal(ours["amax_history_fwd"][:, :4], expected["amax_history_fwd"][:, forward])
    assert torch.equal(ours["scale_bwd"], expected["scale_bwd"][backward])
    assert torch.equal(ours["amax_history_bwd"], expected["amax_history_bwd"][:, backward])


@pytest.mark.parametrize("recipe", [RECIPE, FORWARD_ONLY], ids=["fp8", "dequantized"])
def test_it_trains_on_by_either_backward(recipe: DelayedScaling) -> None:
    layer, other = DotProductAttention(2, 16), DotProductAttention(2, 16)
    layer.load_state_dict(state_of(THEIRS))
    scales = layer.get_buffer("scale_fwd").clone()
    y = attend(layer, recipe, 5)[0]
    assert not torch.equal(y, attend(other, recipe, 5)[0])  # whose scales are 1
    assert not torch.equal(layer.get_buffer("scale_fwd"), scales)  # the step has updated them


def test_a_run_of_equal_scales_comes_back_bit_for_bit() -> None:
    """Nothing is lost where queries, keys and values have one amax."""
    layer = trained(FORWARD_ONLY)
    for name in ("scale_fwd", "amax_history_fwd"):
        layer.get_buffer(name)[..., :3] = layer.get_buffer(name)[..., :1]
    resumed = DotProductAttention(2, 16)
    resumed.load_state_dict(transformer_engine_state_dict(layer, FORWARD_ONLY))
    for one, other in zip(
        attend(resumed, FORWARD_ONLY, 7), attend(layer, FORWARD_ONLY, 7), strict=True
    ):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    "recipe",
    [TheirScaling(), MXFP8BlockScaling()],
    ids=["high precision", "without state"],
)
def test_attention_without_delayed_scaling_takes_nothing(recipe: Any) -> None:
    layer = DotProductAttention(2, 16)
    assert not any(layer.load_state_dict(state_of(recipe)))
    assert not dict(layer.named_buffers())


def test_delayed_scales_beside_current_scaling_are_not_ours() -> None:
    """Transformer Engine delays those of S and dP alone there; here they are constant."""
    layer = DotProductAttention(2, 16)
    layer.load_state_dict(state_of(THEIRS, local_recipes=[MXFP8BlockScaling(), THEIRS]))
    assert not dict(layer.named_buffers())
    with autocast(recipe=Float8CurrentScaling(fp8_dpa=True)):
        layer(*(torch.randn(8, 2, 2, 16) for _ in range(3)), attn_mask_type="no_mask")


def test_another_number_of_slots_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"scale_fwd is \[6\], expected 9 slots"):
        DotProductAttention(2, 16).load_state_dict(state_of(THEIRS, gemms=2))


def test_another_recipe_is_refused_still() -> None:
    layer = DotProductAttention(2, 16)
    layer.load_state_dict(state_of(THEIRS))
    with pytest.raises(RecipeError, match="state in the checkpoint is for"):
        attend(layer, dataclasses.replace(RECIPE, fp8_format="e4m3"), 0)


def test_the_mapping_is_its_own_inverse_for_one_scale() -> None:
    three = from_three_gemms(buffers(gemms=3))
    again = from_three_gemms(to_three_gemms(three))
    for name, value in three.items():
        assert torch.equal(again[name], value), name
