"""The parts of the whole model's benchmark that need no device, and a trial run on the CPU."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.benchmarks.measuring.contest import Contest
from tests.benchmarks.measuring.device import HOST
from tests.benchmarks.model_gpu import __main__ as command
from tests.benchmarks.model_gpu import contestants, report
from tests.benchmarks.model_gpu.contestants import CONTESTANTS, Bench, torch_decoder, torch_loss
from tests.benchmarks.model_gpu.weights import SHAPES, Shared

TINY, SEQUENCE = SHAPES["tiny"], 16


@pytest.fixture
def bench() -> Bench:
    return Bench(Shared(TINY, HOST.torch_device), HOST, SEQUENCE, torch_loss)


def tokens() -> torch.Tensor:
    source = torch.Generator().manual_seed(1)
    return torch.randint(TINY.vocabulary, (2, SEQUENCE + 1), generator=source)


def test_contestants_begin_as_the_same_function(bench: Bench) -> None:
    pytest.importorskip("transformers")
    losses = {}
    for name in ("torch bf16", "fp8core bf16", "hf bf16", "fp8core current", "best stored"):
        bench.shared.reset()
        losses[name] = CONTESTANTS[name](bench).step(tokens()).item()
    assert losses == pytest.approx(dict.fromkeys(losses, losses["torch bf16"]), abs=0.02)
    assert losses["torch bf16"] == pytest.approx(5.55, abs=0.1)  # ln 256: random weights
    high = [losses[name] for name in ("torch bf16", "fp8core bf16", "hf bf16")]
    assert max(high) - min(high) < 1e-3


def test_contestants_train_the_same_memory(bench: Bench) -> None:
    first, second = (CONTESTANTS[name](bench) for name in ("torch bf16", "fp8core delayed"))
    before = bench.shared.values["layers.1.q"].clone()
    first.step(tokens())
    after = second.model.get_parameter("layers.1.self_attention.layernorm_qkv.weight")
    assert not torch.equal(before, after[: TINY.hidden])
    second.step(tokens())
    assert bench.shared.averages["exp_avg_sq"]["layers.1.fc2"].any()
    bench.shared.reset()
    assert torch.equal(first.model.get_parameter("layers.1.qkv.weight")[: TINY.hidden], before)
    assert not any(averages["head"].any() for averages in bench.shared.averages.values())


def test_model_flops_are_those_of_the_products_and_half_of_attention(bench: Bench) -> None:
    with FlopCounterMode(display=False) as counter:
        torch_decoder(*bench.sizes)(tokens()[:, :-1])
    (products,) = (
        flops for op, flops in counter.get_flop_counts()["Global"].items() if op.__name__ == "mm"
    )
    # [s, d] by [d, s], and [s, s] by [s, d], of each head and row, half of them masked.
    attention = TINY.layers * TINY.heads * 2 * (2 * SEQUENCE**2 * TINY.head * 2) / 2
    assert TINY.flops(2 * SEQUENCE, SEQUENCE) == 3 * (products + attention)


@pytest.mark.parametrize(
    ("device", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA H200", 989.4),
        ("NVIDIA H20", 148.0),
        ("cpu", None),
    ],
)
def test_utilization_is_of_the_device_s_dense_rate(device: str, tflops: float | None) -> None:
    figures = report.Figures([2000.0, 1000.0, 4000.0], [300.0], 7.0, 1.0)
    base = report.Figures([4000.0, 2000.0, 4000.0], [300.0], 7.0, 1.0)
    named = {"x": figures, "torch bf16 compiled": base}
    lines = report.table(named, {"y": "is missing"}, 100, 9.894e10, device)
    rate = "" if tflops is None else f"{989.4 / tflops * 0.05:.1%}"
    assert f"| x | 2.00 (1.00 to 4.00) | 0.500 | 50,000 | {rate} | 7 | 1 | 0.30 |" in lines
    assert lines[-1].startswith("| y | is missing |")
    assert len({line.count("|") for line in lines}) == 1


def test_losses_stand_beside_the_first_contestant_s() -> None:
    base = [float(12 - at) for at in range(12)]
    lines = report.losses_table({"a": base, "b": [*base[:-1], 1.5]})
    assert lines[0] == (
        "| contestant | loss of step 1 | loss of step 10 | loss of step 12 | "
        "mean distance from a | most |"
    )
    assert lines[3] == "| b | 12.0000 | 3.0000 | 1.5000 | 0.0417 | 0.5000 |"


def failing(after: int) -> Any:
    """A maker of a contestant that fails in the step behind ``after`` others."""

    def make(bench: Bench) -> contestants.Contestant:
        contestant = CONTESTANTS["torch bf16"](bench)
        calls: Iterator[int] = iter(range(after))

        def logits(x: torch.Tensor) -> torch.Tensor:
            if next(calls, None) is None:
                raise RuntimeError("out of | memory\nand more")
            y: torch.Tensor = contestant.model(x)
            return y

        return contestant._replace(logits=logits)

    return make


def test_what_fails_is_a_row_with_its_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, after in (("te delayed", 0), ("te block", 6)):
        monkeypatch.setitem(CONTESTANTS, name, failing(after))
    arguments = ["--cpu", "--shape=tiny", "--tokens=32", "--sequence", "16", "--loss=eager"]
    only = ["te block", "torch bf16", "te delayed", "fp8core delayed"]
    command.main([*arguments, "--turns=2", "--losses=4", "--only", *only])
    printed = capsys.readouterr().out
    rows = re.findall(r"^\| ([\w ]+) \| (\d+\.\d\d|RuntimeError)", printed, re.MULTILINE)
    assert [name for name, _ in rows[:4]] == [
        *("torch bf16", "fp8core delayed"),
        *("te delayed", "te block"),
    ]
    assert printed.count("| RuntimeError: out of / memory |") == 2
    assert "| fp8core delayed | 5." in printed
    assert "mean distance from torch bf16" in printed


def test_a_call_that_raised_is_not_made_again() -> None:
    calls: list[int] = []

    def call() -> None:
        calls.append(1)
        if len(calls) == 2:
            raise ValueError("no more")

    contest = Contest(HOST)
    run = contest.guarded("x", call)
    for _ in range(4):
        run()
    assert len(calls) == 2
    assert contest.refused == {"x": "ValueError: no more"}


def test_rows_that_do_not_fit_are_refused() -> None:
    with pytest.raises(SystemExit):
        command.main(["--cpu", "--tokens", "48", "--sequence", "32"])
