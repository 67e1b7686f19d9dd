"""Quantizers of a part of a tensor: ``reduce_amax`` between amax and cast.

The group is the other half in the same process, or two gloo processes.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fp8core import recipe
from fp8core.backend_api import (
    AmaxDesc,
    Operand,
    OperandError,
    OperandSpec,
    QuantizeDesc,
    UnsupportedError,
    split_amax,
)
from fp8core.dispatch import table
from fp8core.distributed.gathered_weight import RowCast, RowShard
from fp8core.recipe.plan import LayerRole, TensorPlan
from fp8core.tensors import scaling
from fp8core.tensors.delayed_state import DelayedState
from fp8core.tensors.quantizer import Slot, TensorQuantizer
from fp8core.tensors.quantizer_binding import Binding, bind_quantizer
from fp8core.tensors.storage import make_operands, storage_plan
from tests.device import DEVICE
from tests.pairs import pairs
from tests.ranks import run_ranks

CPU, BF16 = torch.device("cpu"), torch.bfloat16
BINDING = Binding(CPU, BF16)
ROWS, COLS = 64, 96
REDUCED = ("current", "rowwise", "nvfp4")
TENSORS = ("input", "weight", "grad_output")
Reduce = Callable[[torch.Tensor], torch.Tensor]


def plan_of(name: str, tensor: str = "input") -> TensorPlan:
    chosen: TensorPlan = getattr(recipe.by_name(name).plan(LayerRole("linear"), BF16), tensor)
    return chosen


def bound(plan: TensorPlan, reduce: Reduce | None = None, **more: Any) -> TensorQuantizer:
    return bind_quantizer(plan, BF16, BINDING, reduce_amax=reduce, **more)


def whole() -> torch.Tensor:
    """A tensor whose second half has the larger amax, in each of its columns too."""
    x = torch.randn(ROWS, COLS, generator=torch.Generator().manual_seed(0))
    x[ROWS // 2 :] *= 5
    return x.to(BF16)


def rng_of(plan: TensorPlan) -> torch.Tensor | None:
    is_stochastic = any(spec is not None and spec.stochastic for spec in plan)
    return torch.tensor([3, 4]) if is_stochastic else None


def entries_of_all(desc: QuantizeDesc, amax: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The entries that halves with other rows have in common: all but those of single rows."""
    rowwise, columnwise = split_amax(desc, amax, *x.shape)
    is_of_rows = desc.rowwise is not None and desc.rowwise.block == (1, 0)
    if not is_of_rows:
        return amax
    assert rowwise is not None
    assert columnwise is not None
    return columnwise


def maximum_with(plan: TensorPlan, x: torch.Tensor, other: torch.Tensor) -> Reduce:
    """A reduction over the group of ``x`` and ``other``, run by the one that has ``x``."""
    desc = QuantizeDesc(BF16, *plan)
    theirs = table.resolve(AmaxDesc(desc), CPU).run(other)

    def reduce(amax: torch.Tensor) -> torch.Tensor:
        mine = entries_of_all(desc, amax, x)
        mine.copy_(torch.maximum(mine, entries_of_all(desc, theirs, other)))
        return amax

    return reduce


def rows_of(operand: Operand, dim: int, start: int, end: int, block: int) -> list[torch.Tensor]:
    """What the operand of a tensor holds for some of its rows, which are its dimension ``dim``."""
    per_byte = 2 if operand.global_scale_inv is not None and dim == 1 else 1
    assert operand.scale_inv is not None
    parts = [operand.data.narrow(dim, start // per_byte, (end - start) // per_byte)]
    scale_inv = operand.scale_inv
    if block:
        scale_inv = scale_inv.narrow(dim, start // block, (end - start) // block)
    parts.append(scale_inv)
    return parts if operand.global_scale_inv is None else [*parts, operand.global_scale_inv]


def assert_is_share(plan: TensorPlan, made: Any, start: int, end: int) -> None:
    """Assert that ``made`` are the operands of the whole for these rows; codes if deterministic."""
    expected = bound(plan)(whole(), rng=rng_of(plan))
    for dim, spec in enumerate(plan):
        assert spec is not None
        parts = rows_of(expected[dim], dim, start, end, spec.block[dim])
        for at, (ours, theirs) in enumerate(zip(made[dim], parts, strict=False)):
            if at or not spec.stochastic:  # noise follows the row that a part begins at
                assert torch.equal(ours, theirs), (dim, at)


@pytest.mark.parametrize("tensor", TENSORS)
@pytest.mark.parametrize("name", REDUCED)
def test_halves_of_a_tensor_are_quantized_as_within_the_whole(name: str, tensor: str) -> None:
    plan, halves = plan_of(name, tensor), whole().chunk(2)
    for at, (x, other) in enumerate((halves, halves[::-1])):
        made = bound(plan, maximum_with(plan, x, other))(x, rng=rng_of(plan))
        assert_is_share(plan, made, at * ROWS // 2, (at + 1) * ROWS // 2)


@pytest.mark.parametrize("name", REDUCED)
def test_without_the_reduction_the_halves_differ(name: str) -> None:
    plan = plan_of(name)
    with pytest.raises(AssertionError):
        assert_is_share(plan, bound(plan)(whole()[: ROWS // 2]), 0, ROWS // 2)


@pytest.mark.parametrize("name", REDUCED)
@pytest.mark.parametrize("asked", [(True, False), (False, True)])
def test_one_orientation_alone_is_the_half_of_both(name: str, asked: tuple[bool, bool]) -> None:
    plan, (x, other) = plan_of(name), whole().chunk(2)
    quantizer = bound(plan, maximum_with(plan, x, other))
    both = quantizer(x)
    rowwise, columnwise = asked
    spec = plan._replace(**{"columnwise" if rowwise else "rowwise": None})
    alone = bound(plan, lambda amax: reduced_half(spec, amax, x, other))
    made = alone.cast_to(rowwise=rowwise, columnwise=columnwise)(x)
    assert [one is not None for one in made] == list(asked)
    for one, of_both in zip(made, both, strict=True):
        if one is not None:
            assert all(map(torch.equal, tensors(one), tensors(of_both)))


def reduced_half(
    half: TensorPlan, amax: torch.Tensor, x: torch.Tensor, other: torch.Tensor
) -> torch.Tensor:
    desc = QuantizeDesc(BF16, *half)
    theirs = table.resolve(AmaxDesc(desc), CPU).run(other)
    is_of_rows = half.rowwise is not None and half.rowwise.block == (1, 0)
    return amax if is_of_rows else torch.maximum(amax, theirs)


def tensors(operand: Operand) -> Iterator[torch.Tensor]:
    return (part for part in operand if part is not None)


def test_each_group_has_an_entry() -> None:
    found = []

    def reduce(amax: torch.Tensor) -> torch.Tensor:
        found.append(amax.clone())
        return torch.full_like(amax, 8.0)

    x = torch.tensor([[1.0, -2.0], [3.0, 0.0], [0.5, -4.0]]).to(BF16)
    quantizer = bound(plan_of("current"), reduce, grouped=True)
    made = quantizer(x, (torch.tensor([0, 1, 1, 3]),))
    assert [amax.tolist() for amax in found] == [[2.0, 0.0, 4.0]]
    assert torch.equal(made.rowwise.scale_inv, torch.full((3, 1), 8 / 448))


def test_nan_and_inf_are_counted_once() -> None:
    count = torch.zeros(1, dtype=torch.int64)
    x = torch.tensor([[1.0, torch.nan], [torch.inf, 2.0]]).to(BF16)
    bound(plan_of("current"), lambda amax: amax, nonfinite=count)(x)
    assert count.item() == 2


def unexpected(amax: torch.Tensor) -> torch.Tensor:
    raise AssertionError("nothing is to be reduced")


@pytest.mark.parametrize("name", ["mxfp8", "block"])
def test_scales_of_blocks_reduce_nothing(name: str) -> None:
    plan, x = plan_of(name), torch.randn(128, 128).to(BF16)
    made, expected = bound(plan, unexpected)(x), bound(plan)(x)
    for one, other in zip(made, expected, strict=True):
        assert all(map(torch.equal, tensors(one), tensors(other)))


def test_high_precision_reduces_nothing() -> None:
    x = whole()
    assert torch.equal(bound(TensorPlan(None, None), unexpected)(x).rowwise.data, x)


def test_delayed_scales_reduce_nothing_before_the_cast() -> None:
    slot = Slot(torch.full((1,), 2.0), torch.zeros(1))
    bound(plan_of("delayed"), unexpected, slot=slot)(whole())
    assert slot.amax is not None
    assert slot.amax.item() == whole().abs().max()


def test_an_orientation_of_blocks_beside_one_of_the_tensor_reduces_the_tensors_alone() -> None:
    plan = TensorPlan(plan_of("current").rowwise, plan_of("mxfp8").columnwise)
    sizes = []

    def reduce(amax: torch.Tensor) -> torch.Tensor:
        sizes.append(len(amax))
        return amax * 2

    quantizer, x = bound(plan, reduce), whole()
    made = quantizer(x)
    assert sizes == [1]
    assert torch.equal(made.rowwise.scale_inv, bound(plan)(x).rowwise.scale_inv * 2)
    assert torch.equal(made.columnwise.data, bound(plan)(x).columnwise.data)
    quantizer(x, rowwise=False)
    assert sizes == [1]


def test_an_orientation_in_high_precision_stays_as_it_is() -> None:
    plan = plan_of("current")._replace(columnwise=None)
    x = whole()
    made = bound(plan, lambda amax: amax * 2)(x)
    assert torch.equal(made.columnwise.data, x.t())
    assert torch.equal(made.rowwise.scale_inv, bound(plan)(x).rowwise.scale_inv * 2)


def test_without_a_reduction_the_cast_is_the_backends_own_call() -> None:
    plan = plan_of("current")
    own = table.resolve(QuantizeDesc(BF16, *plan), CPU).run
    assert bound(plan).cast_to(rowwise=True, columnwise=True) is own


@pytest.mark.parametrize(
    ("reduce", "found"),
    [
        (lambda amax: None, "returned None; expected a tensor float32"),
        (lambda amax: amax.tolist(), r"returned \[.*\]; expected a tensor float32"),
        (lambda amax: amax.double(), rf"returned torch.float64 \[\d+\] on {DEVICE}; expected"),
        (lambda amax: amax.sum(), rf"returned torch.float32 \[\] on {DEVICE}; expected"),
        (lambda amax: amax.to("meta"), r"on meta; expected what it was given"),
    ],
    ids=["nothing", "a list", "another dtype", "one for all", "another device"],
)
def test_a_reduction_that_returns_no_amaxes_is_refused(reduce: Reduce, found: str) -> None:
    plan = plan_of("rowwise")
    with pytest.raises(OperandError, match=found):
        bound(plan, reduce)(whole(), rng=rng_of(plan))


def test_nan_that_propagates_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="nonfinite='saturate' works with reduce_amax"):
        bound(plan_of("current"), lambda amax: amax, propagates=True)


def test_a_stored_tensor_is_not_taken_for_the_result() -> None:
    assert bound(plan_of("current"), lambda amax: amax).plan is None


@pytest.mark.parametrize("name", REDUCED)
def test_a_compiled_graph_equals_eager(name: str) -> None:
    plan, x = plan_of(name), whole()

    def reduce(amax: torch.Tensor) -> torch.Tensor:
        return torch.clamp(amax, min=3.0)

    def flat(quantizer: TensorQuantizer, x: torch.Tensor) -> list[torch.Tensor]:
        return [part for operand in quantizer(x) for part in tensors(operand)]

    with table.capturing():
        captured = bound(plan, reduce)
    fast = torch.compile(lambda x: flat(captured, x), fullgraph=True, backend="aot_eager")
    for one, other in zip(fast(x), flat(bound(plan, reduce), x), strict=True):
        assert torch.equal(one, other)


# Two processes
def step_of_rank(rank: int, group: Any, name: str) -> list[list[torch.Tensor]]:
    plan, x = plan_of(name), whole().chunk(2)[rank]
    desc = QuantizeDesc(BF16, *plan)

    def reduce(amax: torch.Tensor) -> torch.Tensor:
        shared = entries_of_all(desc, amax, x)
        dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=group)
        return amax

    return [list(tensors(operand)) for operand in bound(plan, reduce)(x)]


def delayed_steps_of_rank(rank: int, group: Any) -> dict[str, Any]:
    """Record in one step, update over the group, and cast by the new scale in the next."""
    plan, x = plan_of("delayed"), whole().chunk(2)[rank]
    scale, history = torch.ones(1), torch.zeros(4, 1)
    chosen = recipe.DelayedScaling(amax_history_len=4)
    delayed = chosen.plan(LayerRole("linear"), BF16).delayed
    assert delayed is not None
    state = DelayedState(
        "layer", delayed, chosen, scale=scale, amax_history=history, maxima=[448.0], order=(0,)
    )
    state.group = weakref.ref(group)
    quantizer = bound(plan, unexpected, slot=Slot(scale, history[0]))
    quantizer(x)
    recorded = history[0].clone()
    scaling.update([state])
    made = [list(tensors(operand)) for operand in quantizer(x)]
    return {"recorded": recorded, "scale": scale, "operands": made}


def work(rank: int) -> dict[str, Any]:
    """Quantize half of a tensor as ``rank`` of two."""
    group = dist.new_group([0, 1])
    made: dict[str, Any] = {name: step_of_rank(rank, group, name) for name in REDUCED}
    made["delayed"] = delayed_steps_of_rank(rank, group)
    return made


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes made."""
    return run_ranks(work, tmp_path_factory.mktemp("gloo"))


@pytest.mark.parametrize("name", REDUCED)
def test_ranks_quantize_their_rows_as_within_the_whole(
    ranks: list[dict[str, Any]], name: str
) -> None:
    for rank, made in enumerate(ranks):
        half = ROWS // 2
        assert_is_share(plan_of(name), made[name], rank * half, (rank + 1) * half)


def test_delayed_amaxes_are_reduced_where_they_become_scales(ranks: list[dict[str, Any]]) -> None:
    recorded = [made["delayed"]["recorded"].item() for made in ranks]
    assert recorded[0] < recorded[1] == whole().abs().max()
    assert [made["delayed"]["scale"].item() for made in ranks] == [
        torch.tensor(448 / recorded[1]).item()
    ] * 2


def test_ranks_cast_by_equal_delayed_scales(ranks: list[dict[str, Any]]) -> None:
    plan = plan_of("delayed")
    slot = Slot(ranks[0]["delayed"]["scale"], None)
    expected = bound(plan, slot=slot)(whole())
    for rank, made in enumerate(ranks):
        rows = slice(rank * ROWS // 2, (rank + 1) * ROWS // 2)
        rowwise, columnwise = made["delayed"]["operands"]
        assert torch.equal(rowwise[0], expected.rowwise.data[rows])
        assert torch.equal(columnwise[0], expected.columnwise.data[:, rows])
        assert torch.equal(rowwise[1], expected.rowwise.scale_inv)


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
