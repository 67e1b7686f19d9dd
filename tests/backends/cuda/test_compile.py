"""Layers under torch.compile on a GPU: one graph, the bits of eager."""

from __future__ import annotations

import copy

import pytest
import torch

import fp8core
from fp8core import recipe

pytestmark = [
    pytest.mark.needs_accelerator("cuda"),
    # Of few rows two kernels may be timed apart, which add up in other orders.
    pytest.mark.usefixtures("first_algorithms"),
    pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning"),
    # Inductor's advice about float32 matrices, of which there are none.
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
    # A part of a graph between two operators that run in each replay may have none.
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning"),
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


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_delayed_steps_have_the_bits_and_the_scales_of_eager(kind: str, mode: str) -> None:
    torch.compiler.reset()
    torch.manual_seed(0)
    options = {"params_dtype": torch.bfloat16, "device": "cuda"}
    layer: torch.nn.Module = fp8core.Linear(K, N, **options)
    if kind == "mlp":
        layer = fp8core.LayerNormMLP(K, N, activation="swiglu", **options)
    other, chosen = copy.deepcopy(layer), recipe.DelayedScaling(amax_history_len=4)
    compiled = torch.compile(other, fullgraph=True, dynamic=False, mode=mode)
    for _ in range(6):  # CUDA graphs replay from the third step on
        torch.compiler.cudagraph_mark_step_begin()
        found = [x.clone() for x in results(other, chosen, compiled)]
        expected = results(layer, chosen)
        state = zip(other.buffers(), layer.buffers(), strict=True)
        assert all(torch.equal(a, b) for a, b in (*zip(found, expected, strict=True), *state))
        layer.zero_grad()
        other.zero_grad()
