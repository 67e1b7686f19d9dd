"""The parts of the benchmark of prefill and decode that need no device."""

from __future__ import annotations

import sys
import time

import pytest
import torch

from tests.benchmarks import generation_gpu
from tests.benchmarks.generation_gpu import Cell, HuggingFace, Own, Sizes, limited
from tests.benchmarks.measuring.contest import Unavailable

SIZES = Sizes(2, 64, 96, heads=4, groups=2, head=16, vocabulary=64)
CPU = torch.device("cpu")
DECODE = Cell(2, 1, 4)


def test_a_step_of_transformers_stays_behind_its_tokens() -> None:
    pytest.importorskip("transformers")
    contestant = HuggingFace(SIZES, CPU)
    with torch.no_grad():
        step = contestant.step(DECODE)
        first, *rest = [step.eager() for _ in range(4)]
    assert first.shape == (2, 1, SIZES.vocabulary)
    assert all(torch.equal(first, logits) for logits in rest)


def test_a_step_of_own_layers_begins_again_where_the_room_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(generation_gpu, "ROOM", 4)
    monkeypatch.setattr(generation_gpu, "AT_ONCE", 6)  # so that the cache is filled in two steps
    contestant = Own(SIZES, CPU)
    with torch.no_grad():
        step = contestant.step(DECODE)
        cache = step.call.keywords["inference_params"]  # type: ignore[attr-defined]  # a partial
        lengths = []
        for _ in range(6):
            assert step.eager().shape == (2, 1, SIZES.vocabulary)
            lengths.append(cache.sequences[0])
        first, second = step.call(), step.call()  # as in a graph
    assert lengths == [5, 6, 7, 5, 6, 7]
    assert torch.equal(first, second)


def test_a_stored_model_is_counted_by_its_codes() -> None:
    pytest.importorskip("transformers")
    plain = HuggingFace(SIZES, CPU).model
    stored = generation_gpu.MAKERS["hf rowwise"](SIZES, CPU).model
    before, after = (
        sum(map(generation_gpu.bytes_of, model.parameters())) for model in (plain, stored)
    )
    assert 0.5 < after / before < 0.9


def test_a_compilation_is_given_up() -> None:
    with pytest.raises(Unavailable, match="more than 1 s"), limited(1):
        time.sleep(3)


def test_the_program_runs_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = [f"--{name}={size}" for name, size in SIZES._asdict().items()]
    only = ["hf bf16", "hf rowwise", "hf wo rowwise", "own bf16", "own current", "te bf16"]
    more = ["--cpu", "--kinds", "prefill", "decode", "--batch", "2", "--before", "4"]
    more += ["--seconds", "0", "--only", *only]
    monkeypatch.setattr(sys, "argv", ["generation_gpu", *sizes, *more])
    generation_gpu.main()
    printed = capsys.readouterr().out
    assert "prefill, 1 x 16:" in printed
    assert "decode, batch 2, 4 tokens before:" in printed
    rows = [row for row in printed.splitlines() if row.startswith("| ")]
    for name in only[:5]:
        assert sum(row.startswith(f"| {name} |") for row in rows) == 2
    assert "te bf16 does not run" in printed
