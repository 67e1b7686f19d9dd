"""Attention that a backend for other devices runs: said in the log, refused where it is large."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch

import fp8core
from fp8core import DotProductAttention, UnsupportedError, use_backend
from tests.dispatch import toys

LONG = 24_000  # squared, in float32, 2.1 GiB


@pytest.fixture(autouse=True)
def fallback() -> Iterator[None]:
    """Have a backend for CUDA, which also runs elsewhere, come first on the CPU."""
    with toys.isolation():
        elsewhere = toys.backend("elsewhere", device_types=("cuda",), portable=True, priority=9)
        toys.register(elsewhere)
        yield


def tokens(length: int, layout: str = "sbhd") -> torch.Tensor:
    return torch.zeros((length, 1, 8) if layout == "thd" else (length, 1, 1, 8))


def test_large_logits_are_refused_with_the_remedy() -> None:
    q, k = tokens(LONG), tokens(LONG)
    with pytest.raises(UnsupportedError) as caught:
        DotProductAttention(1, 8)(q, k, k)
    said = str(caught.value)
    assert "1 x 1 x 24000 x 24000 of batch, heads, queries and keys are 2.1 GiB" in said
    assert "use_backend('elsewhere') to run it so" in said


def test_the_longest_sequences_count_in_thd() -> None:
    attend = DotProductAttention(1, 8, qkv_format="thd", attn_mask_type="padding")
    q = tokens(LONG, "thd")
    halves = torch.tensor([0, LONG // 2, LONG], dtype=torch.int32)
    longest = {"max_seqlen_q": 20_000, "max_seqlen_kv": 20_000}
    with pytest.raises(UnsupportedError, match="2 x 1 x 20000 x 20000"):
        attend(q, q, q, cu_seqlens_q=halves, cu_seqlens_kv=halves, **longest)


def test_small_logits_run() -> None:
    x = tokens(64).requires_grad_()
    DotProductAttention(1, 8)(x, x, x).sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("name", ["elsewhere", "reference"])
def test_a_backend_that_is_asked_for_or_for_the_device_has_no_limit(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fp8core.chain.attention.spec._MAX_FALLBACK_BYTES", 0)
    x = tokens(8)
    with pytest.raises(UnsupportedError):
        DotProductAttention(1, 8)(x, x, x)
    with use_backend(name):
        DotProductAttention(1, 8)(x, x, x)


def test_the_reference_has_no_limit_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fp8core.chain.attention.spec._MAX_FALLBACK_BYTES", 0)
    with toys.isolation():
        x = tokens(8)
        DotProductAttention(1, 8)(x, x, x)


def test_the_fallback_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    x = tokens(8)
    for _ in range(2):
        fp8core.DotProductAttention(1, 8)(x, x, x)
    said = [record for record in caplog.records if record.levelno == logging.WARNING]
    lines = [record.getMessage() for record in said if "comes before it" in record.getMessage()]
    assert len(lines) == 2  # attention and its backward
    expected = "attention on cpu runs on elsewhere, as no backend for cpu comes before it"
    assert lines[0].startswith(expected)
