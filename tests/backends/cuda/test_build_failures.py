"""Builds that go wrong: a killed one, a full disk, a compiler that is none; all of it named."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fp8core import UnsupportedError
from fp8core_backends.cuda import build
from tests.backends.cuda.test_build import BUILDING

# --- a build that is killed, or has no room ---

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
    assert {file.name for file in folder.iterdir()} <= {"lock", path.name}
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


def test_a_compiler_that_goes_away_is_named(compiler: Path) -> None:
    (compiler / "nvcc").unlink()
    with pytest.raises(UnsupportedError, match="cannot be run"):
        build.build(("90a",))
