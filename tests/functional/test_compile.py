"""Quantizers, products and views of quantized tensors in graphs that torch.compile captures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from fp8core import QuantizedTensor, functional, recipe
from fp8core.backend_api import Operand
from fp8core.quantizers import (
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
)
from fp8core.torch_ops.private import PASSES_DATACLASSES
from tests.device import DEVICE

QUANTIZERS = {
    "current": Float8CurrentScalingQuantizer("e4m3", DEVICE),
    "nvfp4": NVFP4Quantizer(with_rht=True),
}


# One scale a tensor, and two levels of scales behind a transform.
@pytest.fixture(params=["current", "nvfp4"])
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
    expected = functional.gemm(a, b)
    assert torch.equal(compiled(functional.gemm)(a, b), expected)
    plain = rand(64, 128)
    assert torch.equal(compiled(functional.gemm)(plain, b), functional.gemm(plain, b))


def test_a_graph_writes_a_quantized_tensor(quantizer: Any) -> None:
    x, out = rand(64, 128), quantizer(rand(64, 128))
    compiled(quantizer.update_quantized)(x, out)
    expected = quantizer(x)
    assert all(torch.equal(*pair) for pair in zip(out.tensors(), expected.tensors(), strict=True))


def test_a_graph_writes_a_scale_that_both_orientations_share() -> None:
    quantizer = QUANTIZERS["current"]
    rowwise, columnwise = quantizer(rand(64, 128)).operands
    columnwise = Operand(columnwise.data.contiguous(), rowwise.scale_inv)
    out = QuantizedTensor(rowwise, columnwise, quantizer.plan, torch.bfloat16)

    def call(x: torch.Tensor) -> torch.Tensor:
        return quantizer.update_quantized(x, out).dequantize() * 2

    x = rand(64, 128)
    expected = quantizer(x)
    assert torch.equal(compiled(call)(x), expected.dequantize() * 2)
    for held, operand in zip(out.operands, expected.operands, strict=True):
        assert torch.equal(held.data, operand.data)
        assert torch.equal(held.scale_inv, operand.scale_inv)


def test_a_graph_makes_a_tensor_to_be_written(quantizer: Any) -> None:
    made = compiled(lambda: quantizer.make_empty((64, 128), dtype=torch.bfloat16))()
    assert made.plan == quantizer.make_empty((64, 128)).plan
    assert not made.dequantize().any()


def test_a_recipe_quantizes_in_a_graph() -> None:
    x, mxfp8 = rand(64, 128), recipe.MXFP8BlockScaling()

    def by_name(x: torch.Tensor) -> torch.Tensor:
        return functional.quantize(x, "MXFP8BlockScaling", columnwise=False).dequantize()

    def by_object(x: torch.Tensor) -> torch.Tensor:
        return functional.quantize(x, mxfp8).dequantize()

    assert torch.equal(compiled(by_name)(x), by_name(x))
    around = torch.compile(by_object, fullgraph=PASSES_DATACLASSES, backend="aot_eager")
    assert torch.equal(around(x), by_object(x))


def test_a_transpose_is_read_in_a_graph(quantizer: Any) -> None:
    tensor = quantizer(rand(64, 128))
    assert torch.equal(compiled(lambda t: t @ t.t())(tensor), tensor @ tensor.t())


def test_a_write_to_a_transpose_is_refused_in_a_graph(quantizer: Any) -> None:
    with pytest.raises(Exception, match="writes to a view of a QuantizedTensor"):
        compiled(lambda t: t.t().zero_())(quantizer(rand(64, 128)))


def test_parts_are_joined_in_a_graph(quantizer: Any) -> None:
    tensor = quantizer(rand(64, 128))
    made, expected = compiled(lambda t: torch.cat([t, t]))(tensor), torch.cat([tensor, tensor])
    assert isinstance(made, QuantizedTensor)
    assert torch.equal(made.dequantize(), expected.dequantize())


def test_a_graph_refuses_a_write_by_a_scale_that_it_lacks() -> None:
    quantizer = Float8Quantizer(torch.tensor([4.0]), torch.zeros(1), "e4m3")
    tensor = quantizer(rand(64, 128))
    before = tensor.dequantize()
    with pytest.raises(Exception, match="whose scale a Float8Quantizer holds"):
        compiled(lambda t, x: t.copy_(x))(tensor, rand(64, 128))
    assert torch.equal(tensor.dequantize(), before)


def test_a_graph_refuses_a_write_to_a_part_of_a_scale() -> None:
    tensor = QUANTIZERS["current"](rand(64, 128))
    before = tensor.dequantize()
    with pytest.raises(Exception, match="whose scale covers more than the view"):
        compiled(lambda t: t.zero_())(tensor[:32])
    assert torch.equal(tensor.dequantize(), before)


def test_a_fake_tensor_is_quantized_and_multiplied(quantizer: Any) -> None:
    with FakeTensorMode():
        tensor = quantizer(rand(64, 128))
        product = functional.gemm(tensor, tensor)
    assert (tensor.shape, product.shape) == ((64, 128), (64, 64))


def test_a_fake_tensor_is_decoded_and_multiplied_by_operators(quantizer: Any) -> None:
    """A kernel would read its address; torch dispatches to it with is_compiling() off."""
    tensor, called = quantizer(rand(64, 128)), []

    class Operators(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            called.append(func)
            return func(*args, **(kwargs or {}))

    with FakeTensorMode() as mode:
        fake = mode.from_tensor(tensor)
        with Operators():
            made, product = fake.dequantize(), functional.gemm(fake, fake)
    assert (made.shape, product.shape) == ((64, 128), (64, 64))
    assert {torch.ops.fp8core.dequantize.default, torch.ops.fp8core.gemm.default} <= {*called}
