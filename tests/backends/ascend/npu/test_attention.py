"""Attention and rotary embedding on the device against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fp8core.backend_api import AttentionBackwardDesc, AttentionDesc, RotaryDesc
from fp8core.dispatch.table import resolve
from tests.backends.ascend.softcann.device import Call

CPU, NPU = torch.device("cpu"), torch.device("npu:0")
BF16 = torch.bfloat16
BATCH, HEADS, SIZE = 2, 4, 32

MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "causal": {"window": (-1, 0)},
    "causal bottom right": {"window": (-1, 0), "bottom_right": True},
    "window": {"window": (5, 0), "bottom_right": True},
    "band": {"window": (5, 3), "bottom_right": True},
    "arbitrary": {"arbitrary": True},
}


def values(*sizes: int, seed: int) -> torch.Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed)).bfloat16()


def laid(layout: str, length: int, heads: int, seed: int) -> torch.Tensor:
    sizes = (length, BATCH) if layout == "sbhd" else (BATCH, length)
    return values(*sizes, heads, SIZE, seed=seed)


@pytest.mark.parametrize("groups", [HEADS, 2])
@pytest.mark.parametrize("lengths", [(24, 24), (9, 24), (24, 9), (1, 24)], ids=str)
@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
@pytest.mark.parametrize("name", MASKS)
def test_attention_and_its_gradients_are_the_reference_s(
    name: str, layout: str, lengths: tuple[int, int], groups: int, calls: list[Call]
) -> None:
    queries, keys = lengths
    q = laid(layout, queries, HEADS, 0)
    k, v = (laid(layout, keys, groups, seed) for seed in (1, 2))
    grad = laid(layout, queries, HEADS, 3)
    desc = AttentionDesc(BF16, layout, HEADS, groups, SIZE, SIZE, 0.2, **MASKS[name])
    keywords = {}
    if desc.arbitrary:
        mask = torch.rand(BATCH, 1, queries, keys, generator=torch.Generator().manual_seed(4)) < 0.4
        mask[0, 0, 0] = True  # a query without keys
        keywords = {"mask": mask}
    results = []
    for device in (CPU, NPU):
        inputs = [x.to(device) for x in (q, k, v)]
        given = {key: value.to(device) for key, value in keywords.items()}
        out, stats, largest = resolve(desc, device).run(*inputs, **given)
        assert largest is None
        backward = resolve(AttentionBackwardDesc(desc), device)
        grads = backward.run(grad.to(device), *inputs, out, stats, **given)
        results.append([x.cpu().float() for x in (out, stats, *grads[:3])])
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=2.0**-6, atol=2.0**-6)
    names = [call.name for call in calls if "FlashAttention" in call.name]
    assert names == ["aclnnFlashAttentionScoreV4", "aclnnFlashAttentionScoreGradV4"]


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotated", [SIZE, 16])
@pytest.mark.parametrize("starts", [None, [3, 25]], ids=str)
@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
def test_rotary_is_the_reference_s(
    layout: str, starts: list[int] | None, rotated: int, interleaved: bool, inverse: bool
) -> None:
    x = laid(layout, 12, HEADS, 0)
    freqs = 3 * torch.rand(30, 1, 1, rotated, generator=torch.Generator().manual_seed(1))
    desc = RotaryDesc(BF16, layout, interleaved, inverse)
    results = []
    for device in (CPU, NPU):
        begin = None if starts is None else torch.tensor(starts, dtype=torch.int32, device=device)
        given = {} if begin is None else {"start_positions": begin}
        results.append(resolve(desc, device).run(x.to(device), freqs.to(device), **given).cpu())
    torch.testing.assert_close(*results, rtol=2.0**-7, atol=1e-5, equal_nan=True)
