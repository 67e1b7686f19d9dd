"""Every test of dispatch has plug-ins, formats, log lines and environment of its own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.dispatch import toys


@pytest.fixture(autouse=True)
def isolated() -> Iterator[None]:
    with toys.isolation():
        yield


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to import plug-in modules from; they are called ``toy_...``."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return tmp_path


@pytest.fixture
def install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> toys.Install:
    """``install(toy_one=source)`` writes modules, which FP8CORE_PLUGINS then names."""

    def written(**sources: str) -> None:
        for name, source in sources.items():
            (folder / f"{name}.py").write_text(source)
        monkeypatch.setenv("FP8CORE_PLUGINS", ",".join(sources))

    return written
