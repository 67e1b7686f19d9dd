"""The examples in the docstrings are true."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {"fp8core": "fp8core", "backends": "fp8core_backends"}


# Modules that plug into a framework, and import it.
FRAMEWORKS = {
    "fp8core.integrations.lightning": "lightning",
    "fp8core.integrations.torchtitan": "torchtitan.models.common",
}
# Imported in processes of their own alone: what Megatron finds at its import stays.
MEGATRON = "fp8core.integrations.megatron"


def rooms() -> dict[str, list[str]]:
    """Modules by the room that they are in; those of a framework, or of no room, by themselves."""
    found: dict[str, list[str]] = {}
    for folder, package in PACKAGES.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            name = ".".join((package, *parts)).removesuffix(".__init__")
            if not name.startswith(MEGATRON) and not name.endswith(".__main__"):
                room = name if name in FRAMEWORKS else ".".join(name.split(".")[:2])
                found.setdefault(room, []).append(name)
    return found


ROOMS = rooms()


@pytest.mark.parametrize("room", ROOMS)
def test_examples_hold(room: str) -> None:
    if room in FRAMEWORKS:
        pytest.importorskip(FRAMEWORKS[room], reason=f"{FRAMEWORKS[room]} is not installed")
    ran = {name: doctest.testmod(importlib.import_module(name)) for name in ROOMS[room]}
    assert {name: result.failed for name, result in ran.items() if result.failed} == {}
