"""The sdist, the wheel and an editable install give the same two packages, without a compiler.

Nothing here needs a network: builds run without isolation and installs without dependencies.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_string
from pathlib import Path
from typing import NamedTuple

import pytest
from setuptools.config.pyprojecttoml import read_configuration

ROOT = Path(__file__).resolve().parent.parent
CONFIG = read_configuration(ROOT / "pyproject.toml")
VERSION = CONFIG["project"]["version"]
WHEEL = f"fp8core-{VERSION}-py3-none-any.whl"
INFO = f"fp8core-{VERSION}.dist-info"

# Folder of the checkout -> folder of the wheel.
INSTALLED = {
    "fp8core": "fp8core",
    "backends": "fp8core_backends",
    "fp8core_pytest": "fp8core_pytest",
    "csrc": "fp8core_backends/csrc",
}
# What builds, tools and editors leave behind; all of it is in .gitignore.
LEFTOVERS = shutil.ignore_patterns("__pycache__", "*.py[cod]", "*.so", "*.egg-info", ".*_cache")
LEFTOVERS_ON_TOP = {"build", "dist", ".git", ".hypothesis", ".venv", "venv"}

SHOW_PACKAGES = """
import importlib.resources
import fp8core, fp8core_backends.reference
print(fp8core.__file__)
print(fp8core_backends.reference.__file__)
print(importlib.resources.files("fp8core_backends.csrc") / "README.md")
"""


class Distributions(NamedTuple):
    """A clean copy of the tree and what was built from it."""

    tree: Path
    sdist: Path
    wheel: Path
    wheel_from_sdist: Path


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Standard output of a command that sees no PYTHONPATH but the one given."""
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=cwd, env=clean | environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def copy_tree(target: Path) -> Path:
    """Copy the checkout as a fresh clone would hold it."""

    def ignore(folder: str, names: list[str]) -> set[str]:
        on_top = LEFTOVERS_ON_TOP if Path(folder) == ROOT else set()
        return set(LEFTOVERS(folder, names)) | on_top

    return Path(shutil.copytree(ROOT, target, ignore=ignore))


def files_under(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def wheel_names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def shown_paths(text: str) -> list[Path]:
    return [Path(line).resolve() for line in text.splitlines()]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Distributions:
    folder = tmp_path_factory.mktemp("built")
    tree = copy_tree(folder / "tree")
    build = (sys.executable, "-m", "build", "--no-isolation")
    # Each build gets a copy of its own: setuptools leaves build/ and *.egg-info in its source tree.
    first, second = (Path(shutil.copytree(tree, folder / name)) for name in ("first", "second"))
    run(*build, first, "--outdir", folder / "via_sdist", cwd=folder)
    run(*build, "--wheel", second, "--outdir", folder / "direct", cwd=folder)
    return Distributions(
        tree,
        folder / "via_sdist" / f"fp8core-{VERSION}.tar.gz",
        folder / "direct" / WHEEL,
        folder / "via_sdist" / WHEEL,
    )


def test_package_list_equals_the_tree() -> None:
    listed = set(CONFIG["tool"]["setuptools"]["packages"])
    found = {"fp8core_backends.csrc"}
    for folder in ("fp8core", "backends", "fp8core_pytest"):
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.parent.relative_to(ROOT / folder).parts
            found.add(".".join((INSTALLED[folder], *parts)))
            assert (path.parent / "__init__.py").exists(), f"{path.parent} has no __init__.py"
    assert listed == found, "[tool.setuptools] packages in pyproject.toml must list every package"


@pytest.mark.slow
def test_wheel_holds_the_packages_and_nothing_else(built: Distributions) -> None:
    expected = {
        f"{target}/{name}"
        for folder, target in INSTALLED.items()
        for name in files_under(built.tree / folder)
    }
    names = wheel_names(built.wheel)
    assert {name for name in names if not name.startswith(f"{INFO}/")} == expected
    assert {"fp8core/py.typed", "fp8core_backends/py.typed"} <= names
    assert f"{INFO}/licenses/LICENSE" in names


@pytest.mark.slow
def test_wheel_from_sdist_equals_wheel_from_tree(built: Distributions) -> None:
    with zipfile.ZipFile(built.wheel) as direct, zipfile.ZipFile(built.wheel_from_sdist) as via:
        contents = [
            {name: archive.read(name) for name in archive.namelist()} for archive in (direct, via)
        ]
    assert contents[0].keys() == contents[1].keys()
    assert [name for name, data in contents[0].items() if contents[1][name] != data] == []


@pytest.mark.slow
def test_sdist_holds_the_whole_tree(built: Distributions) -> None:
    with tarfile.open(built.sdist) as archive:
        names = {member.name.partition("/")[2] for member in archive if member.isfile()}
    generated = {"PKG-INFO", "setup.cfg"}
    assert {name for name in names if ".egg-info/" not in name} - generated == files_under(
        built.tree
    )


@pytest.mark.slow
def test_wheel_metadata(built: Distributions) -> None:
    with zipfile.ZipFile(built.wheel) as archive:
        wheel, metadata, entry_points = (
            archive.read(f"{INFO}/{name}").decode()
            for name in ("WHEEL", "METADATA", "entry_points.txt")
        )
    assert message_from_string(wheel).get_all("Tag") == ["py3-none-any"]
    fields = message_from_string(metadata)
    assert fields["License-Expression"] == "Apache-2.0"
    assert fields["Requires-Python"] == ">=3.10"
    required = {name for name in fields.get_all("Requires-Dist", []) if "extra ==" not in name}
    assert required == {"torch>=2.11", "pluggy>=1.5", "numpy", "filelock", "typing-extensions>=4.4"}
    assert "[console_scripts]\nfp8core = fp8core.__main__:main\n" in entry_points
    names = ("ascend", "cuda", "reference")
    backends = "".join(f"{name} = fp8core_backends.{name}\n" for name in names)
    assert f"[fp8core.backends]\n{backends}" in entry_points


@pytest.mark.slow
def test_installed_wheel_imports_from_its_own_folder(built: Distributions, tmp_path: Path) -> None:
    target = tmp_path / "target"
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index")
    run(*pip, "--target", target, built.wheel, cwd=tmp_path)
    assert not (target / "backends").exists()
    shown = run(sys.executable, "-c", SHOW_PACKAGES, cwd=tmp_path, PYTHONPATH=str(target))
    assert shown_paths(shown) == [
        target / "fp8core" / "__init__.py",
        target / "fp8core_backends" / "reference" / "__init__.py",
        target / "fp8core_backends" / "csrc" / "README.md",
    ]


def scratch_environment(folder: Path) -> Path:
    """Interpreter of a new environment that sees this one's packages, except fp8core itself."""
    packages = folder / "packages"
    packages.mkdir()
    # Packages may come from another environment, by a .pth file.
    for place in dict.fromkeys(path for path in sys.path if Path(path).name == "site-packages"):
        for entry in Path(place).iterdir():
            is_new = not (packages / entry.name).exists()
            if is_new and "fp8core" not in entry.name and entry.name != "__pycache__":
                (packages / entry.name).symlink_to(entry)
    run(sys.executable, "-m", "venv", "--without-pip", folder / "venv", cwd=folder)
    python = folder / "venv" / "bin" / "python"
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder)
    (Path(site.strip()) / "packages.pth").write_text(f"{packages}\n")
    return python


@pytest.mark.slow
def test_editable_install_imports_from_the_checkout(built: Distributions, tmp_path: Path) -> None:
    checkout = Path(shutil.copytree(built.tree, tmp_path / "checkout"))
    python = scratch_environment(tmp_path)
    pip = (python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index")
    run(*pip, "--no-build-isolation", "--editable", checkout, cwd=tmp_path)
    assert shown_paths(run(python, "-c", SHOW_PACKAGES, cwd=tmp_path)) == [
        checkout / "fp8core" / "__init__.py",
        checkout / "backends" / "reference" / "__init__.py",
        checkout / "csrc" / "README.md",
    ]
    script = "from importlib.metadata import entry_points as e; print(e(group='fp8core.backends'))"
    assert "fp8core_backends.reference" in run(python, "-c", script, cwd=tmp_path)


def test_the_versions_of_torch_that_are_declared_are_those_that_were_run() -> None:
    pages = {name: (ROOT / name).read_text("utf-8") for name in ("README.md", "docs/support.md")}
    run_with = re.findall(r"^\| (2\.\d+)\.\S+ \|", pages["docs/support.md"], re.MULTILINE)
    declared = read_configuration(ROOT / "pyproject.toml")["project"]["dependencies"]
    assert f"torch>={run_with[0]}" in declared
    assert f"works with torch {run_with[0]} and later" in pages["README.md"]
    assert f"torch=={run_with[-1]}." in (ROOT / ".ci/run").read_text("utf-8")
    assert all(f"torch=={run_with[-1]}." in line for line in pip_lines(pages["README.md"]))


def pip_lines(page: str) -> list[str]:
    lines = [line for line in page.splitlines() if "pip install torch==" in line]
    assert lines
    return lines
