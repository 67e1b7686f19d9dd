"""The layout of amaxes: how many entries a cast has, and whose they are."""

from __future__ import annotations

import pytest
import torch

from fp8core.backend_api import (
    AmaxDesc,
    OperandError,
    OperandSpec,
    QuantizeByAmaxDesc,
    QuantizeDesc,
    amax_extent,
    amax_sizes,
    has_amax,
    split_amax,
)

BF16 = torch.bfloat16
TENSOR = OperandSpec("e4m3", (0, 0), 448.0)
DELAYED = OperandSpec("e4m3", (0, 0), 448.0, delayed=True)
ROW = OperandSpec("e4m3", (1, 0), 448.0)
VECTOR = OperandSpec("e4m3", (1, 128), 448.0)
SQUARE = OperandSpec("e4m3", (128, 128), 448.0)
MX = OperandSpec("e4m3", (1, 32), 448.0, "e8m0")
FP4 = OperandSpec("e2m1", (1, 16), 6.0, "e4m3")
HADAMARD = OperandSpec("e2m1", (1, 16), 6.0, "e4m3", transform="hadamard16")


def test_extent_is_that_of_the_outermost_scale() -> None:
    for spec, extent in (
        (TENSOR, "tensor"),
        (DELAYED, "tensor"),
        (FP4, "tensor"),
        (HADAMARD, "tensor"),
        (ROW, "row"),
        (VECTOR, None),
        (SQUARE, None),
        (MX, None),
        (None, None),
    ):
        assert amax_extent(spec) == extent, spec


def test_each_orientation_has_an_entry_a_scale() -> None:
    for rowwise, columnwise, groups, sizes in (
        (TENSOR, TENSOR, 1, (1, 0)),
        (TENSOR, TENSOR, 3, (3, 0)),
        (TENSOR, None, 1, (1, 0)),
        (None, TENSOR, 1, (0, 1)),
        (ROW, ROW, 1, (8, 5)),
        (ROW, ROW, 3, (8, 15)),
        (FP4, FP4, 1, (1, 0)),
        (FP4, HADAMARD, 1, (1, 1)),
        (HADAMARD, HADAMARD, 3, (3, 3)),
        (TENSOR, ROW, 1, (1, 5)),
        (TENSOR, MX, 1, (1, 0)),
        (MX, ROW, 3, (0, 15)),
        (VECTOR, SQUARE, 1, (0, 0)),
    ):
        desc = QuantizeDesc(BF16, rowwise, columnwise)
        assert amax_sizes(desc, 8, 5, groups) == sizes, (desc, groups)


def test_rowwise_entries_come_first() -> None:
    parts = split_amax(QuantizeDesc(BF16, ROW, ROW), torch.arange(5.0), 3, 2)
    assert [part.tolist() for part in parts if part is not None] == [[0, 1, 2], [3, 4]]


def test_shared_entries_are_those_of_both_orientations() -> None:
    amax = torch.ones(2)
    rowwise, columnwise = split_amax(QuantizeDesc(BF16, TENSOR, TENSOR), amax, 8, 5, 2)
    assert rowwise is columnwise
    assert rowwise is not None
    assert rowwise.data_ptr() == amax.data_ptr()


def test_an_orientation_of_blocks_has_no_entries() -> None:
    desc = QuantizeDesc(BF16, MX, ROW)
    assert split_amax(desc, torch.ones(5), 8, 5).rowwise is None
    assert split_amax(QuantizeDesc(BF16, ROW, MX), torch.ones(8), 8, 5).columnwise is None


def test_entries_are_views_to_be_reduced_in_place() -> None:
    amax = torch.zeros(5)
    columnwise = split_amax(QuantizeDesc(BF16, ROW, ROW), amax, 3, 2).columnwise
    assert columnwise is not None
    columnwise.fill_(7.0)
    assert amax.tolist() == [0, 0, 0, 7, 7]


@pytest.mark.parametrize(
    "amax",
    [torch.zeros(12), torch.zeros(1, 13), torch.zeros(13, dtype=BF16), torch.zeros(())],
    ids=["too few", "a matrix", "another dtype", "a scalar"],
)
def test_another_shape_or_dtype_is_refused(amax: torch.Tensor) -> None:
    with pytest.raises(OperandError, match=r"has float32 \[13\]: 8 rowwise, then 5"):
        split_amax(QuantizeDesc(BF16, ROW, ROW), amax, 8, 5)


def test_a_cast_has_amaxes_if_one_orientation_has() -> None:
    assert has_amax(QuantizeDesc(BF16, MX, ROW))
    assert not has_amax(QuantizeDesc(BF16, MX, SQUARE))


def test_a_cast_by_amaxes_is_another_descriptor_than_the_plain_one() -> None:
    plain = QuantizeDesc(BF16, ROW, TENSOR, True, True)
    by_amax = QuantizeByAmaxDesc.of(plain)
    assert by_amax != plain
    assert by_amax.plain() == plain
    assert by_amax.op == plain.op


def test_halves_of_a_cast_by_amaxes_are_by_amaxes() -> None:
    halves = QuantizeByAmaxDesc(BF16, ROW, TENSOR).halves()
    assert halves == (QuantizeByAmaxDesc(BF16, ROW, None), QuantizeByAmaxDesc(BF16, None, TENSOR))


def test_descriptors_print_what_they_are() -> None:
    plain = QuantizeDesc(BF16, ROW, None)
    assert str(AmaxDesc(plain)) == f"AmaxDesc({plain})"
    assert str(QuantizeByAmaxDesc.of(plain)).startswith("QuantizeByAmaxDesc(bfloat16 -> ")
