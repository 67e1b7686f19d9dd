"""DotProductAttention in high precision against loops over single queries: all pairs of options."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from fp8core import DotProductAttention
from tests.modules.attention_oracle import Asked, attend
from tests.pairs import pairs

F64 = torch.float64
HEADS, GROUPS, SIZE, SIZE_V = 4, 2, 3, 2
CU_Q, CU_KV = [0, 4, 4, 6], [0, 2, 5, 5]  # the second has no query, the third no key
STARTS_Q, STARTS_KV = [0, 5, 6, 9], [1, 3, 7, 9]  # gaps between sequences, and around them
BATCH, LONGEST_Q, LONGEST_KV = 3, 4, 5

MASKS = (
    *("no_mask", "padding", "causal", "padding_causal", "causal_bottom_right"),
    *("padding_causal_bottom_right", "arbitrary"),
)
WINDOWS = ((-1, -1), (1, 0), (2, 1))
BIASES = ("no_bias", "pre_scale_bias", "post_scale_bias", "alibi")
SOFTMAXES = ("vanilla", "off-by-one", "learnable")
LAYOUTS = [
    (layout, mask)
    for layout in ("sbhd", "bshd", "thd")
    for mask in MASKS
    if "padding" in mask or layout != "thd"
]


class Combination(NamedTuple):
    """A mask in a layout with a bias, a softmax and a cap of the logits."""

    layout: str
    mask_type: str
    window: tuple[int, int]
    bias_type: str
    softmax: str
    softcap: float


def is_offered(layout: tuple[str, str], window: tuple[int, int], *options: object) -> bool:
    return layout[1] != "arbitrary" or window == (-1, -1)


COMBINATIONS = [
    Combination(*layout, *options)
    for layout, *options in pairs(LAYOUTS, WINDOWS, BIASES, SOFTMAXES, (0.0, 1.5), keep=is_offered)
]


def cu(offsets: list[int]) -> torch.Tensor:
    return torch.tensor(offsets, dtype=torch.int32)


class Side(NamedTuple):
    """The tokens of one side: its first dimensions, and where sequence ``at`` is in them."""

    layout: str
    offsets: list[int]
    starts: list[int]
    longest: int
    is_padded: bool

    @property
    def size(self) -> tuple[int, ...]:
        sizes = {"thd": (11,), "bshd": (BATCH, self.longest), "sbhd": (self.longest, BATCH)}
        return sizes[self.layout]

    def part(self, x: torch.Tensor, at: int) -> torch.Tensor:
        length = self.offsets[at + 1] - self.offsets[at] if self.is_padded else self.longest
        if self.layout == "thd":
            return x[self.starts[at] : self.starts[at] + length]
        return x[:length, at] if self.layout == "sbhd" else x[at, :length]


def inputs(one: Combination, number: int) -> tuple[Any, ...]:
    """Return the layer, its call, the leaves to differentiate, and the expected result."""
    torch.manual_seed(number)
    is_padded = "padding" in one.mask_type
    queries = Side(one.layout, CU_Q, STARTS_Q, LONGEST_Q, is_padded)
    keys = Side(one.layout, CU_KV, STARTS_KV, LONGEST_KV, is_padded)
    q = torch.randn(*queries.size, HEADS, SIZE, dtype=F64, requires_grad=True)
    k = torch.randn(*keys.size, GROUPS, SIZE, dtype=F64, requires_grad=True)
    v = torch.randn(*keys.size, GROUPS, SIZE_V, dtype=F64, requires_grad=True)
    layer = DotProductAttention(
        HEADS,
        (SIZE, SIZE_V),
        GROUPS,
        qkv_format=one.layout,
        attn_mask_type=one.mask_type,
        window_size=one.window,
        softcap=one.softcap,
        softmax_scale=0.7,
        softmax_type=one.softmax,
        return_max_logit=True,
    ).double()
    call: dict[str, Any] = {"core_attention_bias_type": one.bias_type}
    leaves = [q, k, v]
    if is_padded:
        call |= {"cu_seqlens_q": cu(CU_Q), "cu_seqlens_kv": cu(CU_KV)}
    if one.layout == "thd":
        call |= {"cu_seqlens_q_padded": cu(STARTS_Q), "cu_seqlens_kv_padded": cu(STARTS_KV)}
    if "scale" in one.bias_type:
        size = (1 if number % 3 else BATCH, HEADS if number % 4 else 1, LONGEST_Q, LONGEST_KV)
        size = (*size[:2], LONGEST_Q, 3) if one.layout == "thd" else size
        bias = torch.randn(size, dtype=F64, requires_grad=True)
        call["core_attention_bias"] = bias
        leaves.append(bias)
    if one.bias_type == "alibi":
        call["alibi_slopes"] = torch.rand(HEADS) if number % 2 else torch.rand(BATCH, HEADS)
    if one.mask_type == "arbitrary":
        mask = torch.rand(BATCH if number % 2 else 1, 1, LONGEST_Q, LONGEST_KV) < 0.4
        mask[:, :, 1] = True
        call["attention_mask"] = mask
    if layer.softmax_offset is not None:
        torch.nn.init.normal_(layer.softmax_offset)
        leaves.append(layer.softmax_offset)
    asked = Asked(
        one.mask_type,
        one.window,
        scale=0.7,
        softcap=layer.softcap,
        bias_type=one.bias_type,
        bias=call.get("core_attention_bias"),
        slopes=call.get("alibi_slopes"),
        softmax=one.softmax,
        offset=layer.softmax_offset,
        mask=call.get("attention_mask"),
    )
    want = torch.zeros(*queries.size, HEADS, SIZE_V, dtype=F64)
    for at in range(BATCH):
        rows = attend(asked, at, queries.part(q, at), keys.part(k, at), keys.part(v, at))
        queries.part(want, at).copy_(rows)
    return layer, call, leaves, want.flatten(-2), asked


@pytest.mark.parametrize(
    ("one", "number"),
    [
        pytest.param(one, number, id="-".join(map(str, one)))
        for number, one in enumerate(COMBINATIONS)
    ],
)
def test_combination_equals_single_queries(one: Combination, number: int) -> None:
    layer, call, leaves, want, asked = inputs(one, number)
    out, max_logit = layer(*leaves[:3], **call)
    torch.testing.assert_close(out, want, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(max_logit.max(), torch.stack(asked.max_logits).max().detach())
    grad = torch.randn_like(out)
    grads = torch.autograd.grad(out, leaves, grad, materialize_grads=True)
    wanted = torch.autograd.grad(want, leaves, grad, materialize_grads=True)
    for got, expected in zip(grads, wanted, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-11)
