"""Building the native library: with a compiler that only pretends, with nvcc where it is, and going
wrong: a killed build, a full disk, a compiler that is none, all of it named.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fp8core import UnsupportedError
from fp8core.errors import RecipeError
from fp8core_backends.cuda import build, native, origin, settings
from tests import forked

BUILDING = """
import pathlib, sys
from fp8core_backends.cuda import build
folder = pathlib.Path(sys.argv[1])
found = build.Toolchain(folder / "nvcc", "13.0", (folder,), folder / "lib")
build.find_toolchain = lambda: found
print(build.build(("90a",)))
"""
"""A program that builds with the compiler in the folder that it is given."""


def test_a_build_is_made_once(compiler: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = build.build(("90a",))
    assert path == build.target(("90a",))
    assert path.read_text() == "made\n"
    units = build._units(build.sources())
    lines = (compiler / "log").read_text().splitlines()
    links = [line for line in lines if "-shared" in line]
    assert len(lines) == len(units) + len(links)
    assert all("arch=compute_90a,code=sm_90a" in line for line in lines if line not in links)
    assert [line.split()[-1].rpartition("/")[2] for line in links] == [
        build.KERNELS,
        "fp8core_cuda.so",
    ]
    bindings = sum(unit.startswith("bindings/") for unit, _ in units)
    told = capsys.readouterr().err
    for count in (len(units) - bindings, bindings):
        assert f"[{count}/{count}]" in told
    assert build.build(("90a",)) == path
    assert (compiler / "log").read_text().splitlines() == lines


def test_another_python_shares_the_kernels(compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = build.build(("90a",))
    (compiler / "log").unlink()
    suffix = ".cpython-399-x86_64-linux-gnu.so"
    monkeypatch.setattr(build.sysconfig, "get_config_var", lambda name: suffix)
    other = build.build(("90a",))
    assert other == path.with_name(f"{build.MODULE}{suffix}")
    assert other.is_file()
    log = (compiler / "log").read_text().splitlines()
    compiled = [line for line in log if "-shared" not in line]
    assert compiled
    assert all("/bindings/" in line for line in compiled)
    assert len(log) == len(compiled) + 1
    assert str(path.with_name(build.KERNELS)) in log[-1].split()


def test_kernels_that_were_deleted_are_built_anew(compiler: Path) -> None:
    path = build.build(("90a",))
    path.with_name(build.KERNELS).unlink()
    assert build.build(("90a",)) == path
    assert path.with_name(build.KERNELS).is_file()


def test_a_source_of_variants_is_compiled_once_for_each(compiler: Path) -> None:
    build.build(("90a",))
    log = (compiler / "log").read_text().splitlines()
    for source, variants in build._VARIANTS.items():
        lines = [line for line in log if source in line]
        assert len(lines) == len(variants)
        for macros in variants:
            assert sum(all(macro in line.split() for macro in macros) for line in lines) == 1
        objects = {line.split()[-1] for line in lines}
        assert len(objects) == len(variants)


def test_other_variants_are_another_file(monkeypatch: pytest.MonkeyPatch) -> None:
    before = build.target(("90a",))
    monkeypatch.setattr(build, "_VARIANTS", {})
    assert build.target(("90a",)) != before


def test_another_architecture_is_another_file(compiler: Path) -> None:
    assert build.build(("90a",)) != build.build(("90a", "100f"))


def test_a_copy_goes_where_it_is_asked_for(compiler: Path, tmp_path: Path) -> None:
    path = build.build(("90a",), output=tmp_path / "out")
    for name in (path.name, build.KERNELS):
        assert (tmp_path / "out" / name).read_text() == "made\n"


@pytest.mark.parametrize(
    ("fault", "said"), [("fail", "error: planted"), ("fail-link", "no space left")]
)
def test_a_failed_build_says_why_and_leaves_nothing(compiler: Path, fault: str, said: str) -> None:
    (compiler / fault).touch()
    with pytest.raises(UnsupportedError, match=said) as error:
        build.build(("90a",))
    assert "FP8CORE_BUILD=0" in str(error.value)
    path = build.target(("90a",))
    assert {file.name for file in path.parent.iterdir()} <= {"lock"}
    (compiler / fault).unlink()
    assert build.build(("90a",)).is_file()


def test_processes_that_build_at_once_make_one_file(compiler: Path) -> None:
    command = [sys.executable, "-c", BUILDING, str(compiler)]
    outputs = [compiler / "said first", compiler / "said second"]
    with (
        outputs[0].open("w") as first,
        outputs[1].open("w") as second,
        open(os.devnull, "w") as errors,
    ):
        running = [forked.start(command, stdout=out, stderr=errors) for out in (first, second)]
        assert [process.wait(120) for process in running] == [0, 0]
    said = [output.read_text() for output in outputs]
    assert said[0] == said[1] != ""
    links = [line for line in (compiler / "log").read_text().splitlines() if "-shared" in line]
    assert len(links) == 2  # the kernels, and the extension


@pytest.mark.parametrize(
    ("architectures", "said"), [(("90",), "Did you mean '90a'"), ((), "none of them")]
)
def test_an_unknown_architecture_is_refused(architectures: tuple[str, ...], said: str) -> None:
    with pytest.raises(UnsupportedError, match=said):
        build.build(architectures)


def test_without_a_toolchain_the_reason_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "find_toolchain", lambda: "no nvcc in sight")
    with pytest.raises(UnsupportedError, match="no nvcc in sight"):
        build.build(("90a",))


def test_no_compiler_anywhere_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    monkeypatch.setattr(build, "_DEFAULT_NVCC", tmp_path / "nvcc")
    found = build.find_toolchain.__wrapped__()
    assert isinstance(found, str)
    assert found.startswith("no nvcc in CUDA_HOME")


@pytest.mark.parametrize("name", ["FP8CORE_AUTOTUNE", "FP8CORE_BUILD"])
def test_a_flag_is_0_or_1(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "yes")
    with pytest.raises(RecipeError, match=f"{name}='yes'"):
        settings.read()


@pytest.fixture
def source() -> Callable[..., native._Source]:
    return native._source.__wrapped__


def test_a_build_of_before_is_used(compiler: Path, source: Callable[..., native._Source]) -> None:
    assert source(("90a",), settings.read()).description.startswith("built with")
    path = build.build(("90a",))
    assert source(("90a",), settings.read()) == native._Source(path, f"built earlier: {path}", None)


def test_a_build_can_be_forbidden(
    compiler: Path, source: Callable[..., native._Source], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FP8CORE_BUILD", "0")
    assert source(("90a",), settings.read()).why_not == "FP8CORE_BUILD=0 forbids building it"


def test_another_chip_has_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    why_not = native.missing(torch.device("cuda", 0))
    assert why_not is not None
    assert "8.0, 8.6, 8.9, 9.0, 10.0, 10.3, 12.0, this is 7.5" in why_not


def test_a_build_for_more_is_found(compiler: Path, source: Callable[..., native._Source]) -> None:
    path = build.build(("90a", "100f"))
    assert source(("90a",), settings.read()).path == path


@pytest.mark.usefixtures("compiler", "unloaded")
def test_a_library_for_another_chip_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    made = SimpleNamespace(SOURCE_HASH=build.source_hash(), ARCHITECTURES="100f")
    monkeypatch.setattr(native, "_import", lambda path: made)
    with pytest.raises(UnsupportedError, match="was built for 100f, this machine takes 90a"):
        native.load()


def test_a_folder_that_cannot_be_made_is_named(
    compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FP8CORE_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(
        UnsupportedError, match=r"is no folder.* name another folder in FP8CORE_CACHE_DIR"
    ):
        build.build(("90a",))


@pytest.mark.usefixtures("unloaded")
def test_a_failed_build_is_not_tried_again(compiler: Path) -> None:
    (compiler / "fail").touch()
    for _ in range(2):
        with pytest.raises(UnsupportedError, match="error: planted"):
            native.load()
    assert (compiler / "log").read_text().count("scale_update.cu") == 1


@pytest.mark.usefixtures("compiler", "unloaded")
def test_a_library_of_other_sources_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_import", lambda path: SimpleNamespace(SOURCE_HASH="older"))
    with pytest.raises(UnsupportedError, match=r"other sources \(older"):
        native.load()


def test_a_file_that_is_no_library_is_refused(tmp_path: Path) -> None:
    broken = tmp_path / f"{build.MODULE}.so"
    broken.write_text("not a library")
    with pytest.raises(UnsupportedError, match=r"Delete it to have it built anew.*noexec"):
        native._import(broken)
    installed = tmp_path / origin.package("12") / broken.name
    installed.parent.mkdir()
    installed.write_bytes(b"\x7fELF cut short")
    with pytest.raises(UnsupportedError, match=r"--no-deps fp8core-cuda-cu12\. From a file"):
        native._import(installed)


@pytest.mark.slow
def test_the_sources_compile_without_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toolchain = build.find_toolchain()
    if isinstance(toolchain, str):
        pytest.skip(f"needs nvcc and the headers of cuBLAS: {toolchain}")
    if torch.version.cuda is None and not (toolchain.cublaslt).is_file():
        pytest.skip("needs cuBLASLt to link with")
    monkeypatch.setenv("FP8CORE_CACHE_DIR", str(tmp_path))
    flags = [flag.replace("-Wextra", "-Wextra,-Werror") for flag in build._FLAGS]
    monkeypatch.setattr(build, "_FLAGS", tuple(flags))
    assert build.build(tuple(build.ARCHITECTURES.values())).stat().st_size > 100_000


SLOW_NVCC = """#!/bin/sh
while [ $# -gt 1 ]; do [ "$1" = "-o" ] && echo half > "$2"; shift; done
mktemp > /dev/null
touch "{folder}/started"
sleep 60
"""


def test_a_killed_build_leaves_nothing_that_stays(compiler: Path, tmp_path: Path) -> None:
    good = (compiler / "nvcc").read_text()
    (compiler / "nvcc").write_text(SLOW_NVCC.format(folder=compiler))
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    child = subprocess.Popen(
        [sys.executable, "-c", BUILDING, str(compiler)],
        env={**os.environ, "TMPDIR": str(temporary)},
        start_new_session=True,
    )
    deadline = time.monotonic() + 120
    while not (compiler / "started").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    folder = build.target(("90a",)).parent
    assert {file.name for file in folder.iterdir()} - {"lock"}  # it was in the middle of it
    (compiler / "nvcc").write_text(good)
    path = build.build(("90a",))
    assert {file.name for file in folder.iterdir()} <= {"lock", path.name, build.KERNELS}
    assert list(temporary.iterdir()) == []  # the compiler's own files were in the build's folder


def test_what_is_not_a_leftover_stays(compiler: Path) -> None:
    built = build.build(("90a",))
    built.unlink()
    (built.parent / "notes").mkdir()
    build.build(("90a",))
    assert (built.parent / "notes").is_dir()


@pytest.mark.parametrize("place", ["mkdtemp", "replace"])
def test_a_full_disk_is_named(compiler: Path, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr({"mkdtemp": build.tempfile, "replace": os}[place], place, full)
        with pytest.raises(UnsupportedError, match=r"No space left.*FP8CORE_CACHE_DIR"):
            build.build(("90a",))
    folder = build.target(("90a",)).parent
    assert {file.name for file in folder.iterdir()} <= {"lock"}
    assert build.build(("90a",)).is_file()


def test_a_copy_that_cannot_be_made_is_named(compiler: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UnsupportedError, match="--output") as caught:
        build.build(("90a",), output=tmp_path / "file" / "below")
    assert str(tmp_path / "file" / "below") in str(caught.value)


# --- the compiler ---


@pytest.fixture
def toolkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path of the nvcc that CUDA_HOME names, where nothing is yet."""
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.setenv(name, str(tmp_path / "cuda"))
    (tmp_path / "cuda" / "bin").mkdir(parents=True)
    return tmp_path / "cuda" / "bin" / "nvcc"


def found() -> object:
    return build.find_toolchain.__wrapped__()


def ends(pid: int) -> bool:
    """Whether a killed process ends within a minute: it does so some time after the signal."""
    for _ in range(600):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().split()[2]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state in "XZ":
            return True
        time.sleep(0.1)
    return False


def test_a_compiler_that_is_a_folder_is_named(toolkit: Path) -> None:
    toolkit.mkdir()
    assert found() == f"{toolkit} is no file"


def test_a_compiler_that_may_not_be_run_is_named(toolkit: Path) -> None:
    toolkit.write_text("#!/bin/sh\necho release 13.0")
    toolkit.chmod(0o644)
    assert found() == f"{toolkit} cannot be run: Permission denied"


def test_a_compiler_that_is_no_program_is_named(toolkit: Path) -> None:
    toolkit.write_bytes(b"\x00\x01")
    toolkit.chmod(0o755)
    assert found() == f"{toolkit} cannot be run: Exec format error"


def test_a_compiler_that_fails_is_named(toolkit: Path) -> None:
    toolkit.write_text("#!/bin/sh\nprintf 'no license \\377' >&2\nexit 3")
    toolkit.chmod(0o755)
    said = str(found())
    assert said.startswith(f"{toolkit} --version ended with exit status 3: no license")


def test_a_compiler_that_does_not_answer_is_named_and_ended(
    toolkit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toolkit.write_text(f"#!/bin/sh\nsleep 600 & echo $! > {toolkit}.pid\nwait")
    toolkit.chmod(0o755)
    monkeypatch.setattr(build, "_ANSWER_S", 0.5)
    assert found() == f"{toolkit} --version does not answer within 0.5 s"
    pid = int(Path(f"{toolkit}.pid").read_text())
    assert ends(pid), f"process {pid}, which the compiler started, still runs"


def test_a_compiler_that_is_a_dangling_link_is_named(toolkit: Path, tmp_path: Path) -> None:
    toolkit.symlink_to(tmp_path / "gone")
    assert found() == f"{toolkit} is no file"


def test_a_compiler_of_cuda_12_takes_headers_of_a_cublas_that_has_all_products(
    toolkit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toolkit.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.4, V12.4.131'")
    toolkit.chmod(0o755)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    packages = tmp_path / "nvidia"
    monkeypatch.setattr(build, "_packages", lambda: [packages])
    for name in ("cublas/include", "cublas/lib", "cuda_runtime/include"):
        (packages / name).mkdir(parents=True)
    library = packages / "cublas" / "lib" / "libcublasLt.so.12"
    library.touch()
    header = packages / "cublas" / "include" / "cublasLt.h"
    header.write_text("CUBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0")
    other = tmp_path / "cuda-13"  # where nvcc is by default, of another CUDA
    for file in ("bin/nvcc", "lib64/libcublasLt.so.13", "include/cublasLt.h"):
        (other / file).parent.mkdir(parents=True)
        (other / file).write_text("CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F")
    monkeypatch.setattr(build, "_DEFAULT_NVCC", other / "bin" / "nvcc")
    assert f"{header} is of a cuBLAS before 12.9" in str(found())
    header.write_text("CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F")
    toolchain = found()
    assert isinstance(toolchain, build.Toolchain)
    assert (toolchain.nvcc, toolchain.release) == (toolkit, "12.4")
    assert toolchain.cublaslt == library
    assert toolchain.includes[0] == header.parent
    assert toolchain.includes[-2:] == (
        packages / "cuda_runtime" / "include",
        toolkit.parent.parent / "include",
    )
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert found() == f"{toolkit} is 12.4, torch uses CUDA 13.0"


def test_a_copy_says_what_it_was_made_of(compiler: Path, tmp_path: Path) -> None:
    build.build(("90a", "80"), output=tmp_path / "out")
    assert origin.read(tmp_path / "out") == build.origin_of("13.0", ("90a", "80"))


def test_a_compiler_that_goes_away_is_named(compiler: Path) -> None:
    (compiler / "nvcc").unlink()
    with pytest.raises(UnsupportedError, match="cannot be run"):
        build.build(("90a",))
