"""Runs the tests of ``npu/`` in the process that has torch_npu, one file after the other.

A file's failures are printed by the process. The environment is installed from the package index
once a session, or once for all in the folder that SOFTCANN_FOLDER names.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.backends.ascend.softcann.environment import ROOT, environment

FILES = sorted(path.name for path in (Path(__file__).parent / "npu").glob("test_*.py"))


@pytest.mark.parametrize("name", FILES)
def test_file_passes_on_the_software_device(name: str, softcann_folder: Path) -> None:
    command = [str(softcann_folder / "bin" / "python"), "-m", "pytest", "-q", "--tb=short"]
    path = f"tests/backends/ascend/npu/{name}"
    ran = subprocess.run(
        [*command, "-p", "no:cacheprovider", path],
        cwd=ROOT,
        env=environment(softcann_folder),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr[-4000:]
    assert " skipped" not in ran.stdout.splitlines()[-1]


def test_missing_cann_is_an_error_that_says_what_to_install(softcann_folder: Path) -> None:
    variables = {**environment(softcann_folder), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    del variables["LD_LIBRARY_PATH"]
    script = "from fp8core_backends.ascend import ops; ops.load()"
    command = [str(softcann_folder / "bin" / "python"), "-c", script]
    ran = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert "UnsupportedError: torch_npu cannot be imported: " in ran.stderr
    assert "source set_env.sh" in ran.stderr
