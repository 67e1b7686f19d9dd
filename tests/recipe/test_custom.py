"""``CustomRecipe``: a quantizer factory by role, or scaling fields; exactly one of the two."""

from __future__ import annotations

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
    Float8CurrentScaling,
    Format,
    OperandSpec,
    QuantizerRole,
    TensorPlan,
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

    CustomRecipe(factory).plan(LayerRole("grouped_linear", "moe.experts"), torch.bfloat16)
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

    CustomRecipe(factory).plan(LayerRole("layernorm_mlp", name), torch.bfloat16)
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
    assert plan(always(TensorPlan(None, None))) == HIGH_PRECISION


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
