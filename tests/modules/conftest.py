"""Every test of layers begins with no compiled graph of another test."""

from __future__ import annotations

import sys

import pytest
import torch


@pytest.fixture(autouse=True)
def no_graphs() -> None:
    """Forget what torch.compile has made, if it was used: its limits are the process's."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
