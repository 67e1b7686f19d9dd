"""Tables, CSV, TensorBoard and plots say what the rows say; missing packages are named."""

from __future__ import annotations

import csv
import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import fp8core as te
from fp8core import monitoring, recipe
from fp8core.monitoring import Monitor, Row, rows
from tests.inspection import models


@pytest.fixture(scope="module")
def watch() -> Monitor:
    model = torch.nn.Sequential(te.Linear(32, 64), te.LayerNormMLP(64, 96))
    with te.monitor(model) as made:
        for _ in range(2):
            with te.autocast(recipe=recipe.MXFP8BlockScaling()):
                model(torch.randn(32, 32)).sum().backward()
            made.step()
    return made


def without(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    for module in (rows, monitoring):
        find = module.find_spec
        monkeypatch.setattr(
            module, "find_spec", lambda name, find=find: None if name == package else find(name)
        )


@pytest.mark.parametrize("has_rich", [True, False])
def test_table_shows_every_operand(
    watch: Monitor, has_rich: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_rich:
        without(monkeypatch, "rich")
    table = watch.table()
    assert ("│" in table) == has_rich
    assert "step 1" in table.splitlines()[0]
    lines = [line for line in table.splitlines() if "reference" in line]
    latest = [row for row in watch.rows if row.step == 1]
    assert len(lines) == len(latest)
    for line, row in zip(lines, latest, strict=True):
        assert f"{row.layer} " in line
        assert f"{row.role} {row.orientation}" in line
        assert f"{row.sqnr_db:.4g}" in line
    assert "step 0" in watch.table(0).splitlines()[0]


def test_csv_reads_back(watch: Monitor, tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    watch.to_csv(path)
    with path.open(newline="", encoding="utf-8") as file:
        read = list(csv.DictReader(file))
    kinds: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "str": str}
    types = {field.name: kinds[str(field.type)] for field in dataclasses.fields(Row)}
    made = [Row(**{name: types[name](text) for name, text in line.items()}) for line in read]
    assert list(map(str, made)) == list(map(str, watch.rows))


def test_tensorboard_reads_the_scalars_back(watch: Monitor, tmp_path: Path) -> None:
    watch.to_tensorboard(tmp_path)
    read = EventAccumulator(str(tmp_path)).Reload()
    events = read.Scalars("1[0]/input/columnwise/sqnr_db")
    want = [row for row in watch.rows if row.key == ("1[0]", "input", "columnwise")]
    assert [event.step for event in events] == [row.step for row in want] == [0, 1]
    assert [event.value for event in events] == pytest.approx([row.sqnr_db for row in want])
    finite = {
        "/".join((*row.key, name))
        for row in watch.rows
        for name in rows.STATISTICS
        if math.isfinite(getattr(row, name))
    }
    assert set(read.Tags()["scalars"]) == finite


def test_statistics_are_the_fields_that_are_numbers() -> None:
    assert "sqnr_db" in rows.STATISTICS
    assert "scale_log2_std" in rows.STATISTICS
    assert not {"layer", "casts"} & set(rows.STATISTICS)


def test_plots_are_pictures(watch: Monitor, tmp_path: Path) -> None:
    watch.plot(tmp_path / "sqnr.png")
    watch.plot_exponents(tmp_path / "exponents.png", "0", "weight")
    watch.plot_scales(tmp_path / "scales.png", "0", "input", "columnwise")
    pictures = [path.read_bytes() for path in sorted(tmp_path.iterdir())]
    assert len(set(pictures)) == 3
    assert all(data.startswith(b"\x89PNG") for data in pictures)


def test_plot_of_what_was_not_cast_is_refused(watch: Monitor, tmp_path: Path) -> None:
    with pytest.raises(te.OperandError, match=r"no layer '1\[2\]'"):
        watch.plot_exponents(tmp_path / "x.png", "1[2]", "weight")
    model = models.make("linear")
    with te.monitor(model) as other:
        model(torch.randn(4, 32).to(models.BF16))
    with pytest.raises(te.OperandError, match="no scales to draw"):
        other.plot_scales(tmp_path / "x.png", "Linear", "input")
    assert not list(tmp_path.iterdir())


def test_missing_packages_are_named(
    watch: Monitor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without(monkeypatch, "matplotlib")
    with pytest.raises(te.UnsupportedError, match=r"needs matplotlib, (?s:.*)fp8core\[monitor\]"):
        watch.plot(tmp_path / "x.png")
    without(monkeypatch, "tensorboard")
    with pytest.raises(te.UnsupportedError, match=r"needs tensorboard, (?s:.*)fp8core\[monitor\]"):
        watch.to_tensorboard(tmp_path)
