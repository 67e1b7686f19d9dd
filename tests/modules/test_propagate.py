"""``nonfinite="propagate"``: a tensor with NaN or inf makes all results that it has part in NaN."""

from __future__ import annotations

import math

import pytest
import torch

import fp8core as te
from fp8core import recipe
from fp8core.backend_api import OperandSpec

KINDS: dict[str, type[recipe.Recipe]] = {
    "delayed": recipe.DelayedScaling,
    "current": recipe.Float8CurrentScaling,
    "rowwise": recipe.Float8RowwiseScaling,
    "block": recipe.Float8BlockScaling,
    "mxfp8": recipe.MXFP8BlockScaling,
    "nvfp4": recipe.NVFP4BlockScaling,
}
VALUES = (math.inf, -math.inf, math.nan)


def results(
    layer: torch.nn.Module,
    chosen: recipe.Recipe,
    *,
    x_value: float | None = None,
    grad_value: float | None = None,
    splits: tuple[object, ...] = (),
) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    x = torch.randn(64, 64, dtype=torch.bfloat16)
    if x_value is not None:
        x[40, 7] = x_value
    x.requires_grad_()
    layer.zero_grad()
    with te.autocast(recipe=chosen):
        y = layer(x, *splits)
    grad = torch.randn(y.shape).to(y.dtype)
    if grad_value is not None:
        grad[40, 7] = grad_value
    y.backward(grad)
    made = {"y": y, "dx": x.grad}
    made |= {f"d{name}": own.grad for name, own in layer.named_parameters()}
    return {name: value.detach().clone() for name, value in made.items()}


def linear() -> torch.nn.Module:
    torch.manual_seed(0)
    return te.Linear(64, 32, bias=False, params_dtype=torch.bfloat16)


def is_all_nan(x: torch.Tensor) -> bool:
    return bool(x.isnan().all())


@pytest.mark.parametrize("name", KINDS)
def test_a_gradient_makes_both_gradients_nan(name: str) -> None:
    for value in VALUES:
        layer = linear()
        made = results(layer, KINDS[name](nonfinite="propagate"), grad_value=value)
        assert made["y"].isfinite().all()
        assert is_all_nan(made["dx"])
        assert is_all_nan(made["dweight"])
        assert te.found_inf(layer) == 1


def test_an_input_makes_output_and_weight_gradient_nan() -> None:
    for name in KINDS:
        for value in VALUES:
            made = results(linear(), KINDS[name](nonfinite="propagate"), x_value=value)
            assert is_all_nan(made["y"]), name
            assert is_all_nan(made["dweight"]), name
            assert made["dx"].isfinite().all(), name


@pytest.mark.parametrize("name", KINDS)
def test_a_weight_makes_output_and_input_gradient_nan(name: str) -> None:
    layer = linear()
    with torch.no_grad():
        layer.weight[5, 6] = math.inf
    made = results(layer, KINDS[name](nonfinite="propagate"))
    assert is_all_nan(made["y"])
    assert is_all_nan(made["dx"])
    assert made["dweight"].isfinite().all()


@pytest.mark.parametrize("name", KINDS)
def test_finite_tensors_give_the_same_bits(name: str) -> None:
    one, other = linear(), linear()
    te.clear_found_inf(other)  # graphs of other tests count for all models
    for _ in range(3):
        first = results(one, KINDS[name]())
        second = results(other, KINDS[name](nonfinite="propagate"))
        for key, value in first.items():
            assert torch.equal(value, second[key]), key
    assert te.found_inf(other) == 0


def test_delayed_state_is_not_touched() -> None:
    layer = linear()
    chosen = recipe.DelayedScaling(nonfinite="propagate")
    results(layer, chosen)
    before = {name: own.clone() for name, own in layer.named_buffers()}
    results(layer, chosen, x_value=math.nan, grad_value=math.inf)
    assert all(own.isfinite().all() for own in layer.buffers())
    assert torch.equal(layer.scale_bwd, before["scale_bwd"])
    again = results(layer, chosen)
    assert all(value.isfinite().all() for value in again.values())


def test_the_result_of_a_fused_chain_shows_it() -> None:
    torch.manual_seed(0)
    layer = te.LayerNormMLP(64, 128, bias=False, params_dtype=torch.bfloat16)
    made = results(layer, recipe.Float8CurrentScaling(nonfinite="propagate"), grad_value=math.inf)
    assert is_all_nan(made["dfc2_weight"])
    assert is_all_nan(made["dfc1_weight"])


def test_groups_show_it() -> None:
    torch.manual_seed(0)
    layer = te.GroupedLinear(2, 64, 32, bias=False, params_dtype=torch.bfloat16)
    chosen = recipe.Float8CurrentScaling(nonfinite="propagate")
    made = results(layer, chosen, grad_value=math.inf, splits=([32, 32],))
    assert is_all_nan(made["dweight1"])
    made = results(layer, chosen, splits=([32, 32],))
    assert all(value.isfinite().all() for value in made.values())


@pytest.mark.parametrize("name", ["current", "mxfp8", "nvfp4"])
def test_a_compiled_layer_shows_it(name: str) -> None:
    layer = linear()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    chosen = KINDS[name](nonfinite="propagate")
    made = results(compiled, chosen, grad_value=math.inf)
    assert is_all_nan(made["dx"])
    eager, captured = results(linear(), chosen), results(compiled, chosen)
    if name != "nvfp4":  # whose graph draws another seed
        assert torch.equal(eager["dx"], captured["dx"])
    assert captured["y"].isfinite().all()


def test_an_exported_layer_shows_it() -> None:
    layer = linear().eval()
    x = torch.randn(64, 64, dtype=torch.bfloat16)
    with te.autocast(recipe=recipe.Float8CurrentScaling(nonfinite="propagate")), torch.no_grad():
        program = torch.export.export(layer, (x,)).module()
        assert torch.equal(program(x), layer(x))
        x[3, 4] = math.inf
        assert is_all_nan(program(x))


def test_a_kept_weight_of_the_other_kind_is_not_used() -> None:
    layer = linear()
    with torch.no_grad():
        layer.weight[0, 0] = math.inf
    x = torch.randn(32, 64, dtype=torch.bfloat16)
    with te.autocast(recipe=recipe.Float8CurrentScaling()):
        assert layer(x, is_first_microbatch=True).isfinite().all()
    with te.autocast(recipe=recipe.Float8CurrentScaling(nonfinite="propagate")):
        assert is_all_nan(layer(x, is_first_microbatch=False)[:, 0])


def test_a_custom_recipe_takes_it() -> None:
    def factory(role: object) -> OperandSpec:
        return OperandSpec("e4m3", (0, 0), 448.0)

    made = results(
        linear(), recipe.CustomRecipe(factory, nonfinite="propagate"), grad_value=math.inf
    )
    assert is_all_nan(made["dx"])


def test_a_quantize_of_a_chain_shows_it() -> None:
    chain = te.ops.Sequential(te.ops.Quantize(forward=True), te.ops.GELU())
    x = torch.randn(32, 64, dtype=torch.bfloat16)
    x[0, 0] = math.inf
    with te.autocast(recipe=recipe.Float8CurrentScaling(nonfinite="propagate")):
        assert is_all_nan(chain(x))


def test_another_word_is_refused() -> None:
    for kind in [*KINDS.values(), recipe.CustomRecipe]:
        given = {"margin": 1} if kind is recipe.CustomRecipe else {}
        with pytest.raises(te.RecipeError, match=r"nonfinite='nan'.*'saturate', 'propagate'"):
            kind(**given, nonfinite="nan")


def test_recipes_that_differ_in_it_are_different_values() -> None:
    for kind in KINDS.values():
        assert kind() == kind(nonfinite="saturate") != kind(nonfinite="propagate"), kind
        assert "nonfinite='propagate'" in str(kind(nonfinite="propagate")), kind
