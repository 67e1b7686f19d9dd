"""What tests of builds and of the cache folder share: a compiler that only pretends."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fp8core_backends.cuda import build, native

FAKE_NVCC = """#!/bin/sh
echo "$@" >> "{log}"
case "$*" in
  *-shared*) [ -f "{folder}/fail-link" ] && {{ echo "ld: no space left"; exit 1; }} ;;
  *scale_update.cu*) [ -f "{folder}/fail" ] && {{ echo "scale_update: error: planted"; exit 2; }} ;;
esac
while [ $# -gt 1 ]; do [ "$1" = "-o" ] && echo made > "$2"; shift; done
exit 0
"""


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a pretended nvcc, which fails while ``fail`` or ``fail-link`` is there."""
    folder = tmp_path / "a toolkit"  # a path with a space
    folder.mkdir()
    nvcc = folder / "nvcc"
    nvcc.write_text(FAKE_NVCC.format(log=folder / "log", folder=folder))
    nvcc.chmod(0o755)
    found = build.Toolchain(nvcc, "13.0", (folder,), folder / "libcublasLt.so")
    monkeypatch.setattr(build, "find_toolchain", lambda: found)
    monkeypatch.setenv("FP8CORE_CACHE_DIR", str(tmp_path / "cache"))
    return folder


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No native library is loaded, nor looked for yet, and the machine's device is of 9.0."""
    monkeypatch.setattr(native, "_loaded", [])
    monkeypatch.setattr(build, "present", lambda: ["90a"])
    native._source.cache_clear()
    yield
    native._source.cache_clear()


STRANGER = 54321


@pytest.fixture
def give_away(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Make a path another user's. Who is not root becomes another user instead."""

    def give(path: Path) -> None:
        if os.geteuid() == 0:
            os.chown(path, STRANGER, -1, follow_symlinks=False)
        else:
            monkeypatch.setattr(os, "geteuid", lambda: STRANGER)

    return give
