"""``LayerNormMLP(checkpoint=True)`` holds its input alone, and computes the rest again."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fp8core
from tests.pairs import turns


def run(layer: Any, x: torch.Tensor, chosen: Any) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    with fp8core.autocast(enabled=chosen is not None, recipe=chosen):
        y = layer(x)
    y = y[0] if isinstance(y, tuple) else y
    y.square().sum().backward()
    return [y, x.grad, *[parameter.grad for parameter in layer.parameters()]]


@pytest.mark.parametrize(
    ("chosen", "more"),
    turns(
        [None, "delayed", "mxfp8", "nvfp4"],
        [{}, {"return_bias": True, "return_layernorm_output": True}],
    ),
)
def test_results_are_those_without(chosen: Any, more: dict[str, Any]) -> None:
    results = []
    for checkpoint in (False, True):
        torch.manual_seed(0)
        layer = fp8core.LayerNormMLP(48, 64, checkpoint=checkpoint, **more)
        x = torch.randn(5, 8, 48)
        for _ in range(2):
            layer.zero_grad()
            results.append(run(layer, x, chosen))
    for first, second in ((0, 2), (1, 3)):
        for plain, again in zip(results[first], results[second], strict=True):
            if plain is not None:
                assert torch.equal(plain, again)


@pytest.mark.parametrize("chosen", [None, "mxfp8"])
def test_the_input_alone_is_held(chosen: Any) -> None:
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    layer, x = fp8core.LayerNormMLP(48, 64, checkpoint=True), torch.randn(8, 48)
    with (
        fp8core.autocast(enabled=chosen is not None, recipe=chosen),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
    ):
        layer(x)
    assert all(tensor.data_ptr() == x.data_ptr() for tensor in saved if tensor.numel())


def test_evaluation_computes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = fp8core.LayerNormMLP(48, 64, checkpoint=True), torch.randn(8, 48)
    with torch.no_grad():
        y = layer(x)
    assert not y.requires_grad
    assert torch.equal(y, layer(x))
