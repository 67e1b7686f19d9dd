"""Casts that return column sums as well: the bits of the cast, and of the sums alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fp8core
from fp8core.backend_api import ColumnSumsDesc, Quantized, QuantizeDesc
from fp8core_backends.cuda import quantize_and_sum, quantize_chunked
from fp8core_backends.cuda.quantize_chunked import QuantizeChunked, QuantizeChunkedAndSum
from tests.backends.cuda.cuda_cases import DEVICE, backend, put_on_the_host, spec

on_device = pytest.mark.needs_accelerator("cuda")


@on_device
@pytest.mark.parametrize(
    ("name", "dtype"), [("square", torch.bfloat16), ("current", torch.float32)]
)
def test_what_has_no_kernel_offers_no_sums(name: str, dtype: torch.dtype) -> None:
    run = backend("cuda").bind(QuantizeDesc(dtype, spec(name), spec(name)), DEVICE)
    assert getattr(run, "quantize_and_sum", None) is None
    assert getattr(run, "quantize_chunked_and_sum", None) is None


@on_device
@pytest.mark.parametrize("rows", [96, 8192])
@pytest.mark.parametrize("name", ["delayed", "current", "rowwise", "block"])
def test_gradients_of_a_layer_have_the_bits_of_a_frozen_bias(name: str, rows: int) -> None:
    layer = fp8core.Linear(128, 8192, params_dtype=torch.bfloat16, device=DEVICE)
    x = torch.randn(rows, 128, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(rows, 8192, device=DEVICE, dtype=torch.bfloat16)
    grads = []
    for is_trained in (True, False):
        layer.zero_grad()
        layer.reset_delayed_state()
        x.grad = None
        layer.bias.requires_grad_(is_trained)
        with fp8core.autocast(recipe=fp8core.recipe.by_name(name)):
            y = layer(x)
        y.backward(grad)
        grads.append([x.grad, layer.weight.grad, layer.bias.grad])
    assert all(map(torch.equal, grads[0][:2], grads[1][:2]))
    sums = backend("cuda").bind(ColumnSumsDesc(grad.dtype), DEVICE)(grad)
    assert torch.equal(grads[0][2], sums.bfloat16())


class Native:
    """A native cast that takes down its arguments, and the library beside it."""

    MAX_PARTIALS = 8

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, arguments: tuple[int, ...], stream: int) -> None:
        raise AssertionError("the cast without sums")

    def tile_sums_floats(self, rows: int, cols: int) -> int:
        return -(-rows // 128) * cols

    def and_sum(self, arguments: tuple[int, ...], stream: int) -> None:
        self.calls.append(arguments)

    def add_tile_sums(self, arguments: tuple[int, ...], index: int, stream: int) -> None:
        self.calls.append(arguments)


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> Native:
    put_on_the_host(monkeypatch, quantize_and_sum, quantize_chunked)
    monkeypatch.setattr(quantize_chunked, "CHUNK_ROWS", 256)
    monkeypatch.setattr(quantize_chunked, "LEAST_SAVED", 1)
    return Native()


def test_cast_is_given_sums_and_tensor_and_results(native: Native) -> None:
    results = (Quantized(None, None), (11, 12, 13), None)
    cast: Any = SimpleNamespace(
        dtype=torch.bfloat16, native_cast=native, results=lambda *given: results
    )
    x = torch.zeros(130, 64, dtype=torch.bfloat16)[:, 8:48]
    _, sums = quantize_and_sum.QuantizeAndSum(cast, 0)(x)
    ((address, tile_sums, *rest),) = native.calls
    assert address == sums.data_ptr() != tile_sums
    assert rest == [x.data_ptr(), 130, 40, 64, 11, 12, 13]
    assert (sums.shape, sums.dtype) == ((40,), torch.float32)


def test_sums_of_tiles_of_each_chunk_lie_behind_those_before(native: Native) -> None:
    own, cpu = spec("delayed"), torch.device("cuda", 0)
    desc = QuantizeDesc(torch.bfloat16, own, own)
    chunked: Any = QuantizeChunked(desc, cpu, native, native, None)  # type: ignore[arg-type]  # no whole cast
    x = torch.zeros(600, 40, dtype=torch.bfloat16)
    run = QuantizeChunkedAndSum(chunked, None, chunked._empty)  # type: ignore[arg-type]  # likewise
    (chunks, _), sums = run(x, scale=torch.ones(1))
    assert [(start, end) for start, end, _ in chunks] == [(0, 256), (256, 512), (512, 600)]
    *casts, (tile_sums, *added) = native.calls
    assert [one[:2] for one in casts] == [(0, tile_sums + 4 * 40 * at) for at in (0, 2, 4)]
    assert [one[2:6] for one in casts] == [
        (x.data_ptr() + 2 * 40 * start, rows, 40, 40)
        for start, rows in ((0, 256), (256, 256), (512, 88))
    ]
    assert added == [600, 40, sums.data_ptr()]
