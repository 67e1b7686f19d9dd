"""The doctor's test of collectives: a process a rank, and ranks that answer wrongly or die."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import pytest
import torch

from fp8core.cli.commands import number_of_processes
from fp8core.doctor import collectives
from fp8core.doctor.collectives import Outcome
from fp8core.doctor.report import with_collectives
from fp8core.errors import Fp8CoreError
from tests.doctor.test_report import examine

CPU = torch.device("cpu")
NAMES = [
    "gather of float8_e4m3fn",
    "gather of bfloat16",
    "scatter of sums in bfloat16",
    "sum of float32",
    "maximum of float32",
    "exchange of float8_e4m3fn",
]

# A plug-in changes what the communicator of rank 1 does.
WILD = """
import os, sys
from fp8core.collectives import Communicator, Started

rank = sys.argv[sys.argv.index("--rank") + 1] if "--rank" in sys.argv else None

def leave(self, x, purpose=""):
    os._exit(3)

def mistaken(self, x, purpose=""):
    started = rightly(self, x, purpose)
    return Started(started.wait() + 1)

rightly = Communicator.sum
if rank == "1":
    Communicator.sum = {act}
"""


@pytest.fixture
def wild(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forking_doctor: None) -> Path:
    """The file of a plug-in that every process of the doctor loads."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("FP8CORE_PLUGINS", "toy_ranks")
    return tmp_path / "toy_ranks.py"


@pytest.mark.parametrize("processes", [2, 3])
def test_collectives_of_the_cpu_pass(processes: int, forking_doctor: None) -> None:
    results = collectives.apart(processes, CPU, deadline=60)
    assert results == [Outcome(name, None) for name in NAMES]


def test_a_wrong_sum_on_one_rank_is_named(wild: Path) -> None:
    wild.write_text(WILD.format(act="mistaken"))
    failures = {one.name: one.failure for one in collectives.apart(2, CPU, deadline=60)}
    assert failures.pop("sum of float32") == "rank 1: 480 of 480 elements are wrong"
    assert set(failures.values()) == {None}


def test_a_rank_that_dies_is_named_and_the_rest_did_not_run(wild: Path) -> None:
    wild.write_text(WILD.format(act="leave"))
    failures = {one.name: one.failure for one in collectives.apart(2, CPU, deadline=60)}
    assert failures["scatter of sums in bfloat16"] is None
    assert "rank 1: exited with status 3" in str(failures["sum of float32"])
    assert "rank 1: not run, after sum of float32" in str(failures["maximum of float32"])


def test_a_failed_collective_is_a_problem() -> None:
    results = [Outcome("sum of float32", "rank 1: wrong"), Outcome("gather", None)]
    report = with_collectives(examine(), results, 2, "cpu")
    assert report.problems[-1] == "the collectives fail between 2 processes on cpu: sum of float32"
    assert [one["processes"] for one in report.collectives] == [2, 2]


def test_passing_collectives_are_no_problem() -> None:
    report = with_collectives(examine(), [Outcome("gather", None)], 2, "cpu")
    assert report.problems == []


def test_ranks_without_a_device_each_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    with pytest.raises(Fp8CoreError, match="torch finds 1 cuda devices here"):
        collectives.device_for(torch.device("cuda"), 2)
    assert collectives.device_for(None, 2) == CPU
    assert collectives.device_for(None, 1) == torch.device("cuda")


@pytest.mark.parametrize("text", ["1", "0", "-2", "two", "65", "²"])
def test_a_bad_number_of_processes_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="expected a number from 2 to 64"):
        number_of_processes(text)
