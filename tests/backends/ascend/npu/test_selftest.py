"""``fp8core selftest ascend``: on the software device, which computes as the documents say."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from fp8core_backends.ascend import ops, selftest


def test_software_device_does_what_is_assumed() -> None:
    differs = [one.name for one in selftest.run() if not one.holds]
    assert differs == ["HiFloat8 hybrid"]  # which it does not have


def test_command_writes_the_findings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "findings.json"
    command = ("selftest", "ascend", "--json", str(file))
    assert importlib.import_module("fp8core.__main__").main(command) == 1
    findings = json.loads(file.read_text(encoding="utf-8"))
    printed = capsys.readouterr().out
    assert len(findings) - 1 == printed.count("ok  ") > 20
    assert printed.count("DIFF") == 1
    assert {"name", "assumption", "holds", "answer"} == findings[0].keys()


def test_device_that_differs_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    original = ops.quant_max

    def wraps(x: object, scale: object, format: str) -> object:
        codes, amax = original(x, scale, format)  # type: ignore[arg-type]  # tensors
        return (codes.cpu() ^ 1).to(codes.device), amax

    monkeypatch.setattr(ops, "quant_max", wraps)
    found = {one.name: one for one in selftest.run()}
    assert not found["hif8 rounding"].holds
    assert "assumed 0" in found["hif8 rounding"].answer


def test_operator_that_fails_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: object, **keywords: object) -> None:
        raise RuntimeError("call aclnnSwiGlu failed\nmore")

    monkeypatch.setattr(ops, "swiglu", fails)
    (found,) = [one for one in selftest.run() if one.name == "SwiGLU"]
    assert (found.holds, found.answer) == (False, "error: call aclnnSwiGlu failed")
