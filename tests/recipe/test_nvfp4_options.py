"""The options of NVFP4BlockScaling: which operand of which tensor gets which scales."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fp8core
from fp8core.recipe import NVFP4BlockScaling
from fp8core.recipe.plan import LayerRole, LinearPlan
from tests.pairs import turns


def plan_of(**fields: Any) -> LinearPlan:
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
    plan = plan_of(nvfp4_4over6=scope, nvfp4_4over6_err_mode="MSE")
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
    plan = plan_of(nvfp4_4over6="all", nvfp4_4over6_e4m3_use_256=scope)
    assert {spec.scale_max for spec in plan.input if spec is not None} == {input_max}
    assert {spec.scale_max for spec in plan.weight if spec is not None} == {weight_max}


def test_the_largest_block_scale_is_448_without_two_maxima() -> None:
    assert plan_of(nvfp4_4over6_e4m3_use_256="all") == plan_of()


def test_rows_of_the_input_of_fprop_alone_have_outer_scales() -> None:
    plan = plan_of(row_scaled_activation=True)
    flags = {
        name: [spec.row_scaled for spec in tensor if spec is not None]
        for name, tensor in plan.tensors.items()
    }
    assert flags == {
        "input": [True, False],
        "weight": [False, False],
        "grad_output": [False, False],
    }


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
