"""A weight in low precision by activations that are not: what is multiplied by the kernel."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fp8core.backend_api import DequantizeDesc, GemmDesc, Operand, OperandError, QuantizeDesc
from fp8core_backends.cuda import autotune, dequantize, gemm, transposition, weight_only
from fp8core_backends.cuda.weight_only import WeightOnlyGemm
from fp8core_backends.reference.backend import ReferenceBackend
from tests.backends.cuda.cuda_cases import put_on_the_host, spec

CPU = torch.device("cpu")
N, K = 48, 272
SPEC = spec("rowwise")


def at(address: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the tensor of contiguous memory at ``address``."""
    size = dtype.itemsize * torch.Size(shape).numel()
    return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=dtype).view(shape)


class Product:
    """Stands for the kernel: it reads and writes at addresses."""

    def __init__(self, desc: tuple[Any, ...], *_: object) -> None:
        self.m, self.n, self.k, (a_type, a_mode, _, self.pitch), _b, *rest = desc
        assert a_mode == "none"
        self.dtype, self.has_bias = getattr(torch, a_type), rest[1]

    def workspace_bytes(self, candidate: int) -> int:
        return 0

    def run(self, candidate: int, addresses: tuple[int, ...], stream: int) -> None:
        a, a_scale, b, b_scale, bias, d = addresses
        assert a_scale == 0
        codes = at(b, torch.float8_e4m3fn, (self.n, self.k)).float()
        values = codes * at(b_scale, torch.float32, (self.n, 1))
        rows = at(a, self.dtype, ((self.m - 1) * self.pitch + self.k,))
        product = rows.as_strided((self.m, self.k), (self.pitch, 1)).float() @ values.t()
        if self.has_bias:
            product += at(bias, self.dtype, (self.n,)).float()
        at(d, self.dtype, (self.m, self.n)).copy_(product)


class Native:
    """The part of the native library that a product is described to."""

    Gemm = Product
    ElementType = SimpleNamespace(
        __members__={name: name for name in ("e4m3", "bfloat16", "float16", "float32")}
    )
    ScaleMode = SimpleNamespace(__members__={"none": "none", "row": "row"})
    ScaleFormat = SimpleNamespace(__members__={"float32": 0})

    def OperandDesc(self, *fields: object) -> tuple[object, ...]:
        return fields

    def GemmDesc(self, *fields: object) -> tuple[object, ...]:
        return fields

    def Transpose(self, index: int) -> None:
        """Nothing here is transposed."""

    def Dequantize(self, *fields: object) -> None:
        """Decoded by the reference instead."""


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of what was decoded."""
    rows: list[int] = []

    class Decode:
        def __init__(self, desc: DequantizeDesc, *_: object) -> None:
            self.run = ReferenceBackend().bind(desc, CPU)

        def __call__(self, operand: Operand) -> torch.Tensor:
            rows.append(len(operand.data))
            return self.run(operand)

    put_on_the_host(monkeypatch, gemm, dequantize, transposition)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(weight_only, "Dequantize", Decode)
    monkeypatch.setattr(gemm, "allocator_now", lambda index: None)
    monkeypatch.setattr(autotune, "choose", lambda *arguments: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return rows


def weight() -> Operand:
    x = torch.randn(N, K).bfloat16()
    operand = ReferenceBackend().bind(QuantizeDesc(x.dtype, SPEC, None), CPU)(x).rowwise
    assert operand is not None
    return operand


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rows", [1, 64, 65])
def test_few_rows_of_16_bits_are_multiplied_by_codes_and_others_by_what_is_decoded(
    rows: int, dtype: torch.dtype, decoded: list[int]
) -> None:
    desc, b = GemmDesc(None, SPEC, dtype), weight()
    run = WeightOnlyGemm(desc, torch.device("cuda", 0), Native())
    wide = torch.randn(rows, 2 * K).to(dtype)
    bias = torch.randn(N).to(dtype)
    for x in (wide[:, :K].contiguous(), wide[:, K:]):
        for keywords in ({}, {"bias": bias}):
            want = ReferenceBackend().bind(desc, CPU)(Operand(x), b, **keywords)
            result = run(Operand(x), b, **keywords)
            torch.testing.assert_close(result, want, rtol=2.0**-6, atol=0.25)  # of 16
    is_few = rows <= 64 and dtype != torch.float32
    assert decoded == ([] if is_few else [N] * 4)


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (12, 0)])
def test_few_rows_are_decoded_where_a_block_has_less_memory(
    capability: tuple[int, int], decoded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    desc, x = GemmDesc(None, SPEC, torch.bfloat16), Operand(torch.randn(3, K).bfloat16())
    run = WeightOnlyGemm(desc, torch.device("cuda", 0), Native())
    b = weight()
    want = ReferenceBackend().bind(desc, CPU)(x, b)
    torch.testing.assert_close(run(x, b), want, rtol=2.0**-6, atol=0.25)  # of 16
    assert decoded == [N]
    assert run.kernel == "decoded"


@pytest.mark.usefixtures("decoded")
def test_a_scale_beside_high_precision_is_refused() -> None:
    run = WeightOnlyGemm(GemmDesc(None, SPEC, torch.bfloat16), torch.device("cuda", 0), Native())
    with pytest.raises(OperandError, match="expected None"):
        run(Operand(torch.randn(2, K).bfloat16(), torch.ones(2, 1)), weight())


@pytest.mark.usefixtures("decoded")
@pytest.mark.parametrize("dtype", [torch.float64, torch.int8])
def test_activations_of_another_dtype_are_refused_by_name(dtype: torch.dtype) -> None:
    run = WeightOnlyGemm(GemmDesc(None, SPEC, torch.bfloat16), torch.device("cuda", 0), Native())
    with pytest.raises(OperandError, match=rf"a is {dtype}; expected one of torch\.bfloat16"):
        run(Operand(torch.ones(2, K, dtype=dtype)), weight())
