"""Groups in high precision whose sizes only the device knows, by torch's operators."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch

from fp8core.backend_api import GroupedGemmDesc, Operand, OperandError
from fp8core_backends.cuda.gemm import high_precision_gemm
from fp8core_backends.cuda.grouped import bind_grouped_gemm
from fp8core_backends.reference.backend import ReferenceBackend

CPU = torch.device("cpu")
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
OFFSETS = ((0, 5, 5, 12), (0, 0, 0, 16), (0, 0, 0, 0))


def product(dtype: torch.dtype, **fields: bool) -> GroupedGemmDesc:
    return GroupedGemmDesc(None, None, dtype, offsets_on_device=True, **fields)


def bound(desc: GroupedGemmDesc):  # type: ignore[no-untyped-def]  # of two signatures
    return bind_grouped_gemm(desc, functools.partial(high_precision_gemm, desc))


def integers(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Return integers, whose sums are exact in every dtype, in whatever order."""
    return torch.randint(-3, 4, shape, generator=torch.manual_seed(len(shape))).to(dtype)


@pytest.mark.parametrize("offsets", OFFSETS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_those_of_the_reference(dtype: torch.dtype, offsets: tuple[int, ...]) -> None:
    a = Operand(integers(16, 8, dtype=dtype))
    b = [Operand(integers(6, 8, dtype=dtype) + group) for group in range(3)]
    biases = [integers(6, dtype=dtype) - group for group in range(3)]
    where = torch.tensor(offsets)
    for bias in (None, biases):
        desc = product(dtype)
        want = ReferenceBackend().bind(desc, CPU)(a, b, where, bias=bias)
        assert torch.equal(bound(desc)(a, b, where, bias=bias), want)
        out = torch.full((16, 6), 7.0, dtype=dtype)
        assert bound(desc)(a, b, where, bias=bias, out=out) is out
        assert torch.equal(out, want)


@pytest.mark.parametrize("offsets", OFFSETS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_are_those_of_the_reference(dtype: torch.dtype, offsets: tuple[int, ...]) -> None:
    a, b = (Operand(integers(rows, 16, dtype=dtype)) for rows in (6, 8))
    where, desc = torch.tensor(offsets), product(dtype, contract_groups=True)
    want = ReferenceBackend().bind(desc, CPU)(a, b, where)
    got = bound(desc)(a, b, where)
    assert len(got) == 3
    assert all(torch.equal(*pair) for pair in zip(got, want, strict=True))


@pytest.mark.parametrize("contract", [False, True])
def test_a_result_is_added_to_and_the_rest_stays(contract: bool) -> None:
    desc, where = product(torch.float32, accumulate=True, contract_groups=contract), OFFSETS[0]
    dtype = torch.float32
    a = Operand(integers(16, 16, dtype=dtype))
    b = a if contract else [Operand(integers(16, 16, dtype=dtype) + group) for group in range(3)]
    outs = [
        [torch.full((16, 16), 7.0) for _ in range(3)] if contract else torch.full((16, 16), 7.0)
        for _ in range(2)
    ]
    bound(desc)(a, b, torch.tensor(where), out=outs[0])
    ReferenceBackend().bind(desc, CPU)(a, b, torch.tensor(where), out=outs[1])
    pairs = zip(*outs, strict=True)
    assert all(torch.equal(*pair) for pair in pairs)


def test_what_is_not_finite_stays_in_its_group() -> None:
    a, where = torch.ones(8, 4), torch.tensor((0, 4, 8))
    b = [Operand(torch.full((2, 4), value)) for value in (1.0, float("inf"))]
    got = bound(product(torch.float32))(Operand(a), b, where)
    assert torch.equal(got[:4], torch.full((4, 2), 4.0))
    assert bool(got[4:].isinf().all())
    a[0] = float("nan")
    sums = product(torch.float32, contract_groups=True)
    first, second = bound(sums)(Operand(a.t()), Operand(a.t()), where)
    assert bool(first.isnan().all())
    assert torch.equal(second, torch.full((4, 4), 4.0))


def test_no_offset_is_read() -> None:
    """A tensor on ``meta`` has no values to read."""
    a, where = Operand(torch.empty(16, 8, device="meta")), torch.empty(4, device="meta").long()
    b = [Operand(torch.empty(6, 8, device="meta"))] * 3
    assert bound(product(torch.float32))(a, b, where).shape == (16, 6)
    sums = product(torch.float32, contract_groups=True)
    assert [d.shape for d in bound(sums)(a, a, where)] == [(16, 16)] * 3


def test_lists_that_are_not_one_a_group_are_refused() -> None:
    a, where = Operand(torch.ones(8, 4)), torch.tensor((0, 4, 8))
    desc = product(torch.float32)
    with pytest.raises(OperandError, match="1 entries; expected 2, one a group"):
        bound(desc)(a, [Operand(torch.ones(2, 4))], where)
    sums = dataclasses.replace(desc, contract_groups=True)
    with pytest.raises(OperandError, match="3 entries; expected 2, one a group"):
        bound(sums)(a, a, where, out=[torch.ones(8, 8)] * 3)
    with pytest.raises(OperandError, match="group_offsets"):
        bound(desc)(a, [Operand(torch.ones(2, 4))] * 2, where.to("meta"))
