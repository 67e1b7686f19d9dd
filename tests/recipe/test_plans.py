"""What each recipe plans for each operand of each GEMM: every cell, written down.

A cell is ``format block target scale_format flags``; ``-`` is high precision. A tensor is its
rowwise cell, then, if it is another one, ``/`` and the columnwise cell.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import pytest
import torch

import fp8core
from fp8core import formats
from fp8core.backend_api import OperandSpec
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
    QuantizerRole,
    Recipe,
)
from fp8core.recipe.plan import DelayedPlan, GemmPlan, LayerRole, LinearPlan, TensorPlan
from tests.dispatch import toys
from tests.pairs import turns

FLAGS = ("power_of_two", "delayed", "stochastic", "row_scaled")


def cell(spec: OperandSpec | None) -> str:
    """One cell as text; every field of the spec that has not its default shows."""
    if spec is None:
        return "-"
    words = [spec.format, "{}x{}".format(*spec.block), f"{spec.target:g}", spec.scale_format]
    words += [name for name in FLAGS if getattr(spec, name)]
    words += [spec.transform] if spec.transform else []
    words += [spec.four_over_six] if spec.four_over_six else []
    words += [f"scales up to {spec.scale_max:g}"] if spec.scale_max != 448 else []
    words += [f"epsilon={spec.amax_epsilon}"] if spec.amax_epsilon else []
    words += [] if spec.cast_first else ["uncast"]
    return " ".join(words)


def tensor(plan: TensorPlan) -> str:
    cells = [cell(plan.rowwise), cell(plan.columnwise)]
    return " / ".join(dict.fromkeys(cells))


def accumulators(plan: LinearPlan) -> str:
    gemms = (plan.fprop, plan.dgrad, plan.wgrad)
    return " ".join("fast" if gemm.fast_accumulation else "split" for gemm in gemms)


class Row(NamedTuple):
    """A recipe, and the cells of input, weight and grad_output; fprop, dgrad, wgrad."""

    recipe: Recipe
    input: str
    weight: str
    grad_output: str
    accumulators: str = "fast split split"


DELAYED = "e4m3 0x0 448 float32 delayed uncast"
DELAYED_E5M2 = "e5m2 0x0 57344 float32 delayed uncast"
TENSOR = "e4m3 0x0 448 float32"
TENSOR_E5M2 = "e5m2 0x0 57344 float32"
TENSOR_POW2 = "e4m3 0x0 448 float32 power_of_two"
ROW = "e4m3 1x0 448 float32"
MX = "e4m3 1x32 448 e8m0"
LINE = "e4m3 1x128 448 float32 power_of_two"
SQUARE = "e4m3 128x128 448 float32 power_of_two"
NV = "e2m1 1x16 6 e4m3"
NV_SQUARE = "e2m1 16x16 6 e4m3"
NV_RHT = f"{NV} / {NV} hadamard16"
NV_SR = f"{NV} stochastic"
SPLITS = "split split split"
KEEP = "high_precision"


def factory(role: QuantizerRole) -> OperandSpec | TensorPlan | DelayedScalingRequest:
    """An MX input, a weight that is quantized for fprop alone, a delayed e5m2 gradient."""
    row = OperandSpec("e4m3", (1, 0), 448.0)
    return {
        "input": OperandSpec("e4m3", (1, 32), 448.0, "e8m0"),
        "weight": TensorPlan(row, None),
        "grad_output": DelayedScalingRequest(fp8_format=Format.E5M2),
    }[role.tensor_type]


TABLE = {
    "delayed": Row(DelayedScaling(), DELAYED, DELAYED, DELAYED_E5M2),
    "delayed e4m3": Row(DelayedScaling(fp8_format=Format.E4M3), DELAYED, DELAYED, DELAYED),
    "current": Row(Float8CurrentScaling(), TENSOR, TENSOR, TENSOR_E5M2),
    "current e4m3": Row(Float8CurrentScaling(fp8_format=Format.E4M3), TENSOR, TENSOR, TENSOR),
    "current power of two": Row(
        Float8CurrentScaling(use_power_2_scales=True, fp8_format=Format.E4M3),
        *(TENSOR_POW2,) * 3,
    ),
    "current accumulators": Row(
        Float8CurrentScaling(fp8_gemm_fprop=MMParams(True), fp8_gemm_wgrad=MMParams(False)),
        TENSOR,
        TENSOR,
        TENSOR_E5M2,
        "split split fast",
    ),
    "current forward only": Row(
        Float8CurrentScaling(backward_override=KEEP), f"{TENSOR} / -", f"{TENSOR} / -", "-"
    ),
    "rowwise": Row(Float8RowwiseScaling(), ROW, ROW, ROW),
    "rowwise hybrid": Row(
        Float8RowwiseScaling(fp8_format=Format.HYBRID), ROW, ROW, "e5m2 1x0 57344 float32"
    ),
    "rowwise power of two": Row(
        Float8RowwiseScaling(use_power_2_scales=True), *(f"{ROW} power_of_two",) * 3
    ),
    "mxfp8": Row(MXFP8BlockScaling(), MX, MX, MX, SPLITS),
    "mxfp8 hybrid": Row(
        MXFP8BlockScaling(fp8_format=Format.HYBRID), MX, MX, "e5m2 1x32 57344 e8m0", SPLITS
    ),
    "mxfp8 square weights": Row(
        MXFP8BlockScaling(enable_2d_quantization=True), MX, "e4m3 32x32 448 e8m0", MX, SPLITS
    ),
    "block": Row(Float8BlockScaling(), LINE, SQUARE, LINE, SPLITS),
    "block float32": Row(
        Float8BlockScaling(use_f32_scales=True),
        "e4m3 1x128 448 float32",
        "e4m3 128x128 448 float32",
        "e4m3 1x128 448 float32",
        SPLITS,
    ),
    "block dims turned": Row(
        Float8BlockScaling(x_block_scaling_dim=2, w_block_scaling_dim=1, grad_block_scaling_dim=2),
        SQUARE,
        LINE,
        SQUARE,
        SPLITS,
    ),
    "block square for wgrad": Row(
        Float8BlockScaling(x_wgrad_block_scaling_dim=2), f"{LINE} / {SQUARE}", SQUARE, LINE, SPLITS
    ),
    "block line for wgrad": Row(
        Float8BlockScaling(x_block_scaling_dim=2, x_wgrad_block_scaling_dim=1),
        f"{SQUARE} / {LINE}",
        SQUARE,
        LINE,
        SPLITS,
    ),
    "nvfp4": Row(NVFP4BlockScaling(), NV_RHT, NV_SQUARE, f"{NV_SR} / {NV_SR} hadamard16", SPLITS),
    "nvfp4 no transform": Row(NVFP4BlockScaling(disable_rht=True), NV, NV_SQUARE, NV_SR, SPLITS),
    "nvfp4 row scales": Row(
        NVFP4BlockScaling(row_scaled_activation=True, disable_rht=True),
        f"{NV} row_scaled / {NV}",
        NV_SQUARE,
        NV_SR,
        SPLITS,
    ),
    "nvfp4 two maxima": Row(
        NVFP4BlockScaling(nvfp4_4over6="weights"),
        NV_RHT,
        f"{NV_SQUARE} MAE scales up to 256",
        f"{NV_SR} / {NV_SR} hadamard16",
        SPLITS,
    ),
    "nvfp4 nearest": Row(
        NVFP4BlockScaling(disable_stochastic_rounding=True), NV_RHT, NV_SQUARE, NV_RHT, SPLITS
    ),
    "nvfp4 line weights": Row(
        NVFP4BlockScaling(disable_2d_quantization=True, disable_rht=True), NV, NV, NV_SR, SPLITS
    ),
    "custom fields": Row(CustomRecipe(margin=0.1), DELAYED, DELAYED, DELAYED_E5M2),
    "custom factory": Row(CustomRecipe(factory), MX, f"{ROW} / -", DELAYED_E5M2),
    "custom factory forward only": Row(
        CustomRecipe(factory, backward_override=KEEP), f"{MX} / -", f"{ROW} / -", "-"
    ),
}


def plan_of(name: str, dtype: torch.dtype = torch.bfloat16) -> LinearPlan:
    return TABLE[name].recipe.plan(LayerRole(), dtype)


@pytest.mark.parametrize("name", TABLE)
def test_plan_is_what_the_table_says_for_every_dtype_and_kind_of_layer(name: str) -> None:
    plan = plan_of(name)
    found = Row(
        TABLE[name].recipe,
        *map(tensor, (plan.input, plan.weight, plan.grad_output)),
        accumulators(plan),
    )
    assert found == TABLE[name]
    plans = {
        TABLE[name].recipe.plan(LayerRole(kind, path), dtype)
        for kind in ("linear", "grouped_linear")
        for path in (None, "decoder.fc1")
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
    }
    assert plans == {plan}


def test_every_field_of_a_cell_shows_in_the_table() -> None:
    """Guard: a new field of OperandSpec must get a word in ``cell``."""
    shown = {"format", "block", "target", "scale_format", *FLAGS}
    shown |= {"transform", "amax_epsilon", "cast_first", "four_over_six", "scale_max"}
    assert {field.name for field in dataclasses.fields(OperandSpec)} == shown


def test_gemms_take_the_tensors_in_the_orientation_that_they_contract() -> None:
    cells = [OperandSpec(str(number), (0, 0), 1.0) for number in range(6)]
    plan = LinearPlan(GemmPlan(*cells[:2]), GemmPlan(*cells[2:4]), GemmPlan(*cells[4:]))
    assert plan.input == TensorPlan(plan.fprop.a, plan.wgrad.b)
    assert plan.weight == TensorPlan(plan.fprop.b, plan.dgrad.b)
    assert plan.grad_output == TensorPlan(plan.dgrad.a, plan.wgrad.a)


def test_recipe_without_history_has_no_delayed_plan() -> None:
    for name in ("current", "rowwise", "mxfp8", "block", "nvfp4"):
        assert plan_of(name).delayed is None, name


def most_recent(history: torch.Tensor) -> torch.Tensor:
    return history[0]


def halve(
    amax: torch.Tensor, scale: torch.Tensor, fp8_max: torch.Tensor, recipe: object
) -> torch.Tensor:
    return scale / 2


FIELDS = {
    "margin": 3,
    "amax_history_len": 7,
    "amax_compute_algo": most_recent,
    "scaling_factor_compute_algo": halve,
}
DEFAULT_DELAYED = DelayedPlan(1024, 0, "max", None, True)
CHANGED_DELAYED = DelayedPlan(7, 3, most_recent, halve, True)


@pytest.mark.parametrize("kind", [DelayedScaling, CustomRecipe])
def test_fields_of_delayed_scaling_reach_the_plan(kind: type[Recipe]) -> None:
    assert kind(**FIELDS).plan(LayerRole(), torch.bfloat16).delayed == CHANGED_DELAYED


@pytest.mark.parametrize("name", ["delayed", "custom factory"])
def test_fields_of_delayed_scaling_have_transformer_engines_defaults(name: str) -> None:
    assert plan_of(name).delayed == DEFAULT_DELAYED


def test_reduction_of_amaxes_reaches_the_plan() -> None:
    plan = DelayedScaling(reduce_amax=False).plan(LayerRole(), torch.bfloat16)
    assert plan.delayed == dataclasses.replace(DEFAULT_DELAYED, reduce_amax=False)


@pytest.mark.parametrize("kind", [Float8CurrentScaling, Float8RowwiseScaling, DelayedScaling])
def test_amax_maps_to_the_maximum_of_a_plugins_format(kind: type[Recipe]) -> None:
    formats.register(toys.TOY8)
    plan = kind(fp8_format="toy8").plan(LayerRole(), torch.bfloat16)
    cells = [spec for gemm in (plan.fprop, plan.dgrad, plan.wgrad) for spec in (gemm.a, gemm.b)]
    assert {(spec.format, spec.target) for spec in cells if spec} == {("toy8", 31.0)}


def linear_plan(**fields: Any) -> LinearPlan:
    return NVFP4BlockScaling(disable_rht=True, **fields).plan(LayerRole(), torch.bfloat16)


@pytest.mark.parametrize(
    ("scope", "tensors"),
    [
        ("none", set()),
        ("weights", {"weight"}),
        ("activations", {"input"}),
        ("all", {"input", "weight"}),
    ],
)
def test_the_scope_chooses_the_tensors_with_two_maxima(scope: str, tensors: set[str]) -> None:
    plan = linear_plan(nvfp4_4over6=scope, nvfp4_4over6_err_mode="MSE")
    chosen = {
        name
        for name, tensor in plan.tensors.items()
        for spec in tensor
        if spec is not None and spec.four_over_six == "MSE" and spec.scale_max == 256
    }
    assert chosen == tensors


@pytest.mark.parametrize(
    ("scope", "input_max", "weight_max"),
    [("none", 448, 448), ("weights", 448, 256), ("activations", 256, 448), ("all", 256, 256)],
)
def test_the_largest_block_scale_is_chosen_apart(
    scope: str, input_max: float, weight_max: float
) -> None:
    plan = linear_plan(nvfp4_4over6="all", nvfp4_4over6_e4m3_use_256=scope)
    assert {spec.scale_max for spec in plan.input if spec is not None} == {input_max}
    assert {spec.scale_max for spec in plan.weight if spec is not None} == {weight_max}


def test_the_largest_block_scale_is_448_without_two_maxima() -> None:
    assert linear_plan(nvfp4_4over6_e4m3_use_256="all") == linear_plan()


def test_rows_keep_outer_scales_beside_the_hadamard_transform() -> None:
    plan = NVFP4BlockScaling(row_scaled_activation=True).plan(LayerRole(), torch.bfloat16)
    row, column = plan.input
    assert row is not None
    assert column is not None
    assert (row.row_scaled, row.transform) == (True, None)
    assert (column.row_scaled, column.transform) == (False, "hadamard16")


OPTIONS = {
    "row scaled": {"row_scaled_activation": True},
    "two maxima": {"nvfp4_4over6": "all", "disable_rht": True},
    "both": {"nvfp4_4over6": "all", "disable_rht": True, "row_scaled_activation": True},
    "dequantized": {"row_scaled_activation": True, "backward_override": "dequantized"},
}


def error_of(layer: Any, x: torch.Tensor, **fields: Any) -> torch.Tensor:
    layer.zero_grad()
    with fp8core.autocast(recipe=NVFP4BlockScaling(disable_stochastic_rounding=True, **fields)):
        y = layer(x)
    y.sum().backward()
    exact = layer(x)
    error: torch.Tensor = (y - exact).norm(dim=-1) / exact.norm(dim=-1)
    return error


@pytest.mark.parametrize(("name", "rows"), turns(OPTIONS, [64, 33]))
def test_a_layer_trains_with_it(name: str, rows: int) -> None:
    torch.manual_seed(0)
    layer, x = fp8core.Linear(96, 64, bias=False), torch.randn(rows, 96)
    assert error_of(layer, x, **OPTIONS[name]).mean() < 0.2
    assert layer.weight.grad is not None
    assert layer.weight.grad.any()


def test_small_rows_beside_a_large_one_keep_their_accuracy_with_row_scales() -> None:
    torch.manual_seed(0)
    layer, x = fp8core.Linear(96, 64, bias=False), torch.randn(32, 96)
    x[0] *= 1e6
    worst = [error_of(layer, x, row_scaled_activation=rows).max() for rows in (False, True)]
    assert worst[0] > 0.5
    assert worst[1] < 0.25


def test_groups_have_two_maxima_and_no_row_scales() -> None:
    torch.manual_seed(0)
    layer = fp8core.GroupedLinear(2, 96, 64)
    x = torch.randn(40, 96, requires_grad=True)
    with fp8core.autocast(recipe=NVFP4BlockScaling(nvfp4_4over6="all", disable_rht=True)):
        y = layer(x, [13, 27])
    assert isinstance(y, torch.Tensor)
    y.sum().backward()
    assert (y - layer(x, [13, 27])).norm() < 0.2 * y.norm()  # type: ignore[operator]
    with (
        fp8core.autocast(recipe=NVFP4BlockScaling(row_scaled_activation=True)),
        pytest.raises(fp8core.UnsupportedError, match="no groups with an outer scale a row"),
    ):
        layer(x, [13, 27])
