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
