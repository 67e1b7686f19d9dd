"""Recipes of several parts: ``CustomRecipe`` by role or by fields, ``PerLayer`` by name or role."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fp8core
from fp8core.errors import RecipeError
from fp8core.recipe import (
    CustomRecipe,
    DelayedScaling,
    DelayedScalingRequest,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
    OperandSpec,
    PerLayer,
    QuantizerRole,
    TensorPlan,
    WeightOnly,
)
from fp8core.recipe.plan import HIGH_PRECISION, LayerRole

ROW = OperandSpec("e4m3", (1, 0), 448.0)
TENSOR = OperandSpec("e4m3", (0, 0), 448.0)
TENSOR_E5M2 = OperandSpec("e5m2", (0, 0), 57344.0)


def always(made: Any) -> Callable[[QuantizerRole], Any]:
    return lambda role: made


def plan(factory: Callable[[QuantizerRole], Any]) -> Any:
    return CustomRecipe(factory).plan(LayerRole(), torch.bfloat16)


def test_neither_way_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"either qfactory or scaling fields.*found neither"):
        CustomRecipe()


def test_a_misspelt_format_fails_when_the_recipe_is_made_and_lists_the_formats() -> None:
    misspelt = OperandSpec("e4m4", (0, 0), 448.0)
    said = r"returned for input: no format 'e4m4'; known: e2m1, e4m3.* Did you mean 'e4m3'\?"
    for answer in (misspelt, TensorPlan(TENSOR, misspelt)):
        with pytest.raises(RecipeError, match=said):
            CustomRecipe(always(answer))
    with pytest.raises(RecipeError, match=r"no format 'hybird'; .* Did you mean 'hybrid'\?"):
        CustomRecipe(lambda role: DelayedScalingRequest(fp8_format="hybird"))


def test_a_factory_that_needs_names_is_asked_again_for_a_layer() -> None:
    answers = {"fc1": OperandSpec("e4m4", (0, 0), 448.0), "fc2": TENSOR}
    chosen = CustomRecipe(lambda role: answers[role.name])
    assert chosen.plan(LayerRole(name="fc2"), torch.bfloat16).fprop.a == TENSOR
    with pytest.raises(RecipeError, match="no format 'e4m4'"):
        chosen.plan(LayerRole(name="fc1"), torch.bfloat16)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("margin", 0),
        ("fp8_format", Format.E4M3),
        ("amax_history_len", 10),
        ("amax_compute_algo", "max"),
        ("scaling_factor_compute_algo", max),
    ],
)
def test_both_ways_are_refused(field: str, value: Any) -> None:
    with pytest.raises(RecipeError, match=f"found qfactory and {field}"):
        CustomRecipe(always(ROW), **{field: value})


def test_transformer_engine_s_default_format_beside_a_factory_says_nothing() -> None:
    factory = always(ROW)
    assert CustomRecipe(factory, Format.HYBRID) == CustomRecipe(factory)


def test_the_alignment_of_padding_changes_nothing() -> None:
    factory = always(ROW)
    assert CustomRecipe(factory, quantization_alignment=32) == CustomRecipe(factory)
    with pytest.raises(RecipeError, match="quantization_alignment=0"):
        CustomRecipe(factory, quantization_alignment=0)


@pytest.mark.parametrize("field", ["margin", "amax_history_len"])
def test_one_scaling_field_is_enough(field: str) -> None:
    custom, delayed = CustomRecipe(**{field: 2}), DelayedScaling(**{field: 2})
    role = LayerRole()
    assert custom.plan(role, torch.bfloat16) == delayed.plan(role, torch.bfloat16)


def test_factory_is_asked_for_each_tensor_with_its_role() -> None:
    asked: list[QuantizerRole] = []

    def factory(role: QuantizerRole) -> OperandSpec:
        asked.append(role)
        return ROW

    chosen = CustomRecipe(factory)
    asked.clear()
    chosen.plan(LayerRole("grouped_linear", "moe.experts"), torch.bfloat16)
    assert asked == [
        QuantizerRole("grouped_linear", tensor, "moe.experts")
        for tensor in ("input", "weight", "grad_output")
    ]


@pytest.mark.parametrize(("name", "prefix"), [("encoder.mlp", "encoder.mlp."), (None, "")])
def test_factory_is_asked_for_both_products_of_a_mlp(name: str | None, prefix: str) -> None:
    asked: list[QuantizerRole] = []

    def factory(role: QuantizerRole) -> OperandSpec:
        asked.append(role)
        return ROW

    chosen = CustomRecipe(factory)
    asked.clear()
    chosen.plan(LayerRole("layernorm_mlp", name), torch.bfloat16)
    assert asked == [
        QuantizerRole("linear", tensor, f"{prefix}{product}")
        for product in ("fc1", "fc2")
        for tensor in ("input", "weight", "grad_output")
    ]


def test_different_answers_for_the_products_of_a_mlp_are_refused() -> None:
    layer = fp8core.LayerNormMLP(16, 32, name="mlp", device="cpu")
    recipe = CustomRecipe(lambda role: ROW if role.name == "mlp.fc1" else TENSOR)
    with (
        fp8core.autocast(recipe=recipe),
        pytest.raises(RecipeError, match=r"different answers for mlp\.fc1 and mlp\.fc2"),
    ):
        layer(torch.zeros(4, 16))


def test_factory_is_not_asked_before_a_plan_is() -> None:
    CustomRecipe(lambda role: 1 / 0)


def test_operand_spec_is_for_both_orientations() -> None:
    assert plan(always(ROW)).input == TensorPlan(ROW, ROW)


def test_tensor_plan_is_one_for_each_orientation() -> None:
    made = TensorPlan(ROW, TENSOR)
    assert plan(always(made)).weight == made


def test_none_within_a_tensor_plan_is_high_precision() -> None:
    assert plan(always(TensorPlan(None, None))).is_high_precision


def test_request_is_a_tensorwise_delayed_scale() -> None:
    made = plan(always(DelayedScalingRequest()))
    assert made == DelayedScaling().plan(LayerRole(), torch.bfloat16)


def test_requests_of_a_layer_may_differ_in_format() -> None:
    def factory(role: QuantizerRole) -> DelayedScalingRequest:
        name = "e5m2" if role.tensor_type == "grad_output" else "e4m3"
        return DelayedScalingRequest(fp8_format=name)

    assert plan(factory) == DelayedScaling().plan(LayerRole(), torch.bfloat16)


def test_requests_of_a_layer_that_differ_otherwise_are_refused() -> None:
    def factory(role: QuantizerRole) -> DelayedScalingRequest:
        return DelayedScalingRequest(margin=float(role.tensor_type == "weight"))

    with pytest.raises(RecipeError, match="delayed slots of one layer share their history"):
        plan(factory)


@pytest.mark.parametrize(
    "made",
    [None, "e4m3", (ROW, ROW), DelayedScaling(), TensorPlan("e4m3", None)],
    ids=["none", "name", "tuple", "recipe", "plan_of_names"],
)
def test_factory_that_makes_something_else_is_refused(made: Any) -> None:
    with pytest.raises(RecipeError) as caught:
        plan(always(made))
    assert f"qfactory returned {made!r} for input; expected an OperandSpec" in str(caught.value)


def test_delayed_spec_without_a_request_is_refused() -> None:
    spec = OperandSpec("e4m3", (0, 0), 448.0, delayed=True)
    with pytest.raises(RecipeError, match="return a DelayedScalingRequest"):
        plan(always(spec))


def test_factory_that_says_what_a_named_recipe_says_computes_the_same() -> None:
    def factory(role: QuantizerRole) -> OperandSpec:
        return TENSOR_E5M2 if role.tensor_type == "grad_output" else TENSOR

    layer = fp8core.Linear(16, 8)
    x = torch.randn(4, 16, requires_grad=True)
    gradients = []
    for recipe in (CustomRecipe(factory), Float8CurrentScaling()):
        with fp8core.autocast(recipe=recipe):
            gradients.append(torch.autograd.grad(layer(x).square().sum(), [x, layer.weight]))
    assert all(map(torch.equal, *gradients))


def test_error_in_a_factorys_answer_names_the_layer() -> None:
    layer = fp8core.Linear(16, 8, name="decoder.fc1")
    with (
        fp8core.autocast(recipe=CustomRecipe(always(None))),
        pytest.raises(
            RecipeError, match=r"^'decoder.fc1' .*: CustomRecipe: qfactory returned None"
        ),
    ):
        layer(torch.zeros(4, 16))


BLOCK, CURRENT, MX = Float8BlockScaling(), Float8CurrentScaling(), MXFP8BlockScaling()
RULES = {
    "*.head": None,
    LayerRole("grouped_linear", "moe.*"): BLOCK,
    LayerRole("grouped_linear"): MX,
    "decoder.[01].*": BLOCK,
    "decoder.*.fc1": MX,
}


def test_first_matching_rule_decides() -> None:
    chosen = PerLayer(RULES, default=CURRENT)
    for role, expected in (
        (LayerRole("linear", "model.head"), None),
        (LayerRole("grouped_linear", "model.head"), None),
        (LayerRole("grouped_linear", "moe.experts"), BLOCK),
        (LayerRole("grouped_linear", "other.experts"), MX),
        (LayerRole("linear", "moe.experts"), CURRENT),
        (LayerRole("linear", "decoder.1.fc1"), BLOCK),
        (LayerRole("linear", "decoder.2.fc1"), MX),
        (LayerRole("linear", "decoder.2.fc2"), CURRENT),
        (LayerRole("linear", "decoder.2.FC1"), CURRENT),
        (LayerRole("linear", "head"), CURRENT),
    ):
        assert chosen.choose(role) == expected, role


def test_no_rule_and_no_default_is_no_quantization() -> None:
    assert PerLayer({}).plan(LayerRole(), torch.bfloat16) == HIGH_PRECISION


def test_none_is_no_quantization() -> None:
    recipe = PerLayer({LayerRole("linear"): None}, default=CURRENT)
    assert recipe.plan(LayerRole(), torch.bfloat16) == HIGH_PRECISION


def test_rules_may_nest() -> None:
    role = LayerRole("linear", "decoder.2.fc1")
    inner = PerLayer({"*.fc1": MX}, default=CURRENT)
    assert PerLayer({"decoder.*": inner}).plan(role, torch.bfloat16) == MX.plan(
        role, torch.bfloat16
    )


def test_pairs_are_the_same_as_a_mapping() -> None:
    pairs = [[key, value] for key, value in RULES.items()]
    assert PerLayer(pairs, CURRENT) == PerLayer(RULES, CURRENT)


def test_order_of_the_rules_is_part_of_the_value() -> None:
    assert PerLayer({"a": MX, "b": None}) != PerLayer({"b": None, "a": MX})


def test_default_is_part_of_the_value() -> None:
    assert PerLayer({"a": MX}) != PerLayer({"a": MX}, default=CURRENT)


def test_later_change_of_the_given_mapping_changes_nothing() -> None:
    rules: dict[str | LayerRole, Any] = {"a": MX}
    recipe = PerLayer(rules)
    rules["b"] = None
    assert recipe == PerLayer({"a": MX})


def test_pattern_needs_a_name_and_says_how_to_get_one() -> None:
    with pytest.raises(RecipeError) as caught:
        PerLayer({"*.fc1": MX}).plan(LayerRole(), torch.bfloat16)
    message = str(caught.value)
    assert "'*.fc1'" in message
    assert "Call fp8core.prepare(model) first, or pass name=." in message


def test_role_without_a_name_needs_none() -> None:
    assert PerLayer({LayerRole("linear"): MX}).choose(LayerRole()) == MX


def test_what_is_no_rule_is_refused() -> None:
    table: tuple[tuple[Any, str], ...] = (
        ({3: None}, "rule 3: expected a name pattern or a LayerRole"),
        ({"a": "mxpf8"}, "rule 'a': no recipe is called 'mxpf8'"),
        ({"a": MXFP8BlockScaling}, "rule 'a': expected a Recipe, a recipe's name or None, found"),
        ("abc", "PerLayer('abc'): expected a mapping, or pairs"),
        ([("a",)], "expected a mapping, or pairs"),
        (MX, "expected a mapping, or pairs"),
        (None, "expected a mapping, or pairs"),
    )
    for rules, reason in table:
        with pytest.raises(RecipeError, match=re.escape(reason)):
            PerLayer(rules)


def test_default_that_is_no_recipe_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"PerLayer\(default=...\): expected a Recipe, a"):
        PerLayer({}, default=3)


def test_rules_and_default_take_names() -> None:
    named = PerLayer({"a": "mxfp8", "b": None}, default="Float8CurrentScaling")
    assert named == PerLayer({"a": MX, "b": None}, default=Float8CurrentScaling())


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(fp8core.Linear(32, 32), fp8core.Linear(32, 32))
        self.head = fp8core.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.body(x))
        return result


def test_prepared_model_computes_each_layer_as_its_rule_says() -> None:
    model, x = fp8core.prepare(Model()), torch.randn(32, 32)
    with fp8core.autocast(recipe=PerLayer({"body.0": MX, "head": None}, default=CURRENT)):
        mixed = model(x)
    with fp8core.autocast(recipe=MX):
        x = model.body[0](x)
    with fp8core.autocast(recipe=CURRENT):
        x = model.body[1](x)
    assert torch.equal(mixed, model.head(x))


def test_model_that_is_not_prepared_is_refused_with_the_remedy() -> None:
    with (
        fp8core.autocast(recipe=PerLayer({"body.*": MX})),
        pytest.raises(RecipeError, match=r"Linear\(32, 32\): .*fp8core\.prepare\(model\)"),
    ):
        Model()(torch.randn(32, 32))


def test_delayed_scaling_keeps_state_in_its_own_layers_only() -> None:
    model = fp8core.prepare(Model())
    with fp8core.autocast(recipe=PerLayer({"head": DelayedScaling()}, default=CURRENT)):
        model(torch.randn(32, 32))
    owners = {name.rpartition(".")[0] for name, _ in model.named_buffers()}
    assert owners == {"head"}


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ({"hed": None}, "rule 'hed' matches no layer .* body.0, body.1, head. Did you mean 'head'"),
        ({"head": MX, "body.*.fc": None}, r"rule 'body.\*.fc' matches no layer"),
        ({LayerRole("linear", "hed"): MX}, "rule 'hed' matches no layer"),
        ({LayerRole("grouped_linear", "head"): MX}, "rule 'head' matches no layer"),
        ({"*": PerLayer({"hed": None}, default=MX)}, "rule 'hed' matches no layer"),
    ],
    ids=["name", "pattern", "role", "kind", "nested"],
)
def test_pattern_that_matches_nothing_in_a_prepared_model_is_an_error_that_lists_what_exists(
    rules: Any, said: str
) -> None:
    model = fp8core.prepare(Model())
    for _ in range(2):
        with fp8core.autocast(recipe=PerLayer(rules)), pytest.raises(RecipeError, match=said):
            model(torch.randn(32, 32))


def test_pattern_that_matches_nothing_is_an_error_in_a_graph() -> None:
    run = torch.compile(fp8core.prepare(Model()), backend="eager")
    for _ in range(2):
        with (
            fp8core.autocast(recipe=PerLayer({"hed": None})),
            pytest.raises(RecipeError, match="Did you mean 'head'"),
        ):
            run(torch.randn(32, 32))


def test_patterns_that_match_a_layer_that_does_not_run_are_right() -> None:
    model = fp8core.prepare(Model())
    rules = {"head": None, LayerRole("grouped_linear"): MX, "body.[01]": MX}
    with fp8core.autocast(recipe=PerLayer(rules)):
        model.body(torch.randn(32, 32))
    copied = copy.deepcopy(model)
    with fp8core.autocast(recipe=PerLayer({"hed": None})), pytest.raises(RecipeError):
        copied(torch.randn(32, 32))


def test_prepare_with_the_recipe_finds_a_pattern_that_matches_nothing() -> None:
    with pytest.raises(RecipeError, match="rule 'hed' matches no layer"):
        fp8core.prepare(Model(), recipe=PerLayer({"hed": None}, default=DelayedScaling()))


def test_weight_only_plans_the_rows_of_the_weight_alone() -> None:
    plan: Any = WeightOnly("block").plan(LayerRole(), torch.bfloat16)
    whole: Any = Float8BlockScaling().plan(LayerRole(), torch.bfloat16)
    assert plan.weight == TensorPlan(whole.weight.rowwise, None)
    assert plan.input == plan.grad_output == TensorPlan(None, None)
    assert WeightOnly() == WeightOnly("rowwise")


def test_weight_only_has_no_delayed_scale() -> None:
    plan: Any = WeightOnly("delayed").plan(LayerRole(), torch.bfloat16)
    assert plan == WeightOnly("current").plan(LayerRole(), torch.bfloat16)
    assert plan.delayed is None


def test_weight_only_leaves_attention_in_high_precision() -> None:
    chosen = WeightOnly(Float8CurrentScaling(fp8_dpa=True))
    assert chosen.plan(LayerRole("attention"), torch.bfloat16).is_high_precision


@pytest.mark.parametrize("weights", [None, PerLayer({}), "nothing"])
def test_weight_only_takes_the_recipe_of_weights(weights: Any) -> None:
    with pytest.raises(RecipeError, match=r"WeightOnly\("):
        WeightOnly(weights)
