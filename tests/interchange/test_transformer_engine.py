"""A run moves to Transformer Engine's form and back, bit for bit."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from fp8core import (
    DotProductAttention,
    GroupedLinear,
    LayerNormMLP,
    Linear,
    RMSNorm,
    TransformerLayer,
    autocast,
    convert,
    ops,
    prepare,
)
from fp8core.checkpoints import transformer_engine_state_dict
from fp8core.errors import RecipeError, UnsupportedError
from fp8core.modules.state.extra_state import from_three_gemms, to_three_gemms
from fp8core.recipe import DelayedScaling, Float8CurrentScaling, Format, PerLayer
from fp8core.recipe.plan import LinearPlan
from tests.modules.extra_state.states import (
    RECIPES,
    MXFP8BlockScaling,
    as_tensor,
    buffers,
    content,
    pickled,
    unpickled,
)
from tests.modules.extra_state.states import DelayedScaling as TheirScaling

RECIPE = DelayedScaling(amax_history_len=4)


class Grouped(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = GroupedLinear(2, 32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.experts(x, [3, 5])
        return out


MODELS: dict[str, Callable[[], torch.nn.Module]] = {
    "linear": lambda: Linear(32, 16),
    "mlp": lambda: torch.nn.Sequential(LayerNormMLP(32, 64), RMSNorm(32), Linear(32, 16)),
    "grouped": Grouped,
    "transformer": lambda: TransformerLayer(
        32, 64, 2, hidden_dropout=0.0, attention_dropout=0.0, self_attn_mask_type="no_mask"
    ),
}


def train(model: torch.nn.Module, steps: int, seed: int) -> list[torch.Tensor]:
    """Train, and return the losses."""
    torch.manual_seed(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        x = torch.randn(8, 32) if not isinstance(model, TransformerLayer) else torch.randn(4, 2, 32)
        with autocast(recipe=RECIPE):
            loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize("name", MODELS)
def test_a_resumed_run_equals_the_run_that_went_on(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    train(model, 3, seed=1)
    saved = copy.deepcopy(transformer_engine_state_dict(model, RECIPE))
    resumed = MODELS[name]()
    assert not any(resumed.load_state_dict(saved))
    expected = model.state_dict()
    for key, value in resumed.state_dict().items():
        assert torch.equal(value, expected[key]), key
    assert torch.equal(torch.stack(train(resumed, 3, seed=2)), torch.stack(train(model, 3, seed=2)))


def test_the_pickle_has_the_layer_s_numbers_and_its_recipe() -> None:
    recipe = DelayedScaling(
        margin=2, fp8_format=Format.E4M3, amax_history_len=3, amax_compute_algo="most_recent"
    )
    layer = Linear(32, 16)
    with autocast(recipe=recipe):
        layer(torch.randn(8, 32)).sum().backward()
    state = unpickled(bytes(transformer_engine_state_dict(layer, recipe)["_extra_state"].tolist()))
    for key in ("scale_fwd", "amax_history_fwd", "scale_bwd", "amax_history_bwd"):
        assert torch.equal(state[key], layer.state_dict()[key])
    theirs = state["recipe"]
    assert (type(theirs).__module__, type(theirs).__name__) == (RECIPES, "DelayedScaling")
    assert vars(theirs) == {
        **{"margin": 2, "amax_history_len": 3, "amax_compute_algo": "most_recent"},
        **{"scaling_factor_compute_algo": None, "reduce_amax": True, "backward_override": None},
        **{"fp8_dpa": False, "fp8_mha": False, "fp8_format": theirs.fp8_format},
    }
    assert tuple(theirs.fp8_format.value) == (448, 448)
    assert state["extra_fp8_variables"] == {
        **{"fp8_checkpoint": True, "num_gemms": 1},
        **{"fp8_max_fwd": 448, "fp8_max_bwd": 448},
    }


def test_a_layer_without_delayed_state_has_an_empty_one() -> None:
    state = transformer_engine_state_dict(torch.nn.Sequential(Linear(32, 16), RMSNorm(16)))
    for key in ("0._extra_state", "1._extra_state"):
        assert state[key].dtype == torch.uint8
        assert state[key].numel() == 0


def test_a_layer_within_a_checkpoint_wrapper_has_the_key_that_is_loaded() -> None:
    model = torch.nn.Sequential(checkpoint_wrapper(Linear(32, 16)))
    prepare(model, RECIPE)
    state = transformer_engine_state_dict(model, RECIPE)
    assert state.keys() == {"0.weight", "0.bias", "0._extra_state"}
    model.load_state_dict(state)


def test_a_container_of_operations_has_none() -> None:
    state = transformer_engine_state_dict(ops.Sequential(ops.Linear(32, 16), ops.GELU()))
    assert [key for key in state if "extra" in key] == ["0._extra_state", "1._extra_state"]


def test_a_converted_model_brings_its_recipe() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(32, 16))
    convert(model, RECIPE)
    model(torch.randn(8, 32)).sum().backward()
    assert transformer_engine_state_dict(model)["0._extra_state"].numel()


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        (None, "'0' has delayed state"),
        (Float8CurrentScaling(), "Float8CurrentScaling"),
        (DelayedScaling(amax_history_len=5), "the recipe needs"),
        (PerLayer({"*": None}, default=RECIPE), "is None"),
    ],
)
def test_a_recipe_that_is_not_the_state_s_is_refused(recipe: Any, words: str) -> None:
    model = prepare(torch.nn.Sequential(Linear(32, 16)), RECIPE)
    with pytest.raises(RecipeError, match=words):
        transformer_engine_state_dict(model, recipe)


def test_a_function_of_the_recipe_is_refused() -> None:
    recipe = DelayedScaling(amax_history_len=4, amax_compute_algo=lambda history: history[0])
    model = prepare(torch.nn.Sequential(Linear(32, 16)), recipe)
    with pytest.raises(UnsupportedError, match="by a function"):
        transformer_engine_state_dict(model, recipe)


class OwnPlan(Linear):
    """A layer whose slots are not those of Transformer Engine's."""

    plan_type = type("OwnPlan", (LinearPlan,), {})


def test_the_state_of_a_plan_of_its_own_is_refused() -> None:
    model = torch.nn.Sequential(OwnPlan(32, 16))
    for name, value in prepare(Linear(32, 16), RECIPE).named_buffers():
        model[0].register_buffer(name, value)
    with pytest.raises(UnsupportedError, match="'0' has delayed scales of OwnPlan"):
        transformer_engine_state_dict(model, RECIPE)


def test_a_state_of_transformer_engine_is_loaded_exactly() -> None:
    layer, expected = LayerNormMLP(32, 64), buffers(gemms=2)
    state = {
        **layer.state_dict(),
        "_extra_state": as_tensor(pickled(content(TheirScaling(), **expected))),
    }
    assert not any(layer.load_state_dict(state))
    loaded = layer.state_dict()
    for key, value in expected.items():
        assert torch.equal(loaded[key], value)
    with autocast(recipe=RECIPE):  # the state's metadata is the recipe's
        layer(torch.randn(8, 32))


def test_a_loaded_state_refuses_another_recipe() -> None:
    layer = Linear(32, 16)
    layer.load_state_dict(
        {**layer.state_dict(), "_extra_state": as_tensor(pickled(content(TheirScaling())))}
    )
    with pytest.raises(RecipeError, match="in the checkpoint"), autocast(recipe=DelayedScaling()):
        layer(torch.randn(8, 32))


REFUSED = {
    "of another number of GEMMs": (
        pickled(content(TheirScaling(), **buffers(gemms=2))),
        "scale_fwd",
    ),
    "with a command": (b"\x80\x04cos\nsystem\nX\x01\x00\x00\x00x\x85R.", "'os.system'"),
    "with a scale of zero": (
        pickled(content(TheirScaling(), **{**buffers(), "scale_fwd": torch.zeros(3)})),
        "zero or negative",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_state_leaves_the_layer_as_it_was(name: str) -> None:
    data, words = REFUSED[name]
    layer = Linear(32, 16)
    train(layer, 1, seed=0)
    before = copy.deepcopy(layer.state_dict())
    other = {"weight": torch.ones(16, 32), "bias": torch.ones(16), "_extra_state": as_tensor(data)}
    with pytest.raises(RuntimeError, match=words):
        layer.load_state_dict(other)
    for key, value in layer.state_dict().items():
        assert torch.equal(value, before[key])


ATTENDING = DelayedScaling(amax_history_len=4, fp8_dpa=True, fp8_dpa_backward="fp8")
FORWARD_ONLY = DelayedScaling(amax_history_len=4, fp8_dpa=True)
THEIRS = TheirScaling(fp8_dpa=True, amax_history_len=4)


def attend(layer: Any, recipe: DelayedScaling, seed: int) -> list[torch.Tensor]:
    """Return the output and the gradients of a step."""
    torch.manual_seed(seed)
    q, k, v = ((torch.randn(8, 2, 2, 16) * size).requires_grad_() for size in (1.0, 2.0, 5.0))
    with autocast(recipe=recipe):
        y = layer(q, k, v, qkv_format="sbhd", attn_mask_type="no_mask")
    return [y.detach(), *torch.autograd.grad(y.square().sum(), (q, k, v))]


def trained(recipe: DelayedScaling = ATTENDING) -> DotProductAttention:
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
    written = transformer_engine_state_dict(layer, ATTENDING)["_extra_state"]
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


@pytest.mark.parametrize("recipe", [ATTENDING, FORWARD_ONLY], ids=["fp8", "dequantized"])
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
        attend(layer, dataclasses.replace(ATTENDING, fp8_format="e4m3"), 0)


def test_the_mapping_is_its_own_inverse_for_one_scale() -> None:
    three = from_three_gemms(buffers(gemms=3))
    again = from_three_gemms(to_three_gemms(three))
    for name, value in three.items():
        assert torch.equal(again[name], value), name
