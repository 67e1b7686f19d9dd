"""With a recipe transforms and second derivatives are refused by name, and leave no trace."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import grad, hessian, jvp, vmap

import fp8core
from fp8core import UnsupportedError, autocast, recipe
from tests.chain import fused_toy
from tests.chain.test_differentiable import K, layer_of_residual, loss
from tests.pairs import turns

# torch itself: forward-mode differentiation loads decompositions that it still compiles by script.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")

TRANSFORMS: dict[str, tuple[Callable[[nn.Module, torch.Tensor], object], str]] = {
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
    for transform, name in turns(TRANSFORMS, recipe.names()):
        layer, x = fp8core.LayerNormMLP(32, 64, name="mlp"), torch.randn(32, 32)
        run, message = TRANSFORMS[transform]
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


def test_a_refused_transform_changes_no_delayed_state() -> None:
    layer, x = fp8core.Linear(32, 16), torch.randn(32, 32)
    with autocast(recipe=recipe.by_name("delayed")):
        layer(x)
        before = {name: own.clone() for name, own in layer.named_buffers()}
        with pytest.raises(UnsupportedError):
            grad(loss(layer))(x)
        assert all(torch.equal(own, before[name]) for name, own in layer.named_buffers())


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
