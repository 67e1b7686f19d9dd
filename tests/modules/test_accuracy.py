"""Each row of a result is accurate: SQNR floors against high precision, worst row.

27 dB where both operands are e4m3, 23 dB where one is e5m2 (conventions.md). A recipe with scales
of its own for each row, or each block of a row, promises it on rows that span decades; a tensorwise
one on rows of one magnitude.
"""

from __future__ import annotations

import pytest
import torch

from fp8core import GroupedLinear, Linear, autocast, recipe

torch.set_num_threads(1)  # on a busy machine a second thread costs small GEMMs 20 times the work

BOTH_E4M3, ONE_E5M2 = 27.0, 23.0
HYBRID = recipe.Format.HYBRID
BY_ROW = {
    "rowwise": (recipe.Float8RowwiseScaling(), BOTH_E4M3),
    "rowwise hybrid": (recipe.Float8RowwiseScaling(fp8_format=HYBRID), ONE_E5M2),
    "rowwise pow2": (recipe.Float8RowwiseScaling(use_power_2_scales=True), BOTH_E4M3),
    "block": (recipe.Float8BlockScaling(), BOTH_E4M3),
    "block f32": (recipe.Float8BlockScaling(use_f32_scales=True), BOTH_E4M3),
    "mxfp8": (recipe.MXFP8BlockScaling(), BOTH_E4M3),
    "mxfp8 hybrid": (recipe.MXFP8BlockScaling(fp8_format=HYBRID), ONE_E5M2),
    "mxfp8 2d": (recipe.MXFP8BlockScaling(enable_2d_quantization=True), BOTH_E4M3),
}
TENSORWISE = {
    "current": (recipe.Float8CurrentScaling(), ONE_E5M2),
    "current e4m3": (recipe.Float8CurrentScaling(fp8_format=recipe.Format.E4M3), BOTH_E4M3),
    "current pow2": (recipe.Float8CurrentScaling(use_power_2_scales=True), ONE_E5M2),
    "delayed": (recipe.DelayedScaling(), ONE_E5M2),
}
# Few long rows and long contractions: the worst of many short ones is a matter of luck.
FEW, MANY = 64, 1024


def worst_row(got: torch.Tensor, want: torch.Tensor) -> float:
    """Return the lowest signal to quantization noise ratio of any row, dB."""
    noise = (got.double() - want.double()).square().sum(1)
    return (10 * torch.log10(want.double().square().sum(1) / noise)).min().item()


def decades(rows: int, cols: int) -> torch.Tensor:
    """Normal values in rows of 1e-3 to 1e2, in no order."""
    sizes = 10.0 ** torch.linspace(-3, 2, rows)[torch.randperm(rows)]
    return torch.randn(rows, cols) * sizes[:, None]


def compute(
    layer: Linear, x: torch.Tensor, dy: torch.Tensor, chosen: recipe.Recipe | None
) -> dict[str, torch.Tensor]:
    layer.zero_grad()
    x = x.clone().requires_grad_()
    with autocast(enabled=chosen is not None, recipe=chosen):
        y = layer(x)
    y.backward(dy)
    return {"y": y.detach(), "grad_input": x.grad, "grad_weight": layer.weight.grad}


@pytest.mark.parametrize("result", ["y", "grad_input", "grad_weight"])
@pytest.mark.parametrize("name", BY_ROW)
def test_rows_that_span_decades_keep_their_accuracy(name: str, result: str) -> None:
    chosen, floor = BY_ROW[name]
    rows, out_features = (MANY, FEW) if result == "grad_weight" else (FEW, MANY)
    layer = Linear(MANY, out_features, bias=False)
    x, dy = torch.randn(rows, MANY), decades(FEW, MANY)  # the rows of y are those of x
    if result == "y":
        x, floor = dy, BOTH_E4M3  # input and weight are e4m3 in every recipe here
    elif result == "grad_weight":
        dy = dy.t().contiguous()
    got, want = (compute(layer, x, dy, active)[result] for active in (chosen, None))
    assert worst_row(got, want) > floor


@pytest.mark.parametrize("name", TENSORWISE)
def test_rows_of_one_magnitude_keep_their_accuracy(name: str) -> None:
    chosen, floor = TENSORWISE[name]
    for rows, out_features, result in (
        (FEW, MANY, "y"),
        (FEW, MANY, "grad_input"),
        (MANY, FEW, "grad_weight"),
    ):
        layer = Linear(MANY, out_features, bias=False)
        x, dy = torch.randn(rows, MANY), torch.randn(rows, out_features)
        if name == "delayed":  # its first step has no amaxes to go by
            compute(layer, x, dy, chosen)
        got, want = (compute(layer, x, dy, active)[result] for active in (chosen, None))
        assert worst_row(got, want) > (BOTH_E4M3 if result == "y" else floor), result


@pytest.mark.parametrize("name", ["rowwise", "block", "mxfp8"])
def test_an_outlier_costs_no_other_row(name: str) -> None:
    chosen, floor = BY_ROW[name]
    layer = Linear(MANY, MANY, bias=False)
    x = torch.randn(FEW, MANY)
    x[3, 5] = 1e4
    got, want = (compute(layer, x, x, active)["y"] for active in (chosen, None))
    others = [row for row in range(FEW) if row != 3]
    assert worst_row(got[others], want[others]) > floor


def test_a_tensorwise_scale_loses_small_rows_and_the_whole_does_not_tell() -> None:
    layer = Linear(MANY, MANY, bias=False)
    x, dy = decades(FEW, MANY), torch.randn(FEW, MANY)
    chosen = recipe.Float8CurrentScaling()
    got, want = (compute(layer, x, dy, active)["y"] for active in (chosen, None))
    assert worst_row(got.reshape(1, -1), want.reshape(1, -1)) > BOTH_E4M3
    assert worst_row(got, want) < BOTH_E4M3 - 10


@pytest.mark.parametrize("name", BY_ROW)
def test_rows_of_groups_keep_their_accuracy(name: str) -> None:
    chosen, floor = BY_ROW[name]
    layer = GroupedLinear(3, MANY, MANY, bias=False)
    x, dy = decades(FEW, MANY), decades(FEW, MANY)
    found = []
    for active in (chosen, None):
        leaf = x.clone().requires_grad_()
        with autocast(enabled=active is not None, recipe=active):
            y = layer(leaf, [0, 27, 37])
        y.backward(dy)
        found.append((y.detach(), leaf.grad))
    (y, dx), (exact_y, exact_dx) = found
    assert worst_row(y, exact_y) > BOTH_E4M3
    assert worst_row(dx, exact_dx) > floor
