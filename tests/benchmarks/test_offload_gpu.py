"""The parts of the offload benchmark that need no device: its steps, its bytes and its bound."""

from __future__ import annotations

import contextlib

import pytest
import torch

from fp8core import cpu_offload
from tests.benchmarks.offload_gpu import Measured, Stack


def test_a_step_offloads_all_layers_but_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_offload, "MIN_ELEMENTS", 64)
    stack = Stack(3, (64, 128), "mxfp8", "cpu")
    x = torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)
    stack.step(x, contextlib.nullcontext(), lambda y: y)
    context, sync = stack.offload()
    for _ in range(2):
        stack.step(x, context, sync)
    held = [bool(layer.saved) for layer in context.offload_synchronizer.layers]
    assert held == [True, True, False]
    assert context.offload_synchronizer.get_offloaded_total_size_mb() > 0
    assert x.grad is None


@pytest.mark.parametrize(("without", "ratio"), [(0.2, 1.1), (0.01, 2.2)])
def test_the_larger_of_step_and_copies_is_the_bound(without: float, ratio: float) -> None:
    found = Measured(without, 0.22, 10**9, 2e10, 2e10)
    assert found.copies == pytest.approx(0.1)
    assert found.ratio == pytest.approx(ratio)
    assert any("953.7 MiB each" in line for line in found.lines())
