"""Attention by one operator, and its gradients."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Protocol

import torch

from fp8core_backends.ascend.operators.arguments import (
    QUANTIZABLE,
    check_rows,
    check_scale,
    require,
)
from fp8core_backends.ascend.operators.library import load

NO_MASK, FULL_MASK, CAUSAL_TOP_LEFT, CAUSAL_BOTTOM_RIGHT, BAND = 0, 1, 2, 3, 4
"""What ``sparse_mode`` says of a mask: none; bool ``[b, heads, s_q, s_kv]``, True excludes; for the
others bool ``[2048, 2048]``, True above the diagonal. A band counts from the lower right corner."""


class AttentionMask(Protocol):
    """Which keys a query looks at: the mode, its mask, how many keys ``before`` and ``after`` the
    query's own are in a band, and in the layout TND where sequences end."""

    @property
    def mode(self) -> int:
        """The mode of ``sparse_mode``, of those above."""

    @property
    def mask(self) -> torch.Tensor | None:
        """The mask of the mode."""

    @property
    def before(self) -> int:
        """Keys before the query's own."""

    @property
    def after(self) -> int:
        """Keys after the query's own."""

    @property
    def query_ends(self) -> Sequence[int] | None:
        """Where the queries of each sequence end, for TND."""

    @property
    def key_ends(self) -> Sequence[int] | None:
        """Where the keys of each sequence end, for TND."""


def _check_attention(
    operator: str, tensors: tuple[torch.Tensor, ...], layout: str, mask: AttentionMask
) -> None:
    check_rows(operator, *tensors)
    dims = {"SBH": 3, "BSND": 4, "TND": 3}
    require(layout in dims, operator, f"layout {layout!r}, expected one of {[*dims]}")
    for x in tensors:
        shape = f"{list(x.shape)} in {layout}"
        require(x.dim() == dims[layout], operator, shape)
        require(x.dtype in QUANTIZABLE, operator, f"{x.dtype}, expected bfloat16 or float16")
    _check_sequences(operator, tensors, layout, mask)
    if mask.mode == NO_MASK:
        require(mask.mask is None, operator, "a mask, but sparse_mode 0")
        return
    is_bool = mask.mask is not None and mask.mask.dtype == torch.bool
    require(is_bool, operator, "sparse_mode without a bool mask")
    if mask.mode != FULL_MASK and mask.mask is not None:
        compressed = f"a mask {list(mask.mask.shape)}, expected [2048, 2048]"
        require(tuple(mask.mask.shape) == (2048, 2048), operator, compressed)


def _check_sequences(
    operator: str, tensors: tuple[torch.Tensor, ...], layout: str, mask: AttentionMask
) -> None:
    ends = (mask.query_ends, mask.key_ends)
    if layout != "TND":
        require(ends == (None, None), operator, f"ends of sequences in {layout}")
        return
    lengths = []
    for x, of_all in zip(tensors, ends, strict=False):  # queries, then keys
        require(of_all is not None, operator, "no ends of sequences in TND")
        assert of_all is not None
        lengths.append([end - start for start, end in itertools.pairwise((0, *of_all))])
        is_whole = min(lengths[-1], default=0) > 0 and of_all[-1] == len(x)
        require(is_whole, operator, f"sequences end at {[*of_all]} of {len(x)} tokens")
    require(len(lengths[0]) == len(lengths[1]), operator, "other sequences of keys than queries")
    if mask.mode == CAUSAL_BOTTOM_RIGHT:
        is_seen = all(q <= kv for q, kv in zip(*lengths, strict=True))
        require(is_seen, operator, "queries before the first key of their sequence")
    require(mask.mode != FULL_MASK, operator, "a mask of its own in TND")


def fusion_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    heads: int,
    layout: str,
    scale: float,
    mask: AttentionMask,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the output, and the maximum and the sum of each query's exponentials, float32
    ``[b, heads, s, 8]`` of equal entries. ``layout`` is ``SBH``, ``BSND`` or ``TND``, whose
    statistics have the shape ``[t, heads, 8]`` and hold ``[heads, s, 8]`` of each sequence."""
    _check_attention("npu_fusion_attention", (q, k, v), layout, mask)
    result = load().npu_fusion_attention(
        q,
        k,
        v,
        heads,
        layout,
        pse=None,
        padding_mask=None,
        atten_mask=mask.mask,
        scale=scale,
        keep_prob=1.0,
        pre_tockens=mask.before,
        next_tockens=mask.after,
        inner_precise=0,
        prefix=None,
        actual_seq_qlen=mask.query_ends,
        actual_seq_kvlen=mask.key_ends,
        sparse_mode=mask.mode,
        gen_mask_parallel=True,
        sync=False,
    )
    out, largest, total = result[:3]
    return out, largest, total


def fusion_attention_grad(
    grad: torch.Tensor,
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    out: torch.Tensor,
    softmax: tuple[torch.Tensor, torch.Tensor],
    *,
    heads: int,
    layout: str,
    scale: float,
    mask: AttentionMask,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of q, k and v; ``softmax`` are the maximum and the sum of forward."""
    operator = "npu_fusion_attention_grad"
    _check_attention(operator, (*qkv, grad, out), layout, mask)
    for statistic in softmax:
        shape = tuple(statistic.shape)
        check_scale(operator, "a statistic of the softmax", statistic, (*shape[:-1], 8))
    result = load().npu_fusion_attention_grad(
        *qkv,
        grad,
        heads,
        layout,
        pse=None,
        padding_mask=None,
        atten_mask=mask.mask,
        softmax_max=softmax[0],
        softmax_sum=softmax[1],
        softmax_in=None,
        attention_in=out,
        scale_value=scale,
        keep_prob=1.0,
        pre_tockens=mask.before,
        next_tockens=mask.after,
        inner_precise=0,
        seed=0,
        offset=0,
        numels=0,
        prefix=None,
        actual_seq_qlen=mask.query_ends,
        actual_seq_kvlen=mask.key_ends,
        sparse_mode=mask.mode,
        gen_mask_parallel=True,
        sync=False,
    )
    grad_q, grad_k, grad_v = result[:3]
    return grad_q, grad_k, grad_v
