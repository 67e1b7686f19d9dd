"""ops.Sequential: equal to torch's modules and to the layers, and what it refuses."""

from __future__ import annotations

import copy

import pytest
import torch

import fp8core
from fp8core import autocast, functional, ops, recipe
from fp8core.backend_api import ACTIVATIONS
from tests.pairs import turns

BF16 = torch.bfloat16
RECIPES = [None, *recipe.names()]
ACTIVATION_OPS = {
    operation.activation: operation
    for operation in vars(ops).values()
    if isinstance(operation, type) and hasattr(operation, "activation")
}


def chosen(name: str | None) -> autocast:
    return autocast(enabled=name is not None, recipe=recipe.by_name(name or "current"))


def step(
    layer: torch.nn.Module, x: torch.Tensor, *extra: torch.Tensor, name: str | None = None
) -> list[torch.Tensor]:
    """Return the output and the gradients of the inputs and parameters that get one."""
    inputs = [one.clone().requires_grad_() for one in (x, *extra)]
    layer.zero_grad()
    with chosen(name):
        y = layer(*inputs)
    y.square().sum().backward()
    grads = [own.grad for own in (*inputs, *layer.parameters())]
    return [y.detach(), *(grad.clone() for grad in grads if grad is not None)]


def same(got: list[torch.Tensor], want: list[torch.Tensor]) -> bool:
    return len(got) == len(want) and all(map(torch.equal, got, want))


def test_every_operation_is_public() -> None:
    kinds = {"Sequential", "Linear", "Bias", "LayerNorm", "RMSNorm", "Quantize", "Dropout"}
    assert {*kinds, "AddExtraInput"} <= set(ops.__all__)
    assert set(ACTIVATION_OPS) == set(ACTIVATIONS)


@pytest.mark.parametrize("name", RECIPES)
def test_a_sequential_is_the_mlp_bit_for_bit(name: str | None) -> None:
    torch.manual_seed(1)
    layer = fp8core.LayerNormMLP(32, 64, activation="swiglu")
    made = ops.Sequential(ops.LayerNorm(32), ops.Linear(32, 128), ops.SwiGLU(), ops.Linear(64, 32))
    made.load_state_dict(dict(zip(made.state_dict(), layer.state_dict().values(), strict=True)))
    x = torch.randn(32, 32)
    torch.manual_seed(2)
    want = step(layer, x, name=name)
    torch.manual_seed(2)
    assert same(step(made, x, name=name), want)


def test_its_delayed_state_is_the_mlps() -> None:
    layer = fp8core.LayerNormMLP(32, 64)
    made = ops.Sequential(ops.LayerNorm(32), ops.Linear(32, 64), ops.GELU(), ops.Linear(64, 32))
    made.load_state_dict(dict(zip(made.state_dict(), layer.state_dict().values(), strict=True)))
    x = torch.randn(32, 32)
    for one in (layer, made):
        step(one, x, name="delayed")
    for buffer in ("scale_fwd", "amax_history_fwd", "scale_bwd", "amax_history_bwd"):
        assert torch.equal(getattr(made, buffer), getattr(layer, buffer))


def test_gradcheck_of_every_kind_of_operation() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        made = ops.Sequential(
            ops.Bias(4), ops.RMSNorm(4, eps=1e-2), ops.Quantize(), ops.Linear(4, 6), ops.SwiGLU(),
            ops.AddExtraInput(), ops.Linear(3, 2), ops.Dropout(0.0),
        )  # fmt: skip
        x, extra = torch.randn(3, 4, requires_grad=True), torch.randn(3, 3, requires_grad=True)
        inputs = (x, extra, *made.parameters())
        assert torch.autograd.gradcheck(lambda x, extra, *_: made(x, extra), inputs)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", [None, "delayed", "mxfp8"])
def test_a_nested_sequential_is_flat(name: str | None) -> None:
    torch.manual_seed(1)
    flat = ops.Sequential(ops.LayerNorm(32), ops.Linear(32, 32), ops.GELU(), ops.Linear(32, 32))
    parts = list(copy.deepcopy(flat).children())
    nested = ops.Sequential(ops.Sequential(*parts[:2]), ops.Sequential(*parts[2:]))
    x = torch.randn(32, 32)
    torch.manual_seed(2)
    want = step(flat, x, name=name)
    torch.manual_seed(2)
    assert same(step(nested, x, name=name), want)


def test_a_nested_sequential_takes_its_extra_inputs() -> None:
    nested = ops.Sequential(ops.AddExtraInput(), ops.Sequential(ops.AddExtraInput()))
    x = torch.randn(3, 4)
    assert torch.equal(nested(x, 2 * x, 4 * x), x + 2 * x + 4 * x)


@pytest.mark.parametrize("name", [None, "delayed", "mxfp8"])
def test_a_layer_takes_part(name: str | None) -> None:
    torch.manual_seed(1)
    layer = fp8core.LayerNormLinear(32, 32)
    made = ops.Sequential(copy.deepcopy(layer))
    x = torch.randn(32, 32)
    torch.manual_seed(2)
    want = step(layer, x, name=name)
    torch.manual_seed(2)
    assert same(step(made, x, name=name), want)


@pytest.mark.parametrize("name", [None, "delayed", "mxfp8"])
def test_residual_add_is_torchs_add(name: str | None) -> None:
    torch.manual_seed(1)
    made = ops.Sequential(ops.Linear(32, 16), ops.AddExtraInput())
    x, residual = torch.randn(4, 8, 32), torch.randn(4, 8, 16)
    with chosen(name), torch.no_grad():
        assert torch.equal(made(x, residual), made(x, torch.zeros_like(residual)) + residual)


def test_a_residual_of_another_dtype_leaves_the_dtype() -> None:
    x, residual = torch.randn(4, 8).to(BF16), torch.randn(4, 8)
    y = ops.Sequential(ops.AddExtraInput())(x, residual)
    assert torch.equal(y, (x + residual).to(BF16))


def test_an_add_alone_takes_its_extra_input() -> None:
    x, residual = torch.randn(2, 8), torch.randn(2, 8)
    assert torch.equal(ops.AddExtraInput()(x, residual), x + residual)


@pytest.mark.parametrize("name", [None, "current", "delayed"])
def test_bias_is_torchs_add(name: str | None) -> None:
    layer = ops.Bias(5)
    torch.nn.init.normal_(layer.bias)
    x = torch.randn(3, 5)
    y, grad_x, grad_bias = step(layer, x, name=name)
    assert torch.equal(y, x + layer.bias)
    assert torch.equal(grad_bias, grad_x.sum(0))


def test_dropout_zeroes_and_scales() -> None:
    x = torch.ones(64, 64)
    y = ops.Dropout(0.25)(x)
    assert set(y.unique().tolist()) == {0.0, float(torch.ones(()) / 0.75)}


def test_dropout_of_everything_gives_zeros_and_gradients_of_zero() -> None:
    x = torch.randn(8, 8, requires_grad=True)
    y = ops.Dropout(1.0)(x)
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert not y.any()
    assert not grad.any()


def test_dropout_on_meta_gives_shapes() -> None:
    x = torch.randn(4, 32, device="meta", requires_grad=True)
    y = ops.Dropout(0.25)(x)
    y.sum().backward()
    assert x.grad is not None
    assert y.shape == x.grad.shape == (4, 32)
    assert y.is_meta


def test_dropout_drops_as_often_as_asked() -> None:
    dropped = (ops.Dropout(0.25)(torch.ones(128, 128)) == 0).sum().item()
    # six standard deviations of a binomial with n = 128^2
    assert abs(dropped - 128**2 / 4) <= 6 * (128**2 * 0.25 * 0.75) ** 0.5


def test_dropout_drops_the_same_in_backward() -> None:
    x = torch.ones(32, 32, requires_grad=True)
    y = ops.Dropout(0.5)(x)
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())


def test_two_dropouts_drop_differently() -> None:
    made = ops.Sequential(ops.Dropout(0.5), ops.Dropout(0.5))
    kept = (made(torch.ones(128, 128)) != 0).sum().item()
    # a quarter is kept, not a half; six standard deviations of a binomial with n = 128^2
    assert abs(kept - 128**2 / 4) <= 6 * (128**2 * 0.25 * 0.75) ** 0.5


@pytest.mark.parametrize("is_training", [False, True])
def test_a_dropout_in_another_mode_than_its_chain_follows_its_own(is_training: bool) -> None:
    made = ops.Sequential(ops.Linear(64, 64), ops.Dropout(0.5)).train(is_training)
    x = torch.randn(32, 64)

    def dropped() -> int:
        return int((made(x) == 0).sum())

    drops = [bool(dropped()) for _ in range(2)]  # the second call repeats the first
    made[1].train(not is_training)
    drops += [bool(dropped()) for _ in range(2)]
    made[1].train(is_training)
    assert [*drops, bool(dropped())] == [*[is_training] * 2, *[not is_training] * 2, is_training]


def test_each_call_drops_differently() -> None:
    layer, x = ops.Dropout(0.5), torch.ones(32, 32)
    assert not torch.equal(layer(x), layer(x))


def test_the_seed_decides_what_is_dropped() -> None:
    layer, x = ops.Dropout(0.5), torch.ones(32, 32)
    torch.manual_seed(3)
    first = layer(x)
    torch.manual_seed(3)
    assert torch.equal(layer(x), first)


def test_dropout_saves_nothing_for_backward() -> None:
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        ops.Dropout(0.5)(torch.ones(4, 4, requires_grad=True))
    assert saved == []


def test_dropout_in_evaluation_passes_everything() -> None:
    x = torch.randn(8, 8)
    assert torch.equal(ops.Dropout(0.5).eval()(x), x)


def test_dropout_in_evaluation_draws_no_random_number() -> None:
    layer = ops.Sequential(ops.Dropout(0.5), ops.Linear(8, 8)).eval()
    before = torch.get_rng_state()
    layer(torch.zeros(2, 8))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", [name for name in RECIPES if name not in (None, "nvfp4")])
def test_quantize_rounds_once(name: str) -> None:
    # NVFP4's two-level scales move with the rounded tensor's amax, so it is left out.
    layer, x = ops.Quantize(), torch.randn(32, 32).to(BF16)
    with chosen(name):
        once = layer(x)
        assert not torch.equal(once, x)
        assert torch.equal(layer(once), once)


@pytest.mark.parametrize(("name", "columns"), turns(recipe.names(), [17, 1, 33]))
def test_quantize_takes_any_number_of_columns(name: str, columns: int) -> None:
    """Two codes of NVFP4 share a byte."""
    layer, x = ops.Quantize(backward=True), torch.randn(32, columns)

    def both_ways(given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        leaf = given.clone().requires_grad_()
        with chosen(name):
            y = layer(leaf)
        y.backward(given)
        return y, leaf.grad

    padded = both_ways(torch.nn.functional.pad(x, (0, 1)))
    for result, wide in zip(both_ways(x), padded, strict=True):
        assert torch.equal(result, functional.dequantize(wide)[:, :columns])


def test_quantize_passes_the_gradient_straight_through() -> None:
    x = torch.randn(32, 32, requires_grad=True)
    with chosen("current"):
        y = ops.Quantize()(x)
    grad = torch.randn(32, 32)
    y.backward(grad)
    assert torch.equal(x.grad, grad)


def test_quantize_outside_an_autocast_changes_nothing() -> None:
    x = torch.randn(4, 8)
    assert torch.equal(ops.Quantize(backward=True)(x), x)


def test_operations_without_parameters_have_a_repr() -> None:
    for operation in (ops.GELU(), ops.Dropout(0.5), ops.Sequential(ops.ReLU())):
        assert repr(operation).startswith(type(operation).__name__)


def test_an_operation_without_a_linear_is_labelled_by_its_class() -> None:
    assert ops.LayerNorm(8).label == "LayerNorm"


@pytest.mark.parametrize("name", recipe.names())
def test_quantize_rounds_gradients_of_every_recipe(name: str) -> None:
    x = torch.randn(32, 32, requires_grad=True)
    with autocast(recipe=recipe.by_name(name)):
        y = ops.Sequential(ops.Quantize(forward=False, backward=True))(x)
    grad = torch.randn(32, 32)
    y.backward(grad)
    assert torch.equal(y, x)
    assert not torch.equal(x.grad, grad)
    assert torch.allclose(x.grad, grad, atol=1.0)  # half an e2m1 step of a block's amax below 6
