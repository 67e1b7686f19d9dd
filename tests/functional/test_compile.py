"""Quantizers, products and views of quantized tensors in graphs that torch.compile captures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fp8core import QuantizedTensor, functional
from fp8core.quantizers import Float8CurrentScalingQuantizer, MXFP8Quantizer, NVFP4Quantizer

QUANTIZERS = {
    "current": Float8CurrentScalingQuantizer("e4m3", "cpu"),
    "mxfp8": MXFP8Quantizer("e4m3"),
    "nvfp4": NVFP4Quantizer(with_rht=True),
}


@pytest.fixture(params=QUANTIZERS)
def quantizer(request: pytest.FixtureRequest) -> Any:
    return QUANTIZERS[request.param]


def compiled(call: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(call, fullgraph=True, backend="aot_eager")


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(shape).to(torch.bfloat16)


def test_quantize_and_dequantize_in_a_graph(quantizer: Any) -> None:
    x = rand(64, 128)

    def call(x: torch.Tensor) -> torch.Tensor:
        return quantizer(x).dequantize() * 2

    assert torch.equal(compiled(call)(x), call(x))


def test_a_graph_returns_a_quantized_tensor(quantizer: Any) -> None:
    x = rand(2, 32, 128)
    made = compiled(lambda x: quantizer(x + 1))(x)
    expected = quantizer(x + 1)
    assert isinstance(made, QuantizedTensor)
    assert made.plan == expected.plan
    pairs = zip(made.tensors(), expected.tensors(), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)


def test_gradients_pass_in_a_graph(quantizer: Any) -> None:
    def call(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return functional.gemm(quantizer(x), quantizer(w)).float().square().sum()

    grads = []
    for run in (call, compiled(call)):
        torch.manual_seed(0)
        x, w = rand(64, 128).requires_grad_(), rand(96, 128).requires_grad_()
        run(x, w).backward()
        grads.append((x.grad, w.grad))
    assert all(torch.equal(*pair) for pair in zip(*grads, strict=True))


def test_usages_that_change_are_seen_by_a_graph() -> None:
    quantizer, x = MXFP8Quantizer("e4m3"), rand(32, 64)
    run = compiled(lambda x: quantizer(x))
    assert run(x).get_usages() == {"rowwise": True, "columnwise": True}
    quantizer.set_usage(columnwise=False)
    assert run(x).get_usages() == {"rowwise": True, "columnwise": False}


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "view": lambda q: q.view(2, 32, 128),
    "slice": lambda q: q[:32],
    "chunk": lambda q: q.chunk(2)[1],
    "select": lambda q: q.view(2, 32, 128)[1],
    "cat": lambda q: torch.cat([q, q]),
    "arithmetic": lambda q: q + 1,
}


@pytest.mark.parametrize("view", VIEWS)
def test_views_of_an_input_in_a_graph(view: str) -> None:
    tensor = MXFP8Quantizer("e4m3")(rand(64, 128))

    def call(q: torch.Tensor) -> torch.Tensor:
        return functional.dequantize(VIEWS[view](q))

    assert torch.equal(compiled(call)(tensor), call(tensor))


def test_products_of_inputs_in_a_graph(quantizer: Any) -> None:
    a, b = quantizer(rand(64, 128)), quantizer(rand(96, 128))
    assert torch.equal(compiled(functional.gemm)(a, b), functional.gemm(a, b))
    plain = rand(64, 128)
    assert torch.equal(compiled(functional.gemm)(plain, b), functional.gemm(plain, b))
