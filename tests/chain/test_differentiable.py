"""Without a recipe torch differentiates a layer as its own."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import fp8core
from fp8core import UnsupportedError, autocast, ops, recipe
from fp8core.chain import differentiable
from fp8core.torch_ops import operators
from tests.chain import fused_toy
from tests.device import DEVICE, assert_same_sums
from tests.pairs import turns

# torch itself: forward-mode differentiation loads decompositions that it still compiles by script.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
D = torch.float64
# Small, as gradgradcheck calls a layer twice for each number; no two sizes of a layer are equal.
K, HIDDEN, N = 4, 3, 2


def mlp() -> ops.Sequential:
    return ops.Sequential(
        ops.Linear(K, 2 * HIDDEN),
        ops.Bias(2 * HIDDEN),
        ops.SwiGLU(),
        ops.Dropout(0.25),
        ops.RMSNorm(HIDDEN),
        ops.Linear(HIDDEN, N),
    )


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: fp8core.Linear(K, N),
    "linear without bias": lambda: fp8core.Linear(K, N, bias=False),
    "linear of parts": lambda: fp8core.Linear(K, N, parameters_split=("query", "key")),
    "norm": lambda: fp8core.LayerNorm(K),
    "zero-centered norm": lambda: fp8core.RMSNorm(K, zero_centered_gamma=True),
    "norm and linear": lambda: fp8core.LayerNormLinear(K, N),
    "mlp": lambda: fp8core.LayerNormMLP(K, HIDDEN, activation="swiglu"),
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


TRAINED = ("linear", "sequential", "mlp")
FROZEN = ("weight", "bias", "input", "all but the input")
ALWAYS = turns(TRAINED, FROZEN)


@pytest.mark.parametrize(
    ("kind", "frozen"),
    [
        pytest.param(*case, marks=() if case in ALWAYS else pytest.mark.slow)
        for case in itertools.product(TRAINED, FROZEN)
    ],
)
def test_second_derivatives_of_what_is_trained(kind: str, frozen: str) -> None:
    layer = layer_of(kind)
    x = torch.randn(3, K, dtype=D, requires_grad=frozen != "input")
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(not name.endswith(frozen) and frozen != "all but the input")
    assert torch.autograd.gradgradcheck(pure(layer), (x, *layer.parameters()))


def test_derivatives_of_a_grouped_layer_pass_gradcheck() -> None:
    layer = fp8core.GroupedLinear(3, K, N, params_dtype=D)
    x = torch.randn(5, K, dtype=D, requires_grad=True)
    names = [name for name, _ in layer.named_parameters()]

    def run(x: torch.Tensor, *values: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = functional_call(
            layer, dict(zip(names, values, strict=True)), (x, [2, 0, 3])
        )
        return made

    assert torch.autograd.gradcheck(run, (x, *layer.parameters()))
    assert torch.autograd.gradgradcheck(run, (x, *layer.parameters()))


def test_second_derivatives_reach_a_residual() -> None:
    layer = layer_of_residual()
    arguments = [torch.randn(3, K, dtype=D, requires_grad=True) for _ in "ab"]
    assert torch.autograd.gradgradcheck(layer, arguments)


def test_second_derivatives_of_a_transformer_layer_as_one_chain() -> None:
    torch.manual_seed(0)
    options = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "params_dtype": D}
    layer = fp8core.TransformerLayer(4, HIDDEN, 2, activation="swiglu", **options)
    x = torch.randn(2, 2, 4, dtype=D, requires_grad=True)
    y = layer(x)  # held: torch 2.11 drops what a node knows with the tensor
    assert type(y.grad_fn.next_functions[0][0]).__name__ == "AccumulateGrad"  # one node
    assert torch.autograd.gradgradcheck(pure(layer), (x, *layer.parameters()))


def test_second_derivatives_behind_a_frozen_norm_of_a_constant() -> None:
    layer = layer_of("mlp")
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(not name.startswith("layer_norm"))
    trained = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    x = torch.randn(3, K, dtype=D)
    names = [name for name, own in layer.named_parameters() if own.requires_grad]

    def run(*values: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = functional_call(layer, dict(zip(names, values, strict=True)), (x,))
        return made

    assert torch.autograd.gradgradcheck(run, trained)


def test_a_second_derivative_behind_a_write_to_a_parameter_is_refused() -> None:
    layer, x = layer_of("mlp"), torch.randn(3, K, dtype=D, requires_grad=True)
    y, plain_y = layer(x).sum(), layer(x).sum()
    with torch.no_grad():
        layer.fc1_bias += 1
    plain_y.backward()  # which reads no bias
    with pytest.raises(fp8core.OperandError, match="written in place since forward"):
        torch.autograd.grad(y, x, create_graph=True)


def test_summands_that_no_first_derivative_needs_are_not_saved() -> None:
    layer = layer_of_residual()
    x, other = (torch.randn(3, K, dtype=D, requires_grad=True) for _ in "ab")
    found: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: found.append(t.data_ptr()) or t, lambda t: t
    ):
        layer(x, other)
    assert not {x.data_ptr(), other.data_ptr()} & {*found}


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


@pytest.mark.parametrize(("kind", "shape"), turns(LAYERS, [(K,), (3, K), (2, 3, K)]), ids=str)
def test_a_batch_of_gradients_equals_a_loop(kind: str, shape: tuple[int, ...]) -> None:
    layer, x = layer_of(kind), torch.randn(shape, dtype=D, requires_grad=True)
    wanted = [x, *layer.parameters()]
    y = plain(layer, x)
    batch = torch.randn(3, *y.shape, dtype=D)

    def back(dy: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(y, wanted, dy, retain_graph=True)

    want = [torch.stack(own) for own in zip(*map(back, batch), strict=True)]
    old = torch.autograd.grad(y, wanted, batch, is_grads_batched=True, retain_graph=True)
    for got in (old, vmap(back)(batch)):
        torch.testing.assert_close(list(got), want)


def test_a_batch_of_gradients_has_the_mask_of_its_forward() -> None:
    layer, x = ops.Sequential(ops.Bias(8), ops.Dropout(0.5)), torch.randn(2, 8, requires_grad=True)
    y = layer(x)
    (got,) = torch.autograd.grad(
        y, x, torch.eye(16).reshape(16, 2, 8), is_grads_batched=True, retain_graph=True
    )
    want = [
        torch.autograd.grad(y, x, own.reshape(2, 8), retain_graph=True)[0] for own in torch.eye(16)
    ]
    assert torch.equal(got, torch.stack(want))


def test_a_thread_of_autograd_that_entered_no_vmap_draws_the_mask_of_a_batch() -> None:
    """It has the dispatch keys of the thread that called backward, but not its count of levels."""
    x, rng = torch.randn(3, 8), torch.tensor([1, 2])
    want = operators.drop(x[0], rng, 0, 0.5) != 0
    with torch._C._IncludeDispatchKeyGuard(torch._C._dispatch_key_parse("VmapMode")):
        made = operators.drop(torch._add_batch_dim(x, 0, 1), rng, 0, 0.5)
        with pytest.raises(RuntimeError, match="random operations inside of vmap"):
            torch.rand(1)
    assert torch.equal(torch._remove_batch_dim(made, 1, 3, 0) != 0, want.expand(3, 8))


Transform = Callable[[nn.Module, torch.Tensor], torch.Tensor]
COMPILED: dict[str, Transform] = {
    "vmap": lambda layer, x: vmap(layer)(x),
    "jvp": lambda layer, x: jvp(layer, (x,), (x,))[1],
    "grad": lambda layer, x: grad(loss(layer))(x),
    "jacfwd of grad": lambda layer, x: jacfwd(grad(loss(layer)))(x),
}


@pytest.fixture
def nothing_bound() -> Iterator[None]:
    """Another test may have run the same layer, in eager."""
    differentiable._bound.cache_clear()
    torch.compiler.reset()
    yield
    differentiable._bound.cache_clear()
    torch.compiler.reset()


@pytest.mark.usefixtures("nothing_bound")
@pytest.mark.parametrize(
    ("transform", "kind"), turns(COMPILED, ["linear", "norm and linear", "mlp", "sequential"])
)
def test_a_compiled_transform_equals_that_of_a_copy_in_eager(transform: str, kind: str) -> None:
    layer, x = layer_of(kind, torch.float32).eval(), torch.randn(3, K)

    def run(x: torch.Tensor) -> torch.Tensor:
        return COMPILED[transform](layer, x)

    got = torch.compile(run, backend="aot_eager")(x)
    after = run(x)
    differentiable._bound.cache_clear()
    want = run(x)
    torch.testing.assert_close(got, want)
    assert torch.equal(after, want)


@pytest.mark.usefixtures("nothing_bound")
@pytest.mark.parametrize("transform", COMPILED)
def test_with_a_recipe_a_compiled_transform_is_refused_by_name(transform: str) -> None:
    layer, x = fp8core.Linear(32, 16, name="fc"), torch.randn(32, 32)

    def run(x: torch.Tensor) -> torch.Tensor:
        with autocast(recipe=recipe.by_name("current")):
            return COMPILED[transform](layer, x)

    with pytest.raises(Exception, match="is not offered in low precision"):
        torch.compile(run, backend="aot_eager")(x)


REFUSED: dict[str, tuple[Callable[[nn.Module, torch.Tensor], object], str]] = {
    "grad": (lambda layer, x: grad(loss(layer))(x), r"torch\.func\.grad"),
    "vmap": (lambda layer, x: vmap(layer)(x[:, None].expand(-1, 32, -1)), r"torch\.func\.vmap"),
    "jvp": (lambda layer, x: jvp(layer, (x,), (x,)), r"torch\.func\.jvp"),
    "hessian": (lambda layer, x: hessian(loss(layer))(x), r"grad.* within torch\.func\.jvp"),
    "forward mode": (lambda layer, x: dual(layer, x), "forward-mode"),
    "batched": (
        lambda layer, x: torch.autograd.functional.jacobian(layer, x, vectorize=True),
        "batch of gradients",
    ),
}


def dual(layer: nn.Module, x: torch.Tensor) -> None:
    with forward_ad.dual_level():
        layer(forward_ad.make_dual(x, x))


def test_with_a_recipe_a_transform_is_refused_by_name() -> None:
    for transform, name in turns(REFUSED, recipe.names()):
        layer, x = fp8core.LayerNormMLP(32, 64, name="mlp"), torch.randn(32, 32)
        run, message = REFUSED[transform]
        with (
            autocast(recipe=recipe.by_name(name)),
            pytest.raises(UnsupportedError, match=rf"'mlp'.*{message}.*autocast\(enabled=False\)"),
        ):
            run(layer, x)


def test_with_a_recipe_a_second_derivative_is_refused_where_it_is_used() -> None:
    for name in recipe.names():
        layer, x = fp8core.Linear(32, 16, name="fc"), torch.randn(32, 32, requires_grad=True)
        with autocast(recipe=recipe.by_name(name)):
            y = layer(x).square().mean()
        (dx,) = torch.autograd.grad(y, x, create_graph=True)
        total = torch.ones((), requires_grad=True) + dx.square().sum()
        with pytest.raises(UnsupportedError, match=r"'fc'.*create_graph.*in low precision"):
            total.backward()


def test_with_a_recipe_torch_autograd_grad_refuses_a_second_derivative() -> None:
    """Which runs the nodes alone on whose way lies what is asked for, here with the loss itself."""
    for wanted in ["weight", "input", "gradient", "weight before"]:
        before, layer = nn.Linear(32, 32), fp8core.Linear(32, 16, name="fc")
        x, dy = (torch.randn(32, size, requires_grad=True) for size in (32, 16))
        with autocast(recipe=recipe.by_name("current")):
            y = layer(before(x) if wanted == "weight before" else x)
        places = {
            "weight": layer.weight,
            "input": x,
            "gradient": dy,
            "weight before": before.weight,
        }
        place = places[wanted]
        penalty = torch.autograd.grad(y, layer.weight, dy, create_graph=True)[0].square().sum()
        with pytest.raises(UnsupportedError, match=r"'fc'.*create_graph.*in low precision"):
            torch.autograd.grad(penalty + y.square().sum() + dy.sum(), place, allow_unused=True)


def test_with_a_recipe_a_gradient_with_a_graph_has_the_bits_of_the_one_without() -> None:
    layer, x = fp8core.Linear(32, 16), torch.randn(32, 32, requires_grad=True)
    with autocast(recipe=recipe.by_name("current")):
        y = layer(x)
    wanted, dy = [x, *layer.parameters()], torch.randn_like(y)
    want = torch.autograd.grad(y, wanted, dy, retain_graph=True)
    got = torch.autograd.grad(y, wanted, dy, create_graph=True)
    assert all(map(torch.equal, got, want))


def test_calibrating_is_refused_under_a_transform() -> None:
    layer = fp8core.Linear(32, 16)
    with (
        autocast(enabled=False, calibrating=True, recipe=recipe.by_name("delayed")),
        pytest.raises(UnsupportedError, match="while it calibrates"),
    ):
        grad(loss(layer))(torch.randn(4, 32))


def test_a_gradient_that_is_added_elsewhere_is_refused_under_a_transform() -> None:
    layer = fp8core.Linear(32, 16, fuse_wgrad_accumulation=True)
    layer.weight.main_grad = torch.zeros(16, 32)
    with pytest.raises(UnsupportedError, match="fuse_wgrad_accumulation=False"):
        grad(loss(layer))(torch.randn(4, 32))


def test_a_transform_is_refused_by_name_with_the_autocast_inside() -> None:
    layer, x = fp8core.Linear(32, 16, name="fc"), torch.randn(32, 32)

    def run(x: torch.Tensor) -> torch.Tensor:
        with autocast(recipe=recipe.by_name("delayed")):
            made: torch.Tensor = layer(x).sum()
        return made

    run(x)
    before = {name: own.clone() for name, own in layer.named_buffers()}
    with pytest.raises(UnsupportedError, match=r"'fc'.*torch\.func\.grad"):
        grad(run)(x)
    assert all(torch.equal(own, before[name]) for name, own in layer.named_buffers())


def test_what_a_backend_computes_as_one_is_refused_by_name() -> None:
    with fused_toy.installed("add_norm"):
        layer = layer_of_residual().float()
        x, other = (torch.randn(3, K, requires_grad=True) for _ in "ab")
        (dx,) = torch.autograd.grad(layer(x, other).square().sum(), x, create_graph=True)
        with pytest.raises(UnsupportedError, match=r"use_backend\(\"reference\"\)"):
            dx.sum().backward()


def test_a_refusal_leaves_nothing_of_its_graph_alive() -> None:
    layer = fp8core.Linear(32, 32)
    x = torch.randn(16, 32, requires_grad=True)
    with fp8core.autocast(recipe=recipe.Float8CurrentScaling()):
        y = layer(x)
    (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(UnsupportedError):
        gradient.sum().backward()
    parameter = weakref.ref(layer.weight)
    del y, gradient, layer, x
    gc.collect()
    assert parameter() is None
