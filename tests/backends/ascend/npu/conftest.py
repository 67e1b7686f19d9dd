"""Tests that run on the software device, in a process of their own: see ``../test_npu.py``."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

HAS_DEVICE = os.environ.get("SOFTCANN") == "1"
collect_ignore_glob = [] if HAS_DEVICE else ["test_*.py"]

if HAS_DEVICE:
    from tests.backends.ascend.softcann import device, formulas  # noqa: F401  # registers them

    device.install()

    def pytest_configure(config: pytest.Config) -> None:
        """Let pass torch_npu's notice that it makes tensors of the ordinary layout."""
        notice = "ignore:Cannot create tensor with internal format:UserWarning"
        config.addinivalue_line("filterwarnings", notice)

    @pytest.fixture(autouse=True)
    def calls() -> Iterator[list[device.Call]]:
        """The operators that the test ran so far."""
        device.CALLS.clear()
        yield device.CALLS
        device.CALLS.clear()
