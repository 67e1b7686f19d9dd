"""Accelerate, Lightning, PEFT and DeepSpeed train on fp8core, unmodified.

Each is skipped where it is not installed; pyproject.toml's extra `compat` has the versions run.
One of them runs always, the others with ``python -m tests --all``.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fp8core.__main__ import main
from fp8core.cli import commands
from fp8core.integrations.transformer_engine import finder

ROOT = Path(__file__).resolve().parents[2]
CONFIG = """
distributed_type: "NO"
num_processes: 1
mixed_precision: fp8
use_cpu: true
fp8_config:
  backend: TE
  use_mxfp8_block_scaling: true
"""


def needs(name: str) -> Any:
    is_missing = importlib.util.find_spec(name) is None
    return pytest.mark.skipif(is_missing, reason=f"{name} is not installed")


def run(*words: str) -> dict[str, Any]:
    """The JSON that a program prints last, with fp8core as transformer_engine."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    given = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    variables = commands.environment(finder.VERSION, {**given, "ACCELERATE_USE_CPU": "true"})
    done = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env=variables,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def trains(losses: list[float]) -> bool:
    return all(later < earlier for earlier, later in itertools.pairwise(losses))


@pytest.mark.slow
@needs("accelerate")
def test_accelerate_by_keywords() -> None:
    result = run("-m", "tests.integrations.frameworks", "accelerate")
    assert result["fp8"]
    assert result["converted"]
    assert result["ran"] == ["DelayedScaling on reference"] * 2
    assert trains(result["losses"])


@needs("accelerate")
def test_accelerate_by_a_configuration_file(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG)
    launch = ("-m", "accelerate.commands.launch", "--config_file", str(config))
    result = run(*launch, "-m", "tests.integrations.frameworks", "accelerate", "configuration")
    assert result["fp8"]
    assert result["converted"]
    assert result["ran"] == ["MXFP8BlockScaling on reference"] * 2
    assert trains(result["losses"])


@pytest.fixture(scope="module")
def lightning() -> dict[str, Any]:
    return run("-m", "tests.integrations.frameworks", "lightning")


@pytest.mark.slow
@needs("lightning")
@pytest.mark.parametrize("kind", ["fabric", "trainer"])
def test_lightning_trains_with_delayed_scales(lightning: dict[str, Any], kind: str) -> None:
    assert trains(lightning[kind])
    assert len(lightning[f"{kind} amaxes"]) == 2
    assert min(lightning[f"{kind} amaxes"]) > 0


@pytest.mark.slow
@needs("lightning")
def test_lightning_constructs_layers_by_its_context(lightning: dict[str, Any]) -> None:
    assert lightning["built"] == "transformer_engine.pytorch.module.linear"


@pytest.mark.slow
@needs("lightning")
def test_lightning_s_setup_of_model_and_optimizer_says_that_nothing_trains(
    lightning: dict[str, Any],
) -> None:
    assert "no optimizer of this process holds the parameters" in lightning["said"]
    assert lightning["said"].count("fp8core.lightning.Fp8CorePrecision") == 1


@pytest.mark.slow
@needs("peft")
def test_peft_adapts_layers() -> None:
    result = run("-m", "tests.integrations.frameworks", "peft")
    assert result["layers"] == [True, True]
    assert result["frozen"]
    assert result["ran"] == "MXFP8BlockScaling on reference"
    assert trains(result["losses"])


@pytest.mark.slow
@needs("deepspeed")
def test_deepspeed_has_equal_losses_at_each_stage() -> None:
    result = run("-m", "tests.integrations.frameworks", "deepspeed")
    first = result.pop("0")
    assert trains(first)
    for losses in result.values():
        assert losses == first


# The package is found without torch, in the command and in a process that it starts.
SCRIPT = """
import importlib.metadata, importlib.util, subprocess, sys
assert importlib.util.find_spec("transformer_engine") is not None, "no alias"
assert "torch" not in sys.modules and "fp8core" not in sys.modules
print(importlib.metadata.version("transformer-engine"), *sys.argv[1:])
if len(sys.argv) < 3:
    sys.stdout.flush()
    sys.exit(subprocess.run([sys.executable, __file__, sys.argv[1], "child"]).returncode + 3)
import transformer_engine.pytorch as te
print(te.Linear.__module__, open(sys.argv[1]).read())
"""
RUN = [sys.executable, "-m", "fp8core", "run", "--as-transformer-engine"]


def test_children_inherit_and_a_hidden_sitecustomize_runs(tmp_path: Path) -> None:
    script, marker, hidden = tmp_path / "script.py", tmp_path / "marker", tmp_path / "site"
    script.write_text(SCRIPT)
    hidden.mkdir()
    (hidden / "sitecustomize.py").write_text(f"open({str(marker)!r}, 'a').write('ran ')")
    path = f"{hidden}{os.pathsep}{Path(__file__).parents[2]}"
    words = ["--version", "2.13.0", "python", str(script), str(marker)]
    done = subprocess.run(
        [*RUN, *words],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 3, done.stderr
    first, second, third = done.stdout.splitlines()
    assert first == f"2.13.0 {marker}"
    assert second == f"2.13.0 {marker} child"
    assert third.startswith("transformer_engine.pytorch.module.linear ran ran")


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
def test_the_command_gets_the_signals_and_its_status_is_the_process_s() -> None:
    words = ["python", "-c", "import time; print('began', flush=True); time.sleep(100)"]
    with subprocess.Popen([*RUN, *words], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "began\n"
        process.terminate()
        # The pipe closes when the last process that holds it has ended.
        assert process.stdout.read() == ""
        assert process.wait(timeout=60) == -signal.SIGTERM


def test_python_is_the_interpreter_that_runs_fp8core() -> None:
    words = ["python3", "-c", "import sys; print(sys.executable)"]
    environment = {**os.environ, "PATH": ""}
    done = subprocess.run(
        [*RUN, *words], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.strip() == sys.executable, done.stderr


def test_the_folder_is_first_on_the_path_and_there_once() -> None:
    once = commands.environment("2.14.0", {"PYTHONPATH": "elsewhere"})
    assert commands.environment("2.14.0", once) == once
    folder, other = once["PYTHONPATH"].split(os.pathsep)
    assert (Path(folder) / "sitecustomize.py").is_file()
    assert (other, once[finder.ENVIRONMENT]) == ("elsewhere", "2.14.0")


def test_another_package_of_the_name_stops_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["run", "--as-transformer-engine", "python", "-c", "print('ran')"]) == 1
    assert "another transformer_engine can be imported" in capsys.readouterr().err


def test_another_package_of_the_name_stops_a_child(tmp_path: Path) -> None:
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine" / "__init__.py").touch()
    variables = commands.environment("2.14.0", {**os.environ, "PYTHONPATH": str(tmp_path)})
    done = subprocess.run(
        [sys.executable, "-c", "print('ran')"],
        env=variables,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "fp8core run --as-transformer-engine: another transformer_engine" in done.stderr
    assert not done.stdout


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        ([], 2, "needs a command"),
        (["--version", "x", "python"], 2, "expected a version number"),
        (["--", __file__], 1, "Permission denied"),
        (["--", "no-such-command-anywhere"], 1, "cannot run 'no-such-command-anywhere'"),
    ],
)
def test_bad_usage(
    words: list[str],
    status: int,
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(finder, "_frameworks_that_looked", lambda: iter(()))
    assert main(["run", "--as-transformer-engine", *words]) == status
    assert message in capsys.readouterr().err
