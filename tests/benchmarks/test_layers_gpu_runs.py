"""Which processes the benchmark of layers starts, and what it does where they end."""

from __future__ import annotations

import io
import subprocess
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.layers_gpu import __main__ as command
from tests.benchmarks.layers_gpu import cases, cell, transformer
from tests.benchmarks.layers_gpu.cases import Case
from tests.benchmarks.layers_records import CASE, job_of
from tests.benchmarks.measuring.device import HOST


def test_each_layer_is_measured_at_its_sizes(tmp_path: Path) -> None:
    starts = Starts()
    command.main(["--out", str(tmp_path)], starts)
    asked = [job.case for job in starts.jobs]
    assert len(asked) == 5 * len(cases.COMMON_SIZES) + 1
    published = Case("transformer_layer_gelu", "b32_s1024")
    assert [case for case in asked if case.size_name not in cases.COMMON_SIZES] == [published]


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
            cell.Cell.of(job, HOST).write_done(measure)
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


@pytest.mark.slow
def test_a_process_whose_input_ends_measures_nothing(tmp_path: Path) -> None:
    job = job_of(Case("linear", "tiny"), ("bf16",), ("graph",), ("fp8core",), tmp_path)
    process = command._start(job)
    process.communicate("")
    assert process.returncode == 0
    assert not list(tmp_path.iterdir())


def test_a_job_survives_the_command_line() -> None:
    job = job_of(CASE, ("bf16", "block"), ("graph",), ("te", "torch"), "out", deadline=12.5)
    assert cases.Job.from_json(job.to_json()) == job


def test_the_command_imports_no_torch_to_measure(tmp_path: Path) -> None:
    """Its processes do, all at once but for the first."""
    code = (
        "import sys; from unittest.mock import MagicMock;"
        "from tests.benchmarks.layers_gpu.__main__ import main;"
        f"main(['--seconds', '-1', '--out', {str(tmp_path)!r}], lambda job: MagicMock());"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
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
