"""Grouped GEMM: each group is a dense GEMM of its own, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch

from fp8core.backend_api import (
    DequantizeDesc,
    GemmDesc,
    GroupedGemmDesc,
    Operand,
    OperandSpec,
    QuantizeDesc,
)
from fp8core_backends.reference.backend import ReferenceBackend

CPU = torch.device("cpu")
BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64

TENSORWISE = OperandSpec("e4m3", (0, 0), 448.0)
E5M2 = OperandSpec("e5m2", (0, 0), 57344.0, power_of_two=True)
DELAYED = replace(TENSORWISE, delayed=True)
ROWWISE = OperandSpec("e4m3", (1, 0), 448.0)
BLOCK_1D = OperandSpec("e4m3", (1, 128), 448.0, power_of_two=True)
BLOCK_2D = OperandSpec("e4m3", (128, 128), 448.0)
FP4 = OperandSpec("e2m1", (1, 10), 6.0)
MXFP8 = OperandSpec("e4m3", (1, 32), 448.0, scale_format="e8m0")
MXFP8_2D = replace(MXFP8, block=(32, 32))
MXFP4 = OperandSpec("e2m1", (1, 32), 6.0, scale_format="e8m0")
NVFP4 = OperandSpec("e2m1", (1, 16), 6.0, scale_format="e4m3")
NVFP4_2D = replace(NVFP4, block=(16, 16))
NVFP4_RHT = replace(NVFP4, transform="hadamard16")

PAIRS = (
    (TENSORWISE, TENSORWISE),
    (TENSORWISE, E5M2),
    (DELAYED, DELAYED),
    (ROWWISE, ROWWISE),
    (BLOCK_1D, BLOCK_1D),
    (BLOCK_1D, BLOCK_2D),
    (BLOCK_2D, BLOCK_1D),
    (FP4, FP4),
    (MXFP8, MXFP8),
    (MXFP8, MXFP8_2D),
    (MXFP4, MXFP8),
    (NVFP4, NVFP4),
    (NVFP4, NVFP4_2D),
    (NVFP4_RHT, NVFP4_RHT),
    (TENSORWISE, None),
    (None, BLOCK_1D),
    (None, NVFP4),
    (None, None),
)
each_pair = pytest.mark.parametrize(("a", "b"), PAIRS, ids=str)
# float32 shows every difference, bfloat16 is what accumulation rounds to.
each_out = pytest.mark.parametrize(
    ("out_dtype", "accumulate"), [(F32, False), (F32, True), (BF16, True)], ids=str
)

M, N, K = 5, 7, 160
# Partial blocks of 128 at the ends of groups, one element, and no element first and between.
ODD_SIZES = (0, 130, 1, 0, 7)
WHOLE_BLOCKS = (0, 160, 32, 0, 96)  # of 16 and 32, for formats that have no partial ones
EVEN_SIZES = (0, 130, 2, 0, 8)  # two elements share a byte


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """The tensors are small: a second thread adds nothing but waiting when the machine is busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def sizes_along_k(*specs: OperandSpec | None) -> tuple[int, ...]:
    given = [spec for spec in specs if spec is not None]
    if any(spec.scale_format != "float32" for spec in given):
        return WHOLE_BLOCKS
    return EVEN_SIZES if any(spec.format == "e2m1" for spec in given) else ODD_SIZES


def offsets_of(sizes: Sequence[int]) -> torch.Tensor:
    return torch.tensor([0, *sizes]).cumsum(0)


def quantize(
    spec: OperandSpec | None, x: torch.Tensor, sizes: Sequence[int] | None, *, columnwise: bool
) -> Operand:
    """One orientation of ``x``, grouped along its rows if there are sizes."""
    if spec is None:
        return Operand(x.t() if columnwise else x)
    desc = QuantizeDesc(
        x.dtype,
        None if columnwise else spec,
        spec if columnwise else None,
        grouped=sizes is not None,
    )
    given = {"scale": torch.full((len(sizes or [0]),), 16.0)} if spec.delayed else {}
    groups = () if sizes is None else (offsets_of(sizes),)
    made = ReferenceBackend().bind(desc, CPU)(x, *groups, **given)
    return made.columnwise if columnwise else made.rowwise


def bound(desc: GemmDesc) -> object:
    backend = ReferenceBackend()
    assert backend.unsupported(desc, CPU) is None
    return backend.bind(desc, CPU)


def dense(desc: GroupedGemmDesc) -> GemmDesc:
    return GemmDesc(desc.a, desc.b, desc.out_dtype, desc.accumulate)


class Rows:
    """A product grouped along the rows of a: ``[m_g, k] x [n, k] -> [m_g, n]``."""

    def __init__(self, desc: GroupedGemmDesc, sizes: Sequence[int]) -> None:
        self.desc, self.sizes, self.offsets = desc, sizes, offsets_of(sizes)
        self.x = torch.randn(sum(sizes), K)
        self.a = quantize(desc.a, self.x, sizes, columnwise=False)
        weights = torch.randn(len(sizes), N, K)
        self.b = [quantize(desc.b, weight, None, columnwise=False) for weight in weights]

    def run(self, **given: object) -> torch.Tensor:
        return bound(self.desc)(self.a, self.b, self.offsets, **given)

    def dense(self, group: int, **given: object) -> torch.Tensor:
        part = torch.split(self.x, self.sizes)[group]
        a = quantize(self.desc.a, part, None, columnwise=False)
        return bound(dense(self.desc))(a, self.b[group], **given)


class Contracted:
    """Products grouped along k: ``[m, k_g] x [n, k_g] -> [m, n]``."""

    def __init__(self, desc: GroupedGemmDesc, sizes: Sequence[int]) -> None:
        self.desc, self.sizes, self.offsets = desc, sizes, offsets_of(sizes)
        self.x, self.y = torch.randn(sum(sizes), M * 2), torch.randn(sum(sizes), N * 2)
        self.a = quantize(desc.a, self.x, sizes, columnwise=True)
        self.b = quantize(desc.b, self.y, sizes, columnwise=True)

    def run(self, **given: object) -> Sequence[torch.Tensor]:
        return bound(self.desc)(self.a, self.b, self.offsets, **given)

    def dense(self, group: int, **given: object) -> torch.Tensor:
        x, y = (torch.split(one, self.sizes)[group] for one in (self.x, self.y))
        a = quantize(self.desc.a, x, None, columnwise=True)
        b = quantize(self.desc.b, y, None, columnwise=True)
        return bound(dense(self.desc))(a, b, **given)


@each_pair
def test_rows_equal_dense_calls(a: OperandSpec | None, b: OperandSpec | None) -> None:
    product = Rows(GroupedGemmDesc(a, b, F32), ODD_SIZES)
    made = product.run()
    assert made.dtype == F32
    for group, part in enumerate(torch.split(made, ODD_SIZES)):
        assert torch.equal(part, product.dense(group)), group


@each_pair
@pytest.mark.parametrize("is_given_out", [False, True])
def test_rows_with_bias_equal_dense_calls(
    a: OperandSpec | None, b: OperandSpec | None, is_given_out: bool
) -> None:
    product = Rows(GroupedGemmDesc(a, b, BF16), ODD_SIZES)
    bias = list(torch.randn(len(ODD_SIZES), N).to(BF16))
    given = {"out": torch.empty(sum(ODD_SIZES), N, dtype=BF16)} if is_given_out else {}
    for group, part in enumerate(torch.split(product.run(bias=bias, **given), ODD_SIZES)):
        assert torch.equal(part, product.dense(group, bias=bias[group])), group


@each_pair
@each_out
def test_rows_in_out_equal_dense_calls(
    a: OperandSpec | None, b: OperandSpec | None, out_dtype: torch.dtype, accumulate: bool
) -> None:
    product = Rows(GroupedGemmDesc(a, b, out_dtype, accumulate), ODD_SIZES)
    out = torch.randn(sum(ODD_SIZES), N).to(out_dtype)
    expected = [part.clone() for part in torch.split(out, ODD_SIZES)]
    assert product.run(out=out) is out
    for group, part in enumerate(torch.split(out, ODD_SIZES)):
        assert torch.equal(part, product.dense(group, out=expected[group])), group


@each_pair
def test_contracted_groups_equal_dense_calls(a: OperandSpec | None, b: OperandSpec | None) -> None:
    desc = GroupedGemmDesc(a, b, BF16, contract_groups=True)
    product = Contracted(desc, sizes_along_k(a, b))
    made = product.run()
    assert len(made) == len(product.sizes)
    for group, part in enumerate(made):
        assert part.dtype == BF16
        assert torch.equal(part, product.dense(group)), group


@each_pair
@each_out
def test_contracted_groups_in_out_equal_dense_calls(
    a: OperandSpec | None, b: OperandSpec | None, out_dtype: torch.dtype, accumulate: bool
) -> None:
    desc = GroupedGemmDesc(a, b, out_dtype, accumulate, contract_groups=True)
    product = Contracted(desc, sizes_along_k(a, b))
    outs = [torch.randn(M * 2, N * 2).to(out_dtype) for _ in product.sizes]
    expected = [out.clone() for out in outs]
    made = product.run(out=outs)
    for group, (part, out) in enumerate(zip(made, outs, strict=True)):
        assert part is out
        assert torch.equal(out, product.dense(group, out=expected[group])), group


@pytest.mark.parametrize("spec", [TENSORWISE, ROWWISE, BLOCK_1D, MXFP4, NVFP4], ids=str)
def test_columnwise_group_lies_in_memory_as_it_does_alone(spec: OperandSpec) -> None:
    # A BLAS may sum in another order when strides differ: without this the equalities above would
    # hold for some shapes and numbers of threads only.
    x = torch.randn(sum(WHOLE_BLOCKS), M * 2)
    whole = quantize(spec, x, WHOLE_BLOCKS, columnwise=True).data
    sizes = [size * whole.shape[1] // len(x) for size in WHOLE_BLOCKS]
    for part, own in zip(torch.split(whole, sizes, 1), torch.split(x, WHOLE_BLOCKS), strict=True):
        assert part.stride() == quantize(spec, own, None, columnwise=True).data.stride()


@pytest.mark.parametrize("contract_groups", [False, True])
@each_pair
def test_product_of_each_group_is_within_the_float32_bound(
    a: OperandSpec | None, b: OperandSpec | None, contract_groups: bool
) -> None:
    """Independently of the dense code: values by group, float64 product, bound of test_gemm."""
    desc = GroupedGemmDesc(a, b, F32, contract_groups=contract_groups)
    sizes = sizes_along_k(a, b) if contract_groups else ODD_SIZES
    product = Contracted(desc, sizes) if contract_groups else Rows(desc, sizes)
    made = product.run() if contract_groups else torch.split(product.run(), sizes)
    for group, part in enumerate(made):
        if contract_groups:
            pieces = [
                values(spec, torch.split(whole, sizes)[group], columnwise=True)
                for spec, whole in ((a, product.x), (b, product.y))
            ]
        else:
            own = values(a, torch.split(product.x, sizes)[group], columnwise=False)
            pieces = [own, dequantize(b, product.b[group])]
        x, y = pieces
        expected = x @ y.t()
        # k 2^-24 (|a| @ |b|.T) for the sums, 2^-23 |d| for an ulp of float32
        tolerance = x.shape[1] * 2.0**-24 * (x.abs() @ y.abs().t()) + 2.0**-23 * expected.abs()
        assert bool(((part.double() - expected).abs() <= tolerance).all()), group


def dequantize(spec: OperandSpec | None, operand: Operand) -> torch.Tensor:
    if spec is None:
        return operand.data.double()
    return ReferenceBackend().bind(DequantizeDesc(spec), CPU)(operand).double()


def values(spec: OperandSpec | None, x: torch.Tensor, *, columnwise: bool) -> torch.Tensor:
    return dequantize(spec, quantize(spec, x, None, columnwise=columnwise))


EMPTY_SPECS = (None, TENSORWISE, ROWWISE, BLOCK_1D, BLOCK_2D, MXFP8, NVFP4, NVFP4_RHT)
each_spec = pytest.mark.parametrize("spec", EMPTY_SPECS, ids=str)


@each_spec
@pytest.mark.parametrize("accumulate", [False, True])
def test_empty_contracted_group_is_zero_or_leaves_out(
    spec: OperandSpec | None, accumulate: bool
) -> None:
    desc = GroupedGemmDesc(spec, spec, BF16, accumulate, contract_groups=True)
    product = Contracted(desc, WHOLE_BLOCKS)
    outs = [torch.randn(M * 2, N * 2).to(BF16) for _ in WHOLE_BLOCKS]
    before = [out.clone() if accumulate else torch.zeros_like(out) for out in outs]
    product.run(out=outs)
    for size, out, expected in zip(WHOLE_BLOCKS, outs, before, strict=True):
        assert torch.equal(out, expected) == (size == 0)


@each_spec
def test_empty_contracted_group_without_out_is_zero(spec: OperandSpec | None) -> None:
    made = Contracted(GroupedGemmDesc(spec, spec, F32, contract_groups=True), WHOLE_BLOCKS).run()
    assert [bool(part.any()) for part in made] == [size > 0 for size in WHOLE_BLOCKS]


@each_spec
@pytest.mark.parametrize("contract_groups", [False, True])
def test_all_groups_may_be_empty(spec: OperandSpec | None, contract_groups: bool) -> None:
    desc = GroupedGemmDesc(spec, spec, F32, contract_groups=contract_groups)
    if contract_groups:
        made = torch.cat(list(Contracted(desc, (0, 0)).run()))
        assert made.shape == (4 * M, 2 * N)
        assert not made.any()
    else:
        assert Rows(desc, (0, 0)).run().shape == (0, N)


def test_float64_groups_are_not_rounded_to_float32() -> None:
    a, b = torch.eye(2, dtype=F64) * (1 + 2.0**-40), torch.ones(3, 2, dtype=F64)
    desc = GroupedGemmDesc(None, None, F64)
    made = bound(desc)(Operand(a), [Operand(b), Operand(2 * b)], torch.tensor([0, 1, 2]))
    one = 1 + 2.0**-40
    assert made.tolist() == [[one] * 3, [2 * one] * 3]


def test_grouped_gemm_writes_nothing_but_out() -> None:
    product = Rows(GroupedGemmDesc(BLOCK_1D, BLOCK_2D, F32), ODD_SIZES)
    parts = [part for one in (product.a, *product.b) for part in one if part is not None]
    parts.append(product.offsets)
    before = [part.clone() for part in parts]
    product.run().fill_(math.nan)
    assert all(map(torch.equal, parts, before))
