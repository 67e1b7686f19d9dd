"""The virtual environment that torch_npu is installed in, apart from that of the tests.

torch loads torch_npu into every process that finds it, and without CANN that ends ``import torch``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import torch

from tests.backends.ascend.softcann.build import build

__all__ = ["ROOT", "TORCH", "VERSION", "Unavailable", "create", "environment", "why_not"]

VERSION = "2.13.0"
"""The version of torch_npu, which runs with the torch of the same version alone."""
TORCH = "2.13.0"
ROOT = Path(__file__).resolve().parents[4]


class Unavailable(Exception):
    """torch_npu cannot be installed: the package index does not answer, or has no such wheel."""


def why_not() -> str | None:
    """Return why this interpreter cannot run torch_npu, or None."""
    missing = [tool for tool in ("gcc", "nm") if shutil.which(tool) is None]
    if missing:
        return f"no {' and no '.join(missing)} to compile stand-ins with"
    version = torch.__version__.split("+")[0]
    if version != TORCH:
        return f"torch_npu {VERSION} needs torch {TORCH}, this is {version}"
    if sys.platform != "linux" or not sys.version_info[:2] <= (3, 13):
        return f"torch_npu {VERSION} has no wheel for {sys.platform}, Python {sys.version}"
    return None


def create(folder: Path) -> Path:
    """Return the Python of an environment in ``folder`` with torch_npu and this one's packages.

    One that is there already is used.

    Raises:
        Unavailable: torch_npu cannot be installed.
    """
    python = folder / "bin" / "python"
    packages = folder / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    if not (packages / "torch_npu").is_dir():
        venv.create(folder, with_pip=False, symlinks=True)
        wheel = (f"torch-npu=={VERSION}", "pyyaml")
        command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps"]
        # Compiled here: its invalid escapes are warnings, and errors where pytest compiles.
        installed = subprocess.run(
            [*command, "--compile", "--quiet", "--disable-pip-version-check", *wheel],
            capture_output=True,
            text=True,
            check=False,
        )
        if installed.returncode:
            raise Unavailable(installed.stderr.strip())
        shared = sysconfig.get_path("purelib")
        line = f"import site; site.addsitedir({shared!r})\n"
        (packages / "packages_of_the_tests.pth").write_text(line, encoding="utf-8")
    libraries = folder / "softcann"
    libraries.mkdir(exist_ok=True)
    build(libraries, packages / "torch_npu")
    return python


def environment(folder: Path) -> dict[str, str]:
    """Return the variables of a process that runs torch_npu on the software device."""
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("FP8CORE_")},
        "CUDA_VISIBLE_DEVICES": "",  # torch_npu refuses a second kind of accelerator
        "LD_LIBRARY_PATH": str(folder / "softcann"),
        "PYTHONPATH": str(ROOT),  # the device is Python code
        "SOFTCANN": "1",
        "TASK_QUEUE_ENABLE": "0",  # an operator has run when its call returns
    }
