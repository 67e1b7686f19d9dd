"""A weight in low precision by activations that are not: what is multiplied by the kernel."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fp8core.backend_api import (
    DequantizeDesc,
    GemmDesc,
    GroupedGemmDesc,
    Operand,
    OperandError,
    QuantizeDesc,
)
from fp8core_backends.cuda import (
    autotune,
    dequantize,
    device_groups,
    gemm,
    transposition,
    weight_only,
)
from fp8core_backends.cuda.weight_only import MOST_ROWS_A_GROUP, WeightOnlyGemm, WeightOnlyGroups
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


class Groups:
    """Stands for the kernel of groups."""

    def __init__(self, *fields: Any) -> None:
        a_type, b_type, a_mode, b_mode, out, contracts, accumulate, _, _ = fields
        assert (b_type, a_mode, b_mode, contracts, accumulate) == ("e4m3", "none", "row", 0, 0)
        self.a_dtype, self.dtype = getattr(torch, a_type), getattr(torch, out)

    def __call__(self, arguments: tuple[Any, ...], stream: int) -> None:
        m, n, k, *rest = arguments
        (a,), pitch, *a_scale = rest[:6]
        assert a_scale == [[], 0, 0, 0]
        weights, b_pitch, scales, row_stride, _, _ = rest[6:12]
        biases, bias_type, (d,), offsets, groups = rest[12:]
        assert b_pitch == k
        assert row_stride == 1
        bounds = at(offsets, torch.int64, (groups + 1,)).tolist()
        pitch //= self.a_dtype.itemsize
        rows = at(a, self.a_dtype, ((m - 1) * pitch + k,)).as_strided((m, k), (pitch, 1))
        result = at(d, self.dtype, (m, n)).zero_()
        for group in range(groups):
            values = at(weights[group], torch.float8_e4m3fn, (n, k)).float()
            values *= at(scales[group], torch.float32, (n, 1))
            own = slice(bounds[group], bounds[group + 1])
            product = rows[own].float() @ values.t()
            if biases:
                product += at(biases[group], getattr(torch, bias_type), (n,)).float()
            result[own] = product


class Native:
    """The part of the native library that a product is described to."""

    Gemm = Product
    GroupedGemm = Groups
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

        def __call__(self, operand: Operand, x: torch.Tensor | None = None) -> torch.Tensor:
            rows.append(len(operand.data))
            return self.run(operand) if x is None else x.copy_(self.run(operand))

    put_on_the_host(monkeypatch, gemm, dequantize, device_groups, transposition)
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


# --- groups whose sizes only the device knows, which the CPU plays here ---


def of_groups(dtype: torch.dtype, out: torch.dtype | None = None) -> WeightOnlyGroups:
    desc = GroupedGemmDesc(None, SPEC, out or dtype, offsets_on_device=True)
    run = WeightOnlyGroups(desc, torch.device("cuda", 0), Native())
    for few in run._of_few_rows.values():
        few._device = CPU
    return run


def wanted(run: WeightOnlyGroups, *operands: Any, **keywords: Any) -> torch.Tensor:
    return ReferenceBackend().bind(run._desc, CPU)(*operands, **keywords)


@pytest.mark.parametrize("bounds", [(0, 5, 5, 40), (0, 0, 0, 0), (0, 1, 2, 37)])
@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
    ],
)
def test_rows_of_groups_are_multiplied_by_codes(
    dtypes: tuple[torch.dtype, torch.dtype], bounds: tuple[int, ...], decoded: list[int]
) -> None:
    run, b = of_groups(*dtypes), [weight() for _ in range(3)]
    offsets, wide = torch.tensor(bounds), torch.randn(40, 2 * K).to(dtypes[0])
    biases = [torch.randn(N).to(dtypes[0]) for _ in b]
    for x in (wide[:, :K].contiguous(), wide[:, K:], wide[:, 3 : K + 3]):
        for bias in (None, biases):
            want = wanted(run, Operand(x), b, offsets, bias=bias)
            result = run(Operand(x), b, offsets, bias=bias)
            torch.testing.assert_close(result, want, rtol=2.0**-6, atol=0.25)  # of 16
            assert not result[bounds[-1] :].any()
            out = torch.full((40, N), 7.0, dtype=dtypes[1])
            assert run(Operand(x), b, offsets, bias=bias, out=out) is out
            assert torch.equal(out, result)
    assert decoded == ([N] * 3 * 12 if dtypes[0] == torch.float32 else [])


@pytest.mark.parametrize("bounds", [(0, 300, 300, 400), (0, 0, 0, 0), (0, 500, -7, 2**40)])
def test_many_rows_of_groups_are_multiplied_by_what_is_decoded(
    bounds: tuple[int, ...], decoded: list[int]
) -> None:
    run, b, rows = of_groups(torch.bfloat16), [weight() for _ in range(3)], 3 * MOST_ROWS_A_GROUP
    offsets, x = torch.tensor(bounds), torch.randn(rows + 16, K).bfloat16()
    cut = torch.tensor(bounds).clamp(0, rows + 16).cummax(0).values
    want = wanted(run, Operand(x), b, cut)
    result = run(Operand(x), b, offsets)
    torch.testing.assert_close(result, want, rtol=2.0**-6, atol=0.25)
    out = torch.full_like(result, 7.0)
    assert run(Operand(x), b, offsets, out=out) is out
    assert torch.equal(out, result)
    assert decoded == [N] * 6
    run(Operand(x[:rows]), b, cut.clamp(max=rows))  # the kernel's
    assert decoded == [N] * 6


@pytest.mark.usefixtures("decoded")
def test_operands_of_groups_that_do_not_fit_are_refused() -> None:
    run, b = of_groups(torch.bfloat16), [weight() for _ in range(3)]
    x, offsets = Operand(torch.randn(8, K).bfloat16()), torch.tensor((0, 5, 5, 8))
    with pytest.raises(OperandError, match="3 groups, None biases; expected 3 b"):
        run(x, b[:2], offsets)
    with pytest.raises(OperandError, match=r"scales \[\(1, 1\), \(48, 1\)\]; expected \(48, 1\)"):
        run(x, [b[0], b[1], Operand(b[2].data, torch.ones(1, 1))], offsets)
    with pytest.raises(OperandError, match="expected int64"):
        run(x, b, offsets.to("meta"))
    with pytest.raises(OperandError, match=r"a is torch\.int8"):
        run(Operand(torch.ones(8, K, dtype=torch.int8)), b, offsets)
