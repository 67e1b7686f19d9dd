"""``fp8core selftest ascend``: on the software device, which computes as the documents say."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from fp8core_backends.ascend import selftest
from fp8core_backends.ascend.operators import (
    activations,
    casts,
    fused_attention,
    grouped_products,
    products,
)


def test_software_device_does_what_is_assumed() -> None:
    differs = [one.name for one in selftest.run() if not one.holds]
    assert differs == ["HiFloat8 hybrid"]  # which it does not have


def test_command_writes_the_findings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "findings.json"
    command = ("selftest", "ascend", "--json", str(file))
    assert importlib.import_module("fp8core.__main__").main(command) == 1
    findings = json.loads(file.read_text(encoding="utf-8"))
    printed = capsys.readouterr().out
    assert len(findings) - 1 == printed.count("ok  ") > 40
    assert printed.count("DIFF") == 1
    assert {"name", "assumption", "holds", "answer"} == findings[0].keys()


def test_device_that_differs_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    original = casts.quant_max

    def wraps(x: object, scale: object, format: str) -> object:
        codes, amax = original(x, scale, format)  # type: ignore[arg-type]  # tensors
        return (codes.cpu() ^ 1).to(codes.device), amax

    monkeypatch.setattr(casts, "quant_max", wraps)
    found = {one.name: one for one in selftest.run()}
    assert not found["hif8 rounding"].holds
    assert "assumed 0" in found["hif8 rounding"].answer


def test_operator_that_fails_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: object, **keywords: object) -> None:
        raise RuntimeError("call aclnnSwiGlu failed\nmore")

    monkeypatch.setattr(activations, "swiglu", fails)
    (found,) = [one for one in selftest.run() if one.name == "SwiGLU"]
    assert (found.holds, found.answer) == (False, "error: call aclnnSwiGlu failed")


@pytest.mark.parametrize("fault", [ValueError("shapes differ"), IndexError(), TypeError("no")])
def test_result_of_another_shape_is_a_finding(
    fault: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*arguments: object, **keywords: object) -> None:
        raise fault

    monkeypatch.setattr(grouped_products, "grouped_quant_matmul", fails)
    found = {one.name: one for one in selftest.run()}
    assert not found["current groups"].holds
    assert found["current groups"].answer.startswith("error: ")
    assert found["current products"].holds


def test_product_that_is_off_is_reported_by_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    original = products.quant_matmul

    def wrong(*arguments: object, **keywords: object) -> object:
        return original(*arguments, **keywords) * 1.2  # type: ignore[arg-type]  # as given

    monkeypatch.setattr(products, "quant_matmul", wrong)
    differs = {one.name for one in selftest.run() if not one.holds}
    recipes = ("current", "rowwise", "block", "mxfp8", "hif8")
    assert differs >= {f"{name} products" for name in recipes}


def test_statistics_laid_out_otherwise_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    original = fused_attention.fusion_attention

    def by_token(*arguments: object, **keywords: object) -> object:
        out, largest, total = original(*arguments, **keywords)  # type: ignore[arg-type]  # as given
        if keywords["layout"] == "TND":
            largest = largest.flip(0)
        return out, largest, total

    monkeypatch.setattr(fused_attention, "fusion_attention", by_token)
    differs = {one.name for one in selftest.run() if not one.holds}
    assert "attention, packed" in differs
    assert "attention, causal" not in differs
