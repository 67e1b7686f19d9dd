"""The benchmark of layers over ranks: its arithmetic on records, and a trial run of two ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.measuring import records, turns
from tests.benchmarks.measuring.device import HOST
from tests.benchmarks.parallel_gpu import cases, contestants, rank, report
from tests.benchmarks.parallel_gpu.cases import Job, Size
from tests.benchmarks.parallel_gpu.together import of_world
from tests.ranks import run_ranks

START = {"kind": "sequence_parallel", "size": "8B"}
TURNS = 10


def job(out: Path | str = "", **fields: Any) -> Job:
    values = {"kind": "sequence_parallel", "size_name": "tiny", "recipes": ("bf16", "block")}
    values |= {"libraries": ("fp8core", "collectives"), "ranks": 2, "device": "cpu"}
    return Job(**{**values, **fields}, out=str(out))


def test_a_job_travels_as_one_line() -> None:
    assert Job.from_json(job("results").to_json()) == job("results")


def test_exposed_communication_is_what_the_layer_alone_does_not_take() -> None:
    us = {"fp8core block": 110.0, "fp8core block alone": 100.0, "collectives": 40.0}
    us["te block"] = 220.0
    times = {name: [value] * TURNS for name, value in us.items()}
    figures = {"contestant": "fp8core block", "peak_mib": 5.0, "collectives": 5, "bytes_sent": 2e6}
    found = [START | {"measure": "eager", "us": times}, START | {"measure": "figures"} | figures]
    (row,) = [one for one in report.tables(found).splitlines() if "| fp8core block |" in one]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[2:4] == ["110.0", "0.500 (0.500 to 0.500)"]
    assert cells[6:9] == ["10.0", "0.25", "5"]
    assert cells[10:12] == ["5", "2.00"]


def test_turns_end_when_another_process_wants_them_to() -> None:
    clock = HOST.clock._replace(agree=lambda value: 1.0)
    stop = turns.Stop(1e9)
    assert stop.is_reached({"a": [1.0] * turns.FEWEST_TURNS}, clock.now(), clock)
    assert not stop.is_reached({"a": [1.0] * turns.FEWEST_TURNS}, clock.now(), HOST.clock)


def work(rank_: int, out: str) -> dict[str, Any]:
    """Measure layers of a few features; a contestant that fails on rank 1 takes part on none."""
    cases.SIZES["tiny"] = Size(32, 32, 64, 1)
    ranks = of_world(HOST)
    rank.measure(job(out, seconds=0.0), ranks)
    failing = contestants.Entrant(lambda: None)

    def make() -> contestants.Entrant:
        if rank_ == 1:
            raise ImportError("there is none on rank 1")
        return failing

    return {
        "slowest": ranks.slowest({"a": [1.0 + rank_, 4.0 - rank_]})["a"],
        "entered": int(rank._entered("toy", make, ranks) is not None),
    }


@pytest.fixture(scope="module")
def trial(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Path]:
    folder = tmp_path_factory.mktemp("trial")
    return run_ranks(work, folder, str(folder / "out")), folder / "out"


@pytest.mark.slow
def test_a_turn_takes_as_long_as_on_the_slowest_rank(
    trial: tuple[list[dict[str, Any]], Path],
) -> None:
    assert [one["slowest"] for one in trial[0]] == [[2.0, 4.0], [2.0, 4.0]]


@pytest.mark.slow
def test_what_fails_on_one_rank_takes_part_on_none(
    trial: tuple[list[dict[str, Any]], Path],
) -> None:
    assert [one["entered"] for one in trial[0]] == [0, 0]


@pytest.mark.slow
def test_a_trial_run_measures_every_contestant(trial: tuple[list[dict[str, Any]], Path]) -> None:
    found = records.read(trial[1])
    (eager,) = [one for one in found if one["measure"] == "eager"]
    assert list(eager["us"]) == [
        "collectives",
        "fp8core bf16",
        "fp8core bf16 alone",
        "fp8core block",
        "fp8core block alone",
    ]
    assert {len(times) for times in eager["us"].values()} == {TURNS}
    sent = {one["contestant"]: one["collectives"] for one in found if one["measure"] == "figures"}
    assert min(sent["fp8core block"], sent["fp8core bf16"]) > sent["fp8core bf16 alone"] == 0


def decoders(_: int) -> dict[str, list[int]]:
    """Collectives and bytes that a rank sends in a step of sharded decoders, by contestant."""
    case = job(kind="decoder", size_name="trial")
    made = contestants.contestants(case, of_world(HOST))
    found = {}
    for name in ("fp8core bf16", "fp8core block"):
        entrant = made[name]()
        entrant.step()
        assert entrant.traffic is not None
        found[name] = list(entrant.traffic())
    return found


@pytest.mark.slow
def test_bytes_of_a_sharded_step_are_those_of_the_weights(tmp_path: Path) -> None:
    _, hidden, ffn, _ = cases.SIZES["trial"]
    matrices = 4 * hidden**2 + 3 * hidden * ffn
    layer, rest = matrices + 2 * hidden, 2 * 256 * hidden + hidden
    # Of two ranks each sends half: a layer's weights in forward and again in backward, the others
    # once, and the sums of all gradients; bfloat16.
    high = (2 * layer + rest) + (layer + rest)
    for sent in run_ranks(decoders, tmp_path):
        assert sent["fp8core bf16"] == [5, high]
        calls, num_bytes = sent["fp8core block"]
        assert calls == 6  # and the amaxes of blocks that ranks share
        # Codes of one byte, and scales: the weights of the layer twice, half as much as before.
        assert 0 < num_bytes - (high - matrices) < 0.02 * high
