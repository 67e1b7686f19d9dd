"""Attention of sequences that are as long as their tensors.

A backward kernel takes the maximum and the sum of each query's exponentials; the contract's
statistics, the logarithm of that sum with the maximum in it, are the maximum to a sum of 1.
"""

from __future__ import annotations

import torch

from fp8core.backend_api import AttentionBackwardDesc, AttentionDesc
from fp8core_backends.ascend.attention_mask import NEVER, Mask, mask_of
from fp8core_backends.ascend.operators import fused_attention

LAYOUTS = {"sbhd": "SBH", "bshd": "BSND"}
"""torch_npu's names of the layouts."""


def _mask(desc: AttentionDesc, q: torch.Tensor, kv: int, mask: torch.Tensor | None) -> Mask:
    """Return the mask's arguments for the queries ``q`` and ``kv`` keys a sequence."""
    if not desc.arbitrary:
        return mask_of(desc, q.device)
    assert mask is not None
    sequences, queries = _sizes(desc, q)
    full = torch.broadcast_to(mask, (sequences, desc.heads, queries, kv))
    return Mask(fused_attention.FULL_MASK, full.contiguous())


def _sizes(desc: AttentionDesc, q: torch.Tensor) -> tuple[int, int]:
    """Return the number of sequences and of queries in each."""
    return (q.shape[1], q.shape[0]) if desc.layout == "sbhd" else (q.shape[0], q.shape[1])


def _flat(desc: AttentionDesc, x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` in the kernel's layout: ``[s, b, h d]`` for sbhd."""
    return (x.flatten(2) if desc.layout == "sbhd" else x).contiguous()


def _without_keys(desc: AttentionDesc, queries: int, keys: int) -> int:
    """Return how many queries come first that look at no key, because of the window alone."""
    right = desc.window[1]
    if not desc.bottom_right or right < 0:
        return 0
    return min(queries, max(0, queries - keys - right))


def dense_attention(
    desc: AttentionDesc,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, None]:
    """Return the output, the statistics and None; see the backend API."""
    dim = desc.layout.index("s")
    sequences, queries = _sizes(desc, q)
    keys = k.shape[dim]
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    shape = (sequences, desc.heads, queries)
    stats = torch.full(shape, -torch.inf, dtype=torch.float32, device=q.device)
    first = _without_keys(desc, queries, keys)
    if 0 in (sequences, queries - first, keys):
        return out, stats, None
    part = q.narrow(dim, first, queries - first)
    masking = _mask(desc, part, keys, mask)
    result, largest, total = fused_attention.fusion_attention(
        _flat(desc, part),
        _flat(desc, k),
        _flat(desc, v),
        heads=desc.heads,
        layout=LAYOUTS[desc.layout],
        scale=desc.scale,
        mask=masking,
    )
    out.narrow(dim, first, queries - first).copy_(result.reshape(part.shape))
    stats[:, :, first:] = largest[..., 0] + torch.log(total[..., 0])
    if masking.mode == fused_attention.FULL_MASK and masking.mask is not None:
        is_blind = masking.mask.all(-1)  # [b, heads, s]
        stats = stats.masked_fill(is_blind, -torch.inf)
        by_query = is_blind.permute(2, 0, 1) if desc.layout == "sbhd" else is_blind.permute(0, 2, 1)
        out = out.masked_fill(by_query[..., None], 0)
    return out, stats, None


def dense_attention_backward(
    desc: AttentionBackwardDesc,
    grad_out: torch.Tensor,
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    out: torch.Tensor,
    stats: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None, None]:
    """Return the gradients of q, k and v, and None twice; see the backend API."""
    forward = desc.attention
    q, k, v = qkv
    dim = forward.layout.index("s")
    sequences, queries = _sizes(forward, q)
    keys = k.shape[dim]
    grad_q, grad_k, grad_v = (
        torch.zeros_like(x, memory_format=torch.contiguous_format) for x in qkv
    )
    first = _without_keys(forward, queries, keys)
    if 0 in (sequences, queries - first, keys):
        return grad_q, grad_k, grad_v, None, None
    parts = [x.narrow(dim, first, queries - first) for x in (grad_out, q, out)]
    seen = stats[:, :, first:]
    seen = seen.masked_fill(seen == -torch.inf, NEVER)
    largest = seen[..., None].expand(*seen.shape, 8).contiguous()
    grad_part, query, result = (_flat(forward, part) for part in parts)
    gradients = fused_attention.fusion_attention_grad(
        grad_part,
        (query, _flat(forward, k), _flat(forward, v)),
        result,
        (largest, torch.ones_like(largest)),
        heads=forward.heads,
        layout=LAYOUTS[forward.layout],
        scale=forward.scale,
        mask=_mask(forward, parts[1], keys, mask),
    )
    grad_q.narrow(dim, first, queries - first).copy_(gradients[0].reshape(parts[1].shape))
    return grad_q, gradients[1].reshape(k.shape), gradients[2].reshape(v.shape), None, None
