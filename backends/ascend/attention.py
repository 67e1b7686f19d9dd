"""Attention by torch_npu's fused kernels, for the masks that they have.

A backward kernel takes the maximum and the sum of each query's exponentials; the contract's
statistics, the logarithm of that sum with the maximum in it, are the maximum to a sum of 1.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from fp8core.backend_api import AttentionBackwardDesc, AttentionDesc
from fp8core_backends.ascend import ops

__all__ = ["attention", "attention_backward", "refused_attention"]

_LAYOUTS = {"sbhd": "SBH", "bshd": "BSND"}
_MAX_HEAD_DIM = 768
_NO_LIMIT = 2**31 - 1
_NEVER = torch.finfo(torch.float32).max / 2
"""The statistic of a query without keys in backward: all its weights become 0."""


class _Mask(NamedTuple):
    """The arguments of a kernel that say which keys a query looks at."""

    mode: int
    mask: torch.Tensor | None = None
    before: int = _NO_LIMIT
    after: int = _NO_LIMIT


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
        arbitrary=desc.arbitrary,
    )
    if desc.layout not in _LAYOUTS:
        return f"no attention in {desc.layout}, whose sequences' ends are on the device"
    if desc.dtype not in ops.QUANTIZABLE:
        return f"no attention in {desc.dtype}"
    if desc != plain:
        return "no padding, bias, softcap, sink, dropout or largest logit in attention"
    if desc.head_dim != desc.head_dim_v or desc.head_dim > _MAX_HEAD_DIM:
        return f"no head sizes but equal ones of up to {_MAX_HEAD_DIM}"
    if desc.arbitrary and desc.window != (-1, -1):
        return "no window next to a mask"
    is_causal = desc.window == (-1, 0)
    if desc.window != (-1, -1) and not (is_causal or desc.bottom_right):
        return "no window that counts from the upper left, but the causal mask"
    return None


@functools.lru_cache(maxsize=8)
def _causal(device: torch.device) -> torch.Tensor:
    """Return the mask that stands for every causal one: bool ``[2048, 2048]``, True above the
    diagonal."""
    return torch.ones(2048, 2048, dtype=torch.bool, device="cpu").triu(1).to(device)


def _mask(desc: AttentionDesc, q: torch.Tensor, kv: int, mask: torch.Tensor | None) -> _Mask:
    """Return the mask's arguments for the queries ``q`` and ``kv`` keys a sequence."""
    left, right = desc.window
    if desc.arbitrary:
        assert mask is not None
        sequences, queries = _sizes(desc, q)
        full = torch.broadcast_to(mask, (sequences, desc.heads, queries, kv))
        return _Mask(ops.FULL_MASK, full.contiguous())
    if desc.window == (-1, -1):
        return _Mask(ops.NO_MASK)
    if desc.window == (-1, 0):
        mode = ops.CAUSAL_BOTTOM_RIGHT if desc.bottom_right else ops.CAUSAL_TOP_LEFT
        return _Mask(mode, _causal(q.device))
    limits = (_NO_LIMIT if limit < 0 else limit for limit in (left, right))
    return _Mask(ops.BAND, _causal(q.device), *limits)


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


def attention(
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
    given = _mask(desc, part, keys, mask)
    result, largest, total = ops.fusion_attention(
        _flat(desc, part),
        _flat(desc, k),
        _flat(desc, v),
        heads=desc.heads,
        layout=_LAYOUTS[desc.layout],
        scale=desc.scale,
        mask=given,
    )
    out.narrow(dim, first, queries - first).copy_(result.reshape(part.shape))
    stats[:, :, first:] = largest[..., 0] + torch.log(total[..., 0])
    if given.mode == ops.FULL_MASK and given.mask is not None:
        is_blind = given.mask.all(-1)  # [b, heads, s]
        stats = stats.masked_fill(is_blind, -torch.inf)
        by_query = is_blind.permute(2, 0, 1) if desc.layout == "sbhd" else is_blind.permute(0, 2, 1)
        out = out.masked_fill(by_query[..., None], 0)
    return out, stats, None


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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None, None]:
    """Return the gradients of q, k and v, and None twice; see the backend API."""
    forward = desc.attention
    dim = forward.layout.index("s")
    sequences, queries = _sizes(forward, q)
    keys = k.shape[dim]
    grad_q, grad_k, grad_v = (
        torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)
    )
    first = _without_keys(forward, queries, keys)
    if 0 in (sequences, queries - first, keys):
        return grad_q, grad_k, grad_v, None, None
    parts = [x.narrow(dim, first, queries - first) for x in (grad_out, q, out)]
    seen = stats[:, :, first:]
    seen = seen.masked_fill(seen == -torch.inf, _NEVER)
    largest = seen[..., None].expand(*seen.shape, 8).contiguous()
    grad_part, query, result = (_flat(forward, part) for part in parts)
    found = ops.fusion_attention_grad(
        grad_part,
        (query, _flat(forward, k), _flat(forward, v)),
        result,
        (largest, torch.ones_like(largest)),
        heads=forward.heads,
        layout=_LAYOUTS[forward.layout],
        scale=forward.scale,
        mask=_mask(forward, parts[1], keys, mask),
    )
    grad_q.narrow(dim, first, queries - first).copy_(found[0].reshape(parts[1].shape))
    return grad_q, found[1].reshape(k.shape), found[2].reshape(v.shape), None, None
