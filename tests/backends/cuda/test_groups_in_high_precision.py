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


def by_torch(desc: GroupedGemmDesc):  # type: ignore[no-untyped-def]  # of two signatures
    """Return what multiplies by torch's grouped product alone; on a CPU that reads the offsets."""

    def refuse(*arguments: object, **keywords: object) -> torch.Tensor:
        raise AssertionError("a product of all rows")

    return bind_grouped_gemm(desc, refuse, reads_offsets=True)


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


PLACES = ("apart", "one tensor", "turned", "one tensor, turned", "astray", "every second")


def weights_in(place: str, n: int, k: int) -> list[Operand]:
    """Return three weights ``[n, k]``, as they may lie in memory."""
    size = (6, k, n) if "turned" in place else (6, n, k)
    whole = integers(*size, dtype=torch.bfloat16) + torch.arange(6).view(6, 1, 1)
    if place == "astray":  # one row further than an address that torch's product takes
        flat = torch.cat([whole.new_zeros(1), whole.flatten()])
        whole = flat[1:].view(size)
    parts = whole[::2] if place == "every second" else whole[:3]
    parts = parts.mT if "turned" in place else parts
    return [Operand(each.clone() if place in ("apart", "turned") else each) for each in parts]


@pytest.mark.parametrize("offsets", [*OFFSETS, (0, 9, 4, 30), (-3, 5, 5, 16)])
@pytest.mark.parametrize("place", PLACES)
def test_torchs_grouped_product_gives_the_same_rows(place: str, offsets: tuple[int, ...]) -> None:
    desc, b, where = product(torch.bfloat16), weights_in(place, 24, 8), torch.tensor(offsets)
    bounds = where.clamp(0, 16).cummax(0).values  # as the groups of a layer are
    for a in (integers(16, 8, dtype=torch.bfloat16), integers(17, 8, dtype=torch.bfloat16)[1:]):
        want = bound(desc)(Operand(a), b, torch.cat([torch.zeros(1).long(), bounds[1:]]))
        assert torch.equal(by_torch(desc)(Operand(a), b, where), want)
        out = torch.full((16, 24), float("nan"), dtype=torch.bfloat16)
        assert by_torch(desc)(Operand(a), b, where, out=out) is out
        assert torch.equal(out, want)


def test_slices_of_one_tensor_are_multiplied_where_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(torch, "stack")
    a, where = Operand(integers(16, 8, dtype=torch.bfloat16)), torch.tensor(OFFSETS[0])
    for place in ("one tensor", "one tensor, turned"):
        by_torch(product(torch.bfloat16))(a, weights_in(place, 24, 8), where)


@pytest.mark.parametrize("offsets", OFFSETS)
@pytest.mark.parametrize("is_turned", [False, True])
def test_torchs_grouped_product_gives_the_same_sums(
    offsets: tuple[int, ...], is_turned: bool
) -> None:
    a, b = (integers(16, rows, dtype=torch.bfloat16) for rows in (24, 8))
    if is_turned:
        a, b = (each.t().contiguous().t() for each in (a, b))
    pair, where = (Operand(a.t()), Operand(b.t())), torch.tensor(offsets)
    desc = product(torch.bfloat16, contract_groups=True)
    want, got = bound(desc)(*pair, where), by_torch(desc)(*pair, where)
    assert len(got) == 3
    assert all(map(torch.equal, got, want))
    outs = [torch.full((24, 8), float("nan"), dtype=torch.bfloat16) for _ in range(3)]
    result = by_torch(desc)(*pair, where, out=outs)
    assert all(x is y for x, y in zip(result, outs, strict=True))
    assert all(map(torch.equal, outs, want))
    with pytest.raises(OperandError, match="2 entries; expected 3, one a group"):
        by_torch(desc)(*pair, where, out=outs[:2])


def test_what_torchs_grouped_product_lacks_is_a_product_of_all_rows() -> None:
    where, options = torch.tensor(OFFSETS[0]), {"dtype": torch.bfloat16}
    cases = {
        "biases": (16, 8, 24, {"bias": [integers(24, **options)] * 3}),
        "k": (16, 12, 24, {}),
        "n": (16, 8, 20, {}),
        "no k": (16, 0, 24, {}),
        "no rows": (0, 8, 24, {}),
    }
    for name, (rows, k, n, keywords) in cases.items():
        desc = product(torch.bfloat16)
        a, b = Operand(integers(rows, k, **options)), [Operand(integers(n, k, **options))] * 3
        dense = functools.partial(high_precision_gemm, desc)
        run = bind_grouped_gemm(desc, dense, reads_offsets=True)
        want = bound(desc)(a, b, where, **keywords)
        assert torch.equal(run(a, b, where, **keywords), want), name
        with pytest.raises(AssertionError, match="a product of all rows"):
            by_torch(desc)(a, b, where, **keywords)
    wide = product(torch.float32), product(torch.bfloat16, accumulate=True)
    for desc in wide:
        assert bind_grouped_gemm(desc, high_precision_gemm, reads_offsets=True).__name__ == "run"


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
