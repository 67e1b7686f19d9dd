"""The examples run from the command line and do what they say, each in one recipe or in all."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests import device
from tests.docs.pages import DOCS

SLOW = pytest.mark.slow


def printed(example: str, *arguments: str, folder: Path) -> str:
    """What an example prints, run as its page says."""
    return device.run_program(DOCS / "examples" / example, *arguments, folder=folder)


@pytest.mark.parametrize(
    ("name", "floor"),
    [
        pytest.param("mxfp8", 93.0, marks=SLOW),
        pytest.param("delayed", 93.0, marks=SLOW),
        ("nvfp4", 90.0),
    ],
)
def test_classifier_learns_the_digits(name: str, floor: float, tmp_path: Path) -> None:
    settings = ("--recipe", name, "--epochs", "6", "--hidden", "64")
    out = printed("classifier.py", *settings, folder=tmp_path)
    accuracies = dict(re.findall(r"^(\w+): ([\d.]+)% of", out, flags=re.MULTILINE))
    assert set(accuracies) == {"float32", name}
    assert float(accuracies["float32"]) > 93.0
    assert float(accuracies[name]) > floor


@pytest.mark.parametrize("name", ["mxfp8", pytest.param("delayed", marks=SLOW)])
def test_llama_is_converted_and_learns(name: str, tmp_path: Path) -> None:
    settings = ("--recipe", name, "--steps", "20", "--hidden", "32", "--rows", "4")
    out = printed("llama.py", *settings, folder=tmp_path)
    assert "14 of 15 linear layers converted" in out
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)$", out, flags=re.MULTILINE)]
    assert losses[0] > 5.0  # ln 256 = 5.5: random weights
    assert losses[-1] < 0.75 * losses[0]


@pytest.mark.parametrize("name", [pytest.param("mxfp8", marks=SLOW), "delayed"])
def test_decoder_generates_tokens(name: str, tmp_path: Path) -> None:
    rows = json.loads(printed("decoder.py", "--recipe", name, folder=tmp_path))
    assert [len(row) for row in rows] == [16, 16]
    assert all(0 <= token < 256 for row in rows for token in row)


def printed_by_two(example: str, *arguments: str, folder: Path) -> str:
    """What an example prints, run on two processes as its page says."""
    path = str(DOCS / "examples" / example)
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", path]
    return device.run(*command, *arguments, folder=folder, num_devices=2)


@SLOW
def test_layer_over_two_ranks_learns_and_says_what_it_sends(tmp_path: Path) -> None:
    out = printed_by_two("sequence_parallel.py", "--recipe", "mxfp8", folder=tmp_path)
    rows = re.findall(r"^step (\d+): (\d+) bytes sent, loss ([\d.]+)$", out, re.MULTILINE)
    assert [int(step) for step, *_ in rows] == [10, 20, 30, 40]
    assert len({sent for _, sent, _ in rows}) == 1
    assert float(rows[-1][2]) < 0.85 * float(rows[0][2])


def test_sharded_gpt_learns_and_is_saved(tmp_path: Path) -> None:
    settings = ["--steps", "6", "--hidden", "64", "--checkpoint", "saved"]
    settings += ["--device", device.DEVICE_TYPE]
    out = printed_by_two("sharded.py", *settings, folder=tmp_path)
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)$", out, re.MULTILINE)]
    assert losses[0] > 5.0
    assert losses[-1] < 0.9 * losses[0]
    assert (tmp_path / "saved" / ".metadata").exists()


@pytest.mark.parametrize("example", sorted((DOCS / "examples").glob("*.py")), ids=lambda p: p.stem)
def test_example_is_short(example: Path) -> None:
    assert len(example.read_text(encoding="utf-8").splitlines()) < 80
