"""fuse_wgrad_accumulation: weight gradients go to main_grad, in float32."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import fp8core
from fp8core import OperandError, UnsupportedError, recipe
from tests.device import DEVICE
from tests.pairs import turns

RECIPES = [None, *map(recipe.by_name, ("delayed", "current", "block", "mxfp8"))]
LAYERS: dict[str, Callable[[bool], torch.nn.Module]] = {
    "linear": lambda fuse: fp8core.Linear(64, 96, fuse_wgrad_accumulation=fuse, device=DEVICE),
    "padded": lambda fuse: fp8core.Linear(50, 70, fuse_wgrad_accumulation=fuse, device=DEVICE),
    "norm_linear": lambda fuse: fp8core.LayerNormLinear(
        64, 96, fuse_wgrad_accumulation=fuse, device=DEVICE
    ),
    "mlp": lambda fuse: fp8core.LayerNormMLP(64, 96, fuse_wgrad_accumulation=fuse, device=DEVICE),
}


def weights(layer: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return the matrices: what main_grad is for."""
    return [own for own in layer.parameters() if own.dim() == 2]


def pair(name: str) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Return two equal layers, the first of which adds to main_grad."""
    fused, plain = LAYERS[name](True), LAYERS[name](False)
    plain.load_state_dict(fused.state_dict())
    for weight in weights(fused):
        weight.main_grad = torch.zeros_like(weight)
    return fused, plain


def run(layer: torch.nn.Module, x: torch.Tensor, chosen: recipe.Recipe | None) -> torch.Tensor:
    x = x.clone().requires_grad_()
    with fp8core.autocast(enabled=chosen is not None, recipe=chosen):
        y = layer(x)
    y.square().sum().backward()
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize(("name", "chosen"), turns(LAYERS, RECIPES), ids=str)
def test_two_microbatches_add_up_as_grad_does(name: str, chosen: recipe.Recipe | None) -> None:
    fused, plain = pair(name)
    for x in torch.randn(2, 33, fused.in_features if name != "mlp" else 64):
        assert torch.equal(run(fused, x, chosen), run(plain, x, chosen))
    for ours, theirs in zip(weights(fused), weights(plain), strict=True):
        assert ours.grad is None
        assert torch.equal(ours.main_grad, theirs.grad)
    others = [own for own in fused.parameters() if own.dim() == 1]
    assert others
    assert all(own.grad is not None for own in others)


def test_a_bfloat16_weight_adds_in_float32() -> None:
    layer = fp8core.Linear(
        64, 64, params_dtype=torch.bfloat16, fuse_wgrad_accumulation=True, device=DEVICE
    )
    layer.weight.main_grad = torch.full((64, 64), 2.0**-12)
    x = torch.zeros(16, 64, dtype=torch.bfloat16)
    x[:, 0] = 1
    with fp8core.autocast(recipe=recipe.Float8CurrentScaling()):
        layer(x).sum().backward()
    assert layer.weight.main_grad.dtype == torch.float32
    # bfloat16 would have lost it; a GPU rounds the product of the scales by itself.
    slack = 0.0 if DEVICE.type == "cpu" else 2.0**-16
    torch.testing.assert_close(
        layer.weight.main_grad[:, 0] - 16, torch.full((64,), 2.0**-12), rtol=0, atol=slack
    )
    assert (layer.weight.main_grad[:, 1:] == 2.0**-12).all()


def test_groups_have_a_main_grad_each() -> None:
    fused = fp8core.GroupedLinear(
        3, 64, 32, bias=False, fuse_wgrad_accumulation=True, device=DEVICE
    )
    plain = fp8core.GroupedLinear(3, 64, 32, bias=False, device=DEVICE)
    plain.load_state_dict(fused.state_dict())
    fused.weight1.requires_grad_(False)
    for weight in (fused.weight0, fused.weight2):
        weight.main_grad = torch.ones_like(weight)
    x = torch.randn(48, 64)
    with fp8core.autocast(recipe=recipe.Float8CurrentScaling()):
        for layer in (fused, plain):
            layer(x, [16, 0, 32]).sum().backward()
    for name in ("weight0", "weight2"):
        want = getattr(plain, name).grad + 1
        assert torch.equal(getattr(fused, name).main_grad, want), name


def test_a_framework_that_asks_is_told_and_gets_zeros() -> None:
    layer = fp8core.Linear(64, 64, fuse_wgrad_accumulation=True, device=DEVICE)
    layer.weight.main_grad = torch.zeros(64, 64)
    layer.weight.grad_added_to_main_grad = False
    run(layer, torch.randn(16, 64), None)
    assert layer.weight.grad_added_to_main_grad is True
    assert layer.weight.grad is not None
    assert not layer.weight.grad.any()


def test_a_main_grad_that_does_not_fit_is_refused() -> None:
    for main_grad, found in [
        (None, "main_grad=None"),
        (torch.zeros(64, 64, dtype=torch.bfloat16), "torch.bfloat16"),
        (torch.zeros(32, 64), r"\[32, 64\]"),
    ]:
        layer = fp8core.Linear(64, 64, fuse_wgrad_accumulation=True, device=DEVICE)
        layer.weight.main_grad = main_grad
        with pytest.raises(OperandError, match=found):
            run(layer, torch.randn(16, 64), None)


@pytest.mark.parametrize("name", [None, "current"])
def test_backward_runs_again_when_a_missing_main_grad_is_there(name: str | None) -> None:
    layer = fp8core.Linear(32, 16, bias=False, fuse_wgrad_accumulation=True)
    x = torch.randn(64, 32, requires_grad=True)
    with fp8core.autocast(enabled=name is not None, recipe=name):
        y = layer(x)
    with pytest.raises(OperandError, match="Set it before backward"):
        y.sum().backward()
    layer.weight.main_grad = torch.zeros(16, 32)
    y.sum().backward()
    assert layer.weight.main_grad.any()


def test_parts_of_a_weight_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="parameters_split"):
        fp8core.Linear(
            64, 64, parameters_split=("a", "b"), fuse_wgrad_accumulation=True, device=DEVICE
        )


def test_a_compiled_graph_refuses_it() -> None:
    layer = fp8core.Linear(64, 64, fuse_wgrad_accumulation=True, device=DEVICE)
    layer.weight.main_grad = torch.zeros(64, 64)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    with (
        fp8core.autocast(recipe=recipe.Float8CurrentScaling()),
        pytest.raises(UnsupportedError, match="main_grad"),
    ):
        compiled(torch.randn(16, 64))
