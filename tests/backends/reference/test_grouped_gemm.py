"""Grouped GEMM: each group is a dense GEMM of its own, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch

from fp8core.backend_api import (
    GemmDesc,
    GroupedGemmDesc,
    Operand,
    OperandSpec,
    QuantizeDesc,
)
from fp8core_backends.reference.backend import ReferenceBackend
from tests.backends.reference.conformance import broken_laws

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

OF_RECIPES = (
    (TENSORWISE, TENSORWISE),
    (ROWWISE, ROWWISE),
    (BLOCK_1D, BLOCK_1D),
    (MXFP8, MXFP8),
    (MXFP8, MXFP8_2D),
    (NVFP4, NVFP4),
    (NVFP4, NVFP4_2D),
    (None, None),
)
OTHERS = (
    (TENSORWISE, E5M2),
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
each_pair = pytest.mark.parametrize(("a", "b"), [*OF_RECIPES, *OTHERS], ids=str)

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


class Given(NamedTuple):
    """The dtype of a product, whether it is added to out, and which tensors a call has."""

    dtype: torch.dtype
    accumulate: bool = False
    has_out: bool = False
    has_bias: bool = False


# float32 shows every difference, bfloat16 is what accumulation rounds to.
GIVEN = (
    *(Given(F32), Given(F32, has_out=True), Given(BF16)),
    *(Given(F32, accumulate=True, has_out=True), Given(BF16, accumulate=True, has_out=True)),
    *(Given(BF16, has_bias=True), Given(BF16, has_out=True, has_bias=True)),
)


@each_pair
def test_rows_equal_dense_calls(a: OperandSpec | None, b: OperandSpec | None) -> None:
    for case in GIVEN:
        product = Rows(GroupedGemmDesc(a, b, case.dtype, case.accumulate), ODD_SIZES)
        biases = list(torch.randn(len(ODD_SIZES), N).to(case.dtype))
        out = torch.randn(sum(ODD_SIZES), N).to(case.dtype)
        before = [part.clone() for part in torch.split(out, ODD_SIZES)]
        given = {"bias": biases} if case.has_bias else {}
        made = product.run(**given, **({"out": out} if case.has_out else {}))
        assert made.dtype == case.dtype
        assert (made is out) == case.has_out
        for group, part in enumerate(torch.split(made, ODD_SIZES)):
            alone = {"bias": biases[group]} if case.has_bias else {}
            alone |= {"out": before[group]} if case.has_out else {}
            assert torch.equal(part, product.dense(group, **alone)), (case, group)


@each_pair
def test_contracted_groups_equal_dense_calls(a: OperandSpec | None, b: OperandSpec | None) -> None:
    for case in (case for case in GIVEN if not case.has_bias):
        desc = GroupedGemmDesc(a, b, case.dtype, case.accumulate, contract_groups=True)
        product = Contracted(desc, sizes_along_k(a, b))
        outs = [torch.randn(M * 2, N * 2).to(case.dtype) for _ in product.sizes]
        before = [out.clone() for out in outs]
        made = product.run(**({"out": outs} if case.has_out else {}))
        assert len(made) == len(product.sizes)
        for group, (part, out) in enumerate(zip(made, outs, strict=True)):
            assert part.dtype == case.dtype
            assert (part is out) == case.has_out
            alone = {"out": before[group]} if case.has_out else {}
            assert torch.equal(part, product.dense(group, **alone)), (case, group)


@pytest.mark.parametrize("spec", [TENSORWISE, ROWWISE, BLOCK_1D, MXFP4, NVFP4], ids=str)
def test_columnwise_group_lies_in_memory_as_it_does_alone(spec: OperandSpec) -> None:
    # A BLAS may sum in another order when strides differ: without this the equalities above would
    # hold for some shapes and numbers of threads only.
    x = torch.randn(sum(WHOLE_BLOCKS), M * 2)
    whole = quantize(spec, x, WHOLE_BLOCKS, columnwise=True).data
    sizes = [size * whole.shape[1] // len(x) for size in WHOLE_BLOCKS]
    for part, own in zip(torch.split(whole, sizes, 1), torch.split(x, WHOLE_BLOCKS), strict=True):
        assert part.stride() == quantize(spec, own, None, columnwise=True).data.stride()


@pytest.mark.parametrize(("a", "b"), OTHERS, ids=str)
def test_laws_of_grouped_products_hold(a: OperandSpec | None, b: OperandSpec | None) -> None:
    plain = GroupedGemmDesc(a, b, F32)
    descs = [plain, replace(plain, accumulate=True, out_dtype=BF16)]
    descs += [replace(desc, contract_groups=True) for desc in descs]
    assert broken_laws(*descs) == []


def test_float64_groups_are_not_rounded_to_float32() -> None:
    a, b = torch.eye(2, dtype=F64) * (1 + 2.0**-40), torch.ones(3, 2, dtype=F64)
    desc = GroupedGemmDesc(None, None, F64)
    made = bound(desc)(Operand(a), [Operand(b), Operand(2 * b)], torch.tensor([0, 1, 2]))
    one = 1 + 2.0**-40
    assert made.tolist() == [[one] * 3, [2 * one] * 3]
