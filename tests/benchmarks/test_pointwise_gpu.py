"""The benchmark's arithmetic, its formulas against autograd, and a trial run on the CPU."""

from __future__ import annotations

import gc
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8core.backend_api import FusedDesc, NormBackwardDesc
from tests.benchmarks.measuring import records, turns
from tests.benchmarks.measuring.device import HOST
from tests.benchmarks.pointwise_gpu import __main__ as command
from tests.benchmarks.pointwise_gpu import contestants, report
from tests.benchmarks.pointwise_gpu.operations import (
    FORMULAS,
    OPERATIONS,
    Shape,
    exact_results,
)

CPU = torch.device("cpu")
SMALL = Shape(48, 32)
RECIPES = ("delayed", "current", "block", "rowwise")


@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm", "swiglu", "gelu"])
def test_gradients_are_those_of_autograd(kind: str) -> None:
    operation = OPERATIONS[f"{kind}_backward"]
    grad, x, *rest = (tensor.double() for tensor in operation.inputs(SMALL, CPU))
    x.requires_grad_()
    if kind in ("rmsnorm", "layernorm"):
        bias = (torch.zeros_like(rest[0]),) if kind == "layernorm" else ()
        y = FORMULAS["norm"](kind, x, rest[0], *bias)
    else:
        y = FORMULAS["activation"](kind, x)
    (wanted,) = torch.autograd.grad(y, x, grad)
    with torch.no_grad():
        found = FORMULAS[operation.step](kind, grad, x, *rest)
    assert ((found - wanted).norm() / wanted.norm()).item() < 1e-6  # statistics are of float32


@pytest.mark.parametrize("name", ["rmsnorm", "layernorm", "gelu"])
def test_formulas_are_torch_s(name: str) -> None:
    operation = OPERATIONS[name]
    inputs = operation.inputs(SMALL, CPU)
    x, *own = (tensor.float() for tensor in inputs)
    functional = torch.nn.functional
    wanted = {
        "rmsnorm": lambda: functional.rms_norm(x, (32,), own[0], 1e-5),
        "layernorm": lambda: functional.layer_norm(x, (32,), own[0], own[1], 1e-5),
        "gelu": lambda: functional.gelu(x, approximate="tanh"),
    }[name]()
    torch.testing.assert_close(exact_results(operation, inputs), wanted, rtol=1e-5, atol=1e-6)


def test_a_residual_is_added_in_bfloat16_first() -> None:
    operation = OPERATIONS["rmsnorm_residual"]
    x, residual, weight = operation.inputs(SMALL, CPU)
    exact = exact_results(operation, (x, residual, weight))
    wanted = exact_results(OPERATIONS["rmsnorm"], (x + residual, weight))
    assert torch.equal(exact, wanted)


def test_descriptors_are_those_that_layers_ask_for() -> None:
    for (name, operation), recipe in itertools.product(OPERATIONS.items(), RECIPES):
        assert (operation.desc("bf16") is None) == operation.has_recipe, name
        desc = operation.desc(recipe)
        if not operation.quantizes and operation.step != "dequantize":
            assert desc is None, name
            continue
        assert desc is not None, name
        if isinstance(desc, FusedDesc):
            plan = operation.plan(recipe)
            assert (desc.quantize.rowwise, desc.quantize.columnwise) == plan
            of_norm = isinstance(desc.producer, NormBackwardDesc)
            out = desc.producer.norm.dtype if of_norm else desc.producer.out_dtype
            assert out == desc.quantize.dtype
            assert desc.producer.op == operation.step


def test_a_cast_in_one_orientation_writes_one() -> None:
    row, column = (OPERATIONS[f"cast_{which}"] for which in ("rowwise", "columnwise"))
    shape = Shape(8192, 4096)
    assert row.plan("block").columnwise is None
    assert column.plan("block").rowwise is None
    assert row.ideal_bytes(shape, "delayed") == 3 * 8192 * 4096 + 4
    assert row.ideal_bytes(shape, "rowwise") == 3 * 8192 * 4096 + 4 * 8192
    assert column.ideal_bytes(shape, "rowwise") == 5 * 8192 * 4096 + 4 * 4096


def test_bytes_follow_the_result() -> None:
    shape = Shape(8192, 4096)
    elements = 8192 * 4096
    of_casts = ("cast", "rmsnorm", "swiglu", "swiglu_backward", "gelu", "gelu_backward")
    in_one_pass, in_two = (4, 4, 6, 10, 4, 6), (6, 6, 10, 16, 6, 10)
    passes = {"delayed": in_one_pass, "block": in_one_pass, "current": in_two, "rowwise": in_two}
    each = {
        (name, recipe): size
        for recipe, sizes in passes.items()
        for name, size in zip(of_casts, sizes, strict=True)
    }
    each |= {
        ("rmsnorm", "bf16"): 4,
        ("rmsnorm_residual", "bf16"): 8,
        ("layernorm_backward", "bf16"): 6,
        ("layernorm_backward", "delayed"): 6,
        ("swiglu", "bf16"): 6,
        ("swiglu_backward", "bf16"): 10,
        ("dequantize", "delayed"): 3,
    }
    for (name, recipe), wanted in each.items():
        found = OPERATIONS[name].ideal_bytes(shape, recipe) / elements
        assert 0 <= found - wanted < 0.14, (name, recipe)


def record(operation: str, shape: str, **us: list[float]) -> records.Record:
    times = {name.replace("_", " "): own for name, own in us.items()}
    return {
        **{"measure": "pointwise", "operation": operation, "shape": shape, "us": times},
        **{"is_resident": shape.startswith("8x"), "bytes": dict.fromkeys(times, 4000)},
        "refused": {},
    }


def test_shares_are_of_the_copy_of_the_same_turns() -> None:
    slower = [10.0 * 1.1**turn for turn in range(9)]
    one = record("rmsnorm", "64x32", copy=slower, fp8core_bf16=[2 * time for time in slower])
    one["bytes"] = {"copy": 4000, "fp8core bf16": 6000}
    (row,) = report.rows([one])
    assert row.share["fp8core bf16"].median == pytest.approx(0.75)
    assert row.share["fp8core bf16"].high == pytest.approx(0.75)
    assert row.gb_per_s["fp8core bf16"] == pytest.approx(6000 / (2 * slower[4]) / 1e3)


def test_the_last_run_counts_and_rows_are_in_order() -> None:
    found = [
        record("swiglu", "64x32", copy=[1.0] * 9),
        record("rmsnorm", "64x64", copy=[1.0] * 9),
        record("rmsnorm", "64x32", copy=[1.0] * 9),
        record("rmsnorm", "64x32", copy=[3.0] * 9),
    ]
    rows = list(report.rows(found))
    assert [(row.operation, row.shape) for row in rows] == [
        *(("rmsnorm", "64x32"), ("rmsnorm", "64x64"), ("swiglu", "64x32")),
    ]
    assert rows[0].us == {"copy": 3.0}


def test_tables_name_the_best_peer_and_what_is_refused() -> None:
    one = record(
        "rmsnorm",
        "8x32",
        **{"copy": [1.0] * 9, "fp8core_bf16": [3.0] * 9, "liger": [2.0] * 9},
        **{"torch.compile": [4.0] * 9, "fp8core_block": [5.0] * 9},
    )
    one["refused"] = {"quack": "no | kernel", "fp8core delayed": "not written"}
    text = report.markdown([one])
    assert "| rmsnorm | 8x32 in L2 | 3.0 | 1 | 0.33 (0.33-0.33) | 4.0 | 2.0 |  |" in text
    assert "| **1.500 (1.500-1.500) liger** |" in text
    assert "| rmsnorm | 8x32 in L2 |  |  | 5.0 0.20 (0.20-0.20) |  |" in text
    assert "| rmsnorm | quack | no / kernel | 8x32 |" in text
    assert len(report.markdown([]).split("\n\n")) == 4


def test_bars_are_of_shapes_beyond_the_cache() -> None:
    ours = {"copy": [1.0] * 9, "fp8core_bf16": [1.25] * 9, "fp8core_block": [1.0] * 9}
    found = [
        record("rmsnorm", "64x32", **ours, liger=[1.0] * 9, quack=[2.0] * 9),
        record("gelu", "64x32", **ours, liger=[1.25] * 9),
        record("gelu", "8x32", **ours, liger=[0.1] * 9),
    ]
    lines = report.bars_table(list(report.rows(found))).splitlines()[2:]
    assert lines[0] == (
        "| bf16: time / best peer | 1.00 | 1 of 2 | rmsnorm 64x32 | 1.250 | 1.118 |"
    )
    assert lines[2].startswith("| goal: bf16: rate / copy | 0.90 | 0 of 2 |")
    assert lines[3].split(" | ")[1:3] == ["0.80", "2 of 2"]
    assert "not run" in report.bars_table([]).splitlines()[2]


@pytest.fixture
def trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gc, "unfreeze", lambda: None)  # other tests are not visited each time
    monkeypatch.setattr(turns, "FEWEST_TURNS", 3)
    monkeypatch.setattr(turns, "MOST_TURNS", 3)
    monkeypatch.setattr(turns, "SLICE_MS", 0.01)


@pytest.mark.usefixtures("trial")
def test_a_trial_run_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipes = ("delayed", "block")
    options = ["--shape", "32x64", "--library", "fp8core", "liger", "--recipe", "bf16", *recipes]
    options += ["--out", str(tmp_path)]
    command.main(options, HOST)
    text = capsys.readouterr().out
    assert "IS WRONG" not in text
    assert "does not run: ModuleNotFoundError" in text  # Liger
    found = {row.operation: row for row in report.rows(records.read(tmp_path))}
    assert list(found) == list(OPERATIONS)
    for name, row in found.items():
        operation = OPERATIONS[name]
        assert "liger" in row.refused or operation.has_recipe
        for recipe in recipes:
            known = row.us.keys() | row.refused.keys()
            assert (f"fp8core {recipe}" in known) == (operation.desc(recipe) is not None)
        if not operation.has_recipe and operation.step != "add_norm":
            assert row.us.keys() >= {"fp8core bf16", "copy"}
        if operation.step == "cast":
            assert row.us.keys() == {"copy", *(f"fp8core {one}" for one in recipes)}

    command.main(options, HOST)
    assert "turns" not in capsys.readouterr().out


@pytest.mark.usefixtures("trial")
def test_sets_of_inputs_exceed_the_cache_unless_they_fit_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "RESIDENT_BYTES", 1 << 14)
    monkeypatch.setattr(command, "ROTATED_BYTES", 1 << 17)
    cast = OPERATIONS["cast_gradient"]
    assert len(command._sets(cast, Shape(128, 64), HOST)) == 1
    sets = command._sets(cast, Shape(128, 128), HOST)
    assert len(sets) == 4  # 32 KiB each
    assert len({own[0].data_ptr() for own in sets}) == 4
    options = ["--shape", "128x128", "--operation", "cast_gradient", "--library", "fp8core"]
    command.main([*options, "--recipe", "nvfp4", "--out", str(tmp_path)], HOST)
    (row,) = report.rows(records.read(tmp_path))
    assert not row.is_resident
    assert row.us.keys() == {"copy", "fp8core nvfp4"}


@pytest.mark.usefixtures("trial")
def test_time_that_is_up_begins_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command.main(["--out", str(tmp_path), "--seconds", "-1"], HOST)
    assert "the time is up" in capsys.readouterr().out
    assert records.read(tmp_path) == []


@pytest.mark.usefixtures("trial")
def test_a_wrong_result_is_called_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def enter(name: str, operation: Any, sets: Any, device: Any) -> contestants.Entrant:
        if name == "torch.compile":
            raise RuntimeError("a peer's own\nerror")
        return contestants.Entrant([lambda own=own: own[0] * 2 for own in sets], lambda y: y)

    monkeypatch.setattr(command, "enter", enter)
    found = command.measure(
        OPERATIONS["gelu"], Shape(32, 32), ("fp8core bf16", "torch.compile"), 1.0, HOST
    )
    assert "fp8core bf16 IS WRONG: its error is" in capsys.readouterr().out
    assert found["refused"] == {"torch.compile": "RuntimeError: a peer's own"}


def test_a_contestant_that_breaks_the_device_ends_the_process() -> None:
    def synchronize() -> None:
        raise RuntimeError("CUDA error: an illegal memory access")

    broken = replace(HOST, clock=HOST.clock._replace(synchronize=synchronize))
    with pytest.raises(SystemExit, match="gelu 8x8: liger broke the device: CUDA error"):
        command._check_device(broken, "liger", OPERATIONS["gelu"], Shape(8, 8))
    command._check_device(HOST, "liger", OPERATIONS["gelu"], Shape(8, 8))


def test_the_peers_know_their_kernels() -> None:
    """Of the peers that are not installed, the request alone says that they are not."""
    for name in ("liger", "quack"):
        with pytest.raises(ImportError, match="No module named"):
            contestants.enter(name, OPERATIONS["rmsnorm"], [], HOST)


def test_bytes_are_printed_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    command.main(["--bytes", "--operation", "cast", "--shape", "8192x4096"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + len(RECIPES)
    assert lines[2] == "| cast | 8192x4096 | delayed | 134.2 | 4.00 |"
