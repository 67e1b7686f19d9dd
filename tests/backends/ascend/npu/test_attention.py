"""Attention of sequences with lengths against the reference, and what reaches CANN.

The kit's laws have the masks and layouts of whole batches, and rotary embedding.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from fp8core.backend_api import AttentionBackwardDesc, AttentionDesc, OperandSpec
from fp8core.dispatch.table import resolve
from fp8core.errors import OperandError, UnsupportedError
from tests.backends.ascend.softcann.device import Call
from tests.pairs import pairs

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


@pytest.mark.parametrize("lengths", [(24, 24), (24, 9)])
def test_attention_of_a_batch_is_one_kernel_each_way(
    lengths: tuple[int, int], calls: list[Call]
) -> None:
    """Also of queries that see no key."""
    mask = MASKS["causal bottom right"]
    desc = AttentionDesc(BF16, "bshd", HEADS, HEADS, SIZE, SIZE, 0.2, **mask)
    sizes = (lengths[0], *[lengths[1]] * 2, lengths[0])
    tensors = [values(BATCH, of, HEADS, SIZE, seed=seed) for seed, of in enumerate(sizes)]
    results = []
    for device in (CPU, NPU):
        *qkv, grad = (x.to(device) for x in tensors)
        out, stats, largest = resolve(desc, device).run(*qkv)
        assert largest is None
        grads = resolve(AttentionBackwardDesc(desc), device).run(grad, *qkv, out, stats)
        results.append([x.cpu().float() for x in (out, stats, *grads[:3])])
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=2.0**-6, atol=2.0**-6)
    names = [call.name for call in calls if "FlashAttention" in call.name]
    assert names == ["aclnnFlashAttentionScoreV4", "aclnnFlashAttentionScoreGradV4"]


LENGTHS = {
    "equal": ([7, 5, 9], [7, 5, 9]),
    "more keys": ([3, 1, 4], [9, 6, 4]),
    "more queries": ([9, 6, 4], [3, 1, 4]),
    "empty ones": ([0, 5, 0, 4], [0, 0, 3, 6]),
    "one": ([12], [12]),
    "none": ([0, 0], [0, 0]),
}
PACKED_MASKS = {name: mask for name, mask in MASKS.items() if name != "arbitrary"}


class Packed(NamedTuple):
    """Tensors of sequences, and where those are."""

    desc: AttentionDesc
    q: torch.Tensor
    kv: tuple[torch.Tensor, torch.Tensor]
    grad: torch.Tensor
    keywords: dict[str, Any]

    def run(self, device: torch.device) -> list[torch.Tensor]:
        inputs = [x.to(device) for x in (self.q, *self.kv)]
        given = {
            name: value.to(device) if isinstance(value, torch.Tensor) else value
            for name, value in self.keywords.items()
        }
        out, stats, _ = resolve(self.desc, device).run(*inputs, **given)
        backward = resolve(AttentionBackwardDesc(self.desc), device)
        grads = backward.run(self.grad.to(device), *inputs, out, stats, **given)
        return [x.cpu().float() for x in (out, stats, *grads[:3])]


def packed(layout: str, lengths: str, mask: str, *, gap: int = 0) -> Packed:
    """Return sequences with NaN behind each; ``gap`` tokens of none behind each in thd."""
    both, keywords, tensors = LENGTHS[lengths], {}, []
    for side, of_all, counts in zip(("q", "kv"), both, ((HEADS,), (2, 2)), strict=True):
        ends = torch.tensor([0, *of_all], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        keywords[f"cu_seqlens_{side}"] = ends
        starts, longest = ends, max(of_all) + gap
        if layout == "thd":
            keywords[f"max_seqlen_{side}"] = max(of_all)
            starts = ends + gap * torch.arange(len(ends), dtype=torch.int32)
            if gap:
                keywords[f"cu_seqlens_{side}_padded"] = starts
        size = {
            "thd": (int(starts[-1]),),
            "bshd": (len(of_all), longest),
            "sbhd": (longest, len(of_all)),
        }[layout]
        for count in counts:
            x = values(*size, count, SIZE, seed=len(tensors))
            is_token = torch.zeros(size, dtype=torch.bool)
            for at, length in enumerate(of_all):
                if layout == "thd":
                    is_token[int(starts[at]) : int(starts[at]) + length] = True
                else:
                    (is_token[at] if layout == "bshd" else is_token[:, at])[:length] = True
            tensors.append(x.masked_fill(~is_token[..., None, None], torch.nan))
    desc = AttentionDesc(
        BF16, layout, HEADS, 2, SIZE, SIZE, 0.2, padding=True, **PACKED_MASKS[mask]
    )
    grad = values(*tensors[0].shape, seed=9)
    return Packed(desc, tensors[0], (tensors[1], tensors[2]), grad, keywords)


@pytest.mark.parametrize(
    ("mask", "layout", "lengths"),
    pairs(PACKED_MASKS, ["thd", "thd with gaps", "bshd", "sbhd"], LENGTHS),
)
def test_sequences_with_lengths_are_the_reference_s(
    mask: str, layout: str, lengths: str, calls: list[Call]
) -> None:
    gap = 0 if layout == "thd" else 3
    case = packed(layout.partition(" ")[0], lengths, mask, gap=gap)
    for expected, found in zip(case.run(CPU), case.run(NPU), strict=True):
        torch.testing.assert_close(found, expected, rtol=2.0**-6, atol=2.0**-6)
    kernels = [call.arguments for call in calls if "FlashAttention" in call.name]
    assert len(kernels) == (0 if lengths == "none" else 2)
    assert all("TND" in arguments for arguments in kernels)


def test_packed_tokens_without_gaps_are_not_copied(calls: list[Call]) -> None:
    packed("thd", "equal", "causal").run(NPU)
    assert not [call for call in calls if "Index" in call.name]
    (forward,) = [call for call in calls if call.name == "aclnnFlashAttentionScoreV4"]
    assert forward.arguments[14:16] == ([7, 12, 21], [7, 12, 21])


@pytest.mark.parametrize("lengths", [[0, 7, 40], [0, 7, 5], [-3, 4, 9]], ids=str)
def test_sequence_outside_of_its_tensor_is_refused(lengths: list[int], calls: list[Call]) -> None:
    case = packed("thd", "equal", "causal")
    ends = torch.tensor(lengths, dtype=torch.int32)
    given = {"cu_seqlens_q": ends, "cu_seqlens_kv": ends}
    with pytest.raises(OperandError, match=r"does not fit into \[21, 4, 32\]"):
        case._replace(keywords=given).run(NPU)
    assert not [call for call in calls if "FlashAttention" in call.name]


def test_attention_in_fp8_is_refused_with_the_reason() -> None:
    spec = OperandSpec("e4m3", (0, 0), 448.0)
    desc = AttentionDesc(BF16, "bshd", HEADS, 2, SIZE, SIZE, 0.2, qkv=spec, s=spec)
    with pytest.raises(UnsupportedError, match="its attention in FP8 is documented for HiFloat8"):
        resolve(desc, NPU)
