"""A low-precision product that a backend declines and another runs: said in training, once."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest
import torch

import fp8core
from fp8core.backend_api import OpDesc
from fp8core.dispatch import table
from tests import forked
from tests.dispatch import toys


def no_product(desc: OpDesc) -> str | None:
    return "no product of this kind" if "gemm" in desc.op else None


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno == logging.WARNING and "declines" in record.getMessage()
    ]


def train(name: str = "mxfp8", steps: int = 2) -> None:
    layer = fp8core.Linear(64, 64, device="cpu")
    for _ in range(steps):
        with fp8core.autocast(recipe=fp8core.recipe.by_name(name)):
            layer(torch.randn(32, 64)).sum().backward()


def test_it_is_said_once_by_name(caplog: pytest.LogCaptureFixture) -> None:
    toys.register(toys.backend("toy", refuse=no_product, priority=9))
    train()
    train()
    (line,) = said(caplog)
    assert line.startswith(
        "gemm on cpu runs on reference, as toy, which comes before it, declines: "
        "no product of this kind [GemmDesc("
    )


def test_each_reason_is_said(caplog: pytest.LogCaptureFixture) -> None:
    toys.register(
        toys.backend("one", refuse=no_product, priority=9),
        toys.backend("two", priority=8, probe=lambda: "there is no driver"),
        toys.backend("three", priority=7, refuse=lambda desc: f"{desc}: no"),
    )
    train("current")
    lines = said(caplog)
    assert sum("as one," in line for line in lines) == 1
    assert sum("as two," in line and "there is no driver" in line for line in lines) == 1
    assert sum("as three," in line for line in lines) == 2  # e4m3 with e4m3, and e5m2 with e4m3


def test_attention_is_said_in_high_precision_too(caplog: pytest.LogCaptureFixture) -> None:
    def no_attention(desc: OpDesc) -> str | None:
        return "no attention" if "attention" in desc.op else None

    toys.register(toys.backend("toy", refuse=no_attention, priority=9))
    q = torch.randn(4, 1, 2, 8, requires_grad=True)
    for _ in range(2):
        fp8core.DotProductAttention(2, 8)(q, q, q).sum().backward()
    forward, backward = said(caplog)
    assert forward.startswith("attention on cpu runs on reference, as toy,")
    assert backward.startswith("attention_backward on cpu runs on reference, as toy,")


def test_a_product_that_the_first_backend_runs_is_not_news(
    caplog: pytest.LogCaptureFixture,
) -> None:
    toys.register(
        toys.backend("toy", priority=9),
        toys.backend("later", priority=1, refuse=no_product),
        toys.backend("elsewhere", priority=10, device_types=("cuda",)),
    )
    train()
    assert said(caplog) == []


def test_what_somebody_decided_is_not_news(caplog: pytest.LogCaptureFixture) -> None:
    toys.register(toys.backend("toy", refuse=no_product, priority=9))
    with fp8core.use_backend("reference"):
        train()
    toys.plugins.register(
        toys.plugin(fp8core_select_backend=lambda candidates: "reference"), "policy"
    )
    train("current")
    assert said(caplog) == []


def test_high_precision_and_other_operations_are_not_news(
    caplog: pytest.LogCaptureFixture,
) -> None:
    toys.register(
        toys.backend("toy", refuse=lambda desc: None if desc.low_precision else "no", priority=9)
    )
    train()
    fp8core.Linear(16, 16, device="cpu")(torch.ones(4, 16))
    table.resolve(toys.AMAX, toys.CPU)
    assert said(caplog) == []


PLUGIN = """
from fp8core.backend_api import API_VERSION, BackendSpec, hookimpl
from fp8core_backends.reference.backend import ReferenceBackend

class Declining(ReferenceBackend):
    def unsupported(self, desc, device):
        return "needs rows of 64" if "gemm" in desc.op else super().unsupported(desc, device)

@hookimpl
def fp8core_register_backends(register):
    fields = {"priority": 9, "api_version": API_VERSION}
    register(BackendSpec("toy_fast", ("cpu",), "toy_declining:Declining", **fields))
"""
TRAINING = """
import torch, fp8core
layer = fp8core.Linear(32, 32, device="cpu")
for _ in range(3):
    with fp8core.autocast(recipe=fp8core.recipe.Float8CurrentScaling()):
        layer(torch.randn(32, 32)).sum().backward()
"""


def test_a_program_that_configures_no_logging_shows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "toy_declining.py").write_text(PLUGIN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("FP8CORE_PLUGINS", "toy_declining")
    ran = forked.run([sys.executable, "-c", TRAINING], timeout=300)
    assert ran.returncode == 0, ran.stderr
    lines = [line for line in ran.stderr.splitlines() if "declines" in line]
    assert len(lines) == 1
    assert "runs on reference, as toy_fast, which comes before it" in lines[0]
    assert "needs rows of 64" in lines[0]
