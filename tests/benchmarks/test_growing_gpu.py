"""The parts of the generation's benchmark that need no device."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest
import torch

from fp8core.conversion.huggingface import from_hugging_face
from tests.benchmarks import growing_gpu
from tests.benchmarks.growing_gpu import (
    SERVED,
    Bench,
    HuggingFace,
    Own,
    Sizes,
    Times,
    serving_schedule,
)
from tests.benchmarks.measuring.device import HOST

SIZES = Sizes(2, 64, 96, heads=4, groups=2, head=16, prompt=5, tokens=12)
CPU = HOST.torch_device


def generated(contestant: Any, x: torch.Tensor) -> torch.Tensor:
    """The outputs of ``x [b, s, hidden]``, of which the first tokens are the prompt."""
    contestant.begin(x.shape[0])
    with torch.no_grad():
        parts = [contestant(x[:, : SIZES.prompt])]
        parts += [contestant(x[:, at : at + 1]) for at in range(SIZES.prompt, x.shape[1])]
    return torch.cat(parts, 1)


def test_contestants_of_the_same_weights_compute_the_same() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    theirs = HuggingFace(SIZES, CPU)
    static, own = HuggingFace(SIZES, CPU, is_static=True), Own(SIZES, CPU)
    static.layers.load_state_dict(theirs.layers.state_dict())
    model = transformers.LlamaForCausalLM(theirs.config)
    model.model.layers = theirs.layers
    state = from_hugging_face(
        model.state_dict(), theirs.config, fuse_qkv_params=True, qkv_weight_interleaved=False
    )
    for at, layer in enumerate(own.layers):
        prefix = f"layers.{at}."
        layer.load_state_dict(
            {name.removeprefix(prefix): x for name, x in state.items() if name.startswith(prefix)}
        )
    x = torch.randn(3, SIZES.capacity, SIZES.hidden).bfloat16()
    want = generated(theirs, x)
    for contestant in (static, own):
        torch.testing.assert_close(generated(contestant, x), want, atol=2**-4, rtol=2**-5)


def test_a_schedule_serves_sequences_that_come_and_go() -> None:
    schedule = serving_schedule(SIZES._replace(tokens=200, prompt=20), 400)
    lengths: dict[int, int] = {}
    for before, counts in zip([{}, *schedule], schedule, strict=False):
        assert 1 <= len(counts) <= SERVED
        for name, count in counts.items():
            assert name in before or name not in lengths  # none comes again
            assert count == 1 or name not in lengths
            lengths[name] = lengths.get(name, 0) + count
    assert len(lengths) > 40
    assert max(map(len, schedule)) > SERVED // 2
    assert max(lengths.values()) <= 220


def test_the_steps_of_a_generation_are_counted() -> None:
    contestants = {name: Own(SIZES, CPU) for name in ("one", "other")}
    with torch.no_grad():
        times = Bench(SIZES, HOST).generate(contestants, 2)
    assert [len(one.steps) for one in times.values()] == [SIZES.tokens - 1] * 2
    lengths = [list(one.cache.sequences.values()) for one in contestants.values()]
    assert lengths == [[SIZES.capacity] * 2] * 2
    assert all(one.plans == [0] * (SIZES.tokens - 1) for one in times.values())


def test_a_line_has_the_median_the_slowest_and_the_plans() -> None:
    line = Times([2.0, 1.0, 9.0, 2.0], [1.0, 0.5, 8.0, 1.0], [0, 0, 3, 0]).line("x", 2, base=1.6)
    assert "step    2.000 ms ( 1.000 a layer)" in line
    assert "slowest    9.000 ( 4.50 x)" in line
    assert "host    1.000, plans 3, 1.250 x the fastest" in line


@pytest.mark.parametrize("profiled", [None, "own stored"])
def test_the_program_runs_on_the_cpu(
    profiled: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = [f"--{name}={size}" for name, size in SIZES._asdict().items()]
    more = ["--cpu", "--batch", "2", "--serving=8"]
    more += ["--profile", profiled] if profiled else []
    monkeypatch.setattr(sys, "argv", ["growing_gpu", *sizes, *more])
    growing_gpu.main()
    printed = capsys.readouterr().out
    if profiled:
        assert re.search(r"fp8core\S*\.py:\d+\(", printed)  # which of them is a matter of time
        assert "us of kernels" in printed
    else:
        assert "quantized" in printed
        assert "serving mix" in printed
