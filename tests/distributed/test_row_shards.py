"""Rows of several ranks, cast one rank after the other, against the whole matrix."""

from __future__ import annotations

import functools

import pytest
import torch

from fp8core import recipe
from fp8core.backend_api import OperandSpec
from fp8core.distributed.gathered_weight import RowCast, RowShard
from fp8core.recipe.plan import LayerRole
from fp8core.tensors.storage import make_operands, storage_plan
from tests.pairs import pairs

BF16 = torch.bfloat16
NAMES = ("current", "block", "mxfp8", "rowwise")


def specs(name: str) -> tuple[OperandSpec, OperandSpec]:
    plan = storage_plan(recipe.by_name(name).plan(LayerRole("linear"), BF16).weight)
    assert plan.rowwise is not None
    assert plan.columnwise is not None
    return plan.rowwise, plan.columnwise


def matrix(rows: int, columns: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """Values over some decades, so that each block has a scale of its own."""
    generator = torch.Generator().manual_seed(rows)
    exponents = torch.randint(-6, 6, (rows, columns), generator=generator)
    return (torch.randn(rows, columns, generator=generator) * 2.0**exponents).to(dtype)


def cast_by_ranks(
    value: torch.Tensor, spec: OperandSpec, num_ranks: int, *, turns: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of all ranks, put together, by rows."""
    rows, columns = value.shape
    shards = [RowShard.of(rows, rank, num_ranks) for rank in range(num_ranks)]
    casts = [RowCast(spec, value.dtype, columns, shard, turns=turns) for shard in shards]
    parts = [value[shard.bounds[shard.rank] : shard.bounds[shard.rank + 1]] for shard in shards]
    amaxes = [cast.amaxes(part) for cast, part in zip(casts, parts, strict=True)]
    assert all(len(amax) == cast.num_amaxes for cast, amax in zip(casts, amaxes, strict=True))
    reduced = functools.reduce(torch.maximum, amaxes)
    made = [cast(part, reduced) for cast, part in zip(casts, parts, strict=True)]
    scales = [part.scales for part in made]
    if casts[0].covers_all_rows:
        assert all(torch.equal(scales[0], one) for one in scales)
        scales = scales[:1]
    else:
        assert max(map(len, scales)) == casts[0].max_scale_rows
    return torch.cat([part.codes for part in made]), torch.cat(scales)


@pytest.mark.parametrize(
    ("name", "turns", "num_ranks", "rows"),
    pairs(NAMES, [False, True], [1, 2, 3, 4, 7], [32, 96, 128, 160, 256, 416]),
)
def test_ranks_cast_what_the_whole_matrix_has(
    name: str, turns: bool, num_ranks: int, rows: int
) -> None:
    value, spec = matrix(rows, 160), specs(name)[turns]
    operands = make_operands(value, storage_plan(recipe_plan(name)))
    operand = operands.columnwise if turns else operands.rowwise
    codes, scales = cast_by_ranks(value, spec, num_ranks, turns=turns)
    assert torch.equal(codes, operand.data.t() if turns else operand.data)
    assert torch.equal(scales, operand.scale_inv.t() if turns else operand.scale_inv)


def recipe_plan(name: str) -> object:
    return recipe.by_name(name).plan(LayerRole("linear"), BF16).weight


@pytest.mark.parametrize("rows", [1, 3, 129, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_any_number_of_rows_and_dtype(dtype: torch.dtype, rows: int) -> None:
    for name in ("current", "block", "rowwise"):
        value, spec = matrix(rows, 130, dtype), specs(name)[0]
        operand = make_operands(value, storage_plan(recipe_plan(name))).rowwise
        codes, scales = cast_by_ranks(value, spec, 4, turns=False)
        assert torch.equal(codes, operand.data)
        assert torch.equal(scales, operand.scale_inv)


@pytest.mark.parametrize("special", [float("nan"), float("inf"), 0.0])
@pytest.mark.parametrize("name", NAMES)
def test_nan_inf_and_zeros_in_blocks_of_several_ranks(name: str, special: float) -> None:
    value = matrix(96, 64)
    value[40:50, :40] = special
    value[:, 63] = 0
    for turns, spec in enumerate(specs(name)):
        operand = make_operands(value, storage_plan(recipe_plan(name)))[turns]
        codes, scales = cast_by_ranks(value, spec, 4, turns=bool(turns))
        assert torch.equal(codes, operand.data.t() if turns else operand.data)
        assert torch.equal(scales, operand.scale_inv.t() if turns else operand.scale_inv)


def test_a_block_within_one_rank_reduces_nothing() -> None:
    block = specs("block")[0]
    counts = {
        rows: RowCast(block, BF16, 256, RowShard.of(rows, 0, 2), turns=False).num_amaxes
        for rows in (256, 320, 512, 128)
    }
    assert counts == {256: 0, 320: 2, 512: 0, 128: 2}  # one amax for each 128 columns
