"""Layers that hand over quantized tensors, and take them: fp8_output, fp8_grad, ops.Quantize."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import fp8core
from fp8core import QuantizedTensor, functional, ops, recipe
from fp8core.recipe.plan import LayerRole
from tests.device import DEVICE

RECIPES = {
    "delayed": recipe.DelayedScaling(),
    "current": recipe.Float8CurrentScaling(),
    "rowwise": recipe.Float8RowwiseScaling(),
    "block": recipe.Float8BlockScaling(),
    "mxfp8": recipe.MXFP8BlockScaling(),
    "nvfp4": recipe.NVFP4BlockScaling(),
}
BF16 = torch.bfloat16


@pytest.fixture(params=RECIPES)
def chosen(request: pytest.FixtureRequest) -> recipe.Recipe:
    return RECIPES[request.param]


def linear(n: int = 256, **arguments: Any) -> fp8core.Linear:
    return fp8core.Linear(128, n, params_dtype=BF16, device=DEVICE, **arguments)


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(shape).to(BF16)


LAYERS: dict[str, Any] = {
    "Linear": linear,
    "LayerNormLinear": lambda: fp8core.LayerNormLinear(128, 256, params_dtype=BF16, device=DEVICE),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_fp8_output_is_the_output_quantized_as_an_input(kind: str, chosen: recipe.Recipe) -> None:
    layer, x = LAYERS[kind](), rand(2, 32, 128)
    with fp8core.autocast(recipe=chosen):
        plain, made = layer(x), layer(x, fp8_output=True)
    assert isinstance(made, QuantizedTensor)
    assert (made.shape, made.dtype, made.requires_grad) == (plain.shape, plain.dtype, True)
    plan = chosen.plan(LayerRole(), BF16).input
    expected = functional.quantize(plain.detach(), plan)
    assert torch.equal(made.dequantize(), expected.dequantize())
    assert made.plan == expected.plan


@pytest.mark.parametrize("kind", LAYERS)
def test_gradients_pass_a_quantized_output_unchanged(kind: str, chosen: recipe.Recipe) -> None:
    layer, x, grad = LAYERS[kind](), rand(64, 128), rand(64, 256)
    initial, grads = copy.deepcopy(layer), []
    for quantizes in (False, True):
        layer = copy.deepcopy(initial)  # with its delayed scales
        given = x.clone().requires_grad_()
        torch.manual_seed(0)
        with fp8core.autocast(recipe=chosen):
            y = layer(given, fp8_output=quantizes)
        y.backward(grad)
        grads.append([given.grad, layer.weight.grad, layer.bias.grad])
    assert all(torch.equal(*pair) for pair in zip(*grads, strict=True))


def test_the_next_layer_takes_the_codes_as_they_are(
    chosen: recipe.Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, x = linear(128), linear(), rand(32, 128).requires_grad_()
    with fp8core.autocast(recipe=chosen):
        expected = second(first(x))
        handed = first(x, fp8_output=True)
        with monkeypatch.context() as patch:
            patch.setattr(QuantizedTensor, "dequantize", None)
            made = second(handed)
    if chosen != RECIPES["delayed"]:  # whose input has another scale than that of the tensor
        assert torch.equal(made, expected)
    made.sum().backward()
    assert x.grad is not None
    assert first.weight.grad is not None


def test_fp8_grad_is_the_gradient_quantized_as_one(chosen: recipe.Recipe) -> None:
    initial, x, grad, grads = linear(), rand(64, 128), rand(64, 256), []
    for quantizes in (False, True):
        layer = copy.deepcopy(initial)  # with its delayed scales
        leaf = x.clone().requires_grad_()
        given = leaf * 1
        given.retain_grad()
        torch.manual_seed(0)
        with fp8core.autocast(recipe=chosen):
            y = layer(given, fp8_grad=quantizes)
        y.backward(grad)
        grads.append((given.grad, leaf.grad))
    (plain, _), (made, leaf_grad) = grads
    assert isinstance(made, QuantizedTensor)
    plan = chosen.plan(LayerRole(), BF16).grad_output
    assert [one.format for one in made.plan] == [one.format for one in plan]
    nearest = QuantizedTensor.of(plain, made.plan)
    assert torch.equal(made.dequantize(), nearest.dequantize())
    assert torch.equal(functional.dequantize(leaf_grad), nearest.dequantize())


def test_a_quantized_gradient_is_taken_by_the_layer_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen = RECIPES["mxfp8"]
    first, second, x = linear(128, bias=False), linear(bias=False), rand(32, 128)
    results = []
    for quantizes in (False, True):
        first.zero_grad()
        leaf = x.clone().requires_grad_()
        with fp8core.autocast(recipe=chosen):
            y = second(first(leaf), fp8_grad=quantizes)
        with monkeypatch.context() as patch:
            patch.setattr(QuantizedTensor, "dequantize", None)
            y.sum().backward()
        results.append((leaf.grad, first.weight.grad))
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_gradients_that_are_quantized_add_up() -> None:
    layer, x = linear(), rand(32, 128).requires_grad_()
    with fp8core.autocast(recipe=RECIPES["mxfp8"]):
        y = layer(x, fp8_grad=True) + layer(x, fp8_grad=True)
    y.sum().backward()
    assert x.grad.shape == x.shape
    with fp8core.autocast(recipe=RECIPES["mxfp8"]):
        layer(x, fp8_grad=True).sum().backward()
    assert functional.dequantize(x.grad).isfinite().all()


def test_without_a_recipe_results_are_plain() -> None:
    layer, x = linear(), rand(8, 128).requires_grad_()
    y = layer(x, fp8_output=True, fp8_grad=True)
    y.sum().backward()
    assert (type(y), type(x.grad)) == (torch.Tensor, torch.Tensor)
    assert torch.equal(y, layer(x))


def test_rows_that_blocks_do_not_divide_leave_out_the_columnwise_orientation() -> None:
    with fp8core.autocast(recipe=RECIPES["mxfp8"]):
        made = linear()(rand(5, 128), fp8_output=True)
    assert made.get_usages() == {"rowwise": True, "columnwise": False}


def test_columns_that_blocks_do_not_divide_stay_plain(caplog: pytest.LogCaptureFixture) -> None:
    layer, x = linear(40), rand(32, 128)
    with fp8core.autocast(recipe=RECIPES["mxfp8"]):
        plain, made = layer(x), layer(x, fp8_output=True)
    assert type(made) is torch.Tensor
    assert not torch.equal(made, plain)
    assert (made - plain).abs().max() < 0.1 * plain.abs().max()


def test_inference_holds_the_rowwise_orientation_alone() -> None:
    layer = linear()
    with torch.no_grad(), fp8core.autocast(recipe=RECIPES["mxfp8"]):
        made = layer(rand(32, 128), fp8_output=True)
        assert made.get_usages() == {"rowwise": True, "columnwise": False}
        quantized = functional.quantize(rand(32, 128), "mxfp8", columnwise=False)
        assert layer(quantized).shape == (32, 256)


def test_quantize_at_the_end_of_a_chain_hands_over_a_quantized_tensor() -> None:
    first = ops.Sequential(ops.Linear(128, 128, dtype=BF16, device=DEVICE), ops.Quantize())
    second, x = linear(), rand(2, 16, 128).requires_grad_()
    with fp8core.autocast(recipe=RECIPES["mxfp8"]):
        handed = first(x)
        y = second(handed)
        expected = second(next(first.children())(x))
    assert isinstance(handed, QuantizedTensor)
    assert torch.equal(y, expected)
    y.sum().backward()
    assert x.grad.shape == x.shape


def test_an_input_in_three_dimensions_is_taken_as_it_is(
    chosen: recipe.Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, x = linear(), rand(2, 32, 128)
    quantized = functional.quantize(x, chosen)
    monkeypatch.setattr(QuantizedTensor, "dequantize", None)
    with fp8core.autocast(recipe=chosen):
        y = layer(quantized)
    assert y.shape == (2, 32, 256)
    y.sum().backward()


def test_a_tensor_of_another_recipe_is_cast_again_and_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    layer = linear(name="cast_again")
    quantized = fp8core.MXFP8Quantizer("e5m2")(rand(32, 128))
    with fp8core.autocast(recipe=RECIPES["mxfp8"]):
        made, expected = layer(quantized), layer(quantized.dequantize())
    assert torch.equal(made, expected)
    assert len([line for line in caplog.messages if "'cast_again'" in line]) == 1


def test_a_compiled_layer_hands_over_the_rounded_values() -> None:
    layer, x = linear(), rand(32, 128)

    def call(x: torch.Tensor) -> torch.Tensor:
        return layer(x, fp8_output=True)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    with fp8core.autocast(recipe=RECIPES["mxfp8"]):
        made, expected = compiled(x), layer(x, fp8_output=True)
    assert torch.equal(made, expected.dequantize())
    made.sum().backward()
    assert layer.weight.grad is not None
