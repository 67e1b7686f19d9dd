"""The plug-in where there is no NPU: what it registers, and why its backend cannot be used."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from importlib import metadata

import pytest

import fp8core as te
from fp8core.dispatch import plugins
from fp8core.errors import Fp8CoreError
from fp8core_backends import ascend


def test_backend_is_for_npus_alone() -> None:
    assert plugins.load().backends["ascend"].device_types == ("npu",)


def test_backend_without_torch_npu_says_so() -> None:
    with te.use_backend("ascend"), pytest.raises(Fp8CoreError, match="torch_npu is not installed"):
        te.Linear(8, 8)


def test_another_version_of_torch_npu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(metadata, "version", lambda name: "2.14.0")
    assert ascend._probe() == "torch_npu is 2.14.0, and the backend is written for 2.13"


def test_torch_npu_that_is_not_imported_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(metadata, "version", lambda name: "2.13.0")
    assert "write `import torch_npu`" in (ascend._probe() or "")


def test_nothing_of_the_plugin_imports_torch_npu() -> None:
    script = (
        "import sys, torch, fp8core as te; te.Linear(8, 8, device='cpu')(torch.ones(8, 8)); "
        "te.recipe.names(); sys.exit('torch_npu' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
