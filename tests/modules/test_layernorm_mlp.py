"""LayerNormMLP: its parts, every activation, names and refusals."""

from __future__ import annotations

import pytest
import torch

from fp8core import (
    LayerNorm,
    LayerNormMLP,
    Linear,
    OperandError,
    RecipeError,
    UnsupportedError,
    autocast,
    ops,
    recipe,
)
from fp8core.backend_api import ACTIVATIONS

BF16 = torch.bfloat16
GATED = ["geglu", "glu", "qgeglu", "reglu", "sreglu", "swiglu", "clamped_swiglu"]
OPERATIONS = {
    operation.activation: operation
    for operation in vars(ops).values()
    if isinstance(operation, type) and hasattr(operation, "activation")
}
STATELESS = [None, *(name for name in recipe.names() if name != "delayed")]


def by_name(name: str | None) -> recipe.Recipe | None:
    return None if name is None else recipe.by_name(name)


def made(activation: str = "gelu", dtype: torch.dtype = BF16, **arguments: object) -> LayerNormMLP:
    torch.manual_seed(1)
    layer = LayerNormMLP(32, 64, activation=activation, params_dtype=dtype, **arguments)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return layer


def parts(layer: LayerNormMLP) -> torch.nn.Sequential:
    """Return the same four operations as layers of their own."""
    norm = LayerNorm(32, params_dtype=BF16)
    fc1 = Linear(32, layer.fc1_weight.shape[0], params_dtype=BF16)
    fc2 = Linear(64, 32, params_dtype=BF16)
    for own, prefix in ((norm, "layer_norm"), (fc1, "fc1"), (fc2, "fc2")):
        names = ("weight", "bias")
        own.load_state_dict({name: getattr(layer, f"{prefix}_{name}") for name in names})
    return torch.nn.Sequential(norm, fc1, OPERATIONS[layer._activation.name](), fc2)


def run(layer: torch.nn.Module, name: str | None) -> list[torch.Tensor]:
    torch.manual_seed(2)
    x = torch.randn(32, 32).to(BF16).requires_grad_()
    with autocast(enabled=name is not None, recipe=by_name(name)):
        y = layer(x)
    torch.manual_seed(3)
    y.backward(torch.randn(y.shape).to(BF16))
    assert x.grad is not None
    return [y.detach(), x.grad, *(own.grad for own in layer.parameters())]


def test_every_activation_has_an_operation() -> None:
    assert set(OPERATIONS) == set(ACTIVATIONS)


# Not nvfp4: it draws one seed a layer, so two linears in two layers round by other numbers.
def test_equals_its_parts_bit_for_bit() -> None:
    for activation, name in [
        *((activation, "current") for activation in ACTIVATIONS),
        *(("swiglu", name) for name in STATELESS if name not in ("current", "nvfp4")),
    ]:
        layer = made(activation)
        for got, want in zip(run(layer, name), run(parts(layer), name), strict=True):
            assert torch.equal(got, want), (activation, name)


def test_nvfp4_forward_equals_its_parts_bit_for_bit() -> None:
    layer = made()
    assert torch.equal(run(layer, "nvfp4")[0], run(parts(layer), "nvfp4")[0])


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradcheck(activation: str) -> None:
    layer = LayerNormMLP(4, 3, eps=1e-2, activation=activation, params_dtype=torch.float64)
    with torch.no_grad():
        layer.fc1_weight.mul_(20)  # far from the kinks
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, *_: layer(x), (x, *layer.parameters()))


def test_gated_activations_double_fc1() -> None:
    for activation in ACTIVATIONS:
        layer = LayerNormMLP(8, 24, activation=activation)
        rows = 48 if activation in GATED else 24
        assert (layer.fc1_weight.shape, layer.fc2_weight.shape) == ((rows, 8), (8, 24)), activation


def test_parameter_names() -> None:
    for arguments, names in [
        (
            {},
            "layer_norm_weight layer_norm_bias fc1_weight fc1_bias fc2_weight fc2_bias",
        ),
        (
            {"normalization": "RMSNorm"},
            "layer_norm_weight fc1_weight fc1_bias fc2_weight fc2_bias",
        ),
        ({"bias": False}, "layer_norm_weight layer_norm_bias fc1_weight fc2_weight"),
    ]:
        assert [
            name for name, _ in LayerNormMLP(8, 8, **arguments).named_parameters()
        ] == names.split(), (arguments, names)


def test_return_order_is_output_bias_norm() -> None:
    layer = made(return_bias=True, return_layernorm_output=True)
    y, bias, normalized = layer(torch.randn(2, 3, 32).to(BF16))
    assert bias is layer.fc2_bias
    assert (y.shape, normalized.shape) == ((2, 3, 32), (2, 3, 32))


def test_returned_bias_is_not_added() -> None:
    added, returned = made(dtype=torch.float64), made(dtype=torch.float64, return_bias=True)
    x = torch.randn(4, 32, dtype=torch.float64)
    y, bias = returned(x)
    # float64 sums of 64 terms below 2^6 each
    assert (y + bias - added(x)).abs().max() <= 64 * 2.0**6 * 2.0**-53


def test_returned_layernorm_output_is_the_norms() -> None:
    for name in STATELESS:
        layer = made(return_layernorm_output=True)
        x = torch.randn(32, 32).to(BF16)
        with autocast(enabled=name is not None, recipe=by_name(name)):
            _, normalized = layer(x)
        assert torch.equal(normalized, parts(layer)[0](x)), name


def test_leading_dimensions_are_rows() -> None:
    for name in STATELESS:
        layer, x = made(), torch.randn(4, 8, 32).to(BF16)
        with torch.no_grad(), autocast(enabled=name is not None, recipe=by_name(name)):
            assert torch.equal(layer(x), layer(x.reshape(32, 32)).reshape(4, 8, 32)), name


def test_delayed_biases_get_the_sum_before_quantization() -> None:
    layer = made()
    grads = run(layer, "delayed")
    torch.manual_seed(3)
    want = torch.randn(32, 32).to(BF16).sum(0, dtype=torch.float32).to(BF16)
    assert torch.equal(grads[-1], want)


def test_clamped_swiglu_takes_its_parameters() -> None:
    x = torch.randn(4, 32).to(BF16)
    default = made("clamped_swiglu")(x)
    given = {"limit": 7.0, "alpha": 1.702, "glu_linear_offset": 1.0}
    assert torch.equal(made("clamped_swiglu", activation_params=given)(x), default)
    other = made("clamped_swiglu", activation_params={"glu_linear_offset": 0.0})(x)
    assert not torch.equal(other, default)


def test_an_unknown_activation_lists_the_known() -> None:
    with pytest.raises(RecipeError, match=rf"'gulu'.*{', '.join(ACTIVATIONS)}"):
        LayerNormMLP(8, 8, activation="gulu")


def test_an_unknown_activation_parameter_lists_the_known() -> None:
    with pytest.raises(RecipeError, match=r"'beta'.*limit, alpha, glu_linear_offset"):
        LayerNormMLP(8, 8, activation="clamped_swiglu", activation_params={"beta": 1.0})


def test_a_parameter_of_an_activation_without_any_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"gelu has no parameter 'limit'.*none"):
        LayerNormMLP(8, 8, activation_params={"limit": 1.0})


def test_an_unknown_normalization_lists_the_known() -> None:
    with pytest.raises(RecipeError, match=r"'layer_norm'.*LayerNorm, RMSNorm"):
        LayerNormMLP(8, 8, normalization="layer_norm")


def test_a_wrong_hidden_size_names_both() -> None:
    with pytest.raises(OperandError, match=r"k=33.*\[\.\.\., 32\]"):
        made()(torch.zeros(2, 33, dtype=BF16))


def test_a_size_of_zero_is_refused() -> None:
    for name in ["hidden_size", "ffn_hidden_size"]:
        with pytest.raises(OperandError, match=rf"{name}=0"):
            LayerNormMLP(**{"hidden_size": 8, "ffn_hidden_size": 8, name: 0})


def test_what_is_not_offered_is_refused() -> None:
    for arguments in [{"ub_bulk_dgrad": True}, {"ub_overlap_rs": True}]:
        with pytest.raises(UnsupportedError, match=next(iter(arguments))):
            LayerNormMLP(8, 8, **arguments)


def test_parallel_modes_of_one_rank_are_taken() -> None:
    LayerNormMLP(8, 8, set_parallel_mode=True, return_layernorm_output_gathered=True)
