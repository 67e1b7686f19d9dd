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


def module_names() -> list[str]:
    names = []
    for folder, package in PACKAGES.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            names.append(".".join((package, *parts)).removesuffix(".__init__"))
    return [name for name in names if not name.endswith(".__main__")]


@pytest.mark.parametrize("name", module_names())
def test_examples_hold(name: str) -> None:
    if name.startswith("fp8core.megatron"):
        pytest.skip("Megatron decides at its import whether there is a Transformer Engine")
    if name in FRAMEWORKS:
        pytest.importorskip(FRAMEWORKS[name], reason=f"{FRAMEWORKS[name]} is not installed")
    failed, _ = doctest.testmod(importlib.import_module(name))
    assert failed == 0
