"""Layers on CUDA: against golden steps of Transformer Engine on an H200, and offloaded on
streams of a device, with the gradients of layers that stay, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import fp8core
from fp8core.cpu_offload import get_cpu_offload_context
from tests import golden_layers

pytestmark = pytest.mark.needs_accelerator("cuda")
BOUND = 2e-3
Arrays = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def linears(golden: Callable[[str], Arrays]) -> Arrays:
    return golden("linears_seed0")


@pytest.mark.parametrize("name", golden_layers.RECIPES)
def test_linear_is_within_the_bound(name: str, linears: Arrays) -> None:
    layer = fp8core.Linear(256, 128, params_dtype=torch.bfloat16, device="cuda")
    steps = 0
    for step in golden_layers.run(layer, "linear", name, linears):
        assert max(step.errors.values()) < BOUND, (step.index, step.errors)
        for way in ("fwd", "bwd") if name.startswith("delayed") else ():
            for buffer in ("scale", "amax_history"):
                want = golden_layers.tensor(linears[f"{step.prefix}/scaling_{way}/{buffer}"])
                got = getattr(layer, f"{buffer}_{way}")
                assert torch.equal(got.cpu(), want), (step.index, way, buffer)
        steps += 1
    assert steps == 5 if name.startswith("delayed") else steps


@pytest.mark.parametrize("name", golden_layers.RECIPES)
def test_grouped_linear_is_within_the_bound(name: str, linears: Arrays) -> None:
    chosen = golden_layers.RECIPES[name]
    layer = fp8core.GroupedLinear(
        4, 256, 128, bias=False, params_dtype=torch.bfloat16, device="cuda"
    )
    names = [f"weight{group}" for group in range(4)]
    at = "inputs/grouped_linear/step0"
    tensor = golden_layers.tensor
    layer.load_state_dict({key: tensor(linears[f"params/grouped_linear/{key}"]) for key in names})
    x = tensor(linears[f"{at}/x"]).cuda().requires_grad_()
    prefix = f"{name}/grouped_linear/step0"
    splits = linears[f"{name}/grouped_linear/m_splits"].tolist()
    with fp8core.autocast(enabled=chosen is not None, recipe=chosen):
        y = layer(x, splits)
    y.backward(tensor(linears[f"{at}/grad_output"]).cuda())
    found = {"y": y, "grad_input": x.grad}
    found |= {f"grad/{key}": getattr(layer, key).grad for key in names}
    errors = {
        key: golden_layers.error(got.cpu(), tensor(linears[f"{prefix}/{key}"]))
        for key, got in found.items()
    }
    assert max(errors.values()) < BOUND, errors


def test_what_ran_is_the_cuda_backend() -> None:
    layer = fp8core.Linear(64, 64, device="cuda", params_dtype=torch.bfloat16)
    with fp8core.autocast(recipe=golden_layers.RECIPES["current"]):
        layer(torch.randn(32, 64, device="cuda", dtype=torch.bfloat16)).sum().backward()
    assert "on cuda" in str(layer)
    said: Any = fp8core.explain(layer, golden_layers.RECIPES["current"])
    assert not said.refused


STEPS, LAYERS = 3, 4


def stack() -> list[fp8core.LayerNormMLP]:
    torch.manual_seed(0)
    options: dict[str, Any] = {"normalization": "RMSNorm", "activation": "swiglu"}
    return [
        fp8core.LayerNormMLP(512, 2048, params_dtype=torch.bfloat16, device="cuda", **options)
        for _ in range(LAYERS)
    ]


def train(recipe: str, context: Any, sync: Any, streams: list[Any]) -> list[torch.Tensor]:
    """Return results and gradients of some steps; layers run on the streams in turn."""
    layers, found = stack(), []
    for step in range(STEPS):
        torch.manual_seed(step)
        x = torch.randn(2048, 512, device="cuda", dtype=torch.bfloat16).requires_grad_()
        y, before = x, torch.cuda.current_stream()
        for layer, stream in zip(layers, streams, strict=True):
            stream.wait_stream(before)
            with torch.cuda.stream(stream), fp8core.autocast(recipe=recipe):
                with context:
                    y = layer(y)
                y = sync(y)
                # Memory that was freed too early is written while copies may still read it.
                torch.full((2**24,), 255, dtype=torch.uint8, device="cuda")
            before = stream
        torch.cuda.current_stream().wait_stream(before)
        y.backward(torch.ones_like(y))
        grads = [p.grad for layer in layers for p in layer.parameters()]
        found += [one.detach().clone() for one in (y, x.grad, *grads) if one is not None]
        for layer in layers:
            layer.zero_grad()
    torch.cuda.synchronize()
    return found


@pytest.mark.parametrize("many", [False, True], ids=["one stream", "two streams"])
@pytest.mark.parametrize("doubles", [False, True])
@pytest.mark.parametrize("recipe", ["delayed", "current", "block"])
def test_gradients_are_those_of_layers_that_stay(recipe: str, doubles: bool, many: bool) -> None:
    streams = [torch.cuda.current_stream()] * LAYERS
    if many:
        streams = [torch.cuda.Stream(), torch.cuda.Stream()] * (LAYERS // 2)
    stays = get_cpu_offload_context(False)
    offloads = get_cpu_offload_context(
        True, LAYERS - 1, LAYERS, double_buffering=doubles, retain_pinned_cpu_buffers=True
    )
    expected = train(recipe, *stays, streams)
    found = train(recipe, *offloads, streams)
    assert offloads[0].offload_synchronizer.get_offloaded_total_size_mb() > 1
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
