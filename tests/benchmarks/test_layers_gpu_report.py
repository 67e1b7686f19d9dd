"""The benchmark's arithmetic on records that are written by hand: ratios, limits, bars, tables."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.layers_gpu import cases, data, report
from tests.benchmarks.layers_gpu import results as bars
from tests.benchmarks.layers_gpu.cases import Case
from tests.benchmarks.layers_gpu.results import Against, Results, rows
from tests.benchmarks.layers_records import (
    CASE,
    TURNS,
    turn_record,
)
from tests.benchmarks.measuring import records


def figures_record(contestant: str, case: Case = CASE, **values: Any) -> records.Record:
    start = {"layer": case[0], "size": case[1], "measure": "figures", "contestant": contestant}
    default = {"peak_mib": 100.0, "held_mib": 80.0, "weight_copies_mib": 20.0}
    return {**start, **default, "errors": {"y": 0.02, "x": 0.04}, **values}


def test_ratios_are_taken_within_turns() -> None:
    """A chip that gets slower moves both sides; the ratio stays."""
    drift = [100.0 * 1.1**turn for turn in range(TURNS)]
    own = [0.9 * time for time in drift]
    results = Results([turn_record("graph", te_delayed=drift, fp8core_delayed=own)])
    found = results.ratio(CASE, "graph", "fp8core delayed", "te delayed")
    assert found is not None
    assert found[:3] == pytest.approx((0.9, 0.9, 0.9))
    assert results.ratio(CASE, "eager", "fp8core delayed", "te delayed") is None
    assert results.ratio(CASE, "graph", "fp8core delayed", "te current") is None


def test_runs_merge_by_their_ratios() -> None:
    """Times of two machines are never compared: each run brings the ratios of its own turns."""
    results = Results(
        [
            turn_record("graph", te_block=100.0, fp8core_block=80.0),
            turn_record("graph", te_block=1000.0, fp8core_block=900.0),
            turn_record("graph", te_block=10.0),
        ]
    )
    found = results.ratio(CASE, "graph", "fp8core block", "te block")
    assert found is not None
    assert found == pytest.approx((0.85, 0.8, 0.9, 2 * TURNS))


def test_the_limit_is_the_products_and_the_bytes_at_the_copy_s_rate() -> None:
    total = sum(one.bytes for one in data.step_bytes(CASE, "delayed"))
    copy_us = 250.0
    wanted = 6000.0 + copy_us * total / 2**30
    results = Results(
        [turn_record("graph", copy=copy_us, products_delayed=6000.0, fp8core_delayed=2 * wanted)]
    )
    found = results.over_limit(CASE, "delayed", "fp8core delayed")
    assert found is not None
    assert found.median == pytest.approx(2.0)
    assert results.over_limit(CASE, "block", "fp8core delayed") is None
    (line,) = report.limit_table(results).splitlines()[2:]
    assert line.split(" | ")[-2:] == [f"{wanted:.0f}", f"{2 * wanted:.0f} |"]


def test_ideal_bytes_of_the_step_of_the_issue() -> None:
    """LayerNormMLP at 8B, delayed: about 0.73 ms at 4.25 TB/s besides weights' casts."""
    found = dict(data.step_bytes(CASE, "delayed"))
    tokens, hidden, ffn, *_ = CASE.size
    assert list(found) == [
        *("rmsnorm + cast", "weight1 cast", "weight2 cast", "swiglu + cast"),
        *("grad_output cast", "swiglu backward + cast", "rmsnorm backward"),
    ]
    assert found["weight1 cast"] == pytest.approx(4 * hidden * 2 * ffn, rel=1e-4)
    assert found["swiglu + cast"] == pytest.approx(6 * tokens * ffn, rel=1e-4)
    assert found["swiglu backward + cast"] == pytest.approx(10 * tokens * ffn, rel=1e-4)
    activations = sum(size for name, size in found.items() if "weight" not in name)
    assert activations / 4.25e6 == pytest.approx(553, rel=0.01)
    assert sum(found.values()) / 4.25e6 == pytest.approx(719, rel=0.01)


def test_a_layer_without_a_recipe_casts_nothing() -> None:
    assert data.step_bytes(CASE, "bf16")
    assert not [one for one in data.step_bytes(CASE, "bf16") if "cast" in one.op]
    assert data.step_bytes(Case("linear", "8B"), "bf16") == []
    names = [one.op for one in data.step_bytes(Case("linear", "8B"), "block")]
    assert names == ["input cast", "weight cast", "grad_output cast"]


def test_the_best_peer_is_the_one_that_fp8core_is_slowest_against() -> None:
    times = {"te_delayed": 10.0, "torchao_tensorwise": 8.0, "fp8core_delayed": 9.0}
    results = Results([turn_record("eager", **times)])
    found = results.best_peer(CASE, "eager", "delayed")
    assert found is not None
    assert found[0] == "torchao tensorwise"
    assert found[1].median == pytest.approx(1.125)
    assert results.best_peer(CASE, "eager", "block") is None


def test_a_row_compares_memory_and_errors_with_the_bars_peers() -> None:
    own = figures_record("fp8core delayed", errors={"y": 0.01, "x": 0.041})
    compiled = figures_record(
        "torch.compile bf16", peak_mib=125.0, held_mib=75.0, weight_copies_mib=0.0
    )
    te = figures_record("te delayed", peak_mib=200.0)
    (row,) = (row for row in rows(Results([own, compiled, te])) if row.recipe == "delayed")
    assert {name: ratio for name, ratio in row.ratios.items() if ratio is not None} == {
        "peak / first peer": 0.5,
        "peak / torch.compile": 0.8,
        "held / torch.compile": 0.8,  # 80 - 20 of 75
        "error / first peer": pytest.approx(0.041 / 0.04),
    }


def test_a_missed_bar_is_bold_and_noise_is_not() -> None:
    sure = [1.02, 1.03, 1.01] * 4
    noisy = [0.99, 1.03, 1.02] * 4
    ones = [1.0] * TURNS
    results = Results(
        [
            turn_record("graph", te_delayed=ones, fp8core_delayed=sure),
            turn_record("graph", te_block=ones, fp8core_block=noisy),
        ]
    )
    delayed, block, mean = report.ratio_table(results).splitlines()[2:]
    assert "| **1.020 (1.010-1.030)** |" in delayed
    assert "| 1.020 (0.990-1.030) |" in block
    assert "1.020" in mean


def test_bars_name_the_cell_that_is_farthest_off() -> None:
    ones = [1.0] * TURNS
    noisy = [0.99, 1.03, 1.02] * 4
    results = Results(
        [
            turn_record("graph", te_delayed=ones, fp8core_delayed=[1.04] * TURNS),
            turn_record("graph", te_block=ones, fp8core_block=noisy),
            turn_record("graph", Case("mlp_gelu", "70B"), te_block=2.0, fp8core_block=1.0),
            turn_record("graph", Case("linear", "8B"), te_block=1.0, fp8core_block=9.0),
            turn_record("eager", te_delayed=4.0, torchao_tensorwise=2.0, fp8core_delayed=1.8),
            turn_record("host", Case("linear", "tiny"), te_delayed=4.0, fp8core_delayed=1.0),
        ]
    )
    lines = bars.bars_table(list(rows(results))).splitlines()[2:]
    assert len(lines) == len(bars.BARS)
    mean = (1.04 * 1.02 * 0.5) ** (1 / 3)
    kept = "2 of 3 (24 not run)"  # the linear is no cell of this bar
    first = ("GPU time / Transformer Engine", "1.00", kept, "mlp_swiglu 8B delayed", "1.040")
    assert lines[0] == f"| {' | '.join(first)} | {mean:.3f} |"
    assert lines[1].endswith("| not run (27) |  |  |  |")
    assert lines[2].split(" | ")[2:5] == ["1 of 1 (26 not run)", "mlp_swiglu 8B delayed", "0.900"]
    assert lines[3].split(" | ")[2] == "missed (26 not run)"
    (host,) = (text for text in lines if "linear tiny" in text)
    assert (
        host
        == "| host / Transformer Engine | 0.30 | 1 of 1 | linear tiny delayed | 0.250 | 0.250 |"
    )


def test_tables_have_as_many_columns_in_each_line() -> None:
    results = Results(
        [
            turn_record("graph", te_delayed=4.0, fp8core_delayed=3.0, copy=1.0),
            turn_record("host", Case("linear", "tiny"), te_block=4.0, fp8core_block=3.0),
            figures_record("te delayed"),
            figures_record("torchao tensorwise", weight_copies_mib=None),
            {"layer": "linear", "size": "8B", "measure": "kernels"}
            | {"contestant": "te block", "kernels": [["gemm", 3.0, 20.0]]},
        ]
    )
    for table in (report.ratio_table, report.figures_table, report.limit_table):
        lines = table(results).splitlines()
        assert len({line.count("|") for line in lines}) == 1, table
    assert len(report.figures_table(results).splitlines()) == 2 + 6


def test_no_records_make_empty_tables() -> None:
    results = Results([])
    for table in (report.ratio_table, report.figures_table, report.limit_table):
        assert len(table(results).splitlines()) == 2


def test_fp8_is_held_against_the_best_without_a_recipe() -> None:
    case = Case("transformer_layer_gelu", "b32_s1024")
    times = {"te_bf16": 10.0, "fp8core_bf16": 8.0, "torch_bf16": 12.0, "fp8core_delayed": 5.0}
    found = [turn_record("graph", case, **times)]
    (row,) = (row for row in rows(Results(found)) if row.recipe == "delayed")
    best = row.ratios["GPU time / best bf16"]
    assert isinstance(best, Against)
    assert best.name == "fp8core bf16"
    assert best.ratio.median == pytest.approx(0.625)
    (line,) = (line for line in bars.bars_table([row]).splitlines() if "| layer: FP8 /" in line)
    assert "| 0.64 | 1 of 1 |" in line


def test_ideal_bytes_of_a_transformer_layer() -> None:
    found = dict(data.step_bytes(Case("transformer_layer", "8B"), "delayed"))
    tokens, hidden, *_ = CASE.size
    assert list(found) == [
        *("rmsnorm + cast", "weight1 cast", "weight2 cast", "weight3 cast", "weight4 cast"),
        *("attention's result cast", "sum + rmsnorm + cast", "swiglu + cast", "sum"),
        *("grad_output cast", "swiglu backward + cast", "rmsnorm backward + sum + cast"),
        *("gradient of q, k, v cast", "rmsnorm backward + sum"),
    ]
    # sum and norm: two tensors and their sum in bfloat16, codes both ways
    assert found["sum + rmsnorm + cast"] == pytest.approx(8 * tokens * hidden, rel=1e-3)
    # the gradients of norm and residual, the input, their sum; codes both ways
    assert found["rmsnorm backward + sum + cast"] == pytest.approx(10 * tokens * hidden, rel=1e-3)
    assert found["rmsnorm backward + sum"] == pytest.approx(8 * tokens * hidden, rel=1e-3)
    names = [one.op for one in data.step_bytes(Case("transformer_layer_gelu", "tiny"), "bf16")]
    assert "sums for biases" in names
    assert not [name for name in names if "cast" in name]


@pytest.mark.parametrize(
    "name", ["picture.svg", pytest.param("picture.png", marks=pytest.mark.slow)]
)
def test_the_picture_is_small_and_the_same_each_time(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    times = {"te_delayed": 4.0, "fp8core_delayed": 3.0, "copy": 1.0, "products_delayed": 2.0}
    found = [
        turn_record(measure, Case(layer, size), **times)
        for layer, size in itertools.product(cases.LAYERS, ("tiny", "8B"))
        for measure in ("graph", "host")
    ]
    drawn = []
    for _ in range(2):
        report.write(found, tmp_path / name)
        drawn.append((tmp_path / name).read_bytes())
    assert 10_000 < len(drawn[0]) < 400_000
    assert drawn[0] == drawn[1]
    assert "mlp_gelu" in capsys.readouterr().out
