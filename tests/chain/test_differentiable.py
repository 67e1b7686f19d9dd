"""Without a recipe torch differentiates a layer as its own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import fp8core
from fp8core import autocast, ops, recipe
from tests.device import DEVICE, assert_same_sums
from tests.pairs import turns

# torch itself: forward-mode differentiation loads decompositions that it still compiles by script.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")

D = torch.float64
K, N = 6, 4


def mlp() -> ops.Sequential:
    return ops.Sequential(
        ops.Linear(K, 8),
        ops.Bias(8),
        ops.SwiGLU(),
        ops.Dropout(0.25),
        ops.RMSNorm(4),
        ops.Linear(4, N),
    )


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: fp8core.Linear(K, N),
    "linear without bias": lambda: fp8core.Linear(K, N, bias=False),
    "linear of parts": lambda: fp8core.Linear(K, N, parameters_split=("query", "key")),
    "norm": lambda: fp8core.LayerNorm(K),
    "zero-centered norm": lambda: fp8core.RMSNorm(K, zero_centered_gamma=True),
    "norm and linear": lambda: fp8core.LayerNormLinear(K, N),
    "mlp": lambda: fp8core.LayerNormMLP(K, 4, activation="swiglu"),
    "sequential": mlp,
    "quantize": lambda: ops.Sequential(ops.Quantize(backward=True), ops.Linear(K, N)),
    **{
        kind.__name__: kind
        for kind in (ops.GELU, ops.GEGLU, ops.SiLU, ops.QGELU, ops.ClampedSwiGLU)
    },
}


def layer_of(kind: str, dtype: torch.dtype = D) -> nn.Module:
    torch.manual_seed(1)
    layer = LAYERS[kind]().to(dtype)
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    return layer


def pure(layer: nn.Module) -> Callable[..., torch.Tensor]:
    """Return ``f(x, *parameters)``, which draws the same each time."""
    names = [name for name, _ in layer.named_parameters()]

    def run(x: torch.Tensor, *values: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(3)
        made: torch.Tensor = functional_call(layer, dict(zip(names, values, strict=True)), (x,))
        return made

    return run


def plain(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(3)
    made: torch.Tensor = layer(x)
    return made


@pytest.mark.parametrize("kind", LAYERS)
def test_first_and_second_derivatives_pass_gradcheck(kind: str) -> None:
    layer, x = layer_of(kind), torch.randn(2, 3, K, dtype=D, requires_grad=True)
    arguments = (x, *layer.parameters())
    assert torch.autograd.gradcheck(pure(layer), arguments)
    assert torch.autograd.gradgradcheck(pure(layer), arguments)


@pytest.mark.parametrize("shape", [(K,), (3, K), (0, K), (2, 0, K)], ids=str)
def test_second_derivatives_take_every_shape(shape: tuple[int, ...]) -> None:
    layer, x = layer_of("mlp"), torch.randn(shape, dtype=D, requires_grad=True)
    assert torch.autograd.gradgradcheck(pure(layer), (x, *layer.parameters()))


@pytest.mark.parametrize("frozen", ["weight", "bias", "input", "all but the input"])
@pytest.mark.parametrize("kind", ["linear", "sequential", "mlp"])
def test_second_derivatives_of_what_is_trained(kind: str, frozen: str) -> None:
    layer = layer_of(kind)
    x = torch.randn(3, K, dtype=D, requires_grad=frozen != "input")
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(not name.endswith(frozen) and frozen != "all but the input")
    assert torch.autograd.gradgradcheck(pure(layer), (x, *layer.parameters()))


def test_second_derivatives_of_a_grouped_layer() -> None:
    layer = fp8core.GroupedLinear(3, K, N, params_dtype=D)
    x = torch.randn(5, K, dtype=D, requires_grad=True)
    names = [name for name, _ in layer.named_parameters()]

    def run(x: torch.Tensor, *values: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = functional_call(
            layer, dict(zip(names, values, strict=True)), (x, [2, 0, 3])
        )
        return made

    assert torch.autograd.gradgradcheck(run, (x, *layer.parameters()))


def test_second_derivatives_reach_a_residual() -> None:
    layer = layer_of_residual()
    arguments = [torch.randn(3, K, dtype=D, requires_grad=True) for _ in "ab"]
    assert torch.autograd.gradgradcheck(layer, arguments)


def layer_of_residual() -> ops.Sequential:
    return ops.Sequential(ops.AddExtraInput(), ops.LayerNorm(K), ops.Linear(K, N)).double()


@pytest.mark.parametrize("kind", LAYERS)
def test_the_gradient_with_a_graph_has_the_bits_of_the_one_without(kind: str) -> None:
    layer, x = layer_of(kind, torch.float32), torch.randn(5, K, requires_grad=True)
    wanted = [x, *layer.parameters()]
    y = plain(layer, x)
    dy = torch.randn_like(y)
    want = torch.autograd.grad(y, wanted, dy, retain_graph=True)
    got = torch.autograd.grad(y, wanted, dy, create_graph=True)
    assert_same_sums(got, want)


def torchs(dtype: torch.dtype) -> tuple[nn.Linear, fp8core.Linear]:
    own, ours = nn.Linear(K, N, dtype=dtype), fp8core.Linear(K, N, params_dtype=dtype)
    ours.load_state_dict(own.state_dict())
    return own, ours


@pytest.mark.parametrize("is_autocast", [False, True])
def test_a_gradient_penalty_trains_as_with_torch_s_linear(is_autocast: bool) -> None:
    found = []
    for layer in torchs(torch.float32):
        torch.manual_seed(0)
        x = torch.randn(7, K, requires_grad=True)
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=is_autocast):
            y = layer(x).tanh()
        (dx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        (y.square().mean() + dx.square().sum()).backward()
        found.append([x.grad, layer.weight.grad, layer.bias.grad])
    for mine, theirs in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-2 if is_autocast else 1e-5, atol=1e-6)


def test_a_quantized_weight_without_a_recipe_has_second_derivatives() -> None:
    with fp8core.quantized_model_init(recipe=recipe.by_name("current")):
        layer = fp8core.Linear(32, 32, bias=False)
    x = torch.randn(4, 32, requires_grad=True)
    (dx,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    dx.sum().backward()
    weight = layer.weight.dequantize().detach().requires_grad_()
    y = torch.nn.functional.linear(x.detach().requires_grad_(), weight)
    (want,) = torch.autograd.grad(2 * (y @ weight).sum(), weight)
    torch.testing.assert_close(layer.weight.grad, want, rtol=1e-4, atol=1e-4)


def loss(layer: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: plain(layer, x).square().sum()


@pytest.mark.parametrize("kind", LAYERS)
def test_func_grad_and_hessian_agree_with_backward(kind: str) -> None:
    layer, x = layer_of(kind).eval(), torch.randn(2, K, dtype=D)
    leaf = x.clone().requires_grad_()
    loss(layer)(leaf).backward()
    torch.testing.assert_close(grad(loss(layer))(x), leaf.grad)
    want = torch.autograd.functional.hessian(loss(layer), x)
    torch.testing.assert_close(hessian(loss(layer))(x), want)
    torch.testing.assert_close(
        torch.autograd.functional.hessian(loss(layer), x, vectorize=True), want
    )


@pytest.mark.parametrize("kind", LAYERS)
def test_jvp_and_the_two_jacobians_agree(kind: str) -> None:
    layer, x, tangent = (
        layer_of(kind).eval(),
        torch.randn(2, K, dtype=D),
        torch.randn(2, K, dtype=D),
    )
    reverse = jacrev(layer)(x)
    torch.testing.assert_close(jacfwd(layer)(x), reverse)
    want = torch.tensordot(reverse, tangent, dims=2)
    torch.testing.assert_close(jvp(layer, (x,), (tangent,))[1], want)
    for is_grad_enabled in (True, False):
        with forward_ad.dual_level(), torch.set_grad_enabled(is_grad_enabled):
            y = layer(forward_ad.make_dual(x, tangent))
            torch.testing.assert_close(forward_ad.unpack_dual(y).tangent, want)
    y, pull = vjp(layer, x)
    torch.testing.assert_close(pull(torch.ones_like(y))[0], reverse.sum((0, 1)))


@pytest.mark.parametrize(("kind", "in_dim"), turns(LAYERS, [0, 1]))
def test_vmap_over_inputs_equals_a_loop(kind: str, in_dim: int) -> None:
    layer, x = layer_of(kind).eval(), torch.randn(3, 3, K, dtype=D)
    got = vmap(layer, in_dims=in_dim)(x)
    want = torch.stack([layer(own) for own in x.unbind(in_dim)])
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize(
    "kind", ["linear", "linear of parts", "norm and linear", "mlp", "sequential"]
)
def test_vmap_over_stacked_parameters_equals_a_loop(kind: str) -> None:
    layer, x = layer_of(kind).eval(), torch.randn(5, K, dtype=D)
    named = dict(layer.named_parameters())
    stacked = {name: torch.stack([own, own * 2]).detach() for name, own in named.items()}
    got = vmap(lambda params: functional_call(layer, params, (x,)))(stacked)
    want = [
        functional_call(layer, {name: own[at] for name, own in stacked.items()}, (x,))
        for at in range(2)
    ]
    torch.testing.assert_close(got, torch.stack(want))


def test_gradients_of_each_example_equal_a_loop() -> None:
    layer, x = layer_of("mlp"), torch.randn(3, K, dtype=D)
    named = {name: own.detach() for name, own in layer.named_parameters()}

    def one(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = functional_call(layer, params, (x,)).square().sum()
        return made

    got = vmap(grad(one), in_dims=(None, 0))(named, x)
    for at in range(3):
        want = grad(one)(named, x[at])
        for name, own in got.items():
            torch.testing.assert_close(own[at], want[name])


def test_vmap_over_a_grouped_layer_equals_a_loop() -> None:
    layer, x = fp8core.GroupedLinear(2, K, N), torch.randn(3, 5, K)
    got = vmap(lambda own: layer(own, [2, 3]))(x)
    torch.testing.assert_close(got, torch.stack([layer(own, [2, 3]) for own in x]))


def drops(randomness: str) -> torch.Tensor:
    layer = ops.Sequential(ops.Bias(64), ops.Dropout(0.5))
    return vmap(layer, randomness=randomness)(torch.ones(3, 64)) == 0


def test_dropout_draws_as_vmap_says() -> None:
    same, different = drops("same"), drops("different")
    assert (same == same[0]).all()
    assert not (different == different[0]).all()
    assert 0.2 < different.float().mean() < 0.8
    with pytest.raises(RuntimeError, match="randomness"):
        drops("error")


@pytest.mark.parametrize("chosen", ["current", None])
def test_after_convert_of_nothing_torch_differentiates_as_before(chosen: str | None) -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 8))
    x = torch.randn(4, 32)
    want = hessian(loss(model))(x[:1])
    fp8core.convert(model, chosen)
    with autocast(enabled=False):
        torch.testing.assert_close(hessian(loss(model))(x[:1]), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["linear", "mlp", "sequential"])
def test_a_transform_of_a_compiled_function_equals_the_eager_one(kind: str) -> None:
    layer, x = layer_of(kind, torch.float32).eval(), torch.randn(3, K)
    compiled = torch.compile(grad(loss(layer)), backend="aot_eager")
    torch.testing.assert_close(compiled(x), grad(loss(layer))(x))


def test_a_layer_within_a_transform_leaves_others_as_they_are() -> None:
    """A dual level alone, without a tangent, changes nothing."""
    layer, x = fp8core.Linear(32, 16), torch.randn(4, 32)
    with autocast(recipe=recipe.by_name("current")):
        want = layer(x)
        with forward_ad.dual_level():
            assert torch.equal(layer(x), want)


def test_saved_tensors_of_high_precision_are_the_tensors_themselves() -> None:
    layer, x = fp8core.Linear(K, N), torch.randn(2, 3, K, requires_grad=True)
    found: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: found.append(t) or t, lambda t: t):
        layer(x)
    pointers = {own.data_ptr() for own in found}
    assert pointers == {x.data_ptr(), layer.weight.data_ptr()}
