"""Layers made under ``quantized_model_init``: what they hold, and what they compute."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import fp8core
from fp8core import recipe
from fp8core.recipe import Recipe
from tests.device import DEVICE
from tests.pairs import turns
from tests.ranks import run_ranks

RECIPES: dict[str, Recipe] = {
    "current": recipe.Float8CurrentScaling(),
    "current_high_precision_backward": recipe.Float8CurrentScaling(
        backward_override="high_precision"
    ),
    "rowwise": recipe.Float8RowwiseScaling(),
    "block": recipe.Float8BlockScaling(),
    "mxfp8": recipe.MXFP8BlockScaling(),
    "nvfp4": recipe.NVFP4BlockScaling(),
}
LAYERS: dict[str, Callable[[], torch.nn.Module]] = {
    "linear": lambda: fp8core.Linear(96, 64, params_dtype=torch.bfloat16),
    "layernorm_linear": lambda: fp8core.LayerNormLinear(96, 64, params_dtype=torch.bfloat16),
    "layernorm_mlp": lambda: fp8core.LayerNormMLP(96, 64, params_dtype=torch.bfloat16),
    "grouped": lambda: fp8core.GroupedLinear(2, 96, 64, params_dtype=torch.bfloat16),
}


def quantized(
    make: Callable[[], torch.nn.Module], used: Recipe, keep: bool = True
) -> torch.nn.Module:
    with fp8core.quantized_model_init(recipe=used, preserve_high_precision_init_val=keep):
        return make()


def initial(layer: torch.nn.Module, own: torch.nn.Module) -> None:
    """Give ``own``, in high precision, the values that ``layer`` was quantized from."""
    for target, source in zip(own.parameters(), layer.parameters(), strict=True):
        is_quantized = isinstance(source, fp8core.QuantizedTensor)
        target.data.copy_(source.get_high_precision_init_val() if is_quantized else source)


def run(layer: torch.nn.Module, used: Recipe | None, x: torch.Tensor) -> list[torch.Tensor]:
    """Return the output and all gradients."""
    torch.manual_seed(1)  # stochastic rounding draws its seed here
    x = x.clone().requires_grad_()
    more = ([40, 24],) if isinstance(layer, fp8core.GroupedLinear) else ()
    with fp8core.autocast(enabled=used is not None, recipe=used):
        y = layer(x, *more)
    y.backward(torch.linspace(-1, 1, y.numel()).reshape(y.shape).to(y.dtype))
    return [y, x.grad, *(parameter.grad for parameter in layer.parameters())]


def sample() -> torch.Tensor:
    return torch.randn(64, 96, dtype=torch.bfloat16)


@pytest.mark.parametrize("layer", LAYERS)
def test_only_gemm_weights_are_quantized(layer: str) -> None:
    made = quantized(LAYERS[layer], RECIPES["current"])
    found = {n: isinstance(p, fp8core.QuantizedTensor) for n, p in made.named_parameters()}
    assert found == {n: "weight" in n and "layer_norm" not in n for n in found}
    assert all(isinstance(parameter, torch.nn.Parameter) for parameter in made.parameters())


def test_norms_stay_in_high_precision() -> None:
    made = quantized(lambda: fp8core.LayerNorm(64), RECIPES["current"])
    assert not isinstance(made.weight, fp8core.QuantizedTensor)


@pytest.mark.parametrize(
    ("layer", "name"),
    [
        *turns(LAYERS, ["current", "block", "mxfp8", "nvfp4"]),
        *turns(LAYERS, ["mxfp8", "nvfp4", "rowwise", "block"]),
    ],
)
def test_computes_what_the_layer_in_high_precision_computes(layer: str, name: str) -> None:
    used, own, x = RECIPES[name], LAYERS[layer](), sample()
    made = quantized(LAYERS[layer], used)
    initial(made, own)
    pairs = list(zip(run(made, used, x), run(own, used, x), strict=True))
    assert all(torch.equal(a, b) for a, b in pairs)


def test_backward_in_high_precision_sees_the_dequantized_weight() -> None:
    used, x = RECIPES["current_high_precision_backward"], sample()
    made = quantized(LAYERS["linear"], used)
    y, grad_input, *_ = run(made, used, x)
    grad = torch.linspace(-1, 1, y.numel()).reshape(y.shape).to(y.dtype)
    assert torch.equal(grad_input, grad @ made.weight.dequantize())


def test_delayed_scaling_uses_the_amax_of_the_weight_at_hand() -> None:
    used, x = recipe.DelayedScaling(), sample()
    made, own = quantized(LAYERS["linear"], used), LAYERS["linear"]()
    initial(made, own)
    run(own, used, x)  # makes the state
    own.reset_delayed_state()
    with torch.no_grad(), fp8core.autocast(recipe=used):
        own(x)
    own.scale_fwd[1] = 448.0 / own.weight.abs().max().float()
    own.zero_grad()
    assert all(
        torch.equal(a, b) for a, b in zip(run(made, used, x), run(own, used, x), strict=True)
    )


def test_delayed_scaling_records_no_amax_of_the_weight() -> None:
    used = recipe.DelayedScaling()
    made = quantized(LAYERS["linear"], used)
    run(made, used, sample())
    assert made.amax_history_fwd[:, 0].any()
    assert not made.amax_history_fwd[:, 1].any()


@pytest.mark.parametrize("name", RECIPES)
def test_without_autocast_the_weight_is_dequantized(name: str) -> None:
    made, x = quantized(LAYERS["linear"], RECIPES[name]), sample()
    expected = torch.nn.functional.linear(x, made.weight.dequantize(), made.bias)
    assert torch.equal(made(x), expected)


def test_another_recipe_is_refused_naming_both() -> None:
    made = quantized(LAYERS["linear"], RECIPES["mxfp8"])
    with pytest.raises(fp8core.OperandError, match=r"e8m0.*\n?.*block=\(128,128\)"):
        run(made, RECIPES["block"], sample())


def test_delayed_and_current_scaling_store_alike() -> None:
    made = quantized(LAYERS["linear"], recipe.DelayedScaling())
    run(made, RECIPES["current"], sample())


def test_a_weight_written_between_calls_is_used() -> None:
    used, x = RECIPES["current"], sample()
    made = quantized(LAYERS["linear"], used)
    run(made, used, x)
    with torch.no_grad():
        made.weight.zero_()
    assert torch.equal(run(made, used, x)[0], made.bias.expand(64, 64))


def test_gradients_are_plain_tensors_in_the_nominal_dtype() -> None:
    made = quantized(LAYERS["linear"], RECIPES["mxfp8"])
    run(made, RECIPES["mxfp8"], sample())
    assert type(made.weight.grad) is torch.Tensor
    assert made.weight.grad.dtype == torch.bfloat16


def test_the_initial_value_is_kept_on_request_and_cleared() -> None:
    weight = quantized(LAYERS["linear"], RECIPES["current"]).weight
    again = fp8core.QuantizedTensor.quantize(
        weight.get_high_precision_init_val().to(DEVICE), weight.plan
    )
    assert torch.equal(again.dequantize(), weight.dequantize())
    weight.clear_high_precision_init_val()
    assert weight.get_high_precision_init_val() is None
    plain = quantized(LAYERS["linear"], RECIPES["current"], keep=False).weight
    assert plain.get_high_precision_init_val() is None


def test_the_initial_value_is_the_one_in_high_precision() -> None:
    torch.manual_seed(3)
    own = LAYERS["linear"]()
    torch.manual_seed(3)
    made = quantized(LAYERS["linear"], RECIPES["current"])
    assert torch.equal(made.weight.get_high_precision_init_val(), own.weight.cpu())


def is_quantized() -> bool:
    return isinstance(LAYERS["linear"]().weight, fp8core.QuantizedTensor)


@pytest.mark.parametrize("name", ["current", "rowwise", "block", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("layer", LAYERS)
def test_weights_made_without_gradients_hold_rows_alone(layer: str, name: str) -> None:
    torch.manual_seed(0)
    whole = quantized(LAYERS[layer], RECIPES[name])
    torch.manual_seed(0)
    with torch.no_grad():
        rows = quantized(LAYERS[layer], RECIPES[name])
    arguments = ([40, 24],) if layer == "grouped" else ()
    x = torch.randn(64, 96, dtype=torch.bfloat16)
    with fp8core.autocast(recipe=RECIPES[name]):
        with torch.no_grad():
            assert torch.equal(rows(x, *arguments), whole(x, *arguments))
        with pytest.raises(fp8core.OperandError, match="stored for inference, in rows alone"):
            rows(x.requires_grad_(), *arguments)
    for stored, both in zip(rows.parameters(), whole.parameters(), strict=True):
        if isinstance(stored, fp8core.QuantizedTensor):
            assert isinstance(both, fp8core.QuantizedTensor)
            assert stored.get_usages() == {"rowwise": True, "columnwise": False}
            assert stored.nbytes == sum(part.nbytes for part in both.stored[0] if part is not None)


def test_the_innermost_context_decides() -> None:
    with fp8core.fp8_model_init(recipe=RECIPES["mxfp8"]):
        with fp8core.quantized_model_init(enabled=False):
            assert not is_quantized()
        assert isinstance(LAYERS["linear"]().weight, fp8core.MXFP8Tensor)
    assert not is_quantized()


def test_the_context_ends_with_an_exception() -> None:
    with pytest.raises(KeyError), fp8core.quantized_model_init():
        raise KeyError
    assert not is_quantized()


def test_the_context_is_of_its_thread() -> None:
    found = []
    with fp8core.quantized_model_init():
        thread = threading.Thread(target=lambda: found.append(is_quantized()))
        thread.start()
        thread.join()
    assert found == [False]


def test_a_recipe_that_is_none_is_refused() -> None:
    with pytest.raises(fp8core.RecipeError, match="expected a Recipe"):
        fp8core.quantized_model_init(recipe=3)  # type: ignore[arg-type]


def test_recipe_may_be_given_by_name() -> None:
    with fp8core.quantized_model_init(recipe="mxfp8"):
        layer = fp8core.Linear(64, 64)
    assert isinstance(layer.weight, fp8core.MXFP8Tensor)


def test_parameters_split_is_refused() -> None:
    make = lambda: fp8core.Linear(96, 64, parameters_split=("query", "key"))  # noqa: E731
    with pytest.raises(fp8core.UnsupportedError, match="parameters_split"):
        quantized(make, RECIPES["current"])


def test_conversion_of_the_module_changes_the_nominal_dtype_alone() -> None:
    made = quantized(LAYERS["linear"], RECIPES["mxfp8"])
    weight, before = made.weight, [part.clone() for part in made.weight.tensors()]
    run(made, RECIPES["mxfp8"], sample())
    made.float()
    assert made.weight is weight
    assert (weight.dtype, weight.grad.dtype) == (torch.float32, torch.float32)
    assert all(torch.equal(*pair) for pair in zip(before, weight.tensors(), strict=True))


@pytest.mark.parametrize("method", ["to", "type"])
def test_conversion_to_the_nominal_dtype_changes_nothing(method: str) -> None:
    made = quantized(LAYERS["linear"], RECIPES["mxfp8"])
    weight, parts = made.weight, made.weight.tensors()
    getattr(made, method)(torch.bfloat16)
    assert made.weight is weight
    assert all(a is b for a, b in zip(parts, weight.tensors(), strict=True))


def test_a_layer_from_meta_is_quantized_when_it_is_filled() -> None:
    make = lambda: fp8core.Linear(96, 64, device="meta", params_dtype=torch.bfloat16)  # noqa: E731
    made = quantized(make, RECIPES["mxfp8"])
    assert made.weight.is_meta
    made.to_empty(device=DEVICE)
    made.reset_parameters()
    kept = made.weight.get_high_precision_init_val()
    again = fp8core.QuantizedTensor.quantize(kept.to(DEVICE), made.weight.plan)
    assert all(torch.equal(*p) for p in zip(again.tensors(), made.weight.tensors(), strict=True))


STORED_BY: dict[str, Recipe] = {
    "current": recipe.Float8CurrentScaling(),
    "block": recipe.Float8BlockScaling(),
    "mxfp8": recipe.MXFP8BlockScaling(),
    "nvfp4": recipe.NVFP4BlockScaling(),
}


def make(used: Recipe | None, seed: int) -> fp8core.LayerNormMLP:
    torch.manual_seed(seed)
    with fp8core.quantized_model_init(used is not None, used):
        return fp8core.LayerNormMLP(64, 96, params_dtype=torch.bfloat16)


def tensors(layer: torch.nn.Module) -> list[torch.Tensor]:
    found = []
    for own in layer.parameters():
        found += own.tensors() if isinstance(own, fp8core.QuantizedTensor) else [own]
    return found


def equal(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    return all(torch.equal(*pair) for pair in zip(tensors(a), tensors(b), strict=True))


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("name", STORED_BY)
def test_state_dict_round_trip_is_bit_exact(name: str, assign: bool, tmp_path: Path) -> None:
    saved, loaded = make(STORED_BY[name], 0), make(STORED_BY[name], 1)
    torch.save(saved.state_dict(), tmp_path / "file")
    loaded.load_state_dict(torch.load(tmp_path / "file", weights_only=True), assign=assign)
    assert equal(saved, loaded)


def test_a_quantized_checkpoint_loads_into_high_precision() -> None:
    saved, loaded = make(STORED_BY["mxfp8"], 0), make(None, 1)
    loaded.load_state_dict(saved.state_dict())
    assert torch.equal(loaded.fc1_weight, saved.fc1_weight.dequantize())


def test_a_high_precision_checkpoint_is_quantized() -> None:
    saved, loaded = make(None, 0), make(STORED_BY["mxfp8"], 1)
    loaded.load_state_dict(saved.state_dict())
    assert equal(loaded, make(STORED_BY["mxfp8"], 0))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", STORED_BY)
def test_distributed_checkpoint_of_one_process_is_bit_exact(name: str, tmp_path: Path) -> None:
    saved, loaded = make(STORED_BY[name], 0), make(STORED_BY[name], 1)
    dcp.save(saved.state_dict(), checkpoint_id=tmp_path)
    state = loaded.state_dict()
    dcp.load(state, checkpoint_id=tmp_path)
    loaded.load_state_dict(state)
    assert equal(saved, loaded)


def checkpoint_of_a_rank(rank: int, folder: str) -> None:
    saved, loaded = make(STORED_BY["mxfp8"], 0), make(STORED_BY["mxfp8"], 1 + rank)
    dcp.save(saved.state_dict(), checkpoint_id=folder)
    state = loaded.state_dict()
    dcp.load(state, checkpoint_id=folder)
    loaded.load_state_dict(state)
    assert equal(saved, loaded)
    with pytest.raises(fp8core.UnsupportedError, match=r"\.tensors\(\)"):
        dist.all_reduce(loaded.fc1_weight.detach())
    other = make(STORED_BY["mxfp8"], 2 + rank)
    dist.broadcast(other.fc1_weight.detach(), 0)
    expected = make(STORED_BY["mxfp8"], 2).fc1_weight.tensors()
    assert all(map(torch.equal, other.fc1_weight.tensors(), expected))


def test_distributed_checkpoint_of_two_processes_is_bit_exact(tmp_path: Path) -> None:
    run_ranks(checkpoint_of_a_rank, tmp_path, str(tmp_path / "checkpoint"))
