"""Products of operands that no recipe pairs, dense and of groups, by the kit's laws; of float64.

The kit's tolerance is ``k 2^-24 (|a| @ |b|.T) + 1 ulp of out_dtype``. Each of the k products and
the k - 1 sums of a float32 dot product rounds by at most 2^-24, in whatever order; a bias or an
accumulated out is one more term of the sum; then the result is rounded once to out_dtype.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fp8core.backend_api import GemmDesc, GroupedGemmDesc, Operand, OperandSpec
from fp8core_backends.reference.backend import ReferenceBackend
from tests.backends.reference.conformance import broken_laws
from tests.pairs import turns

CPU = torch.device("cpu")
BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64

TENSORWISE = OperandSpec("e4m3", (0, 0), 448.0)
TENSORWISE_E5M2 = OperandSpec("e5m2", (0, 0), 57344.0)
ROWWISE = OperandSpec("e4m3", (1, 0), 448.0)
ROWWISE_E5M2 = OperandSpec("e5m2", (1, 0), 57344.0, power_of_two=True)
DELAYED = replace(TENSORWISE, delayed=True)
BLOCK_1D = OperandSpec("e4m3", (1, 128), 448.0, power_of_two=True)
BLOCK_2D = OperandSpec("e4m3", (128, 128), 448.0)
FP4 = OperandSpec("e2m1", (1, 10), 6.0)
MXFP8 = OperandSpec("e4m3", (1, 32), 448.0, scale_format="e8m0")
MXFP4 = OperandSpec("e2m1", (1, 32), 6.0, scale_format="e8m0")
NVFP4 = OperandSpec("e2m1", (1, 16), 6.0, scale_format="e4m3")
NVFP4_2D = replace(NVFP4, block=(16, 16))
NVFP4_RHT = replace(NVFP4, transform="hadamard16")
NVFP4_RHT_SR = replace(NVFP4_RHT, stochastic=True)

PAIRS = (
    (TENSORWISE, TENSORWISE_E5M2),
    (TENSORWISE_E5M2, TENSORWISE_E5M2),
    (ROWWISE, ROWWISE_E5M2),
    (DELAYED, DELAYED),
    (DELAYED, TENSORWISE_E5M2),
    (BLOCK_1D, BLOCK_2D),
    (BLOCK_2D, BLOCK_1D),
    (BLOCK_2D, BLOCK_2D),
    (MXFP8, MXFP4),
    (NVFP4_RHT, NVFP4_RHT_SR),
    (TENSORWISE, None),
    (None, BLOCK_1D),
    (MXFP8, None),
    (None, NVFP4_2D),
)
GROUPED_PAIRS = (
    (TENSORWISE, replace(TENSORWISE_E5M2, power_of_two=True)),
    (DELAYED, DELAYED),
    (BLOCK_1D, BLOCK_2D),
    (BLOCK_2D, BLOCK_1D),
    (FP4, FP4),
    (MXFP4, MXFP8),
    (NVFP4_RHT, NVFP4_RHT),
    (TENSORWISE, None),
    (None, BLOCK_1D),
    (None, NVFP4),
)


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


@pytest.mark.parametrize(
    ("a", "b", "dtype", "total"),
    [(*pair, *dtypes) for pair, *dtypes in turns(PAIRS, (F32, BF16, F16), (BF16, F32))],
    ids=str,
)
def test_laws_of_products_hold(
    a: OperandSpec | None, b: OperandSpec | None, dtype: torch.dtype, total: torch.dtype
) -> None:
    assert broken_laws(GemmDesc(a, b, dtype), GemmDesc(a, b, total, accumulate=True)) == []


@pytest.mark.parametrize(("a", "b"), GROUPED_PAIRS, ids=str)
def test_laws_of_grouped_products_hold(a: OperandSpec | None, b: OperandSpec | None) -> None:
    plain = GroupedGemmDesc(a, b, F32)
    descs = [plain, replace(plain, accumulate=True, out_dtype=BF16)]
    descs += [replace(desc, contract_groups=True) for desc in descs]
    assert broken_laws(*descs) == []


@pytest.mark.parametrize("accumulate", [False, True])
def test_float64_high_precision_is_not_rounded_to_float32(accumulate: bool) -> None:
    # Integers times 2^-30: the sums are exact in float64, and need more bits than float32 has.
    a, b = (torch.randint(-(2**20), 2**20, (rows, 8)).double() for rows in (5, 7))
    out = torch.ones(5, 7, dtype=F64)
    desc = GemmDesc(None, None, F64, accumulate=accumulate)
    bias = torch.full((7,), 2.0**-30, dtype=F64)
    made = gemm(desc, Operand(a * 2.0**-30), Operand(b), bias, out if accumulate else None)
    exact = (a.long() @ b.long().t()).double() * 2.0**-30 + 2.0**-30
    assert torch.equal(made, exact + 1 if accumulate else exact)


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_slow_half_precision_of_a_processor_is_rounded_once_from_float32(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fp8core_backends.reference.gemm._HAS_SLOW_HALF", True)
    x, weight, bias = (torch.randn(size, dtype=dtype) for size in ((256, 512), (512, 512), (512,)))
    got = gemm(GemmDesc(None, None, dtype), Operand(x), Operand(weight), bias)
    wide = torch.nn.functional.linear(x.float(), weight.float(), bias.float())
    assert torch.equal(got, wide.to(dtype))


def test_float64_groups_are_not_rounded_to_float32() -> None:
    a, b = torch.eye(2, dtype=F64) * (1 + 2.0**-40), torch.ones(3, 2, dtype=F64)
    run = ReferenceBackend().bind(GroupedGemmDesc(None, None, F64), CPU)
    made = run(Operand(a), [Operand(b), Operand(2 * b)], torch.tensor([0, 1, 2]))
    one = 1 + 2.0**-40
    assert made.tolist() == [[one] * 3, [2 * one] * 3]
