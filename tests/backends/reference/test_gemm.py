"""Dense GEMM against the float64 product of the dequantized operands, and its exact edges.

Tolerance: ``k 2^-24 (|a| @ |b|.T) + 1 ulp of out_dtype``. Each of the k products and the k - 1 sums
of a float32 dot product rounds by at most 2^-24, in whatever order; a bias or an accumulated out
is one more term of the sum; then the result is rounded once to out_dtype.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from fp8core.backend_api import DequantizeDesc, GemmDesc, Operand, OperandSpec, QuantizeDesc
from fp8core.testing.compare import ulp
from fp8core_backends.reference.backend import ReferenceBackend

CPU = torch.device("cpu")
BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64

TENSORWISE = OperandSpec("e4m3", (0, 0), 448.0)
TENSORWISE_E5M2 = OperandSpec("e5m2", (0, 0), 57344.0)
ROWWISE = OperandSpec("e4m3", (1, 0), 448.0)
ROWWISE_E5M2 = OperandSpec("e5m2", (1, 0), 57344.0, power_of_two=True)
DELAYED = replace(TENSORWISE, delayed=True)
BLOCK_1D = OperandSpec("e4m3", (1, 128), 448.0, power_of_two=True)
BLOCK_2D = OperandSpec("e4m3", (128, 128), 448.0)
MXFP8 = OperandSpec("e4m3", (1, 32), 448.0, scale_format="e8m0")
MXFP8_2D = replace(MXFP8, block=(32, 32))
MXFP8_E5M2 = OperandSpec("e5m2", (1, 32), 57344.0, scale_format="e8m0")
MXFP4 = OperandSpec("e2m1", (1, 32), 6.0, scale_format="e8m0")
NVFP4 = OperandSpec("e2m1", (1, 16), 6.0, scale_format="e4m3")
NVFP4_2D = replace(NVFP4, block=(16, 16))
NVFP4_RHT = replace(NVFP4, transform="hadamard16")
NVFP4_RHT_SR = replace(NVFP4_RHT, stochastic=True)

PAIRS = (
    (TENSORWISE, TENSORWISE),
    (TENSORWISE, TENSORWISE_E5M2),
    (TENSORWISE_E5M2, TENSORWISE),
    (TENSORWISE_E5M2, TENSORWISE_E5M2),
    (ROWWISE, ROWWISE),
    (ROWWISE, ROWWISE_E5M2),
    (DELAYED, DELAYED),
    (DELAYED, TENSORWISE_E5M2),
    (BLOCK_1D, BLOCK_2D),
    (BLOCK_2D, BLOCK_1D),
    (BLOCK_1D, BLOCK_1D),
    (BLOCK_2D, BLOCK_2D),
    (MXFP8, MXFP8),
    (MXFP8, MXFP8_2D),
    (MXFP8_E5M2, MXFP8),
    (MXFP8, MXFP4),
    (NVFP4, NVFP4),
    (NVFP4, NVFP4_2D),
    (NVFP4_RHT, NVFP4_RHT_SR),
    (TENSORWISE, None),
    (None, BLOCK_1D),
    (MXFP8, None),
    (None, NVFP4_2D),
    (None, None),
)
each_pair = pytest.mark.parametrize(("a", "b"), PAIRS, ids=str)
each_out = pytest.mark.parametrize("out_dtype", [F32, BF16, F16], ids=str)

# Odd m and n; k is whole blocks of 16 and 32, and a partial one of 128.
M, N, K = 5, 7, 160


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """The tensors are small: a second thread adds nothing but waiting when the machine is busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make(spec: OperandSpec | None, x: torch.Tensor) -> Operand:
    if spec is None:
        return Operand(x)
    given = {"scale": torch.tensor([16.0])} if spec.delayed else {}
    given |= {"rng": torch.tensor([5, 6])} if spec.stochastic else {}
    return ReferenceBackend().bind(QuantizeDesc(x.dtype, spec, None), CPU)(x, **given).rowwise


def values(spec: OperandSpec | None, operand: Operand) -> torch.Tensor:
    """The operand's values, float64."""
    if spec is None:
        return operand.data.double()
    return ReferenceBackend().bind(DequantizeDesc(spec), CPU)(operand).double()


def operands(
    a: OperandSpec | None, b: OperandSpec | None, m: int = M, n: int = N, k: int = K
) -> tuple[Operand, Operand]:
    """Two operands whose rows span two decades: in range of float16 after the product."""
    rows = 10 ** (2 * torch.rand(m, 1) - 1)
    cols = 10 ** (2 * torch.rand(n, 1) - 1)
    return make(a, torch.randn(m, k) * rows), make(b, torch.randn(n, k) * cols)


def gemm(
    desc: GemmDesc,
    a: Operand,
    b: Operand,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    backend = ReferenceBackend()
    assert backend.unsupported(desc, CPU) is None
    return backend.bind(desc, CPU)(a, b, bias=bias, out=out)


def assert_product(
    desc: GemmDesc, a: Operand, b: Operand, made: torch.Tensor, term: torch.Tensor | None = None
) -> None:
    """Compare with the float64 product plus ``term``, a bias or what out held before."""
    x, y = values(desc.a, a), values(desc.b, b)
    expected, magnitude = x @ y.t(), x.abs() @ y.abs().t()
    num_roundings = x.shape[1]
    if term is not None:
        expected, magnitude = expected + term, magnitude + term.abs()
        num_roundings += 1
    assert made.dtype == desc.out_dtype
    assert made.shape == expected.shape
    bound = num_roundings * 2.0**-24 * magnitude + ulp(expected, desc.out_dtype)
    error = (made.double() - expected).abs()
    assert bool((error <= bound).all()), f"worst error is {(error / bound).max()} of the bound"


@each_pair
@each_out
def test_product(a: OperandSpec | None, b: OperandSpec | None, out_dtype: torch.dtype) -> None:
    desc = GemmDesc(a, b, out_dtype)
    made = operands(a, b)
    assert_product(desc, *made, gemm(desc, *made))


@each_out
def test_high_precision_product_of_its_own_dtype(out_dtype: torch.dtype) -> None:
    desc = GemmDesc(None, None, out_dtype)
    made = [Operand(operand.data.to(out_dtype)) for operand in operands(None, None)]
    assert_product(desc, *made, gemm(desc, *made))


@each_pair
def test_bias(a: OperandSpec | None, b: OperandSpec | None) -> None:
    desc = GemmDesc(a, b, BF16)
    made, bias = operands(a, b), torch.randn(N) * 100
    assert_product(desc, *made, gemm(desc, *made, bias=bias), bias.double())


@each_pair
def test_out_is_written(a: OperandSpec | None, b: OperandSpec | None) -> None:
    desc = GemmDesc(a, b, BF16)
    made = operands(a, b)
    out = torch.full((M, N), math.nan, dtype=BF16)
    assert gemm(desc, *made, out=out) is out
    assert_product(desc, *made, out)


@each_pair
@pytest.mark.parametrize("out_dtype", [F32, BF16], ids=str)
def test_out_is_accumulated(
    a: OperandSpec | None, b: OperandSpec | None, out_dtype: torch.dtype
) -> None:
    desc = GemmDesc(a, b, out_dtype, accumulate=True)
    made, out = operands(a, b), (torch.randn(M, N) * 100).to(out_dtype)
    before = out.double()
    assert gemm(desc, *made, out=out) is out
    assert_product(desc, *made, out, before)


def test_out_may_be_strided() -> None:
    desc = GemmDesc(TENSORWISE, TENSORWISE, F32)
    made, buffer = operands(TENSORWISE, TENSORWISE), torch.zeros(N, 2 * M)
    out = buffer[:, ::2].t()
    gemm(desc, *made, out=out)
    assert torch.equal(out, gemm(desc, *made))
    assert not buffer[:, 1::2].any()


# In bfloat16 around 1 the spacing is 2^-7, and 1 + 2^-8 is a tie that goes to 1; 2^-8 + 2^-20 is
# over the tie, but rounds to 2^-8 by itself. So a sum in float32 rounded once is 1 + 2^-7, and a
# sum of two rounded terms is 1.
SMALL = torch.tensor([[2.0**-8, 2.0**-20]])
ONES = torch.tensor([[1.0, 1.0]])
ROUNDED_ONCE = [[1 + 2.0**-7]]
UNSCALED = OperandSpec("e4m3", (0, 0), 448.0, delayed=True)


@pytest.mark.parametrize("b", [None, UNSCALED], ids=str)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("bias_dtype", [F32, BF16], ids=str)
def test_bias_is_added_before_the_one_rounding(
    b: OperandSpec | None, dtype: torch.dtype, bias_dtype: torch.dtype
) -> None:
    desc = GemmDesc(None, b, BF16)
    small, ones = Operand(SMALL.to(dtype)), make(b, ONES.to(dtype))
    assert gemm(desc, small, ones, torch.ones(1, dtype=bias_dtype)).tolist() == ROUNDED_ONCE


@pytest.mark.parametrize("b", [None, UNSCALED], ids=str)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_out_is_accumulated_before_the_one_rounding(
    b: OperandSpec | None, dtype: torch.dtype
) -> None:
    desc = GemmDesc(None, b, BF16, accumulate=True)
    out = torch.ones(1, 1, dtype=BF16)
    gemm(desc, Operand(SMALL.to(dtype)), make(b, ONES.to(dtype)), out=out)
    assert out.tolist() == ROUNDED_ONCE


EMPTY = [sizes for sizes in itertools.product((0, 32), repeat=3) if 0 in sizes]
EMPTY_SPECS = (None, TENSORWISE, ROWWISE, BLOCK_1D, BLOCK_2D, MXFP8, NVFP4, NVFP4_RHT)
each_empty = pytest.mark.parametrize(("m", "n", "k"), EMPTY)
each_empty_spec = pytest.mark.parametrize("spec", EMPTY_SPECS, ids=str)


@each_empty_spec
@each_empty
def test_empty_product_is_zero(spec: OperandSpec | None, m: int, n: int, k: int) -> None:
    desc = GemmDesc(spec, spec, F32)
    made = gemm(desc, *operands(spec, spec, m, n, k))
    assert made.shape == (m, n)
    assert not made.any()


@each_empty_spec
@each_empty
def test_empty_product_with_bias_is_the_bias(
    spec: OperandSpec | None, m: int, n: int, k: int
) -> None:
    desc, bias = GemmDesc(spec, spec, F32), torch.randn(n)
    made = gemm(desc, *operands(spec, spec, m, n, k), bias=bias)
    assert torch.equal(made, bias.expand(m, n))


@each_empty_spec
@each_empty
@pytest.mark.parametrize("accumulate", [False, True])
def test_empty_product_in_out(
    spec: OperandSpec | None, m: int, n: int, k: int, accumulate: bool
) -> None:
    desc, out = GemmDesc(spec, spec, F32, accumulate=accumulate), torch.randn(m, n)
    expected = out.clone() if accumulate else torch.zeros(m, n)
    gemm(desc, *operands(spec, spec, m, n, k), out=out)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("accumulate", [False, True])
def test_float64_high_precision_is_not_rounded_to_float32(accumulate: bool) -> None:
    # Integers times 2^-30: the sums are exact in float64, and need more bits than float32 has.
    a, b = (torch.randint(-(2**20), 2**20, (rows, 8)).double() for rows in (M, N))
    out = torch.ones(M, N, dtype=F64)
    desc = GemmDesc(None, None, F64, accumulate=accumulate)
    bias = torch.full((N,), 2.0**-30, dtype=F64)
    made = gemm(desc, Operand(a * 2.0**-30), Operand(b), bias, out if accumulate else None)
    exact = (a.long() @ b.long().t()).double() * 2.0**-30 + 2.0**-30
    assert torch.equal(made, exact + 1 if accumulate else exact)


@each_pair
def test_gemm_writes_nothing_but_out(a: OperandSpec | None, b: OperandSpec | None) -> None:
    desc = GemmDesc(a, b, F32, accumulate=True)
    bias = torch.randn(N)
    inputs = [*operands(a, b), Operand(bias)]
    parts = [part for operand in inputs for part in operand if part is not None]
    before = [part.clone() for part in parts]
    gemm(desc, inputs[0], inputs[1], bias, torch.zeros(M, N)).fill_(1.0)
    gemm(replace(desc, accumulate=False), inputs[0], inputs[1], bias).fill_(1.0)
    assert all(map(torch.equal, parts, before))


def test_columnwise_operands_multiply_like_rowwise_ones_of_the_transpose() -> None:
    x, y = torch.randn(K, M), torch.randn(K, N)
    desc = QuantizeDesc(F32, None, MXFP8)
    backend = ReferenceBackend()
    columnwise = [backend.bind(desc, CPU)(one).columnwise for one in (x, y)]
    product = GemmDesc(MXFP8, MXFP8, F32)
    assert_product(product, *columnwise, gemm(product, *columnwise))
    rowwise = [make(MXFP8, one.t()) for one in (x, y)]
    assert all(
        torch.equal(values(MXFP8, one), values(MXFP8, other))
        for one, other in zip(columnwise, rowwise, strict=True)
    )


@pytest.mark.parametrize("spec", [TENSORWISE, MXFP8, None], ids=str)
def test_nan_spreads_over_its_row_only(spec: OperandSpec | None) -> None:
    x = torch.randn(M, K)
    x[2, 3] = math.nan
    made = gemm(GemmDesc(spec, None, F32), make(spec, x), Operand(torch.randn(N, K)))
    assert made.isnan().all(dim=1).tolist() == [row == 2 for row in range(M)]
    assert made.isnan().any(dim=1).tolist() == [row == 2 for row in range(M)]


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_slow_half_precision_of_a_processor_is_rounded_once_from_float32(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fp8core_backends.reference.gemm._HAS_SLOW_HALF", True)
    x, weight, bias = (torch.randn(size, dtype=dtype) for size in ((256, 512), (512, 512), (512,)))
    got = gemm(GemmDesc(None, None, dtype), Operand(x), Operand(weight), bias)
    wide = torch.nn.functional.linear(x.float(), weight.float(), bias.float())
    assert torch.equal(got, wide.to(dtype))
