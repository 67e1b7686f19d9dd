"""Recipes that the user composes, end to end: PerLayer after prepare(), CustomRecipe both ways."""

from __future__ import annotations

import pytest
import torch

import fp8core
from fp8core import (
    GroupedLinear,
    LayerNormLinear,
    LayerNormMLP,
    Linear,
    RecipeError,
    UnsupportedError,
    autocast,
    ops,
    prepare,
    recipe,
    reporting,
)
from fp8core.backend_api import API_VERSION, BackendSpec, GemmDesc, OpDesc, OperandSpec
from fp8core.dispatch import plugins
from fp8core_backends.reference.backend import ReferenceBackend
from tests.modules.layers import assert_same, step

torch.set_num_threads(1)  # on a busy machine a second thread costs small GEMMs 20 times the work


CURRENT = recipe.Float8CurrentScaling()
MXFP8 = recipe.MXFP8BlockScaling()
ROWWISE = OperandSpec("e4m3", (1, 0), 448.0)


def make_model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(Linear(32, 32), torch.nn.ReLU(), Linear(32, 32))


def test_prepare_names_the_layers_by_their_paths() -> None:
    model = prepare(torch.nn.ModuleDict({"decoder": make_model(), "head": Linear(32, 4)}))
    assert [model["decoder"][0].name, model["decoder"][2].name] == ["decoder.0", "decoder.2"]
    assert model["head"].name == "head"


def test_prepare_returns_the_model() -> None:
    model = make_model()
    assert prepare(model) is model


def test_prepare_keeps_the_name_of_a_layer_that_is_the_model() -> None:
    assert prepare(Linear(32, 32, name="alone")).name == "alone"


def test_per_layer_quantizes_each_layer_by_its_own_recipe() -> None:
    x, model = torch.randn(4, 32), prepare(make_model())
    mixed = recipe.PerLayer({"0": CURRENT, "2": MXFP8})
    with autocast(recipe=mixed), torch.no_grad():
        got = model(x)
    with torch.no_grad():
        with autocast(recipe=CURRENT):
            hidden = model[0](x).relu()
        with autocast(recipe=MXFP8):
            assert torch.equal(got, model[2](hidden))


def test_per_layer_none_is_high_precision() -> None:
    model, x = prepare(make_model()), torch.randn(4, 32)
    layer = model[2]
    with autocast(recipe=recipe.PerLayer({"2": None}, default=CURRENT)):
        assert torch.equal(layer(x), torch.nn.functional.linear(x, layer.weight, layer.bias))


def test_per_layer_of_one_recipe_equals_the_recipe() -> None:
    x = torch.randn(4, 32)
    got = step(prepare(make_model()), x, recipe.PerLayer({}, default=CURRENT))
    assert_same(got, step(make_model(), x, CURRENT))


def test_per_layer_chooses_by_kind_without_a_name() -> None:
    rules = {recipe.LayerRole("grouped_linear"): None}
    chosen = recipe.PerLayer(rules, default=recipe.DelayedScaling())
    grouped, linear = GroupedLinear(2, 32, 16), Linear(32, 16)
    with autocast(recipe=chosen):
        grouped(torch.randn(4, 32), [2, 2])
        linear(torch.randn(4, 32))
    assert "scale_fwd" not in grouped.state_dict()
    assert "scale_fwd" in linear.state_dict()


def test_per_layer_by_name_refuses_a_layer_without_one() -> None:
    with pytest.raises(RecipeError, match=r"Linear\(32, 32\): .*prepare\(model\)"):
        step(make_model(), torch.randn(4, 32), recipe.PerLayer({"0": CURRENT}))


def test_per_layer_keeps_delayed_state_where_it_is_delayed() -> None:
    model = prepare(make_model())
    chosen = recipe.PerLayer({"0": recipe.DelayedScaling(amax_history_len=4)}, default=MXFP8)
    step(model, torch.full((4, 32), 7.0), chosen)
    assert model[0].scale_fwd[0] == 64.0
    assert "scale_fwd" not in model[2].state_dict()


def test_preparing_again_lets_another_rule_match() -> None:
    model = prepare(torch.nn.Sequential(Linear(32, 32), torch.nn.Sequential(Linear(32, 32))))
    chosen = recipe.PerLayer({"0": None, "*.0": CURRENT}, default=None)
    x = torch.randn(4, 32)
    with autocast(recipe=chosen), torch.no_grad():
        exact = model[0](x)
        prepare(torch.nn.ModuleDict({"0": Linear(32, 32), "decoder": model}))
        assert not torch.equal(model[0](x), exact)


def test_a_custom_recipe_of_scaling_fields_is_delayed_scaling() -> None:
    fields = {"margin": 1, "amax_history_len": 3, "amax_compute_algo": "most_recent"}
    custom, delayed = make_model(), make_model()
    for x in torch.randn(3, 4, 32):
        got = step(custom, x, recipe.CustomRecipe(**fields))
        assert_same(got, step(delayed, x, recipe.DelayedScaling(**fields)))
    assert torch.equal(custom[0].amax_history_fwd, delayed[0].amax_history_fwd)


def test_a_custom_recipe_may_compute_the_scale() -> None:
    def half(
        amax: torch.Tensor, scale: torch.Tensor, fp8_max: torch.Tensor, _: object
    ) -> torch.Tensor:
        return fp8_max / amax / 2

    layer = Linear(32, 16)
    step(layer, torch.full((4, 32), 7.0), recipe.CustomRecipe(scaling_factor_compute_algo=half))
    assert layer.scale_fwd[0] == 32.0


def test_a_factory_is_asked_for_three_tensors_of_the_layer() -> None:
    seen = []

    def factory(role: recipe.QuantizerRole) -> OperandSpec:
        seen.append(role)
        return ROWWISE

    tensors = ("input", "weight", "grad_output")
    chosen = recipe.CustomRecipe(factory)  # checks the formats of a layer without a name
    assert seen == [recipe.QuantizerRole("linear", tensor) for tensor in tensors]
    seen.clear()
    step(Linear(32, 16, name="head"), torch.randn(4, 32), chosen)
    assert seen == [recipe.QuantizerRole("linear", tensor, "head") for tensor in tensors]


@pytest.mark.parametrize(
    "layer",
    [
        LayerNormLinear(32, 16),
        LayerNormMLP(32, 64),
        ops.Sequential(ops.LayerNorm(32), ops.Linear(32, 16)),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_a_factory_is_asked_for_dense_products_as_linear(layer: torch.nn.Module) -> None:
    asked = set()

    def factory(role: recipe.QuantizerRole) -> OperandSpec:
        asked.add(role.module_type)
        return ROWWISE

    step(layer, torch.randn(4, 32), recipe.CustomRecipe(factory))
    assert asked == {"linear"}


def test_a_factory_of_one_spec_has_the_bits_of_the_named_recipe() -> None:
    x = torch.randn(4, 32)
    got = step(make_model(), x, recipe.CustomRecipe(lambda role: ROWWISE))
    assert_same(got, step(make_model(), x, recipe.Float8RowwiseScaling()))


def test_a_factory_of_delayed_requests_has_the_bits_of_delayed_scaling() -> None:
    custom, delayed = make_model(), make_model()
    chosen = recipe.CustomRecipe(lambda role: recipe.DelayedScalingRequest(amax_history_len=4))
    for x in torch.randn(2, 4, 32):
        got = step(custom, x, chosen)
        assert_same(got, step(delayed, x, recipe.DelayedScaling(amax_history_len=4)))


def weight_only(role: recipe.QuantizerRole) -> recipe.TensorPlan:
    spec = ROWWISE if role.tensor_type == "weight" else None
    return recipe.TensorPlan(spec, spec)


def test_a_factory_may_leave_tensors_in_high_precision() -> None:
    layer, x = Linear(32, 16), torch.randn(4, 32)
    leaf = x.clone().requires_grad_()
    with autocast(recipe=recipe.CustomRecipe(weight_only)):
        y = layer(leaf)
    dy = torch.randn(4, 16)
    y.backward(dy)
    # The weight gradient has two operands in high precision, so it is exact.
    torch.testing.assert_close(layer.weight.grad, dy.t() @ x)
    assert not torch.equal(y, torch.nn.functional.linear(x, layer.weight, layer.bias))


class WithoutMixedProducts(ReferenceBackend):
    def unsupported(self, desc: OpDesc, device: torch.device) -> str | None:
        is_mixed = isinstance(desc, GemmDesc) and (desc.a is None) != (desc.b is None)
        return "no mixed products" if is_mixed else super().unsupported(desc, device)


@pytest.mark.parametrize("groups", [0, 2])
def test_a_weight_alone_in_low_precision_is_decoded_where_no_backend_multiplies_it(
    monkeypatch: pytest.MonkeyPatch, groups: int
) -> None:
    name = "without_mixed_products"
    spec = BackendSpec(
        name=name,
        device_types=("cpu",),
        factory=f"{__name__}:WithoutMixedProducts",
        priority=-1,
        api_version=API_VERSION,
        operand_fields=("row_scaled", "four_over_six", "scale_max"),
    )
    monkeypatch.setitem(plugins.load().backends, name, spec)
    make = (lambda: GroupedLinear(groups, 64, 32)) if groups else (lambda: Linear(64, 32))
    results = []
    for backend in ("reference", name):
        torch.manual_seed(0)
        layer, x = make(), torch.randn(8, 64, requires_grad=True)
        arguments = ([5, 3],) if groups else ()
        with fp8core.use_backend(backend), autocast(recipe=recipe.WeightOnly("block")):
            y = layer(x, *arguments)
        y.square().sum().backward()
        results.append([y, x.grad, *(p.grad for p in layer.parameters())])
    torch.testing.assert_close(*results)
    with fp8core.use_backend(name):
        report = str(fp8core.explain(layer, recipe.WeightOnly("block"), device="cpu"))
    assert name in report


def test_a_factory_may_quantize_one_orientation() -> None:
    def forward_only(role: recipe.QuantizerRole) -> recipe.TensorPlan:
        is_forward = role.tensor_type != "grad_output"
        return recipe.TensorPlan(ROWWISE if is_forward else None, None)

    layer, x = Linear(32, 16), torch.randn(4, 32, requires_grad=True)
    with autocast(recipe=recipe.CustomRecipe(forward_only)):
        y = layer(x)
    dy = torch.randn(4, 16)
    y.backward(dy)
    torch.testing.assert_close(x.grad, dy @ layer.weight)
    torch.testing.assert_close(layer.weight.grad, dy.t() @ x)


def test_a_factory_may_quantize_for_backward_alone() -> None:
    def backward_only(role: recipe.QuantizerRole) -> recipe.TensorPlan:
        return recipe.TensorPlan(ROWWISE if role.tensor_type == "grad_output" else None, ROWWISE)

    layer, x = Linear(32, 16), torch.randn(4, 32, requires_grad=True)
    with autocast(recipe=recipe.CustomRecipe(backward_only)):
        y = layer(x)
    dy = torch.randn(4, 16)
    y.backward(dy)
    assert torch.equal(y, torch.nn.functional.linear(x, layer.weight, layer.bias))
    wanted = Linear(32, 16)
    wanted.load_state_dict(layer.state_dict())
    leaf = x.detach().clone().requires_grad_()
    with autocast(recipe=recipe.Float8RowwiseScaling()):
        wanted(leaf).backward(dy)
    assert_same([x.grad, layer.weight.grad], [leaf.grad, wanted.weight.grad])


def test_a_factory_may_mix_delayed_and_current() -> None:
    def mixed(role: recipe.QuantizerRole) -> object:
        is_weight = role.tensor_type == "weight"
        return recipe.DelayedScalingRequest(amax_history_len=4) if is_weight else ROWWISE

    layer = Linear(32, 16)
    step(layer, torch.full((4, 32), 7.0), recipe.CustomRecipe(mixed))
    weight = layer.weight.detach().abs().max().item()
    assert layer.amax_history_fwd[-1].tolist() == [0.0, weight, 0.0]
    assert not layer.amax_history_bwd.any()


def test_a_factory_s_mistake_is_told_with_the_layer() -> None:
    with pytest.raises(RecipeError, match=r"'head'.*qfactory returned None for input"):
        step(
            Linear(32, 16, name="head"), torch.randn(4, 32), recipe.CustomRecipe(lambda role: None)
        )


def test_an_operand_that_no_backend_makes_is_told_with_the_layer() -> None:
    stochastic = OperandSpec("e4m3", (0, 0), 448.0, stochastic=True)
    with pytest.raises(UnsupportedError, match=r"'head'.*no backend runs"):
        step(
            Linear(32, 16, name="head"),
            torch.randn(4, 32),
            recipe.CustomRecipe(lambda _: stochastic),
        )


def test_an_operand_that_cannot_be_constructed_is_told_when_the_recipe_is_made() -> None:
    with pytest.raises(RecipeError, match=r"OperandSpec\(block=\(3, 0\)\)"):
        recipe.CustomRecipe(lambda _: OperandSpec("e4m3", (3, 0), 448.0))


def test_an_operand_that_cannot_be_constructed_for_a_layer_is_told_with_the_layer() -> None:
    def factory(role: recipe.QuantizerRole) -> OperandSpec:
        return OperandSpec("e4m3", (3, 0), 448.0) if role.name else ROWWISE

    with pytest.raises(RecipeError, match=r"'head'.*OperandSpec\(block=\(3, 0\)\)"):
        step(Linear(32, 16, name="head"), torch.randn(4, 32), recipe.CustomRecipe(factory))


def test_another_recipe_on_a_live_layer_takes_effect_at_once() -> None:
    layer, x = Linear(32, 16), torch.randn(4, 32)
    found: dict[str, torch.Tensor] = {}
    for name in (*recipe.names(), *reversed(recipe.names())):
        layer.reset_delayed_state()
        torch.manual_seed(0)
        with autocast(recipe=recipe.by_name(name)), torch.no_grad():
            y = layer(x)
        assert torch.equal(found.setdefault(name, y), y)


def test_backward_follows_the_recipe_of_its_forward() -> None:
    layer, x, dy = Linear(32, 16), torch.randn(4, 32), torch.randn(4, 16)
    outputs = []
    for chosen in (CURRENT, MXFP8):
        with autocast(recipe=chosen):
            outputs.append(layer(x))
    grads = [torch.autograd.grad(y, layer.weight, dy)[0] for y in outputs]
    for chosen, grad in zip((CURRENT, MXFP8), grads, strict=True):
        with autocast(recipe=chosen):
            y = layer(x)
        assert torch.equal(torch.autograd.grad(y, layer.weight, dy)[0], grad)


# --- a layer that computes by another kind of recipe than before says so, once ---


@pytest.fixture(autouse=True)
def _nothing_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporting, "_logged", set())


def run(layer: fp8core.Linear, chosen: recipe.Recipe | None) -> None:
    with fp8core.autocast(enabled=chosen is not None, recipe=chosen):
        layer(torch.ones(32, 32)).sum().backward()


def test_a_change_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    layer, other = fp8core.Linear(32, 32), fp8core.Linear(32, 32)
    for one in (layer, other):
        run(one, recipe.Float8CurrentScaling())
    assert "recipe changed" not in caplog.text
    for one in (layer, other, layer):
        run(one, recipe.MXFP8BlockScaling())
    assert caplog.text.count("recipe changed from Float8CurrentScaling to MXFP8BlockScaling") == 1


def test_high_precision_between_two_recipes_hides_no_change(
    caplog: pytest.LogCaptureFixture,
) -> None:
    layer = fp8core.Linear(32, 32)
    for chosen in (recipe.Float8CurrentScaling(), None, recipe.MXFP8BlockScaling()):
        run(layer, chosen)
    assert "recipe changed" in caplog.text


def test_another_value_of_the_same_kind_is_no_change(caplog: pytest.LogCaptureFixture) -> None:
    layer = fp8core.Linear(32, 32)
    for power in (False, True):
        run(layer, recipe.Float8CurrentScaling(use_power_2_scales=power))
    assert "recipe changed" not in caplog.text


def test_the_layers_of_a_per_layer_recipe_keep_theirs(caplog: pytest.LogCaptureFixture) -> None:
    model = torch.nn.Sequential(fp8core.Linear(32, 32), fp8core.Linear(32, 32))
    fp8core.prepare(model)
    for rules in ({"0": "mxfp8"}, {"0": "mxfp8", "1": "current"}):
        with fp8core.autocast(recipe=recipe.PerLayer(rules, default="current")):
            model(torch.ones(32, 32))
    assert "recipe changed" not in caplog.text


def test_a_layer_that_quantizes_nothing_has_no_recipe_to_change(
    caplog: pytest.LogCaptureFixture,
) -> None:
    norm, t = fp8core.RMSNorm(32), torch.ones(4, 1, 2, 32)
    angles = fp8core.RotaryPositionEmbedding(32)(4)
    for chosen in (recipe.Float8CurrentScaling(), recipe.DelayedScaling()):
        with fp8core.autocast(recipe=chosen):
            fp8core.apply_rotary_pos_emb(norm(t), angles)
    assert "recipe changed" not in caplog.text
