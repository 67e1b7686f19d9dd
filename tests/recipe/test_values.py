"""A recipe is a value: frozen, compared by value, and the same after any kind of copy."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fp8core import formats
from fp8core.errors import RecipeError, UnsupportedError
from fp8core.recipe import (
    CustomRecipe,
    DelayedScaling,
    DelayedScalingRequest,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    Format,
    MMParams,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    OperandSpec,
    PerLayer,
    QParams,
    QuantizerRole,
    Recipe,
    WeightOnly,
)
from fp8core.recipe.plan import DEFAULT_HOLDING, HOLDING, LayerRole


def factory(role: QuantizerRole) -> OperandSpec:
    return OperandSpec("e4m3", (1, 0), 448.0)


def latest(history: torch.Tensor) -> torch.Tensor:
    return history[0]


# Each recipe with values that are not its defaults, and one field changed.
VALUES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "delayed": (
        lambda: DelayedScaling(margin=1, amax_history_len=4, amax_compute_algo=latest),
        {"amax_compute_algo": "max"},
    ),
    "current": (
        lambda: Float8CurrentScaling(fp8_gemm_fprop=MMParams(True)),
        {"use_power_2_scales": True},
    ),
    "rowwise": (lambda: Float8RowwiseScaling(use_power_2_scales=True), {"fp8_format": "hybrid"}),
    "mxfp8": (lambda: MXFP8BlockScaling(fp8_format="HYBRID"), {"enable_2d_quantization": True}),
    "block": (lambda: Float8BlockScaling(use_f32_scales=True), {"w_block_scaling_dim": 1}),
    "nvfp4": (lambda: NVFP4BlockScaling(disable_rht=True), {"disable_rht": False}),
    "custom_fields": (lambda: CustomRecipe(margin=0.1, amax_history_len=10), {"margin": 0.2}),
    "custom_factory": (lambda: CustomRecipe(factory), {"backward_override": "high_precision"}),
    "request": (lambda: DelayedScalingRequest(fp8_format="e5m2"), {"margin": 2}),
    "per_layer": (
        lambda: PerLayer({"*.head": None, LayerRole("linear"): MXFP8BlockScaling()}),
        {"default": DelayedScaling()},
    ),
    "weight_only": (lambda: WeightOnly("block"), {"recipe": MXFP8BlockScaling()}),
}
COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "replace": dataclasses.replace,
    **{
        f"pickle{protocol}": lambda value, protocol=protocol: pickle.loads(
            pickle.dumps(value, protocol)
        )
        for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1)
    },
}
SIGNATURES = {  # Transformer Engine 2.20's fields and defaults
    DelayedScaling: "margin=0, fp8_format='hybrid', amax_history_len=1024, "
    "amax_compute_algo='max', scaling_factor_compute_algo=None, reduce_amax=True, "
    "fp8_dpa=False, fp8_mha=False, backward_override=None",
    Float8CurrentScaling: "use_power_2_scales=False, fp8_format='hybrid', "
    "fp8_gemm_fprop=MMParams(use_split_accumulator=False), "
    "fp8_gemm_dgrad=MMParams(use_split_accumulator=True), "
    "fp8_gemm_wgrad=MMParams(use_split_accumulator=True), "
    "fp8_dpa=False, fp8_mha=False, backward_override=None",
    MXFP8BlockScaling: "margin=0, fp8_format='e4m3', fp8_dpa=False, fp8_mha=False, "
    "backward_override=None, enable_2d_quantization=False",
    Float8BlockScaling: "use_f32_scales=False, fp8_format='e4m3', x_block_scaling_dim=1, "
    "w_block_scaling_dim=2, grad_block_scaling_dim=1, "
    "fp8_gemm_fprop=MMParams(use_split_accumulator=True), "
    "fp8_gemm_dgrad=MMParams(use_split_accumulator=True), "
    "fp8_gemm_wgrad=MMParams(use_split_accumulator=True), "
    "fp8_dpa=False, fp8_mha=False, backward_override=None",
    NVFP4BlockScaling: "disable_rht=False, disable_stochastic_rounding=False, "
    "disable_2d_quantization=False, row_scaled_activation=False, nvfp4_4over6='none', "
    "nvfp4_4over6_e4m3_use_256='all', nvfp4_4over6_err_mode='MAE', fp4_format='e2m1', "
    "fp8_format='e4m3', fp8_dpa=False, fp8_mha=False, backward_override=None",
}
OWN_FIELDS = {
    "nonfinite": "saturate",
    "requantize_weights": False,
    "fp8_dpa_backward": "dequantized",
    "fp8_dpa_output": "fp8",
    "x_wgrad_block_scaling_dim": None,
    "holding": DEFAULT_HOLDING,
}
"""Those that Transformer Engine does not have, by keyword alone."""


@pytest.mark.parametrize("kind", SIGNATURES)
def test_fields_and_defaults_are_transformer_engines_and_a_few_more(kind: type[Recipe]) -> None:
    known = inspect.signature(kind).parameters
    own = ", ".join(f"{name}={value!r}" for name, value in OWN_FIELDS.items() if name in known)
    default = kind()
    assert repr(default) == f"{kind.__name__}({SIGNATURES[kind]}, {own})"
    by_position = [getattr(default, name) for name in known if name not in OWN_FIELDS]
    assert kind(*by_position) == default


@pytest.mark.parametrize("name", VALUES)
def test_recipes_are_equal_by_their_fields(name: str) -> None:
    make, change = VALUES[name]
    original = make()
    assert dataclasses.replace(original, **change) != original
    assert original == make()  # replace leaves it alone
    assert hash(original) == hash(make())
    with pytest.raises((RecipeError, TypeError), match="amx_history_len"):  # as the constructor
        dataclasses.replace(original, amx_history_len=1)


def test_recipes_of_other_classes_differ() -> None:
    made = [make() for make, _ in VALUES.values()]
    assert len(set(made)) == len(made)


@pytest.mark.parametrize("name", VALUES)
def test_a_copy_is_equal_and_frozen(name: str) -> None:
    make, change = VALUES[name]
    for way, copied in ((way, call(make())) for way, call in COPIES.items()):
        assert copied == make(), way
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(copied, next(iter(change)), None)


@pytest.mark.parametrize("name", VALUES)
def test_no_field_can_be_assigned_or_deleted(name: str) -> None:
    made = VALUES[name][0]()
    for field in dataclasses.fields(made):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(made, field.name, getattr(made, field.name))
        with pytest.raises(dataclasses.FrozenInstanceError):
            delattr(made, field.name)
    with pytest.raises((AttributeError, TypeError)):  # TypeError: a slotted dataclass before 3.14
        made.margni = 1


def test_delayed_recipes_that_differ_in_their_algorithm_differ() -> None:
    # Transformer Engine's share a buffer: its key is a repr that leaves this field out.
    assert DelayedScaling(amax_compute_algo="most_recent") != DelayedScaling()


@pytest.mark.parametrize("name", ["delayed", "mxfp8", "custom_fields"])
def test_a_written_field_raises_the_line_to_write(name: str) -> None:
    made: Any = VALUES[name][0]()
    with pytest.raises(RecipeError) as caught:
        made.fp8_format = "e4m3"
    line = "recipe = dataclasses.replace(recipe, fp8_format='e4m3')"
    assert str(caught.value).endswith(f"Make another one: {line}")
    assert dataclasses.is_dataclass(made)


def test_a_misspelt_field_gets_the_nearest() -> None:
    made: Any = DelayedScaling()
    with pytest.raises(RecipeError, match=r"has no field 'margn'.*Did you mean 'margin'\?"):
        made.margn = 2


def test_formats_have_transformer_engines_attributes() -> None:
    assert Format.E4M3.value.max_fwd == 448
    assert Format.HYBRID.value == (448, 57344)
    assert Format.E2M1.value.max_bwd == 6
    assert Format["E5M2"].name == "E5M2"


PREDICATES = {
    "delayed": DelayedScaling,
    "float8_current_scaling": Float8CurrentScaling,
    "float8_block_scaling": Float8BlockScaling,
    "mxfp8": MXFP8BlockScaling,
    "nvfp4": NVFP4BlockScaling,
}


@pytest.mark.parametrize("predicate", [*PREDICATES, "custom"])
def test_a_predicate_is_true_of_its_recipe_alone(predicate: str) -> None:
    custom = CustomRecipe(qfactory=factory)
    recipes = [kind() for kind in PREDICATES.values()] + [custom]
    wanted = [*PREDICATES, "custom"]
    assert [getattr(one, predicate)() for one in recipes] == [name == predicate for name in wanted]
    assert getattr(recipes[wanted.index(predicate)].__class__, predicate)()  # of the class too


def test_per_tensor_scaling_is_delayed_and_current_scaling() -> None:
    kinds = [kind for kind in PREDICATES.values() if kind.float8_per_tensor_scaling()]
    assert kinds == [DelayedScaling, Float8CurrentScaling]


def test_a_class_of_ones_own_answers_as_its_base() -> None:
    class Mine(MXFP8BlockScaling):
        pass

    assert Mine().mxfp8()
    assert not Mine().delayed()


def test_casts_are_read_from_the_fields() -> None:
    assert Float8CurrentScaling(use_power_2_scales=True).fp8_quant_bwd_grad.power_2_scale
    assert not Float8BlockScaling(use_f32_scales=True).fp8_quant_fwd_inp.power_2_scale
    fp4 = NVFP4BlockScaling(disable_rht=True)
    assert fp4.fp4_quant_fwd_weight == QParams(fp4_2d_quantization=True)
    assert fp4.fp4_quant_bwd_grad == QParams(stochastic_rounding=True)
    assert fp4.fp4_quant_fwd_inp == QParams()


def test_a_role_has_transformer_engines_defaults() -> None:
    role = QuantizerRole()
    assert (role.module_type, role.tensor_type, role.name) == ("", "", "")
    assert {role: 1}[QuantizerRole("", "", "")] == 1


NAMED = (
    DelayedScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    MXFP8BlockScaling,
    Float8BlockScaling,
    NVFP4BlockScaling,
)
ALL = (*NAMED, CustomRecipe, PerLayer, WeightOnly)


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
    *((kind, {"holding": "most"}, r"='most'\): expected one of 'fastest'") for kind in NAMED),
    *(
        (NVFP4BlockScaling, {field: "both"}, r"='both'\): expected one of '")
        for field in ("nvfp4_4over6", "nvfp4_4over6_e4m3_use_256", "nvfp4_4over6_err_mode")
    ),
    (DelayedScaling, {"backward_override": "high_precision"}, r"expected one of None\."),
    (CustomRecipe, {"margin": 0, "backward_override": "high_precision"}, "expected one of"),
    (CustomRecipe, {"qfactory": "e4m3"}, "expected a function of a QuantizerRole"),
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
            if kind is MXFP8BlockScaling:  # a value that devices elsewhere run
                said = r"MXFP8BlockScaling\(fp8_dpa=True\): .*capability 10\.0"
            with pytest.raises(UnsupportedError, match=said):
                kind(**{field: True}).plan(LayerRole("attention"), torch.bfloat16)


def test_base_class_has_no_plan() -> None:
    with pytest.raises(NotImplementedError):
        Recipe().plan(LayerRole(), torch.float32)


@pytest.mark.parametrize("kind", NAMED)
def test_a_recipe_pickled_before_it_had_a_field_has_the_default(kind: Any) -> None:
    old, restored = kind(nonfinite="propagate"), kind.__new__(kind)
    assert dataclasses.fields(kind)[-1].name == "holding"
    restored.__setstate__(old.__getstate__()[:-1])
    assert restored == old


def test_custom_recipes_take_requantize_weights() -> None:
    with pytest.raises(RecipeError, match="requantize_weights='no'"):
        CustomRecipe(margin=1, requantize_weights="no")
    for given in (True, False):
        for chosen in (
            CustomRecipe(margin=1, requantize_weights=given),
            CustomRecipe(lambda role: DelayedScalingRequest(), requantize_weights=given),
            *(kind(requantize_weights=given) for kind in NAMED),
        ):
            remade = chosen.plan(LayerRole(), torch.bfloat16).remade
            assert ("weight" in remade) is (given or "weight" in HOLDING[chosen.holding])
