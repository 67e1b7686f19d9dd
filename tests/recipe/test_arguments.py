"""What a recipe's constructor refuses, and what the message says."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

import fp8core
from fp8core import formats
from fp8core.errors import RecipeError, UnsupportedError
from fp8core.recipe import (
    CustomRecipe,
    DelayedScaling,
    DelayedScalingRequest,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    MMParams,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    PerLayer,
    Recipe,
)
from fp8core.recipe.plan import LayerRole

NAMED = (
    DelayedScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    MXFP8BlockScaling,
    Float8BlockScaling,
    NVFP4BlockScaling,
)
ALL = (*NAMED, CustomRecipe, PerLayer)


def test_unknown_argument_gets_the_list_of_valid_ones() -> None:
    for kind in ALL:
        with pytest.raises(RecipeError) as caught:
            kind(qqq=1)
        valid = ", ".join(inspect.signature(kind).parameters)
        assert str(caught.value) == f"{kind.__name__} has no argument 'qqq'; valid ones: {valid}."


def test_misspelt_argument_gets_the_nearest() -> None:
    for kind, given, nearest in (
        (DelayedScaling, "amax_histroy_len", "amax_history_len"),
        (CustomRecipe, "qfactry", "qfactory"),
        (PerLayer, "rule", "rules"),
    ):
        said = rf"no argument {given!r}.*Did you mean {nearest!r}\?"
        with pytest.raises(RecipeError, match=said):
            kind(**{given: 1})


def test_errors_of_recipes_are_value_errors() -> None:
    with pytest.raises(ValueError, match="no argument 'qqq'"):
        DelayedScaling(qqq=1)


@pytest.mark.parametrize("scope", ["activations", "all"])
def test_two_maxima_of_activations_exclude_the_hadamard_transform(scope: str) -> None:
    with pytest.raises(RecipeError, match=rf"nvfp4_4over6='{scope}'\) needs disable_rht=True"):
        NVFP4BlockScaling(nvfp4_4over6=scope)
    NVFP4BlockScaling(nvfp4_4over6=scope, disable_rht=True)
    NVFP4BlockScaling(nvfp4_4over6="weights")


FORMATTED = (
    DelayedScaling,
    DelayedScalingRequest,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    MXFP8BlockScaling,
    Float8BlockScaling,
    CustomRecipe,
)


@pytest.mark.parametrize("kind", [*FORMATTED, NVFP4BlockScaling])
def test_what_is_no_format_of_elements_is_refused(kind: type[Recipe]) -> None:
    known = ", ".join(sorted([*formats.names(), "hybrid"]))
    said = {
        "e4m4": f"^no format 'e4m4'; known: {known}. Did you mean 'e4m3'\\?$",
        8: r"Format\(8\): expected the name of a format",
        "e8m0": "e8m0 has no negative values, it is for scales|only 'e4m3' exists",
    }
    for value, match in said.items():
        with pytest.raises(RecipeError, match=match):
            kind(fp8_format=value)


def test_pure_e5m2_is_refused_for_delayed_scaling() -> None:
    for kind in (DelayedScaling, CustomRecipe):
        for spelling in ("e5m2", "E5M2"):
            said = rf"^{kind.__name__}\(fp8_format=.*too few mantissa bits"
            with pytest.raises(RecipeError, match=said):
                kind(fp8_format=spelling)


Case = tuple[type[Recipe], dict[str, Any], str]
ACCUMULATING = (Float8CurrentScaling, Float8RowwiseScaling, Float8BlockScaling)
DELAYED = (DelayedScaling, DelayedScalingRequest, CustomRecipe)
WRONG: list[Case] = [
    *(
        (kind, {"amax_history_len": length}, "expected an integer >= 1")
        for kind in DELAYED
        for length in (0, 1.5, True)
    ),
    *((kind, {"amax_compute_algo": "mean"}, "'max', 'most_recent'") for kind in DELAYED),
    *(
        (kind, {"margin": margin}, "expected a finite number")
        for kind in DELAYED
        for margin in ("1", float("nan"), float("inf"))
    ),
    *((kind, {"scaling_factor_compute_algo": "x"}, "a function or None") for kind in DELAYED),
    *((kind, {"fp8_gemm_fprop": True}, "expected an MMParams") for kind in ACCUMULATING),
    *((kind, {"fp8_gemm_wgrad": None}, "expected an MMParams") for kind in ACCUMULATING),
    *((kind, {"backward_override": "bf16"}, "expected one of") for kind in NAMED),
    *(
        (kind, {"requantize_weights": value}, "expected True or False")
        for kind in NAMED
        for value in (1, "yes", None)
    ),
    *(
        (NVFP4BlockScaling, {field: "both"}, r"='both'\): expected one of \(")
        for field in ("nvfp4_4over6", "nvfp4_4over6_e4m3_use_256", "nvfp4_4over6_err_mode")
    ),
    (DelayedScaling, {"backward_override": "high_precision"}, r"expected one of \(None,\)"),
    (CustomRecipe, {"margin": 0, "backward_override": "high_precision"}, "expected one of"),
    (MXFP8BlockScaling, {"margin": 1}, "would have no effect"),
    *(
        (Float8BlockScaling, {f"fp8_gemm_{name}": MMParams(False)}, "block scales are applied in")
        for name in ("fprop", "dgrad", "wgrad")
    ),
    *(
        (Float8BlockScaling, {f"{name}_block_scaling_dim": 3}, "expected 1 or 2")
        for name in ("x", "w", "grad")
    ),
    (NVFP4BlockScaling, {"fp4_format": "e4m3"}, "only 'e2m1' exists"),
    (NVFP4BlockScaling, {"fp8_format": "e5m2"}, "only 'e4m3' exists"),
]


def test_value_without_a_meaning_is_refused() -> None:
    for kind, fields, reason in WRONG:
        with pytest.raises(RecipeError, match=reason) as caught:
            kind(**fields)
        assert kind.__name__ in str(caught.value)
        name, value = list(fields.items())[-1]
        assert f"{name}={value!r}" in str(caught.value)


def test_low_precision_attention_is_refused_as_not_offered() -> None:
    for kind in NAMED[2:]:
        for field in ("fp8_dpa", "fp8_mha"):
            said = rf"{kind.__name__}\({field}=True\).*not offered"
            with pytest.raises(UnsupportedError, match=said):
                kind(**{field: True})


@pytest.mark.parametrize("recipe", [MXFP8BlockScaling, 8])
def test_autocast_refuses_what_is_no_recipe(recipe: Any) -> None:
    with pytest.raises(RecipeError, match=r"expected a Recipe, a recipe's name or None"):
        fp8core.autocast(recipe=recipe)


def test_base_class_has_no_plan() -> None:
    with pytest.raises(NotImplementedError):
        Recipe().plan(LayerRole(), torch.float32)


def test_custom_recipes_take_requantize_weights() -> None:
    with pytest.raises(RecipeError, match="requantize_weights='no'"):
        CustomRecipe(margin=1, requantize_weights="no")
    for given in (True, False):
        for chosen in (
            CustomRecipe(margin=1, requantize_weights=given),
            CustomRecipe(lambda role: DelayedScalingRequest(), requantize_weights=given),
            *(kind(requantize_weights=given) for kind in NAMED),
        ):
            plan = chosen.plan(LayerRole(), torch.bfloat16)
            assert plan.requantize_weights is given
