"""The doctor's test of collectives: a process a rank, and ranks that answer wrongly or die."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import pytest
import torch

from fp8core.__main__ import main
from fp8core.cli.commands import number_of_processes
from fp8core.conformance.ranks import COLLECTIVES, LAWS
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
    assert str(failures.pop("sum of float32")).startswith(
        "rank 1: sum: 1536 of 1536 entries differ"
    )
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


# Rank 1 receives other rows, sums are too large, maxima are of one rank, parts of products are not
# those of the whole.
BROKEN = """
from tests import overlapping_backend as rightly
from tests.overlapping_backend import fp8core_register_backends

gather, finish = rightly.Transfers.gather, rightly.Sending.finish
gemm_part = rightly.ProductInParts.__call__

def shifted(self, x):
    result, arrive = gather(self, x)
    def late(rank):
        arrive(rank)
        result[0] = result[1]
    return result, late if self._rank else arrive

def doubled(self, mine):
    return finish(self, mine * 2)

def of_this_rank(self, x):
    return x.clone()

def rounded(self, rows, a, b, *, bias=None, out):
    return gemm_part(self, rows, a, b, bias=bias, out=out).mul_(1.01)

{change}
"""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forking_doctor: None) -> Path:
    """The file of a plug-in that the processes of the ranks load."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{Path.cwd()}{os.pathsep}{tmp_path}", prepend=os.pathsep)
    monkeypatch.setenv("FP8CORE_PLUGINS", "toy_moving")
    return tmp_path / "toy_moving.py"


def outcomes(plugin: Path, change: str = "") -> dict[str, Outcome]:
    plugin.write_text(BROKEN.format(change=change))
    return {one.name: one for one in collectives.apart(2, CPU, 60, "overlapping")}


def test_a_backend_that_moves_rows_holds_every_law(plugin: Path) -> None:
    found = outcomes(plugin)
    assert list(found) == [*COLLECTIVES, *LAWS]
    assert {name: one.failure or one.skipped for name, one in found.items()} == dict.fromkeys(found)


def test_a_broken_law_is_named_with_its_ranks(plugin: Path) -> None:
    found = outcomes(
        plugin,
        "rightly.Transfers.gather = shifted\n"
        "rightly.Sending.finish = doubled\n"
        "rightly.Transfers.maximum = of_this_rank\n"
        "rightly.ProductInParts.__call__ = rounded",
    )
    broken = {name: one.failure for name, one in found.items() if one.failure is not None}
    assert list(broken) == list(LAWS)[1:]
    assert str(broken["rows_gathered_beside_products"]).startswith("rank 1: ")
    for name in ("sums_scattered_beside_products", "products_of_rows_that_arrive"):
        assert str(broken[name]).startswith("rank 0: ")


def test_a_rank_that_dies_breaks_the_law_that_it_had_begun(plugin: Path) -> None:
    leave = "import os\nrightly.Transfers.scatter = lambda self, size, dtype: os._exit(3)"
    found = outcomes(plugin, leave)
    assert "exited with status 3" in str(found["sums_scattered_beside_products"].failure)
    assert found["rows_gathered_beside_products"].failure is None
    assert "not run, after" in str(found["products_of_rows_that_arrive"].failure)


def test_the_command_prints_what_the_reference_leaves_to_the_group(
    tmp_path: Path, forking_doctor: None, capsys: pytest.CaptureFixture[str]
) -> None:
    written = tmp_path / "laws.json"
    assert main(["conformance", "reference", "--processes", "2", "--json", str(written)]) == 0
    said = capsys.readouterr().out
    assert "reference between 2 processes on cpu" in said
    assert "not judged: the backend moves no rows between these ranks" in said
    assert f"{len(COLLECTIVES) + 1} hold, 0 are broken" in said
    names = [one["name"] for one in json.loads(written.read_text())]
    assert names == [*COLLECTIVES, *LAWS]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["reference", "--processes", "1"], "expected a number from 2 to"),
        (["reference", "--processes", "2", "-k", "gemm"], "--processes takes no --k"),
        (["nobody", "--processes", "2"], "nobody"),
    ],
)
def test_what_cannot_be_tested_is_refused(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["conformance", *arguments]) == 2
    assert text in capsys.readouterr().err
