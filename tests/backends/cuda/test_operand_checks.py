"""Tensors that do not fit what was bound are refused before their address reaches a kernel.

A stand-in takes the library's place, so that these run without a device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fp8core.backend_api import (
    ActivationBackwardDesc,
    AmaxDesc,
    GemmDesc,
    Operand,
    OperandError,
    OperandSpec,
    QuantizeDesc,
)
from fp8core_backends.cuda import (
    activation,
    amax,
    gemm,
    microscaling,
    quantize,
    quantize_chunked,
)
from fp8core_backends.cuda.quantize import bind_quantize
from tests.backends.cuda.cuda_cases import put_on_the_host, spec

CUDA = torch.device("cuda", 0)
BF16 = torch.bfloat16


class _Names(dict[str, str]):
    def __missing__(self, name: str) -> str:
        return name


class Native:
    """Stands for the library: every native call takes down that it was made."""

    MAX_PARTIALS = 4

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        return _Entry(self)


class _Entry:
    __members__ = _Names()

    def __init__(self, native: Native) -> None:
        self._native = native

    def __call__(self, *arguments: Any) -> Any:
        self._native.calls.append(arguments)
        return self

    def __getattr__(self, name: str) -> Any:
        return _Entry(self._native)


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> Native:
    casts = (quantize, quantize_chunked, microscaling)
    put_on_the_host(monkeypatch, activation, amax, gemm, *casts)
    return Native()


def calls_of(native: Native, run: Callable[[], object], match: str) -> int:
    """Return how many native calls ``run``, which has to raise, made."""
    before = len(native.calls)
    with pytest.raises(OperandError, match=match):
        run()
    return len(native.calls) - before


CASTS: dict[str, dict[str, bool]] = {
    "call": {},
    "with sums": {"sums": True},
    "in chunks": {"chunked": True},
    "in chunks with sums": {"sums": True, "chunked": True},
}


@pytest.mark.parametrize("shape", [(32, 64), (0, 64)])
@pytest.mark.parametrize("how", CASTS)
def test_casts_refuse_another_dtype(how: str, shape: tuple[int, int], native: Native) -> None:
    own = spec("current")
    cast = bind_quantize(QuantizeDesc(BF16, own, own, **CASTS[how]), CUDA, native)
    x = torch.zeros(shape, dtype=torch.float32)
    assert calls_of(native, lambda: cast(x), r"float32; bound for .*bfloat16") == 0


def test_casts_with_byte_scales_refuse_another_dtype(native: Native) -> None:
    own = OperandSpec("e4m3", (1, 32), 448.0, scale_format="e8m0")
    cast = microscaling.ByteScaled(QuantizeDesc(BF16, own, own), CUDA, native)
    assert calls_of(native, lambda: cast(torch.zeros(32, 32)), r"bound for .*bfloat16") == 0


def test_amaxes_refuse_another_dtype(native: Native) -> None:
    own = spec("current")
    run = amax.bind_amax(AmaxDesc(QuantizeDesc(BF16, own, own)), CUDA, native)
    assert calls_of(native, lambda: run(torch.zeros(32, 32)), r"bound for .*bfloat16") == 0


@pytest.mark.parametrize(
    ("name", "x", "grad"),
    [
        ("gelu", (32, 64), (31, 64)),
        ("gelu", (32, 64), (32, 32)),
        ("swiglu", (32, 64), (32, 64)),
        ("swiglu", (32, 64), (16, 32)),
        ("swiglu", (32, 65), (32, 32)),
    ],
)
def test_a_gradient_of_another_shape_is_refused(
    name: str, x: tuple[int, int], grad: tuple[int, int], native: Native
) -> None:
    run = activation.ActivationBackward(ActivationBackwardDesc(name, BF16, BF16), CUDA, native)
    given = torch.zeros(grad, dtype=BF16), torch.zeros(x, dtype=BF16)
    assert calls_of(native, lambda: run(*given), "the gradient") == 0


@pytest.mark.parametrize("name", ["current", "rowwise", "vector"])
def test_a_product_refuses_scales_that_do_not_go_with_the_codes(name: str, native: Native) -> None:
    own = spec(name)
    product = gemm.LowPrecisionGemm(GemmDesc(own, own, BF16), CUDA, native)
    codes = torch.zeros(32, 256, dtype=torch.uint8)
    right = {"current": (1, 1), "rowwise": (32, 1), "vector": (32, 2)}[name]
    wrong = Operand(codes, torch.ones(right[0] + 1, right[1]))
    operand = Operand(codes, torch.ones(right))
    assert calls_of(native, lambda: product(wrong, operand), "scales") == 0
    assert calls_of(native, lambda: product(operand, wrong), "scales") == 0
