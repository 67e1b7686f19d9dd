"""Transformer Engine's name for the tests of integrations."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest

from fp8core import transformer_engine as alias
from fp8core.integrations.transformer_engine import finder


@pytest.fixture
def te() -> Iterator[Any]:
    """The alias, whatever other tests of this process have imported."""
    finder.put(alias.VERSION)
    yield importlib.import_module("transformer_engine")
    alias.uninstall()
