"""quantize, dequantize and linear as functions, and tensors of torch and torchao."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import fp8core
from fp8core import OperandError, QuantizedTensor, RecipeError, UnsupportedError, functional, recipe
from fp8core.quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
)
from fp8core.recipe.plan import LayerRole
from tests.device import DEVICE
from tests.hopper_gemm import cut_off

RECIPES = {
    "current": recipe.Float8CurrentScaling(),
    "rowwise": recipe.Float8RowwiseScaling(),
    "block": recipe.Float8BlockScaling(),
    "mxfp8": recipe.MXFP8BlockScaling(),
    "nvfp4": recipe.NVFP4BlockScaling(),
}


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(shape).to(torch.bfloat16)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_says_how_a_tensor_is_quantized(name: str) -> None:
    for tensor in ("input", "weight", "grad_output"):
        plan = RECIPES[name].plan(LayerRole(), torch.bfloat16).tensors[tensor]
        made = functional.quantize(rand(64, 128), RECIPES[name], tensor=tensor)
        assert made.plan == plan
        rowwise = functional.quantize(rand(64, 128), name, tensor=tensor, columnwise=False)
        assert rowwise.get_usages() == {"rowwise": True, "columnwise": False}


def test_quantize_takes_quantizers_specs_and_plans() -> None:
    x, quantizer = rand(32, 64), MXFP8Quantizer("e4m3")
    expected = quantizer(x)
    for by in (quantizer, quantizer.plan, quantizer.plan.rowwise, lambda x: quantizer(x)):
        made = functional.quantize(x, by)
        assert made.plan == expected.plan
        assert torch.equal(made.dequantize(), expected.dequantize())
    for by in (3, None, "mxfp9", MXFP8Quantizer):
        with pytest.raises(RecipeError):
            functional.quantize(x, by)
    with pytest.raises(RecipeError, match="grad_output"):
        functional.quantize(x, "mxfp8", tensor="gradient")


def test_dequantize_takes_plain_tensors() -> None:
    x = rand(4, 4)
    assert functional.dequantize(x) is x
    assert functional.dequantize(x, torch.float32).dtype == torch.float32
    with pytest.raises(OperandError, match="int"):
        functional.dequantize(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", RECIPES)
def test_linear_computes_as_a_layer(name: str) -> None:
    torch.manual_seed(0)
    layer = fp8core.Linear(128, 256, params_dtype=torch.bfloat16, device=DEVICE)
    x, grad, results = rand(2, 32, 128), rand(2, 32, 256), []
    for call in (layer, lambda x: functional.linear(x, layer.weight, layer.bias)):
        given = x.clone().requires_grad_()
        layer.zero_grad()
        torch.manual_seed(5)
        with fp8core.autocast(recipe=RECIPES[name]):
            y = call(given)
        y.backward(grad)
        results.append([y, given.grad, layer.weight.grad, layer.bias.grad])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_linear_uses_tensors_that_are_stored_as_the_recipe_casts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, w = rand(64, 128), rand(256, 128)
    chosen = RECIPES["mxfp8"]
    with fp8core.autocast(recipe=chosen):
        expected = functional.linear(x, w)
    quantized = functional.quantize(x, chosen), functional.quantize(w, chosen, tensor="weight")
    monkeypatch.setattr(QuantizedTensor, "dequantize", None)
    with fp8core.autocast(recipe=chosen):
        assert torch.equal(functional.linear(*quantized), expected)
    assert torch.equal(functional.linear(*quantized), expected)


def test_linear_in_high_precision_is_that_of_torch() -> None:
    x, w, b = rand(4, 8), rand(16, 8), rand(16)
    assert torch.equal(functional.linear(x, w, b), torch.nn.functional.linear(x, w, b))


def test_linear_refuses_what_has_no_layer() -> None:
    x, w = rand(4, 8), rand(16, 8)
    with (
        fp8core.autocast(recipe=recipe.DelayedScaling()),
        pytest.raises(UnsupportedError, match=r"fp8core\.Linear"),
    ):
        functional.linear(x, w)
    for bad in ((x, rand(16, 8, 2)), (x, w, rand(8)), (x, None), (rand(4, 9), w)):
        with pytest.raises(OperandError):
            functional.linear(*bad)  # type: ignore[arg-type]


QUANTIZERS: dict[str, Quantizer] = {
    "current": Float8CurrentScalingQuantizer("e5m2", DEVICE),
    "block1d": Float8BlockQuantizer("e4m3", rowwise=True, columnwise=False, block_scaling_dim=1),
    "block2d": Float8BlockQuantizer("e4m3", rowwise=True, columnwise=False),
    "mxfp8": MXFP8Quantizer("e4m3", columnwise=False),
    "mxfp8_2d": MXFP8Quantizer("e4m3", with_2d_quantization=True),
    "nvfp4": NVFP4Quantizer(columnwise=False),
    "nvfp4_2d": NVFP4Quantizer(with_2d_quantization=True),
    "nvfp4_row": NVFP4Quantizer(columnwise=False, row_scaled_nvfp4=True),
}


@pytest.mark.parametrize("name", QUANTIZERS)
def test_torch_tensors_are_given_and_taken_without_a_copy(name: str) -> None:
    made = QUANTIZERS[name](rand(2, 128, 256))
    data, scale_inv, outer = functional.to_torch(made)
    assert data.dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.float4_e2m1fn_x2)
    assert data.shape[:2] == (2, 128)
    taken = functional.from_torch(data, scale_inv, global_scale_inv=outer)
    assert taken.shape == made.shape
    assert taken._rowwise_data.data_ptr() == made._rowwise_data.data_ptr()
    assert torch.equal(taken.dequantize(), made.dequantize())


def test_a_scaled_product_of_torch_takes_what_to_torch_gives() -> None:
    quantizer = Float8CurrentScalingQuantizer("e4m3", DEVICE)
    a, b = (functional.to_torch(quantizer(rand(*size))) for size in ((32, 64), (48, 64)))
    values = [(one.data.float() * one.scale_inv) for one in (a, b)]
    quantized = [functional.from_torch(one.data, one.scale_inv) for one in (a, b)]
    made = functional.gemm(*quantized, torch.float32)
    lost = cut_off(*values)
    assert ((made - values[0] @ values[1].t()).abs() - lost).max() < 1e-4


def test_from_codes_takes_a_recipe() -> None:
    for name, tensor in (("mxfp8", "input"), ("block", "weight"), ("current", "grad_output")):
        chosen = RECIPES[name]
        made = functional.quantize(rand(256, 128), chosen, tensor=tensor)
        codes, scale_inv, _ = functional.to_torch(made)
        for given in (chosen, name, made.plan, made.plan.rowwise):
            taken = QuantizedTensor.from_codes(codes, scale_inv, given, dtype=torch.float32)
            assert (taken.dtype, taken.plan.rowwise) == (torch.float32, made.plan.rowwise)
            assert torch.equal(taken.dequantize(), made.dequantize(torch.float32))
    taken = QuantizedTensor.from_codes(
        codes.view(torch.uint8), scale_inv, "current", tensor="weight"
    )
    assert taken.plan.rowwise.format == "e4m3"


def test_codes_and_scales_that_do_not_fit_are_refused() -> None:
    codes = torch.zeros(64, 64).to(torch.float8_e4m3fn)
    one = torch.ones(1)
    bad: list[tuple[object, ...]] = [
        (codes, torch.ones(3), "current"),
        (codes, one.double(), "current"),
        (codes, torch.full((1,), float("nan")), "current"),
        (codes, -one, "current"),
        (codes, torch.ones(64, 2), "mxfp8"),
        (codes.float(), one, "current"),
        (codes.view(torch.uint8)[:, ::2], one, recipe.NVFP4BlockScaling()),
        (codes.tolist(), one, "current"),
    ]
    for given in bad:
        with pytest.raises(OperandError):
            QuantizedTensor.from_codes(*given)  # type: ignore[arg-type]
    with pytest.raises(RecipeError):
        QuantizedTensor.from_codes(codes, one, 3)
    with pytest.raises(OperandError, match="one scale"):
        functional.from_torch(codes, torch.ones(64, 3))
    with pytest.raises(OperandError, match="torchao"):
        functional.from_torch(codes)
    with pytest.raises(OperandError, match="uint8"):
        functional.from_torch(codes.view(torch.uint8), one)
    with pytest.raises(OperandError, match="no rowwise"):
        functional.to_torch(MXFP8Quantizer("e4m3", rowwise=False)(rand(32, 32)))


def test_tensors_of_torchao_are_taken_by_their_attributes() -> None:
    x = rand(64, 128)
    made = QUANTIZERS["mxfp8"](x)
    data, scale_inv, _ = functional.to_torch(made)
    theirs = SimpleNamespace(qdata=data, scale=scale_inv, dtype=torch.float16)
    taken = functional.from_torch(theirs)
    assert (taken.dtype, isinstance(taken, fp8core.MXFP8Tensor)) == (torch.float16, True)
    made = QUANTIZERS["current"](x)
    data, scale_inv, _ = functional.to_torch(made)
    trained = SimpleNamespace(_data=data, _scale=1 / scale_inv.view(()), _orig_dtype=torch.float32)
    taken = functional.from_torch(trained)
    torch.testing.assert_close(taken.dequantize(), made.dequantize(torch.float32))
