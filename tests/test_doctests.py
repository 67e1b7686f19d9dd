"""The examples in the docstrings are true."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {"fp8core": "fp8core", "backends": "fp8core_backends"}


# Modules that plug into a framework, and import it.
# Megatron is imported in processes of their own alone: what it finds at its import stays.
FRAMEWORKS = {"fp8core.lightning": "lightning", "fp8core.torchtitan": "torchtitan.models.common"}


def rooms() -> dict[str, list[str]]:
    """Modules by the part of a package that they are in; a module of no such part by its name."""
    found: dict[str, list[str]] = {}
    for folder, package in PACKAGES.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            name = ".".join((package, *parts)).removesuffix(".__init__")
            if not name.endswith(".__main__"):
                found.setdefault(".".join(name.split(".")[:2]), []).append(name)
    return found


ROOMS = rooms()


@pytest.mark.parametrize("room", ROOMS)
def test_examples_hold(room: str) -> None:
    if room == "fp8core.megatron":
        pytest.skip("Megatron decides at its import whether there is a Transformer Engine")
    if room in FRAMEWORKS:
        pytest.importorskip(FRAMEWORKS[room], reason=f"{FRAMEWORKS[room]} is not installed")
    ran = {name: doctest.testmod(importlib.import_module(name)) for name in ROOMS[room]}
    assert {name: result.failed for name, result in ran.items() if result.failed} == {}
