"""Runs the tests of ``npu/`` in one process that has torch_npu, and reports them file by file.

The environment is installed from the package index once a session, or once for all in the folder
that SOFTCANN_FOLDER names.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import pytest

from tests.backends.ascend.softcann.environment import ROOT, environment

FOLDER = "tests/backends/ascend/npu"
FILES = sorted(path.name for path in (ROOT / FOLDER).glob("test_*.py"))


class Ran(NamedTuple):
    """The tests of the process: what it printed, and for each test its file and its failure."""

    printed: str
    tests: list[tuple[str, str | None]]


@pytest.fixture(scope="session")
def ran(
    softcann_folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
    pytestconfig: pytest.Config,
) -> Ran:
    report = tmp_path_factory.mktemp("npu") / "report.xml"
    command = [str(softcann_folder / "bin" / "python"), "-m", "pytest", "-q", "--tb=short"]
    chosen = ("-m", pytestconfig.option.markexpr)
    process = subprocess.run(
        [*command, "-p", "no:cacheprovider", f"--junit-xml={report}", *chosen, FOLDER],
        cwd=ROOT,
        env=environment(softcann_folder),
        capture_output=True,
        text=True,
        check=False,
    )
    printed = process.stdout[-20000:] + process.stderr[-4000:]
    assert report.exists(), printed
    tests = []
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}.py"
        fault = next((one for one in case if one.tag in ("failure", "error", "skipped")), None)
        text = None if fault is None else f"{case.get('name')}: {fault.get('message')}"
        tests.append((name, text))
    return Ran(printed, tests)


@pytest.mark.parametrize("name", FILES)
def test_file_passes_on_the_software_device(name: str, ran: Ran) -> None:
    faults = [fault for file, fault in ran.tests if file == name]
    assert faults, ran.printed  # it has tests, and they were collected
    assert [fault for fault in faults if fault is not None] == []


@pytest.mark.slow  # the tests of two files once more, in another mode
def test_layers_run_from_the_queue_that_devices_have(softcann_folder: Path) -> None:
    # The formulas are Python, so that a call which waits with Python's lock would wait forever.
    # A transformer's layer has the operators of the others.
    files = (f"{FOLDER}/test_grouped.py", f"{FOLDER}/test_layers.py")
    chosen = ("-k", "test_grouped or grouped_linear or transformer_layer")
    command = [str(softcann_folder / "bin" / "python"), "-m", "pytest", "-q", "--tb=short"]
    queued = subprocess.run(
        [*command, "-p", "no:cacheprovider", *chosen, *files],
        cwd=ROOT,
        env={**environment(softcann_folder), "TASK_QUEUE_ENABLE": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert queued.returncode == 0, queued.stdout[-8000:] + queued.stderr[-2000:]


@pytest.mark.slow  # npu/test_layers.py asks about few descriptors
def test_backend_keeps_the_laws_of_the_conformance_kit(softcann_folder: Path) -> None:
    python = str(softcann_folder / "bin" / "python")
    # Whether a result depends on its call alone, law 7, is seen in one dtype of the activations.
    chosen = ("-k", "not law7 or bfloat16")
    kit = subprocess.run(
        [python, "-m", "fp8core", "conformance", "ascend", *chosen],
        cwd=ROOT,
        env=environment(softcann_folder),
        capture_output=True,
        text=True,
        check=False,
    )
    assert kit.returncode == 0, kit.stdout[-8000:] + kit.stderr[-2000:]
    held = re.search(r"^(\d+) passed", kit.stdout, re.MULTILINE)
    assert held is not None
    assert int(held[1]) > 3700


@pytest.mark.slow  # four processes; the laws that it asks are among the kit's
def test_doctor_tests_the_backend_in_a_process_of_its_own(softcann_folder: Path) -> None:
    doctor = subprocess.run(
        [str(softcann_folder / "bin" / "python"), "-m", "fp8core", "doctor"],
        cwd=ROOT,
        env=environment(softcann_folder),
        capture_output=True,
        text=True,
        check=False,
    )
    assert doctor.returncode == 0, doctor.stdout + doctor.stderr
    assert "* ascend       ok" in doctor.stdout
    assert "FAIL" not in doctor.stdout


OLDER = """
import torch, torch_npu, fp8core as te
layer = te.Linear(64, 64, params_dtype=torch.bfloat16, device="npu")
x = torch.ones(64, 64, dtype=torch.bfloat16, device="npu")
print("without a recipe:", *layer(x).shape)
try:
    with te.autocast(recipe=te.recipe.by_name("hif8")):
        layer(x)
except te.errors.UnsupportedError as error:
    print(error)
with te.use_backend("reference"), te.autocast(recipe=te.recipe.Float8CurrentScaling()):
    print("emulated:", *layer(x).shape)
"""


def test_device_before_the_950_is_refused_by_the_name_that_it_gives(softcann_folder: Path) -> None:
    older = subprocess.run(
        [str(softcann_folder / "bin" / "python"), "-W", "ignore", "-c", OLDER],
        env={**environment(softcann_folder), "SOFTCANN_SOC": "Ascend910_9391"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert older.returncode == 0, older.stderr
    assert "without a recipe: 64 64" in older.stdout
    assert "ascend: Ascend910_9391 has no FP8 product, Ascend950PR and" in older.stdout
    assert "emulated: 64 64" in older.stdout


def test_missing_cann_is_an_error_that_says_what_to_install(softcann_folder: Path) -> None:
    variables = {**environment(softcann_folder), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    del variables["LD_LIBRARY_PATH"]
    script = "from fp8core_backends.ascend.operators import library; library.load()"
    command = [str(softcann_folder / "bin" / "python"), "-c", script]
    ran = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert "UnsupportedError: torch_npu cannot be imported: " in ran.stderr
    assert "source set_env.sh" in ran.stderr
