"""``backward_override="dequantized"``: backward multiplies what fprop multiplied, dequantized."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import fp8core
from fp8core import RecipeError, ops, recipe
from fp8core.recipe.plan import LayerRole, LinearPlan, TensorPlan
from fp8core.tensors.quantized_tensor import QuantizedTensor
from fp8core.tensors.storage import storage_plan
from tests.device import assert_same_sums
from tests.pairs import turns

RECIPES: dict[str, Any] = {
    "current": recipe.Float8CurrentScaling(backward_override="dequantized"),
    "rowwise": recipe.Float8RowwiseScaling(backward_override="dequantized"),
    "mxfp8": recipe.MXFP8BlockScaling(backward_override="dequantized"),
    "block": recipe.Float8BlockScaling(backward_override="dequantized"),
    "block of two dimensions": recipe.Float8BlockScaling(
        x_block_scaling_dim=2, backward_override="dequantized"
    ),
    "nvfp4": recipe.NVFP4BlockScaling(backward_override="dequantized"),
    "custom": recipe.CustomRecipe(
        qfactory=lambda role: recipe.OperandSpec("e5m2", (1, 32), 57344.0),
        backward_override="dequantized",
    ),
}
SIZES = [(64, 128, 96), (33, 50, 70), (1, 32, 16)]


def decoded(x: torch.Tensor, chosen: Any, tensor: str) -> torch.Tensor:
    """Return what ``fprop`` multiplies for ``x``, by the library's tensor of one operand."""
    plan: LinearPlan = chosen.plan(LayerRole(), x.dtype)
    rows, columns = x.shape
    padded = torch.nn.functional.pad(x, (0, -columns % 128, 0, -rows % 128))
    spec = TensorPlan(plan.tensors[tensor].rowwise, None)
    stored = QuantizedTensor.quantize(padded, storage_plan(spec))
    return stored.dequantize()[:rows, :columns]


def layer_and_tensors(sizes: tuple[int, int, int]) -> tuple[Any, torch.Tensor, torch.Tensor]:
    rows, inputs, outputs = sizes
    torch.manual_seed(0)
    layer = fp8core.Linear(inputs, outputs)
    x = torch.randn(rows, inputs) * torch.logspace(-2, 2, rows)[:, None]
    return layer, x.requires_grad_(), torch.randn(rows, outputs)


@pytest.mark.parametrize(("name", "sizes"), turns(RECIPES, SIZES), ids=str)
def test_gradients_are_those_of_the_dequantized_operands(
    name: str, sizes: tuple[int, int, int]
) -> None:
    chosen = RECIPES[name]
    layer, x, dy = layer_and_tensors(sizes)
    with fp8core.autocast(recipe=chosen):
        layer(x).backward(dy)
    weight, value = (
        decoded(t.detach(), chosen, n) for t, n in ((layer.weight, "weight"), (x, "input"))
    )
    torch.testing.assert_close(x.grad, dy @ weight)
    torch.testing.assert_close(layer.weight.grad, dy.t() @ value)
    assert_same_sums([layer.bias.grad], [dy.sum(0)])


def test_forward_is_that_of_the_recipe() -> None:
    for name in RECIPES:
        layer, x, _ = layer_and_tensors(SIZES[0])
        outputs = []
        for chosen in (RECIPES[name], dataclasses.replace(RECIPES[name], backward_override=None)):
            with fp8core.autocast(recipe=chosen):
                outputs.append(layer(x))
        assert torch.equal(*outputs), name


@pytest.mark.parametrize(
    ("name", "splits"), turns(RECIPES, [(16, 0, 48), (0, 0, 64), (21, 22, 21)]), ids=str
)
def test_groups_are_decoded_by_their_own_scales(name: str, splits: Sequence[int]) -> None:
    torch.manual_seed(0)
    layer = fp8core.GroupedLinear(3, 64, 96)
    x = (torch.randn(64, 64) * torch.logspace(-2, 2, 64)[:, None]).requires_grad_()
    dy = torch.randn(64, 96)
    with fp8core.autocast(recipe=RECIPES[name]):
        layer(x, splits).backward(dy)
    grad = x.grad
    assert grad is not None
    parts = zip(x.detach().split(splits), dy.split(splits), grad.split(splits), strict=True)
    for group, (part, dy_part, grad_part) in enumerate(parts):
        alone = fp8core.Linear(64, 96)
        weight = getattr(layer, f"weight{group}")
        with torch.no_grad():
            alone.weight.copy_(weight)
        part = part.clone().requires_grad_()
        with fp8core.autocast(recipe=RECIPES[name]):
            alone(part).backward(dy_part)
        torch.testing.assert_close(grad_part, part.grad)
        torch.testing.assert_close(weight.grad, alone.weight.grad)


def test_gradients_are_added_to_main_grad() -> None:
    chosen = RECIPES["mxfp8"]
    layer, x, dy = layer_and_tensors(SIZES[1])
    fused = fp8core.Linear(50, 70, fuse_wgrad_accumulation=True)
    fused.load_state_dict(layer.state_dict())
    fused.weight.main_grad = torch.ones(70, 50)
    for one in (layer, fused):
        with fp8core.autocast(recipe=chosen):
            one(x).backward(dy)
    torch.testing.assert_close(fused.weight.main_grad - 1, layer.weight.grad)


@pytest.mark.parametrize("name", ["current", "mxfp8", "nvfp4"])
def test_a_weight_that_is_stored_quantized_is_decoded_from_its_codes(name: str) -> None:
    chosen = RECIPES[name]
    with fp8core.quantized_model_init(recipe=chosen):
        layer = fp8core.Linear(64, 32, bias=False)
    x, dy = torch.randn(32, 64, requires_grad=True), torch.randn(32, 32)
    weight = layer.weight.dequantize()  # type: ignore[operator]  # a QuantizedTensor
    with fp8core.autocast(recipe=chosen):
        layer(x).backward(dy)
    torch.testing.assert_close(x.grad, dy @ weight)


def test_kept_weights_are_not_mixed_up_with_those_of_the_recipe_alone() -> None:

    layer, x, dy = layer_and_tensors(SIZES[0])
    grads = []
    plain = dataclasses.replace(RECIPES["current"], backward_override=None)
    for chosen in (plain, RECIPES["current"], plain):
        x.grad = None
        for first in (True, False):
            with fp8core.autocast(recipe=chosen):
                layer(x, is_first_microbatch=first).backward(dy)
        assert x.grad is not None
        grads.append(x.grad)
    assert torch.equal(grads[0], grads[2])
    assert not torch.equal(grads[0], grads[1])
    with fp8core.autocast(recipe=plain):
        layer(x, is_first_microbatch=True)
    with fp8core.autocast(recipe=RECIPES["current"]):
        x.grad = None
        layer(x, is_first_microbatch=False).backward(dy)  # quantizes for its own recipe
    assert torch.equal(x.grad, grads[1] / 2)


def test_a_chain_hands_over_to_it() -> None:
    torch.manual_seed(0)
    mlp = fp8core.LayerNormMLP(64, 128, activation="swiglu")
    x = torch.randn(32, 64, requires_grad=True)
    with fp8core.autocast(recipe=RECIPES["mxfp8"]):
        mlp(x).square().sum().backward()
    low = [p.grad for p in mlp.parameters()]
    mlp.zero_grad()
    mlp(x).square().sum().backward()
    for grad, parameter in zip(low, mlp.parameters(), strict=True):
        assert grad is not None
        assert parameter.grad is not None
        assert (grad - parameter.grad).norm() < 0.2 * parameter.grad.norm()


def test_it_holds_codes_where_high_precision_holds_the_tensors() -> None:
    held = {}
    for way in ("high_precision", "dequantized"):
        saved: list[int] = []

        def pack(tensor: torch.Tensor, saved: list[int] = saved) -> torch.Tensor:
            saved.append(tensor.nbytes)
            return tensor

        chosen = recipe.MXFP8BlockScaling(backward_override=way)
        layer = ops.Sequential(ops.GELU(), fp8core.Linear(128, 128, params_dtype=torch.bfloat16))
        x = torch.ones(256, 128, dtype=torch.bfloat16)
        with (
            fp8core.autocast(recipe=chosen),
            torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        ):
            layer(x)
        held[way] = sum(saved)
    assert held == {"high_precision": 256 * 128 * 2, "dequantized": 256 * 128 * (1 + 1 / 32)}


def test_a_recompute_repeats_it() -> None:
    layer, x, dy = layer_and_tensors(SIZES[0])
    grads = []
    for run in (layer, lambda x: fp8core.checkpoint(layer, x, use_reentrant=False)):
        layer.zero_grad()
        with fp8core.autocast(recipe=RECIPES["block"]):
            run(x).backward(dy)
        grads.append(layer.weight.grad.clone())
    assert torch.equal(*grads)


def test_a_monitor_takes_it() -> None:
    layer, x, dy = layer_and_tensors(SIZES[0])
    model = torch.nn.Sequential(layer)
    fp8core.prepare(model)
    with fp8core.monitor(model) as watch:
        with fp8core.autocast(recipe=RECIPES["current"]):
            model(x).backward(dy)
        watch.step()
    low = {(row.role, row.orientation) for row in watch.rows if row.format.startswith("e4m3")}
    assert low == {("input", "rowwise"), ("weight", "rowwise")}
    assert not [r for r in watch.rows if r.role != "grad_output" and r.orientation != "rowwise"]


def test_delayed_scaling_refuses_it() -> None:
    with pytest.raises(RecipeError, match="backward_override='dequantized'"):
        recipe.DelayedScaling(backward_override="dequantized")
    with pytest.raises(RecipeError, match="backward_override='dequantized'"):
        recipe.CustomRecipe(fp8_format="e4m3", backward_override="dequantized")
