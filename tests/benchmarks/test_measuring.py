"""Turns, intervals, records and ideal bytes, by a clock that moves as it is told."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fp8core import recipe
from fp8core.recipe.plan import LayerRole, TensorPlan
from tests.benchmarks.measuring import ideal_bytes, intervals, records, turns
from tests.benchmarks.measuring.device import versions
from tests.benchmarks.measuring.turns import Stop


class FakeClock:
    """A device on which a call takes as long as it says, and a log of what was done."""

    def __init__(self) -> None:
        self.time = 0.0  # ms
        self.log: list[str] = []

    def event(self) -> FakeEvent:
        return FakeEvent(self)

    def synchronize(self) -> None:
        self.log.append("wait")

    def call(self, name: str, milliseconds: float) -> Callable[[], None]:
        def run() -> None:
            self.log.append(name)
            self.time += milliseconds

        return run

    @property
    def clock(self) -> turns.Clock:
        return turns.Clock(self.event, self.synchronize, lambda: self.time / 1e3)


class FakeEvent:
    def __init__(self, owner: FakeClock) -> None:
        self.owner = owner
        self.at = -1.0

    def record(self) -> None:
        self.at = self.owner.time

    def elapsed_time(self, end: FakeEvent) -> float:
        return end.at - self.at


@pytest.fixture
def device() -> FakeClock:
    return FakeClock()


@pytest.mark.parametrize("measure", [turns.graph_us, turns.eager_us])
def test_slices_are_short_and_hold_one_call_at_least(
    measure: Callable[..., dict[str, list[float]]], device: FakeClock
) -> None:
    calls = {"short": device.call("short", 1.0), "long": device.call("long", 17.0)}
    times = measure(calls, Stop(3.0), clock=device.clock)
    assert set(times["short"]) == {1000.0}
    assert set(times["long"]) == {17000.0}
    assert len(times["short"]) == len(times["long"]) >= turns.FEWEST_TURNS
    assert turns.calls_a_slice(calls, device.clock) == {"short": 4, "long": 1}


def test_graphs_are_not_waited_for_within_a_batch(device: FakeClock) -> None:
    calls = {name: device.call(name, 4.0) for name in "abc"}
    batches: list[int] = []
    times = turns.graph_us(
        calls, Stop(0.0), lambda: batches.append(len(device.log)), clock=device.clock
    )
    second = device.log[batches[0] : batches[1]]
    assert second.count("wait") == 1
    assert second[0] == "wait"  # for the batch before, whose slices are all enqueued
    assert len(second) == 1 + 1 + turns.TURNS_A_BATCH * len(calls)  # one call is not timed
    assert {len(own) for own in times.values()} == {len(batches) * turns.TURNS_A_BATCH}


def test_an_eager_slice_begins_without_another_s_lead(device: FakeClock) -> None:
    calls = {name: device.call(name, 2.0) for name in "ab"}
    ends: list[int] = []
    turns.eager_us(calls, Stop(0.0), lambda: ends.append(len(device.log)), clock=device.clock)
    turn = device.log[ends[0] + 1 : ends[1]]
    first, second = turn[1], turn[5]
    assert turn == ["wait", *[first] * 3, "wait", *[second] * 3]
    assert {first, second} == {"a", "b"}


def test_host_slices_wait_before_and_not_within(device: FakeClock) -> None:
    calls = {"a": device.call("a", 0.1), "b": device.call("b", 100.0)}
    times = turns.host_us(calls, Stop(0.0), clock=device.clock)
    assert {name: len(own) for name, own in times.items()} == dict.fromkeys(
        "ab", turns.FEWEST_TURNS
    )
    assert times["a"] == pytest.approx([100.0] * turns.FEWEST_TURNS)
    runs = [list(group) for name, group in itertools.groupby(device.log) if name == "a"]
    # Half as many steps come first, untimed; then the host waits, and a slice begins.
    most = turns.MOST_HOST_CALLS
    assert {len(run) for run in runs[1:]} == {most // 2, most}


def test_turns_end_when_the_intervals_are_narrow(device: FakeClock) -> None:
    """Two contestants of the same spread: the pair that is asked for decides when to stop."""
    noise = random.Random(1)

    def spread(name: str) -> Callable[[], None]:
        return lambda: device.call(name, 10.0 * noise.uniform(0.98, 1.02))()

    calls = {name: spread(name) for name in "ab"}
    narrow = turns.graph_us(calls, Stop(1e9, (("a", "b"),), 0.01), clock=device.clock)
    wide = turns.graph_us(calls, Stop(1e9, (("a", "b"),), 0.05), clock=device.clock)
    estimate = intervals.median_interval(intervals.ratios(narrow["a"], narrow["b"]))
    assert estimate.relative_width <= 0.01
    assert len(wide["a"]) < len(narrow["a"]) < turns.MOST_TURNS


def test_turns_end_in_time_where_nothing_is_narrow_enough(device: FakeClock) -> None:
    values = itertools.cycle([10.0, 20.0, 40.0])
    calls = {name: (lambda: device.call("x", next(values))()) for name in "ab"}
    began = device.time
    turns.graph_us(calls, Stop(5.0, (("a", "b"),), 1e-6), clock=device.clock)
    assert 5e3 <= device.time - began < 7e3


def test_a_pair_that_does_not_take_part_is_not_waited_for(device: FakeClock) -> None:
    calls = {name: device.call(name, 4.0) for name in "ab"}
    times = turns.graph_us(calls, Stop(1e9, (("a", "b"), ("a", "none"))), clock=device.clock)
    assert len(times["a"]) < turns.FEWEST_TURNS + turns.TURNS_A_BATCH


def test_nobody_follows_the_same_contestant_always() -> None:
    names = list("abcdefghijk")
    shuffled = list(itertools.islice(turns.orders(names), 400))
    assert all(sorted(turn) == names for turn in shuffled)
    assert shuffled[:20] == list(itertools.islice(turns.orders(names), 20))
    whole = list(itertools.chain(*shuffled))
    before_a = Counter(one for one, other in itertools.pairwise(whole) if other == "a")
    assert len(before_a) == len(names)
    assert max(count for name, count in before_a.items() if name != "a") < 80


def test_nothing_to_replay_is_no_time(device: FakeClock) -> None:
    assert turns.graph_us({}, Stop(1.0), clock=device.clock) == {}


# For n = 10 and 95 %: P(B <= 1) = 11 / 1024, P(B <= 2) = 56 / 1024 > 0.025, so the second values.
@pytest.mark.parametrize(
    ("count", "rank"), [(1, 1), (5, 1), (6, 1), (9, 2), (10, 2), (20, 6), (100, 40)]
)
def test_an_interval_is_between_two_of_the_values(count: int, rank: int) -> None:
    values = [float(value) for value in range(1, count + 1)]
    random.Random(0).shuffle(values)
    found = intervals.median_interval(values)
    assert found == ((count + 1) / 2, float(rank), float(count + 1 - rank), count)


def test_intervals_hold_the_median_as_often_as_they_say() -> None:
    source = random.Random(3)
    samples = ([source.expovariate(1.0) for _ in range(25)] for _ in range(1500))
    found = [intervals.median_interval(sample) for sample in samples]
    held = sum(one.low <= 0.6931 <= one.high for one in found) / len(found)
    assert 0.94 < held < 0.975  # 0.957 by the binomial distribution


def test_ratios_need_the_same_turns() -> None:
    assert intervals.ratios([2.0, 3.0], [1.0, 6.0]) == [2.0, 0.5]
    with pytest.raises(ValueError, match="shorter"):
        intervals.ratios([1.0, 2.0], [1.0])


def test_records_are_read_in_order_from_all_files(tmp_path: Path) -> None:
    records.append(tmp_path / "one", "b", {"number": 2})
    records.append(tmp_path / "one", "a", {"number": 0})
    records.append(tmp_path / "one", "a", {"number": 1})
    records.append(tmp_path / "two", "a", {"number": 3})
    found = records.read(tmp_path / "one", tmp_path / "two", tmp_path / "none")
    assert [record["number"] for record in found] == [0, 1, 2, 3]


def test_a_line_that_a_killed_process_cut_off_is_left_out(tmp_path: Path) -> None:
    records.append(tmp_path, "a", {"number": 0})
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write('{"number": 1')
    assert records.read(tmp_path) == [{"number": 0}]


@pytest.mark.parametrize("line", ["{", "3"])
def test_a_line_that_is_no_record_is_named(line: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(f'{{"number": 1}}\n{line}\n')
    with pytest.raises(ValueError, match=r"a\.jsonl:2"):
        records.read(tmp_path)


def tensor_plan(name: str, tensor: str) -> TensorPlan:
    plan: TensorPlan = (
        recipe.by_name(name).plan(LayerRole("linear"), torch.bfloat16).tensors[tensor]
    )
    return plan


ROWS, COLUMNS = 8192, 4096
ELEMENTS = ROWS * COLUMNS


def test_bytes_without_a_recipe_and_exactly() -> None:
    parameters, statistics = 2 * COLUMNS, 4 * ROWS
    assert ideal_bytes.norm("rmsnorm", ROWS, COLUMNS) == 4 * ELEMENTS + parameters + statistics
    assert ideal_bytes.norm("layernorm", ROWS, COLUMNS) == (
        4 * ELEMENTS + 2 * parameters + 2 * statistics
    )
    assert ideal_bytes.norm("rmsnorm", ROWS, COLUMNS, residual=True) == (
        8 * ELEMENTS + parameters + statistics
    )
    assert ideal_bytes.norm_backward("rmsnorm", ROWS, COLUMNS) == (
        6 * ELEMENTS + parameters + statistics + 4 * COLUMNS
    )
    assert ideal_bytes.activation("swiglu", ROWS, COLUMNS) == 6 * ELEMENTS
    assert ideal_bytes.activation_backward("swiglu", ROWS, COLUMNS) == 10 * ELEMENTS
    assert ideal_bytes.column_sums(ROWS, COLUMNS) == 2 * ELEMENTS + 4 * COLUMNS


def test_bytes_of_scales_are_counted() -> None:
    row_blocks = tensor_plan("block", "input")
    assert ideal_bytes.result_bytes(row_blocks, 300, 200) == (
        300 * 200 + 4 * 300 * 2 + 200 * 300 + 4 * 200 * 3
    )
    square_blocks = tensor_plan("block", "weight")
    assert ideal_bytes.result_bytes(square_blocks, 300, 200) == 2 * (300 * 200 + 4 * 3 * 2)
    assert square_blocks.rowwise is not None
    assert ideal_bytes.dequantize(300, 200, square_blocks.rowwise) == 300 * 200 * 3 + 4 * 6
    rows = tensor_plan("rowwise", "input")
    assert ideal_bytes.result_bytes(rows, 300, 200) == 2 * 300 * 200 + 4 * 300 + 4 * 200
    four_bits = tensor_plan("nvfp4", "input").rowwise
    assert four_bits is not None
    assert ideal_bytes.operand_bytes(four_bits, 64, 64) == 64 * 32 + 64 * 4


@pytest.mark.parametrize(
    ("name", "both", "row", "column"),
    [
        *(("delayed", 1, 1, 1), ("current", 2, 2, 2), ("rowwise", 2, 1, 2), ("block", 1, 1, 1)),
        *(("mxfp8", 1, 1, 1), ("nvfp4", 2, 2, 2)),
    ],
)
def test_only_a_scale_beyond_a_tile_is_read_for_twice(
    name: str, both: int, row: int, column: int
) -> None:
    plan = tensor_plan(name, "input")
    assert ideal_bytes.passes(plan) == both
    assert ideal_bytes.passes(plan._replace(columnwise=None)) == row
    assert ideal_bytes.passes(plan._replace(rowwise=None)) == column


def test_versions_name_what_is_not_installed() -> None:
    found = versions("no-such-package", "pytest")
    assert found["no-such-package"] == "not installed"
    assert found["pytest"] == pytest.__version__
    assert found["torch"] == torch.__version__
