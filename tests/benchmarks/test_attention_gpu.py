"""The benchmark of attention: its table on records written by hand, and a trial run on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.benchmarks import attention_gpu
from tests.benchmarks.attention_gpu import CASES, CUDNN, OURS, Case, exact, tensors
from tests.benchmarks.measuring import records
from tests.benchmarks.measuring.device import HOST

SMALL = Case("tiny", 2, 16, 4, 2, 16)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CASES, "tiny", SMALL)


def test_ratios_are_to_torch_s_cudnn_within_turns() -> None:
    times = {CUDNN: [100.0, 200.0] * 6, OURS: [90.0, 180.0] * 6}
    record = {"measure": "graph", "case": "8B", "flops": 1e9, "us": times, "errors": {}}
    *_, own = attention_gpu.table([record]).splitlines()
    assert own == "| 8B | graph | fp8core bf16 | 135.0 | 26 | 0.90 (0.90-0.90) |  |"


def test_flops_of_a_causal_mask_are_half() -> None:
    assert SMALL.flops == 2 * 2 * 4 * 16 * 16 * 16
    assert SMALL._replace(is_causal=False).flops == 2 * SMALL.flops


@pytest.mark.parametrize("is_causal", [False, True])
def test_the_exact_result_is_torch_s(is_causal: bool) -> None:
    case = SMALL._replace(is_causal=is_causal)
    given = tensors(case, torch.device("cpu"))
    kind = torch.nn.attention.SDPBackend.MATH
    want = attention_gpu.torch_attention(case, kind)(*given[:3])[:, 0, :16].float()
    torch.testing.assert_close(exact(case, given), want.detach(), rtol=0.02, atol=0.02)


def test_a_trial_run_names_who_does_not_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["torch cudnn", "fp8core bf16", "fp8core current"]
    given = ["--case", "tiny", "--turn-seconds", "0", "--out", str(tmp_path)]
    attention_gpu.main([*given, "--contestant", *names], HOST)
    found = records.read(tmp_path)
    assert [one["measure"] for one in found] == ["graph", "graph forward", "eager", "host"]
    assert all(set(one["us"]) == set(names[1:]) for one in found)
    assert set(found[0]["refused"]) == {"torch cudnn"}
    assert found[0]["errors"]["fp8core bf16"] < 0.01
    assert found[0]["errors"]["fp8core current"] < attention_gpu.MOST_ERROR
    assert "torch cudnn does not run" in capsys.readouterr().out
