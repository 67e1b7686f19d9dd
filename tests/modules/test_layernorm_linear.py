"""LayerNormLinear: the norm and the linear, its names, its extra outputs."""

from __future__ import annotations

import pytest
import torch

from fp8core import (
    LayerNorm,
    LayerNormLinear,
    Linear,
    OperandError,
    RecipeError,
    RMSNorm,
    UnsupportedError,
    autocast,
    recipe,
)

BF16 = torch.bfloat16
RECIPES = [None, *recipe.names()]


def by_name(name: str | None) -> recipe.Recipe | None:
    return None if name is None else recipe.by_name(name)


def pair(layer: LayerNormLinear, norm: torch.nn.Module) -> torch.nn.Sequential:
    """Return the norm and the linear as two layers with the same parameters."""
    linear = Linear(layer.in_features, layer.out_features, params_dtype=layer.weight.dtype)
    linear.load_state_dict({"weight": layer.weight, "bias": layer.bias})
    own = {"weight": layer.layer_norm_weight, "bias": layer.layer_norm_bias}
    norm.load_state_dict({name: own[name] for name, _ in norm.named_parameters()})
    return torch.nn.Sequential(norm, linear)


def made(**arguments: object) -> LayerNormLinear:
    torch.manual_seed(1)
    layer = LayerNormLinear(32, 16, params_dtype=BF16, **arguments)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return layer


def run(layer: torch.nn.Module, name: str | None) -> list[torch.Tensor]:
    torch.manual_seed(2)
    x = torch.randn(32, 32).to(BF16).requires_grad_()
    with autocast(enabled=name is not None, recipe=by_name(name)):
        y = layer(x)
    y = y[0] if isinstance(y, tuple) else y
    torch.manual_seed(3)
    y.backward(torch.randn(y.shape).to(BF16))
    assert x.grad is not None
    return [y.detach(), x.grad, *(own.grad for own in layer.parameters())]


# Stateless recipes round the norm's result before the cast, so the two layers hand over the same;
# nvfp4 draws a seed a layer that takes one: the linear's alone, in both.
def test_equals_the_norm_and_the_linear_bit_for_bit() -> None:
    for name in [name for name in RECIPES if name != "delayed"]:
        layer = made()
        apart = pair(layer, LayerNorm(32, params_dtype=BF16))
        for got, want in zip(run(layer, name), run(apart, name), strict=True):
            assert torch.equal(got, want), name


def test_delayed_quantizes_the_unrounded_norm() -> None:
    layer = made()
    x = torch.randn(32, 32).to(BF16)
    with autocast(recipe=recipe.DelayedScaling(amax_history_len=2)):
        layer(x)
    wide = LayerNorm(32, params_dtype=torch.float32)
    wide.load_state_dict({"weight": layer.layer_norm_weight, "bias": layer.layer_norm_bias})
    assert torch.equal(layer.amax_history_fwd[-1, 0], wide(x.float()).abs().max())


@pytest.mark.parametrize("name", RECIPES)
def test_returned_layernorm_output_is_the_norms(name: str | None) -> None:
    layer = made(return_layernorm_output=True, normalization="RMSNorm")
    norm = RMSNorm(32, params_dtype=BF16)
    norm.load_state_dict({"weight": layer.layer_norm_weight})
    x = torch.randn(32, 32).to(BF16)
    with autocast(enabled=name is not None, recipe=by_name(name)):
        _, normalized = layer(x)
    assert torch.equal(normalized, norm(x))


def test_returning_the_norm_changes_no_result() -> None:
    for name in [name for name in RECIPES if name != "delayed"]:
        plain, returning = made(), made(return_layernorm_output=True)
        for got, want in zip(run(returning, name), run(plain, name), strict=True):
            assert torch.equal(got, want), name


def test_the_returned_norm_has_its_own_gradient() -> None:
    layer = made(return_layernorm_output=True)
    x = torch.randn(4, 32).to(BF16).requires_grad_()
    _, normalized = layer(x)
    normalized.float().square().sum().backward()
    assert x.grad is not None
    assert layer.layer_norm_weight.grad is not None
    assert layer.weight.grad is None


def test_return_bias_leaves_it_out() -> None:
    with_bias, without = made(), made(return_bias=True)
    x = torch.randn(4, 32).to(BF16)
    y, bias = without(x)
    assert bias is without.bias
    wide = (y.double() + bias.double()) - with_bias(x).double()
    # each side rounds once to bfloat16, 2^-8 relative
    assert (wide.abs() <= 2.0**-8 * (y.abs() + with_bias(x).abs()).double()).all()


def test_return_order_is_output_bias_norm() -> None:
    layer = made(return_bias=True, return_layernorm_output=True)
    y, bias, normalized = layer(torch.randn(4, 32).to(BF16))
    assert (y.shape, bias.shape, normalized.shape) == ((4, 16), (16,), (4, 32))


def test_parameter_names() -> None:
    for arguments, names in [
        ({}, ["layer_norm_weight", "layer_norm_bias", "weight", "bias"]),
        ({"normalization": "RMSNorm"}, ["layer_norm_weight", "weight", "bias"]),
        ({"bias": False}, ["layer_norm_weight", "layer_norm_bias", "weight"]),
        (
            {"parameters_split": ["query", "key"], "normalization": "RMSNorm"},
            ["layer_norm_weight", "query_weight", "key_weight", "query_bias", "key_bias"],
        ),
    ]:
        layer = LayerNormLinear(8, 16, **arguments)
        assert [name for name, _ in layer.named_parameters()] == names, (arguments, names)


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_gradcheck(normalization: str) -> None:
    layer = LayerNormLinear(4, 3, eps=1e-2, normalization=normalization, params_dtype=torch.float64)
    x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, *_: layer(x), (x, *layer.parameters()))


def test_frozen_linear_still_trains_the_norm() -> None:
    for name in RECIPES:
        layer, other = made(), made()
        layer.weight.requires_grad_(False)
        got, want = run(layer, name), run(other, name)
        assert got[4] is None, name
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True) if a is not None), name


def test_zero_rows() -> None:
    layer = made()
    with autocast(recipe=recipe.Float8CurrentScaling()):
        y = layer(torch.zeros(0, 32, dtype=BF16, requires_grad=True))
    y.sum().backward()
    assert y.shape == (0, 16)
    assert layer.layer_norm_weight.grad is not None
    assert not layer.layer_norm_weight.grad.any()


def test_an_unknown_normalization_lists_the_known() -> None:
    with pytest.raises(RecipeError, match=r"'BatchNorm'.*LayerNorm, RMSNorm"):
        LayerNormLinear(8, 8, normalization="BatchNorm")


def test_a_part_may_not_be_called_as_the_norm() -> None:
    for bias in [True, False]:
        with pytest.raises(RecipeError, match="'layer_norm' is the norm's"):
            LayerNormLinear(8, 8, bias=bias, parameters_split=["layer_norm_", "b"])


def test_a_wrong_hidden_size_names_both() -> None:
    with pytest.raises(OperandError, match=r"k=31.*\[\.\.\., 32\]"):
        made()(torch.zeros(2, 31, dtype=BF16))


def test_what_is_not_offered_is_refused() -> None:
    for arguments in [{"ub_bulk_wgrad": True}, {"symmetric_ar_type": "multimem"}]:
        with pytest.raises(UnsupportedError, match=next(iter(arguments))):
            LayerNormLinear(8, 8, **arguments)
