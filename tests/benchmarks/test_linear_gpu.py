"""The benchmark's own logic, on made-up cells and a made-up clock: nothing is timed here."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.linear_gpu import __main__ as command
from tests.benchmarks.linear_gpu import report, timing

NAMES = ["torch bf16", "te delayed", "te block", "torchao tensorwise"]
NAMES += ["torchao rowwise", "fp8core delayed", "fp8core block", "fp8core rowwise"]


def contestant(time: float, *, has_graph: bool = True) -> dict[str, Any]:
    return {
        **{"host": 10 * time, "eager": time, "graph": time if has_graph else None},
        **{"kernels": time, "memory": 2 * time, "error": {"y": 0.01, "grad_input": 0.02}},
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two cells: in the second one te block cannot be captured."""
    times = dict(zip(NAMES, (8.0, 4.0, 5.0, 2.0, 3.0, 3.0, 4.0, 6.0), strict=True))
    for size, factor in (("8B", 10.0), ("tiny", 1.0)):
        cell = {
            name: contestant(time * factor, has_graph=(size, name) != ("8B", "te block"))
            for name, time in times.items()
        }
        (tmp_path / f"{size}.json").write_text(json.dumps({"size": size, "contestants": cell}))
    return tmp_path


def test_a_table_has_all_cells_in_the_order_of_sizes(folder: Path) -> None:
    lines = report.table(report.read(folder)).splitlines()
    assert len(lines) == 2 + 2 * len(NAMES)
    assert lines[2] == "| tiny | torch bf16 | 80 | 8 | 8 | 8 | 16 | 0.0200 |"
    assert lines[2 + len(NAMES) + 2] == "| 8B | te block | 500 | 50 |  | 50 | 100 | 0.0200 |"


def test_ratios_are_against_the_same_recipe(folder: Path) -> None:
    found = {(one.size, one.recipe): one for one in report.ratios(report.read(folder))}
    assert list(found) == list(itertools.product(("tiny", "8B"), ("delayed", "block", "rowwise")))
    delayed = found["tiny", "delayed"]
    assert delayed.te == dict.fromkeys(report.METRICS, 0.75)
    assert delayed.best == dict.fromkeys(report.METRICS, 1.5)  # torchao's tensorwise
    assert found["8B", "block"].te["graph"] is None
    assert found["8B", "block"].te["eager"] == pytest.approx(0.8)
    assert set(found["tiny", "rowwise"].te.values()) == {None}
    assert set(found["tiny", "rowwise"].best.values()) == {2.0}


def test_means_are_geometric_and_leave_out_what_is_not_there(folder: Path) -> None:
    lines = report.ratio_table(report.read(folder)).splitlines()
    assert len(lines) == 2 + 6 + 1
    assert len({line.count("|") for line in lines}) == 1
    last = [word.strip() for word in lines[-1].split("|")[3:-1]]
    host = (0.75 * 0.8) ** 0.5
    graph = (0.75 * 0.8 * 0.75) ** (1 / 3)
    best = (1.5 * 0.8 * 2.0) ** (1 / 3)
    assert last[:2] == [f"{host:.3f}", f"{graph:.3f}"]
    assert last[4] == f"{best:.3f}"


def test_no_cells_make_empty_tables(tmp_path: Path) -> None:
    cells = report.read(tmp_path)
    assert len(report.table(cells).splitlines()) == 2
    assert len(report.ratio_table(cells).splitlines()) == 2


@pytest.mark.parametrize("name", ["picture.svg", "picture.png"])
def test_the_picture_is_small_and_made_alike(name: str, folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / name
    drawn = []
    for _ in range(2):
        report.plot(report.read(folder), file)
        drawn.append(file.read_bytes())
    assert 2_000 < len(drawn[0]) < 100_000
    assert drawn[0] == drawn[1]


def test_a_finished_cell_is_not_measured_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = []
    monkeypatch.setattr(
        command.cell, "run_cell", lambda *given: measured.append(given) or {"contestants": {}}
    )
    command.main(["--size", "8B", "--out", str(folder)])
    assert "is there already" in capsys.readouterr().out
    assert not measured
    command.main(["--size", "70B", "--out", str(folder)])
    command.main(["--size", "1.3B", "--out", str(folder), "--seconds", "9"])
    assert measured == [("70B", 105.0), ("1.3B", 9.0)]
    assert list(report.read(folder)) == ["tiny", "1.3B", "8B", "70B"]


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
    def clock(self) -> timing.Clock:
        return timing.Clock(self.event, self.synchronize, lambda: self.time / 1e3)


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


@pytest.mark.parametrize("measure", [timing.graph_us, timing.eager_us])
def test_slices_are_short_and_hold_one_call_at_least(
    measure: Callable[..., dict[str, list[float]]], device: FakeClock
) -> None:
    calls = {"short": device.call("short", 1.0), "long": device.call("long", 17.0)}
    times = measure(calls, 3.0, clock=device.clock)
    assert set(times["short"]) == {1000.0}
    assert set(times["long"]) == {17000.0}
    assert len(times["short"]) == len(times["long"]) >= timing.FEWEST_TURNS
    assert timing.calls_a_slice(calls, device.clock) == {"short": 4, "long": 1}


def test_graphs_are_not_waited_for_within_a_batch(device: FakeClock) -> None:
    calls = {name: device.call(name, 4.0) for name in "abc"}
    batches: list[int] = []
    device_log = device.log

    def between() -> None:
        batches.append(len(device_log))

    times = timing.graph_us(calls, 0.0, between, clock=device.clock)
    first = device_log[batches[0] : batches[1]]
    assert first.count("wait") == 1
    assert first[-1] == "wait"
    assert len(first) == 1 + timing.TURNS_A_BATCH * len(calls) + 1  # one call is not timed
    assert {len(own) for own in times.values()} == {len(batches) * timing.TURNS_A_BATCH}


def test_an_eager_slice_begins_without_another_s_lead(device: FakeClock) -> None:
    calls = {name: device.call(name, 2.0) for name in "ab"}
    batches: list[int] = []
    timing.eager_us(calls, 0.0, lambda: batches.append(len(device.log)), clock=device.clock)
    turn = device.log[batches[0] : batches[1]]
    first, second = turn[1], turn[5]
    assert turn == ["wait", *[first] * 3, "wait", *[second] * 3, "wait"]
    assert {first, second} == {"a", "b"}


def test_host_slices_wait_before_and_not_within(device: FakeClock) -> None:
    calls = {"a": device.call("a", 0.1), "b": device.call("b", 100.0)}
    times = timing.host_us(calls, clock=device.clock)
    assert {name: len(own) for name, own in times.items()} == dict.fromkeys("ab", 40)
    assert times["a"] == pytest.approx([100.0] * 40)
    runs = [list(group) for name, group in itertools.groupby(device.log) if name == "a"]
    assert {len(run) for run in runs[1:]} == {timing.MOST_HOST_CALLS}


def test_nobody_follows_the_same_contestant_always() -> None:
    names = list("abcdefghijk")
    turns = list(itertools.islice(timing.orders(names), 400))
    assert all(sorted(turn) == names for turn in turns)
    assert turns[:20] == list(itertools.islice(timing.orders(names), 20))
    whole = list(itertools.chain(*turns))
    before_a = Counter(one for one, other in itertools.pairwise(whole) if other == "a")
    assert len(before_a) == len(names)
    assert max(count for name, count in before_a.items() if name != "a") < 80


def test_nothing_to_replay_is_no_time(device: FakeClock) -> None:
    assert timing.graph_us({}, 1.0, clock=device.clock) == {}


def test_a_summary_has_median_quartiles_and_range() -> None:
    found = timing.summarize([5.0, 1.0, 2.0, 4.0, 3.0])
    assert found == (3.0, (2.0, 4.0), (1.0, 5.0), 5)
    assert timing.summarize([7.0]) == (7.0, (7.0, 7.0), (7.0, 7.0), 1)
