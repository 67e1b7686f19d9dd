"""Every test of recipes has plug-ins, formats and environment of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.dispatch import toys


@pytest.fixture(autouse=True)
def isolated() -> Iterator[None]:
    with toys.isolation():
        yield
