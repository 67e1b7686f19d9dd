"""Plug-ins of a test's own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.dispatch import toys


@pytest.fixture
def isolated(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> Iterator[None]:
    """No plug-in but the installed ones, and a working folder of the test's own."""
    monkeypatch.chdir(str(tmp_path))
    with toys.isolation():
        yield
