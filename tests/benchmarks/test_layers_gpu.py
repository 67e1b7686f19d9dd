"""What the benchmark of layers measures: its contestants, and a trial run on the CPU."""

from __future__ import annotations

import functools
import gc
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.benchmarks.layers_gpu import __main__ as command
from tests.benchmarks.layers_gpu import cases, cell, contestants, data, limits, report
from tests.benchmarks.layers_gpu.cases import Case
from tests.benchmarks.layers_gpu.results import Results
from tests.benchmarks.layers_records import job_of, turn_record
from tests.benchmarks.measuring import records, turns
from tests.benchmarks.measuring.device import HOST


def test_cases_come_in_the_order_of_layers_and_sizes() -> None:
    every = list(itertools.product(cases.LAYERS, cases.SIZES))
    results = Results([turn_record("graph", Case(*names), a=1.0) for names in reversed(every)])
    assert results.cases == every


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
    job = job_of(case, ("bf16",), ("figures", "graph"), ("torch", "fp8core"), tmp_path, seconds=5.0)
    with pytest.raises(RuntimeError, match="torch bf16 failed"):
        cell.run_cell(job, HOST)
    results = Results(records.read(tmp_path))
    (graphs,) = results.of(case, "graph")
    assert "fp8core bf16" in graphs["us"]
    (run,) = results.of(case, "run")
    assert run["failed"] == ["torch bf16"]
    assert "no such layer" in capsys.readouterr().out


@pytest.mark.usefixtures("trial")
def test_a_compiled_transformer_layer_is_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    in_one = functools.partial(torch.compile, backend="aot_eager", fullgraph=True)
    monkeypatch.setattr(torch, "compile", in_one)
    case = Case("transformer_layer", "tiny")
    given = data.make_data(case, torch.device("cpu"))
    exact = data.exact_results(case, given)
    eager, compiled = (
        contestants.held_and_errors(make(case, given), given, exact, HOST).errors
        for make in (contestants.torch_eager, contestants.torch_compiled)
    )
    assert compiled.keys() == eager.keys()
    assert max(compiled.values()) < 0.02


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
@pytest.mark.parametrize(
    "layer",
    [
        pytest.param(layer, marks=() if layer == "transformer_layer" else pytest.mark.slow)
        for layer in cases.LAYERS
    ],
)
def test_a_trial_run_on_the_cpu_writes_all_measures(
    layer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = Case(layer, "tiny")
    recipes = ("bf16", "delayed", "block")
    libraries = ("torch", "fp8core", "te")
    taken = (cases.FIGURES, *cases.TURNS)
    job = job_of(case, recipes, taken, libraries, tmp_path, seconds=5.0)
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
