"""Attention by torch_npu's fused kernels, for the masks that they have."""

from __future__ import annotations

import torch

from fp8core.backend_api import AttentionBackwardDesc, AttentionDesc
from fp8core_backends.ascend.dense_attention import (
    LAYOUTS,
    dense_attention,
    dense_attention_backward,
)
from fp8core_backends.ascend.operators import arguments
from fp8core_backends.ascend.packed_attention import packed_attention, packed_attention_backward

_MAX_HEAD_DIM = 768


def refused_attention(desc: AttentionDesc) -> str | None:
    """Return why torch_npu's kernels do not compute ``desc``, or None."""
    plain = AttentionDesc(
        desc.dtype,
        desc.layout,
        desc.heads,
        desc.groups,
        desc.head_dim,
        desc.head_dim_v,
        desc.scale,
        desc.window,
        desc.bottom_right,
        padding=desc.padding,
        arbitrary=desc.arbitrary,
        qkv=desc.qkv,
        s=desc.s,
    )
    if desc.low_precision:
        return (
            "its attention in FP8 is documented for HiFloat8 in two sizes, without a mask, with a "
            "scale for each 128 queries, 256 keys and 512 values, not for one scale a tensor; "
            "leave fp8_dpa, or use_backend('reference') to emulate it"
        )
    if desc.layout not in (*LAYOUTS, "thd"):
        return f"no attention in {desc.layout}"
    if desc.layout == "thd" and not desc.padding:
        return "no thd without lengths of its sequences"
    if desc.dtype not in arguments.QUANTIZABLE:
        return f"no attention in {desc.dtype}"
    if desc != plain:
        return "no bias, softcap, sink, dropout or largest logit in attention"
    if desc.head_dim != desc.head_dim_v or desc.head_dim > _MAX_HEAD_DIM:
        return f"no head sizes but equal ones of up to {_MAX_HEAD_DIM}"
    if desc.arbitrary and (desc.window != (-1, -1) or desc.padding):
        return "no window and no lengths of sequences next to a mask"
    is_causal = desc.window == (-1, 0)
    if desc.window != (-1, -1) and not (is_causal or desc.bottom_right):
        return "no window that counts from the upper left, but the causal mask"
    return None


def attention(
    desc: AttentionDesc,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_kv: torch.Tensor | None = None,
    cu_seqlens_q_padded: torch.Tensor | None = None,
    cu_seqlens_kv_padded: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, None]:
    """Return the output, the statistics and None; see the backend API."""
    if not desc.padding:
        return dense_attention(desc, q, k, v, mask=mask)
    ends = (cu_seqlens_q, cu_seqlens_kv)
    starts = (cu_seqlens_q_padded, cu_seqlens_kv_padded)
    return packed_attention(desc, q, k, v, cu_seqlens=ends, cu_seqlens_padded=starts)


def attention_backward(
    desc: AttentionBackwardDesc,
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    stats: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_kv: torch.Tensor | None = None,
    cu_seqlens_q_padded: torch.Tensor | None = None,
    cu_seqlens_kv_padded: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None, None]:
    """Return the gradients of q, k and v, and None twice; see the backend API."""
    if not desc.attention.padding:
        return dense_attention_backward(desc, grad_out, (q, k, v), out, stats, mask=mask)
    ends = (cu_seqlens_q, cu_seqlens_kv)
    starts = (cu_seqlens_q_padded, cu_seqlens_kv_padded)
    return packed_attention_backward(
        desc, grad_out, (q, k, v), out, stats, cu_seqlens=ends, cu_seqlens_padded=starts
    )
