"""The demo: its text, its runs, what it writes, and what a user can get wrong."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from fp8core import OperandError, recipe
from fp8core.__main__ import main
from fp8core.cli.demo import Run, Settings, Training, load

TINY = Settings(steps=3, batch_size=2, num_heldout_windows=8, d_model=32, num_heads=2, context=16)
CPU = torch.device("cpu")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_bytes(bytes(range(256)) * 40)
    return path


def train(name: str, text: Path, settings: Settings = TINY) -> Run:
    chosen = None if name == "bf16" else recipe.by_name(name)
    return Training(*load(text, settings.context), settings, CPU).run(name, chosen)


def demo(text: Path, folder: Path, *more: str) -> int:
    arguments = ("--steps", "1", "--text", str(text), "--out", str(folder))
    return main(["demo", *arguments, *more])


def test_standard_library_is_alike_each_time() -> None:
    first, again = (load(None, 64) for _ in range(2))
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert first[2] == again[2]


def test_heldout_part_of_a_text_is_its_end(text: Path) -> None:
    parts = [bytes(part.tolist()) for part in load(text, TINY.context)[:2]]
    assert b"".join(parts) == text.read_bytes()
    assert len(parts[1]) == len(text.read_bytes()) // 10


@pytest.mark.parametrize("name", ["bf16", "delayed", "nvfp4"])
def test_one_seed_gives_one_result(name: str, text: Path) -> None:
    first, again = train(name, text), train(name, text)
    del first["tokens_per_s"], again["tokens_per_s"]
    assert first == again


def test_first_loss_is_that_of_knowing_nothing(text: Path) -> None:
    first = train("bf16", text)["losses"][0]
    assert first == pytest.approx(torch.log(torch.tensor(256.0)).item(), rel=2**-8)


def test_recipe_changes_the_training(text: Path) -> None:
    assert train("current", text)["losses"][1:] != train("bf16", text)["losses"][1:]


def test_held_bytes_of_fp8_are_fewer_than_of_bf16(text: Path) -> None:
    assert train("current", text)["held_bytes"] < train("bf16", text)["held_bytes"]


def test_results_hold_a_run_for_bf16_and_each_recipe(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out, threads = tmp_path / "own.json", tmp_path / "out", torch.get_num_threads()
    options = ("--json", str(file), "--sample", "7", "--backend", "reference")
    assert demo(text, out, "--recipe", "current", "block", *options) == 0
    runs = json.loads(file.read_text())["runs"]
    assert [run["recipe"] for run in runs] == ["bf16", "current", "block"]
    for run in runs:
        assert {"recipe", "heldout_loss", "tokens_per_s", "steps", "held_bytes"} <= set(run)
        assert run["steps"] == 1
        assert run["tokens_per_s"] > 0
        assert run["sample"]
    assert (out / "loss_curves.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    for words in ("held-out loss", "reference", "bf16 continues", "current continues"):
        assert words in printed
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize(
    ("more", "reason", "status"),
    [
        (["--recipe", "mxfp9"], "mxfp8", 2),
        (["--backend", "cudaa"], "installed: ascend, cuda, reference", 2),
        (["--text", "nowhere.txt"], "nowhere.txt", 1),
    ],
    ids=["recipe", "backend", "text"],
)
def test_wrong_name_is_one_message_and_a_status(
    more: Sequence[str],
    reason: str,
    status: int,
    text: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert demo(text, tmp_path, *more) == status
    errors = capsys.readouterr().err
    assert reason in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize("name", ["bf16", "current", "delayed"])
def test_a_trained_model_draws_text(name: str, text: Path) -> None:
    settings = replace(TINY, sample_bytes=3 * TINY.context)
    first, again = (train(name, text, settings)["sample"] for _ in range(2))
    assert len(first) >= 3 * TINY.context
    assert first == again


@pytest.mark.parametrize("name", ["bf16", "current"])
def test_a_memorized_text_is_continued(name: str, tmp_path: Path) -> None:
    path = tmp_path / "memorized.txt"
    path.write_bytes(b"abcdefgh" * 250)
    settings = replace(TINY, steps=60, batch_size=8, learning_rate=1e-2, sample_bytes=40)
    assert train(name, path, settings)["sample"] == "abcdefgh" * 5


def test_no_steps_is_bad_usage(text: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as stop:
        demo(text, tmp_path, "--steps", "0")
    assert stop.value.code == 2


def test_text_too_small_says_how_much_is_needed(tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_bytes(b"short")
    with pytest.raises(OperandError, match="5130 are needed"):
        load(path, 64)


def test_missing_package_is_named_with_the_remedy(
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)
    assert demo(text, tmp_path / "out") == 1
    errors = capsys.readouterr().err
    assert "rich" in errors
    assert "fp8core[demo]" in errors
    assert not (tmp_path / "out").exists()


def test_diverged_run_is_told_and_status_1(
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    too_fast = partial(Settings, learning_rate=float("inf"))
    monkeypatch.setattr("fp8core.cli.demo.Settings", too_fast)
    assert demo(text, tmp_path, "--recipe", "current", "--steps", "2") == 1
    assert "diverged" in capsys.readouterr().out
    runs = json.loads((tmp_path / "results.json").read_text())["runs"]
    assert all(run["diverged"] and run["heldout_loss"] is None for run in runs)


def test_results_that_cannot_be_written_are_refused_before_training(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    blocked = tmp_path / "blocked"
    blocked.write_text("a file")
    assert demo(text, blocked) == 1
    assert "blocked" in capsys.readouterr().err
