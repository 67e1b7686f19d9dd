"""Offloading on streams of a device: the gradients of layers that stay, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fp8core
from fp8core.cpu_offload import get_cpu_offload_context

pytestmark = pytest.mark.needs_accelerator("cuda")
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
    assert offloads[0].synchronizer.get_offloaded_total_size_mb() > 1
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
