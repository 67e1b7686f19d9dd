"""Installed plug-ins, found through their distributions' entry points by a fresh interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

GOOD = """
from fp8core.backend_api import API_VERSION, BackendSpec, hookimpl
from fp8core.formats import minifloat
from fp8core.recipe import Float8RowwiseScaling

@hookimpl
def fp8core_register_formats(register):
    register(minifloat("toy8", 3, 4, specials="finite"))

@hookimpl
def fp8core_register_backends(register):
    factory = "fp8core_backends.reference.backend:ReferenceBackend"
    fields = {"environment": ("FP8CORE_TOY_TILES",), "api_version": API_VERSION}
    register(BackendSpec("toy", ("cpu",), factory, **fields))

@hookimpl
def fp8core_register_recipes(register):
    register("toy_rows", lambda: Float8RowwiseScaling(fp8_format="toy8"))

@hookimpl
def fp8core_select_backend(op, candidates):
    return "reference" if op == "scale_update" and "reference" in candidates else None

@hookimpl
def fp8core_doctor(report):
    report("toy", "tiles of 4")
"""
MISSPELT = """
from fp8core.backend_api import hookimpl

@hookimpl
def fp8core_register_backend(register): pass
"""
MODULES = {
    "toy_good": GOOD,
    "toy_broken": "import toy_nowhere",
    "toy_misspelt": MISSPELT,
    "toy_disabled": "raise SystemExit('imported although disabled')",
}
SCRIPT = """
import json, logging, sys
logging.basicConfig(format="%(message)s")

import fp8core
at_import = [name for name in sys.modules if name.startswith(("toy_", "fp8core_backends"))]

import torch
from fp8core import recipe
from fp8core.backend_api import ScaleUpdateDesc
from fp8core.dispatch import plugins, policy, select
from fp8core.doctor.findings import here
from fp8core.doctor.report import examine
report = examine(lambda name, device: here(name, torch.device("meta")))  # without a self-test
update = select.choose(ScaleUpdateDesc("max"), torch.device("cpu"), policy.current())
try:
    fp8core.use_backend("toy_broken")
except fp8core.PluginError as error:
    refusal = str(error)
print(json.dumps({
    "at_import": at_import,
    "rows": {row.name: [row.source, row.reason] for row in plugins.load().rows},
    "refusal": refusal,
    "selected": report.selected,
    "format": recipe.Float8CurrentScaling(fp8_format="toy8").fp8_format,
    "recipe": recipe.by_name("toy_rows").fp8_format,
    "update": [update.backend, update.because],
    "notes": report.notes,
}))
"""


@pytest.fixture(scope="module")
def answer(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a fresh interpreter says, with four plug-ins installed beside fp8core."""
    site = tmp_path_factory.mktemp("site")
    for name, source in MODULES.items():
        (site / f"{name}.py").write_text(source)
        info = site / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[fp8core.backends]\n{name} = {name}\n")
    environ = {name: text for name, text in os.environ.items() if not name.startswith("FP8CORE_")}
    environ |= {
        "PYTHONPATH": str(site),
        "FP8CORE_DISABLE_PLUGINS": "toy_disabled",
        "FP8CORE_TOY_TILES": "4",
        "FP8CORE_TOY_TILE": "4",
    }
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT],
        env=environ,
        cwd=Path(site),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return {**found, "stderr": done.stderr}


def test_importing_fp8core_imports_no_plugin(answer: dict[str, Any]) -> None:
    assert answer["at_import"] == []


def test_installed_plugin_is_used(answer: dict[str, Any]) -> None:
    assert answer["rows"]["toy_good"] == ["entry point toy_good", None]
    assert answer["selected"] == "toy"


def test_format_of_an_installed_plugin_is_usable_in_a_recipe(answer: dict[str, Any]) -> None:
    assert answer["format"] == "toy8"


def test_recipe_of_an_installed_plugin_has_a_name(answer: dict[str, Any]) -> None:
    assert answer["recipe"] == "toy8"


def test_policy_of_an_installed_plugin_chooses(answer: dict[str, Any]) -> None:
    assert answer["update"] == ["reference", "site policy"]


def test_lines_of_an_installed_plugin_are_in_the_doctors_report(answer: dict[str, Any]) -> None:
    assert "toy: tiles of 4" in answer["notes"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("toy_broken", "ModuleNotFoundError: No module named 'toy_nowhere'"),
        (
            "toy_misspelt",
            "unknown hook 'fp8core_register_backend'. Did you mean 'fp8core_register_backends'?",
        ),
        ("toy_disabled", "disabled by FP8CORE_DISABLE_PLUGINS"),
    ],
)
def test_installed_plugin_that_is_not_used_is_a_row(
    name: str, reason: str, answer: dict[str, Any]
) -> None:
    assert answer["rows"][name] == [f"entry point {name}", reason]


def test_asking_for_an_installed_broken_plugin_gives_the_reason(answer: dict[str, Any]) -> None:
    assert answer["refusal"].endswith(
        "'toy_broken': ModuleNotFoundError: No module named 'toy_nowhere'"
    )


def test_broken_plugins_and_the_variable_that_no_plugin_declares_warn(
    answer: dict[str, Any],
) -> None:
    *broken, variable = answer["stderr"].splitlines()
    names = ["toy_broken", "toy_misspelt"]
    assert [line.partition(" is not used: ")[0] for line in broken] == [
        f"plug-in {name}" for name in names
    ]
    assert [variable] == [
        "FP8CORE_TOY_TILE is set, but nothing reads it. Did you mean 'FP8CORE_TOY_TILES'?"
    ]
