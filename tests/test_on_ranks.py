"""``python -m tests.on_ranks``: what its parts judge, and that they run over two ranks."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests import ranks
from tests.on_ranks import __main__ as command
from tests.on_ranks import faults, layers, state, training
from tests.on_ranks.faults import LATE_S, TIMEOUT_S, Outcome
from tests.ranks import run_ranks

SLOW = pytest.mark.slow
NAMED = "[rank0]: CollectiveError: ranks [1] did not take part within 15 s"


@pytest.mark.parametrize(
    ("outcome", "is_success"),
    [
        (Outcome(1, 3.0, NAMED), True),
        (Outcome(-6, 3.0, "the watchdog of rank 0 says: rank 1 is gone"), True),
        (Outcome(1, 3.0, "[rank0]: RuntimeError: by rank 0: Connection closed by peer"), False),
        (Outcome(0, 3.0, NAMED), False),  # ended as if nothing had been
        (Outcome(None, 3.0, NAMED), False),  # hung
        (Outcome(1, TIMEOUT_S + LATE_S + 1.0, NAMED), False),
        (Outcome(1, 3.0, NAMED, is_refused=True), True),
        (Outcome(1, 3.0, NAMED, is_refused=False), False),
    ],
)
def test_the_other_rank_has_to_end_in_time_with_an_error_that_names_the_rank(
    outcome: Outcome, is_success: bool
) -> None:
    assert outcome.is_success is is_success


def test_a_row_has_the_last_error_that_a_rank_printed() -> None:
    text = "ValueError: first\nRuntimeError: second | third\n  and a line of another thread"
    row = Outcome(None, 1.25, text, is_refused=False).row("case")
    assert row == "| case | HUNG | 1.2 | no | TAKEN FOR WHOLE | RuntimeError: second / third |"


def test_a_half_written_checkpoint_is_told_from_a_whole_one(tmp_path: Path) -> None:
    (tmp_path / "__1_0.distcp").write_bytes(b"half")
    assert faults._is_refused(tmp_path)


def test_states_that_differ_are_named() -> None:
    saved, loaded = {"a": "1", "b": "2", "c": "3"}, {"a": "1", "b": "4"}
    assert state._difference(saved, dict(saved)) == "equal"
    assert state._difference(saved, loaded) == "2 of 3 differ: b, c"
    assert state._difference([0.5], [0.25]) == "[0.5] and [0.25]"


def result(recipe: str, size: int, loss: float, **more: Any) -> dict[str, Any]:
    losses = {"100": 2.0, "150": loss}
    found = {"recipe": recipe, "size": size, "seed": 0, "steps": 150, "held_out_loss": losses}
    return {**found, "ms": 30.0, "tokens_per_s": 12345, "host_ms": 20.5, "peak_mib": 2000, **more}


def test_runs_on_two_devices_stand_beside_those_on_one() -> None:
    alone = result("block", 1, 1.5)
    row = training.row(result("block", 2, 1.4375, ms=20.0, peak_mib=None), alone)
    assert row == (
        "| block | 2 | 0 | 150 | 1.4375 | 20.0 | 12,345 | 20.5 |  | 1.50 x as fast, loss -0.0625 |"
    )
    assert training.row(alone, None).endswith("| 12,345 | 20.5 | 2,000 |  |")


def test_a_run_that_failed_has_its_error_and_the_losses_before_it() -> None:
    text = (
        "step 10: loss 3.5000, 9.0 ms a step\n"
        "step 20: loss 3.0000, held-out loss 3.2500, 9.0 ms a step\n"
        "[rank1]: torch.OutOfMemoryError: no | memory\nmore"
    )
    failed = {**training.Run("block", 2, 0, 150)._asdict(), **training.curves_of(text)}
    failed["error"] = training.last_error(text)
    assert failed["loss"] == {"10": 3.5, "20": 3.0}
    row = training.row(failed, result("block", 1, 1.5))
    assert row.startswith("| block | 2 | 0 | 20 of 150: [rank1]: torch.OutOfMemoryError: no / mem")
    assert "| 3.2500 |" in row
    assert row.count("|") == training.row(result("block", 1, 1.5), None).count("|")


def test_runs_have_devices_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training.torch.cuda, "device_count", lambda: 5)
    assert training.places_of(2, "cuda") == [(0, 1), (2, 3)]
    assert training.places_of(2, "cpu") == [(0, 1)]


def test_runs_get_gpus_and_packages_of_this_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    monkeypatch.setenv("PYTHONPATH", "of-the-user")
    found = training.Trainer("cuda", (), tmp_path, 0.0).environment((2, 3))
    assert found["CUDA_VISIBLE_DEVICES"] == "6,7"
    assert found["PYTHONPATH"].split(os.pathsep) == [str(training.ROOT), "of-the-user"]


@SLOW
def test_a_decoder_trains_and_leaves_its_curves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    curves = tmp_path / "curves.json"
    given = ["--device", "cpu", "--steps", "20", "--short", "0", "--evaluate", "10"]
    assert training.main([*given, "--recipe", "bf16", "--curves", str(curves)]) == 0
    alone, sharded = json.loads(curves.read_text())
    assert (alone["ranks"], sharded["ranks"]) == (1, 2)
    assert list(alone["loss"]) == list(alone["held_out_loss"]) == ["10", "20"]
    assert alone["held_out_loss"]["20"] < alone["held_out_loss"]["10"] < 4.0
    assert "x as fast, loss" in capsys.readouterr().out


def test_machine_without_two_gpus_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command.torch.cuda, "device_count", lambda: 1)
    assert command.main([]) == 2
    assert "1 GPUs; 2 are needed" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        command.main(["states"])
    assert f"the parts are {', '.join(command.PARTS)}" in capsys.readouterr().err


def test_parts_print_their_tables_and_rows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    prints = command.Limited("", ("-c", "print('| a |'); print('b')"), 60, has_option=False)
    fails = command.Limited("", ("-c", "import sys; sys.exit(str(sys.argv))"), 60)
    monkeypatch.setattr(command, "PARTS", {"state": prints, "faults": fails})
    assert command.main(["--device", "cpu", "--logs", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert "| a |\nstate: passed" in printed
    assert "['-c', '--device', 'cpu']" in printed
    assert "| faults | 0 | ended with status 1 | 0 |" in printed


@SLOW
def test_layers_over_ranks_are_as_accurate_as_one_process(tmp_path: Path) -> None:
    rows, _ = run_ranks(layers.work, tmp_path, "block")
    assert [way for _, way, *_ in rows] == [
        *("tensor and sequence", "context, p2p", "context, all_gather"),
        *("experts, unequal", "experts, none on a rank"),
    ]
    for _, way, difference, ratio, of_bound, *_ in rows:
        assert of_bound <= 1, way
        assert (difference == 0) is way.startswith("experts"), way
        assert ratio > 0.9


@SLOW
def test_a_checkpoint_of_two_ranks_loads_on_two_and_on_one(tmp_path: Path) -> None:
    rows = state.rows("delayed", tmp_path)
    assert rows == [("delayed", size, *["equal"] * 3) for size in ("2", "1")]


@SLOW
@pytest.mark.parametrize("name", ["sequence parallel, raises", "fsdp, killed while it saves"])
def test_a_rank_that_ends_is_named_by_the_other_one(name: str) -> None:
    assert faults.outcome_of(name, "cpu").is_success


@SLOW
def test_a_rank_of_another_shape_is_named_by_the_other_one() -> None:
    outcome = faults.outcome_of("sequence parallel, other rows", "cpu")
    assert outcome.is_success
    assert "an input of [128, 128]" in outcome.text


def fails(rank: int) -> None:
    print("in the way")
    if rank:
        raise ValueError("of this rank")


def test_the_error_of_a_rank_is_in_the_first_line(tmp_path: Path) -> None:
    with pytest.raises(AssertionError) as caught:
        run_ranks(fails, tmp_path)
    assert str(caught.value).splitlines()[0] == (
        "rank 0 ended with 0; rank 1 ended with 1: ValueError: of this rank"
    )


def test_processes_of_pytest_take_gpus_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7,9")
    for worker, gpus in {"gw0": ["4", "5"], "gw1": ["6", "7"], "gw2": ["4", "5"]}.items():
        monkeypatch.setenv("PYTEST_XDIST_WORKER", worker)
        assert ranks.gpus_of(2) == gpus
