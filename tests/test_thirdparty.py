"""The example plug-in of docs/writing-a-backend.md: small, installable, conforming, trainable."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from fp8core.formats import minifloat
from tests import forked
from tests.ranks import IMPORTS
from tests.test_packaging import copy_tree, run, scratch_environment

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "tests" / "thirdparty"
PAGE = (ROOT / "docs" / "writing-a-backend.md").read_text(encoding="utf-8")
SOURCES = [path.read_text(encoding="utf-8") for path in sorted(EXAMPLE.iterdir()) if path.is_file()]
QUOTES = re.findall(r"^```(?:toml|python no-run)\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
# Not of the example, which has nothing to declare, and no variants.
INVENTED = [quote for quote in QUOTES if "def numerics(" in quote or "CastAndSum(" in quote]

TRAIN = """
import json, torch, fp8core as te
torch.manual_seed(0)
layer = te.Linear(24, 40)
recipe = te.get_default_recipe()
optimizer = torch.optim.SGD(layer.parameters(), lr=10.0)
x = torch.randn(64, 24)
target = x @ torch.randn(24, 40) / 5
losses = []
for _ in range(30):
    with te.autocast(recipe=recipe):
        loss = (layer(x) - target).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(json.dumps([str(recipe), repr(layer), losses]))
"""


def test_example_has_under_100_lines() -> None:
    assert sum(len(source.splitlines()) for source in SOURCES) < 100


def test_page_quotes_the_example_as_it_is() -> None:
    assert len(QUOTES) - len(INVENTED) >= 7
    assert len(INVENTED) == 3
    for quote in QUOTES:
        if quote not in INVENTED:
            assert any(quote in source for source in SOURCES), quote


def test_format_is_what_ml_dtypes_calls_float8_e3m4() -> None:
    codes = np.arange(256, dtype=np.uint8)
    theirs = codes.view(ml_dtypes.float8_e3m4).astype(np.float64)
    ours = np.array(minifloat("e3m4", 3, 4, specials="ieee").values)
    assert 'minifloat("e3m4", 3, 4, specials="ieee")' in "".join(SOURCES)
    assert np.array_equal(ours, theirs, equal_nan=True)


def run_beside(*arguments: str, folder: Path) -> str:
    """What Python prints in a fork that finds the example on its path and prefers its backend."""
    variables = {"PYTHONPATH": str(EXAMPLE), "FP8CORE_PLUGINS": "fp8core_e3m4"}
    command = [sys.executable, *arguments]
    environment = {**os.environ, **variables, "FP8CORE_BACKEND": "e3m4"}
    done = forked.run(command, cwd=folder, env=environment, imports=IMPORTS)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_example_holds_laws(tmp_path: Path) -> None:
    command = ("-m", "fp8core", "conformance", "e3m4", "--strict", "-k", "float16")
    assert re.search(r"^\d\d+ passed", run_beside(*command, folder=tmp_path), re.MULTILINE)


def test_example_trains_a_layer(tmp_path: Path) -> None:
    recipe, layer, losses = json.loads(run_beside("-c", TRAIN, folder=tmp_path))
    assert "e3m4" in recipe
    assert "on e3m4" in layer
    assert losses[-1] < losses[0] / 100


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with fp8core and the example installed, as wheels."""
    folder = tmp_path_factory.mktemp("thirdparty")
    python = scratch_environment(folder)
    example = Path(shutil.copytree(EXAMPLE, folder / "example"))
    pip = (python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index")
    for source in (copy_tree(folder / "tree"), example):
        run(*pip, "--no-build-isolation", source, cwd=folder)
    return python


@pytest.mark.slow
def test_installed_example_holds_every_law(installed: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    command = ("conformance", "e3m4", "--strict", "--json", report)
    shown = run(installed, "-m", "fp8core", *command, cwd=tmp_path, OMP_NUM_THREADS="1")
    assert "warning" not in shown.lower()
    found = json.loads(report.read_text(encoding="utf-8"))
    assert found["counts"]["passed"] > 100
    assert found["not_passed"] == []
    supported = {one["op"] for one in found["support"] if one["supported"]}
    assert supported == {"quantize", "dequantize", "gemm"}


@pytest.mark.slow
def test_installed_example_trains_a_layer(installed: Path, tmp_path: Path) -> None:
    environment = {"FP8CORE_BACKEND": "e3m4", "OMP_NUM_THREADS": "1"}
    shown = run(installed, "-W", "error", "-c", TRAIN, cwd=tmp_path, **environment)
    recipe, layer, losses = json.loads(shown)
    assert "e3m4" in recipe
    assert "on e3m4" in layer
    assert losses[-1] < losses[0] / 100


@pytest.mark.slow
def test_installed_example_is_in_the_doctors_report(installed: Path, tmp_path: Path) -> None:
    found = json.loads(run(installed, "-m", "fp8core", "doctor", "--json", cwd=tmp_path))
    assert "e3m4" in found["formats"]
    assert "e3m4" in found["recipes"]
    assert {"name": "e3m4", "source": "entry point fp8core_e3m4", "reason": None} in found[
        "plugins"
    ]


@pytest.mark.slow
def test_pytest_in_the_installed_environment_offers_the_kit(
    installed: Path, tmp_path: Path
) -> None:
    arguments = ("-q", "--fp8core-backend=e3m4", "-k", "law7_something")
    shown = run(installed, "-m", "pytest", *arguments, cwd=tmp_path)
    assert "1 passed" in shown
