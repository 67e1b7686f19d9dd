"""Accelerate, Lightning, PEFT and DeepSpeed train on fp8core, unmodified.

Each is skipped where it is not installed; pyproject.toml's extra `compat` has the versions run.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

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


@needs("lightning")
@pytest.mark.parametrize("kind", ["fabric", "trainer"])
def test_lightning_trains_with_delayed_scales(lightning: dict[str, Any], kind: str) -> None:
    assert trains(lightning[kind])
    assert len(lightning[f"{kind} amaxes"]) == 2
    assert min(lightning[f"{kind} amaxes"]) > 0


@needs("lightning")
def test_lightning_constructs_layers_by_its_context(lightning: dict[str, Any]) -> None:
    assert lightning["built"] == "transformer_engine.pytorch.module.linear"


@needs("peft")
def test_peft_adapts_layers() -> None:
    result = run("-m", "tests.integrations.frameworks", "peft")
    assert result["layers"] == [True, True]
    assert result["frozen"]
    assert result["ran"] == "MXFP8BlockScaling on reference"
    assert trains(result["losses"])


@needs("deepspeed")
def test_deepspeed_has_equal_losses_at_each_stage() -> None:
    result = run("-m", "tests.integrations.frameworks", "deepspeed")
    first = result.pop("0")
    assert trains(first)
    for losses in result.values():
        assert losses == first
