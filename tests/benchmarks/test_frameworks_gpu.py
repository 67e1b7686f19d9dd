"""The parts of the frameworks' benchmark that need neither a device nor a framework."""

from __future__ import annotations

import math

import pytest
import torch

from tests.benchmarks.frameworks_gpu import Bench, Contestant, Sizes, lines
from tests.benchmarks.measuring.device import HOST

SIZES = Sizes(layers=1, hidden=32, tokens=32, vocabulary=16, sequence=16)


def _contestant() -> Contestant:
    torch.manual_seed(1)
    bench = Bench(SIZES, HOST, [torch.randint(16, (2, 16))])
    model = bench.model()
    return Contestant(bench, model, bench.optimizer(model), torch.Tensor.backward)


def test_contestants_begin_with_the_same_weights_and_learn() -> None:
    one, other = _contestant(), _contestant()
    for _ in range(20):
        one.step()
    other.step()
    assert torch.equal(one.losses[0], other.losses[0])
    assert one.losses[0].item() == pytest.approx(math.log(16), abs=0.5)
    assert one.losses[-1] < one.losses[0]


def test_a_line_has_the_ratio_to_bf16_of_the_same_dtypes() -> None:
    times = {"bf16": [2e3] * 6, "fp8": [1e3] * 6, "bf16-true": [4e3] * 6, "fp8-true": [1e3] * 6}
    printed = lines(times, {name: [3.0, 2.0, 1.0] for name in times})
    assert "over bf16 0.500" in printed[1]
    assert "over bf16-true 0.250 [0.250, 0.250] in 6 turns" in printed[3]
    assert "losses 3.0000 2.0000 1.0000 of 3 steps" in printed[3]
