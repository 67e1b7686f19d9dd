"""Layers under torch.compile on a GPU: one graph, the bits of eager."""

from __future__ import annotations

import copy

import pytest
import torch

import fp8core
from fp8core import UnsupportedError, recipe

pytestmark = [
    pytest.mark.needs_accelerator("cuda"),
    pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning"),
    # Inductor's advice about float32 matrices, of which there are none.
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
]

ROWS, K, N = 48, 256, 384


def results(
    layer: torch.nn.Module, chosen: recipe.Recipe, model: torch.nn.Module | None = None
) -> list[torch.Tensor]:
    """Run forward and backward under ``chosen``; return what came of them."""
    torch.manual_seed(1)
    x = torch.randn(ROWS, K, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    with fp8core.autocast(recipe=chosen):
        y = (layer if model is None else model)(x)
    y.square().mean().backward()
    return [y.detach(), x.grad, *(own.grad for own in layer.parameters())]


@pytest.mark.parametrize("name", ["current", "block", "rowwise"])
@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_a_compiled_layer_has_the_bits_of_eager(kind: str, name: str) -> None:
    torch.compiler.reset()
    torch.manual_seed(0)
    options = {"params_dtype": torch.bfloat16, "device": "cuda"}
    layer: torch.nn.Module
    if kind == "linear":
        layer = fp8core.Linear(K, N, **options)
    else:
        layer = fp8core.LayerNormMLP(K, N, activation="swiglu", **options)
    other, chosen = copy.deepcopy(layer), recipe.by_name(name)
    compiled = torch.compile(other, fullgraph=True, dynamic=False)
    for found, expected in zip(
        results(other, chosen, compiled), results(layer, chosen), strict=True
    ):
        assert torch.equal(found, expected)


def test_delayed_scaling_is_refused_in_a_graph() -> None:
    layer = fp8core.Linear(K, N, params_dtype=torch.bfloat16, device="cuda")
    compiled = torch.compile(layer, dynamic=False)
    with pytest.raises(UnsupportedError, match="delayed scaling is not offered"):
        results(layer, recipe.DelayedScaling(), compiled)
