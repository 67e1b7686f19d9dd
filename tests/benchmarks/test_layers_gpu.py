"""The benchmark's arithmetic on records that are written by hand, and a trial run on the CPU."""

from __future__ import annotations

import functools
import gc
import io
import itertools
import subprocess
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.benchmarks.layers_gpu import __main__ as command
from tests.benchmarks.layers_gpu import (
    bars,
    cases,
    cell,
    contestants,
    data,
    limits,
    measures,
    report,
    transformer,
)
from tests.benchmarks.layers_gpu.cases import Case
from tests.benchmarks.layers_gpu.results import Results, rows
from tests.benchmarks.measuring import records, turns
from tests.benchmarks.measuring.device import HOST

CASE = Case("mlp_swiglu", "8B")
TURNS = 12


def turn_record(measure: str, case: Case = CASE, **us: float | list[float]) -> records.Record:
    """A record of 12 turns; underscores in names are spaces, a number is the time of every turn."""
    times = {
        name.replace("_", " "): [value] * TURNS if isinstance(value, float) else value
        for name, value in us.items()
    }
    return {"layer": case[0], "size": case[1], "measure": measure, "us": times}


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
    assert row.peak_first == 0.5
    assert row.peak_compiled == 0.8
    assert row.held_compiled == 0.8  # 80 - 20 of 75
    assert row.error_first == pytest.approx(0.041 / 0.04)
    assert row.graph_first is None


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
            {"layer": "linear", "size": "8B", "measure": "run", "recipes": ["block"]}
            | {"seconds": {"data": 1.5, "all": 4.0}},
        ]
    )
    for table in (report.ratio_table, report.figures_table, report.limit_table, report.cost_table):
        lines = table(results).splitlines()
        assert len({line.count("|") for line in lines}) == 1, table
    assert len(report.figures_table(results).splitlines()) == 2 + 6
    assert "| linear | 8B | block | 4 | data 1.5 |" in report.markdown(results)


def test_no_records_make_empty_tables() -> None:
    results = Results([])
    for table in (report.ratio_table, report.figures_table, report.limit_table, report.cost_table):
        assert len(table(results).splitlines()) == 2


def test_cases_come_in_the_order_of_layers_and_sizes() -> None:
    every = list(itertools.product(cases.LAYERS, cases.SIZES))
    results = Results([turn_record("graph", Case(*names), a=1.0) for names in reversed(every)])
    assert results.cases == every


def test_each_layer_is_measured_at_its_sizes(tmp_path: Path) -> None:
    starts = Starts()
    command.main(["--out", str(tmp_path)], starts)
    asked = [job.case for job in starts.jobs]
    assert len(asked) == 5 * len(cases.COMMON_SIZES) + 1
    published = Case("transformer_layer_gelu", "b32_s1024")
    assert [case for case in asked if case.size_name not in cases.COMMON_SIZES] == [published]


def test_fp8_is_held_against_the_best_without_a_recipe() -> None:
    case = Case("transformer_layer_gelu", "b32_s1024")
    times = {"te_bf16": 10.0, "fp8core_bf16": 8.0, "torch_bf16": 12.0, "fp8core_delayed": 5.0}
    found = [turn_record("graph", case, **times)]
    (row,) = (row for row in rows(Results(found)) if row.recipe == "delayed")
    assert row.graph_high is not None
    assert row.graph_high[0] == "fp8core bf16"
    assert row.graph_high[1].median == pytest.approx(0.625)
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


class Broken:
    """A layer that cannot be made."""

    def __call__(self, *_: Any) -> Any:
        raise RuntimeError("no such layer")


@pytest.mark.usefixtures("trial")
def test_a_contestant_that_fails_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(contestants.CONTESTANTS, "torch bf16", Broken())
    case = Case("transformer_layer", "tiny")
    job = cases.Job(case, ("bf16",), ("figures", "graph"), ("torch", "fp8core"), str(tmp_path), 5.0)
    with pytest.raises(RuntimeError, match="torch bf16 failed"):
        cell.run_cell(job, HOST)
    results = Results(records.read(tmp_path))
    (graphs,) = results.of(case, "graph")
    assert "fp8core bf16" in graphs["us"]
    (run,) = results.of(case, "run")
    assert run["failed"] == ["torch bf16"]
    assert "no such layer" in capsys.readouterr().out


def test_processes_load_the_cudnn_of_torch_s_wheels(tmp_path: Path) -> None:
    folder = tmp_path / "cudnn" / "lib"
    folder.mkdir(parents=True)
    wheels = [str(tmp_path), str(tmp_path / "elsewhere")]
    assert command.with_wheels_first({"A": "b"}, wheels) == {
        "A": "b",
        "LD_LIBRARY_PATH": str(folder),
    }
    known = {"LD_LIBRARY_PATH": "/usr/lib"}
    assert command.with_wheels_first(known, wheels)["LD_LIBRARY_PATH"] == f"{folder}:/usr/lib"
    assert command.with_wheels_first(known, []) == known


def test_libraries_find_the_cudnn_of_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    libraries = tmp_path / "cudnn" / "lib"
    libraries.mkdir(parents=True)
    parts = [libraries / name for name in ("libcudnn.so.9", "libcudnn_graph.so.9")]
    for part in parts:
        part.touch()
    loaded: list[str] = []
    load = transformer.ctypes.CDLL
    monkeypatch.setattr(
        transformer.ctypes,
        "CDLL",
        lambda name, **options: (
            loaded.append(name) if "cudnn" in str(name) else load(name, **options)
        ),
    )
    wheels = types.SimpleNamespace(__path__=[str(tmp_path)])
    monkeypatch.setattr(transformer, "nvidia", wheels)
    environment = {"CUDNN_HOME": "elsewhere"}
    transformer.use_cudnn_of_torch(environment)
    assert environment == {"CUDNN_HOME": str(tmp_path / "cudnn")}
    assert loaded == list(map(str, parts))
    monkeypatch.setattr(transformer, "nvidia", None)
    untouched = {"CUDNN_HOME": "elsewhere"}
    transformer.use_cudnn_of_torch(untouched)
    assert untouched == {"CUDNN_HOME": "elsewhere"}


@pytest.mark.usefixtures("trial")
def test_a_compiled_transformer_layer_is_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    in_one = functools.partial(torch.compile, backend="aot_eager", fullgraph=True)
    monkeypatch.setattr(torch, "compile", in_one)
    case = Case("transformer_layer", "tiny")
    given = data.make_data(case, torch.device("cpu"))
    exact = data.exact_results(case, given)
    eager, compiled = (
        measures.held_and_errors(make(case, given), given, exact, HOST).errors
        for make in (contestants.torch_eager, contestants.torch_compiled)
    )
    assert compiled.keys() == eager.keys()
    assert max(compiled.values()) < 0.02


@pytest.mark.parametrize("name", ["picture.svg", "picture.png"])
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


class FakeProcess:
    """A process that ends with ``code`` and says what it was told."""

    def __init__(self, code: int = 0) -> None:
        self.stdin = io.StringIO()
        self.returncode = code
        self.told: str | None = None

    def wait(self) -> int:
        self.told = self.stdin.getvalue()
        return self.returncode

    def communicate(self, text: str) -> None:
        self.told = text


class Starts:
    """Keeps the jobs that were started, and writes what their processes would."""

    def __init__(self, codes: Sequence[int] = ()) -> None:
        self.jobs: list[cases.Job] = []
        self.processes: list[FakeProcess] = []
        self._codes = list(codes)

    def __call__(self, job: cases.Job) -> Any:
        self.jobs.append(job)
        self.processes.append(FakeProcess(self._codes.pop(0) if self._codes else 0))
        for measure in job.measures:
            cell.Cell(job, HOST).write_done(measure)
        return self.processes[-1]


def test_what_was_measured_is_not_measured_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--module", "linear", "mlp_gelu", "--size", "tiny", "8B", "--out", str(tmp_path)]
    starts = Starts()
    assert command.main([*options, "--recipe", "delayed"], starts) == 0
    assert [job.case for job in starts.jobs] == [
        *(("linear", "tiny"), ("linear", "8B"), ("mlp_gelu", "tiny"), ("mlp_gelu", "8B")),
    ]
    assert starts.jobs[0].measures == ("figures", "graph", "eager", "host")
    assert starts.jobs[1].measures == ("figures", "graph", "eager")
    assert all(process.told == "go\n" for process in starts.processes)

    again = Starts()
    command.main([*options, "--recipe", "delayed"], again)
    assert not again.jobs
    assert "everything that was asked for" in capsys.readouterr().out

    more = Starts()
    command.main([*options, "--recipe", "delayed", "block", "--profile"], more)
    assert {job.recipes for job in more.jobs} == {("delayed", "block")}
    assert more.jobs[0].measures == ("figures", "graph", "eager", "host", "kernels")

    fewer = Starts()
    command.main([*options, "--recipe", "block", "--library", "te", "fp8core"], fewer)
    assert not fewer.jobs


def test_a_run_without_a_library_does_not_count_for_all(tmp_path: Path) -> None:
    options = ["--module", "linear", "--size", "8B", "--out", str(tmp_path)]
    command.main([*options, "--library", "te", "fp8core"], Starts())
    rest = Starts()
    command.main(options, rest)
    assert len(rest.jobs) == 1


def test_time_that_is_up_ends_between_processes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    starts = Starts()
    options = ["--module", "linear", "--out", str(tmp_path), "--seconds", "-1"]
    assert command.main(options, starts) == 0
    assert len(starts.processes) == 1
    assert starts.processes[0].told == ""
    assert "4 of 4 processes had no time" in capsys.readouterr().out


def test_a_process_that_fails_does_not_stop_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    starts = Starts([1, 0])
    options = ["--module", "linear", "--size", "tiny", "8B", "--out", str(tmp_path)]
    assert command.main(options, starts) == 1
    assert [process.told for process in starts.processes] == ["go\n", "go\n"]
    assert "linear tiny: failed with 1" in capsys.readouterr().out


def test_a_process_whose_input_ends_measures_nothing(tmp_path: Path) -> None:
    job = cases.Job(Case("linear", "tiny"), ("bf16",), ("graph",), ("fp8core",), str(tmp_path))
    process = command._start(job)
    process.communicate("")
    assert process.returncode == 0
    assert not list(tmp_path.iterdir())


def test_a_job_survives_the_command_line() -> None:
    job = cases.Job(CASE, ("bf16", "block"), ("graph",), ("te", "torch"), "out", deadline=12.5)
    assert cases.Job.from_json(job.to_json()) == job


def test_contestants_are_those_of_recipes_and_libraries() -> None:
    chosen = cell.contestants_of(("delayed", "bf16"), ("te", "fp8core", "torchao"))
    assert chosen == (
        *("torchao tensorwise", "te bf16", "te delayed"),
        *("fp8core bf16", "fp8core delayed"),
    )
    everyone = cell.contestants_of(cases.RECIPES, command.LIBRARIES)
    assert everyone == tuple(contestants.CONTESTANTS)


def test_the_exact_results_are_those_of_float64() -> None:
    size = cases.Size(24, 16, 32, 4, 2, 12)
    for layer in cases.LAYERS:
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(cases.SIZES, "tiny", size)
            case = Case(layer, "tiny")
            given = data.make_data(case, torch.device("cpu"))
            exact = data.exact_results(case, given)
            model, parameters, _ = contestants.torch_model(case, given)
            model.double()
            x = given.x.double().requires_grad_()
            y = model(x)
            y.backward(given.grad.double())
        # double() replaced the data of the parameters, not the parameters
        got = {"y": y.detach(), "x": x.grad} | {key: p.grad for key, p in parameters.items()}
        assert got.keys() == exact.keys()
        for key, value in got.items():
            assert value is not None
            torch.testing.assert_close(exact[key].double(), value, rtol=2e-4, atol=2e-5)


@pytest.fixture
def trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes and numbers of turns with which a run on the CPU takes a second."""
    monkeypatch.setitem(cases.SIZES, "tiny", cases.Size(64, 64, 128, 4, 2, 32))
    monkeypatch.setattr(gc, "unfreeze", lambda: None)  # other tests are not visited each time
    monkeypatch.setattr(turns, "FEWEST_TURNS", 3)
    monkeypatch.setattr(turns, "MOST_TURNS", 3)
    monkeypatch.setattr(turns, "SLICE_MS", 0.01)
    monkeypatch.setattr(turns, "HOST_SLICE_MS", 0.01)
    monkeypatch.setattr(turns, "MOST_HOST_CALLS", 2)
    monkeypatch.setattr(limits, "COPY_BYTES", 1 << 12)


@pytest.mark.usefixtures("trial")
@pytest.mark.parametrize("layer", cases.LAYERS)
def test_a_trial_run_on_the_cpu_writes_all_measures(
    layer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = Case(layer, "tiny")
    recipes = ("bf16", "delayed", "block")
    libraries = ("torch", "fp8core", "te")
    job = cases.Job(
        case, recipes, ("figures", "graph", "eager", "host"), libraries, str(tmp_path), 5.0
    )
    cell.run_cell(job, HOST)
    found = records.read(tmp_path)
    results = Results(found)
    names = ["torch bf16", *(f"fp8core {name}" for name in recipes)]
    for measure in ("eager", "host"):
        (record,) = results.of(case, measure)
        assert list(record["us"]) == names
        assert {len(times) for times in record["us"].values()} == {3}
    (graphs,) = results.of(case, "graph")
    products = [limits.products_name(name) for name in recipes]
    assert list(graphs["us"]) == [*names, limits.COPY, *products]
    for name in names:
        figures = results.figures(case, name)
        assert figures is not None
        assert set(figures["errors"]) == {"y", "x", *case.parameter_shapes()}
        low, high = (1e-4, 0.02) if name.endswith("bf16") else (0.01, 0.15)
        assert all(0 < error < high for error in figures["errors"].values())
        assert figures["errors"]["y"] > low
    assert {record["done"] for record in results.of(case, "done")} == set(job.measures)
    text = capsys.readouterr().out
    assert "te delayed: No module named" in text or "te delayed" not in text
    assert report.ratio_table(results).count("tiny") == len(recipes)
    lacking = [
        measure
        for measure in job.measures
        if not command.is_measured(found, case, "block", measure, libraries)
    ]
    assert not lacking


@pytest.mark.usefixtures("trial")
def test_the_products_are_those_of_the_layer() -> None:
    case = Case("mlp_swiglu", "tiny")
    given = data.make_data(case, torch.device("cpu"))
    shapes = [
        *((64, 256), (64, 64), (256, 64)),  # fc1: tokens x 2 ffn, tokens x hidden, weight
        *((64, 64), (64, 128), (64, 128)),  # fc2
    ]
    for name in cases.RECIPES:
        results = limits.products_step(case, name, given, HOST)()
        assert isinstance(results, list)
        assert [tuple(result.shape) for result in results] == shapes
        wanted = given.parameters["fc1_weight"].float()
        first = results[0].float()
        exact = given.x.float() @ wanted.t()
        assert ((first - exact).norm() / exact.norm()).item() < 0.06


def test_the_command_imports_no_torch_to_measure(tmp_path: Path) -> None:
    """Its processes do, all at once but for the first."""
    code = (
        "import sys; from unittest.mock import MagicMock;"
        "from tests.benchmarks.layers_gpu.__main__ import main;"
        f"main(['--seconds', '-1', '--out', {str(tmp_path)!r}], lambda job: MagicMock());"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_processes_are_python_modules() -> None:
    options = ["--bytes", "--module", "linear", "--size", "8B", "--recipe", "delayed"]
    process = subprocess.run(
        [sys.executable, "-m", "tests.benchmarks.layers_gpu", *options],
        capture_output=True,
        text=True,
        check=True,
    )
    lines = process.stdout.splitlines()
    assert [line.split(" | ")[3] for line in lines[2:]] == [
        *("input cast", "weight cast", "grad_output cast", "all"),
    ]
