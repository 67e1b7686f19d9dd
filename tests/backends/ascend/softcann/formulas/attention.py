"""Attention of sequences, rotary embeddings, and their gradients."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from tests.backends.ascend.softcann.device import Described, formula
from tests.backends.ascend.softcann.formulas.values import (
    Optional,
    T,
    decode,
    store,
)


def heads_first(x: T, layout: str, heads: int) -> torch.Tensor:
    """The values as ``[b, heads, s, d]``."""
    values = decode(x)
    if layout == "SBH":
        return values.unflatten(-1, (heads, -1)).permute(1, 2, 0, 3)
    assert layout == "BSND"
    return values.permute(0, 2, 1, 3)


def put_heads(to: T, values: torch.Tensor, layout: str) -> None:
    """Write ``[b, heads, s, d]`` in the layout."""
    store(to, values.permute(2, 0, 1, 3).flatten(-2) if layout == "SBH" else values.transpose(1, 2))


def excluded(mode: int, mask: Optional, sizes: tuple[int, int], band: tuple[int, int]) -> Any:
    """Which keys each query does not look at, or None: what ``sparse_mode`` and the mask say."""
    queries, keys = sizes
    if mode == 0 and mask is None:
        return None
    assert mask is not None
    if mode in (0, 1):
        return mask.values
    assert torch.equal(mask.values, torch.ones(2048, 2048, dtype=torch.bool).triu(1))
    distance = torch.arange(keys)[None] - torch.arange(queries)[:, None]
    if mode != 2:
        distance = distance - (keys - queries)
    before, after = band if mode == 4 else (queries + keys, 0)
    return (distance > after) | (distance < -before)


def weights_of(q: torch.Tensor, k: torch.Tensor, scale: float, out: Any) -> torch.Tensor:
    """The logits ``[b, heads, queries, keys]``, those of excluded keys far below all others."""
    logits = scale * (q @ k.transpose(-1, -2))
    return logits if out is None else logits.masked_fill(out, -1e38)


def sequences(x: T, ends: list[int] | None) -> list[T]:
    """The tokens ``[1, s, heads, d]`` of each sequence of TND."""
    assert ends is not None
    assert ends[-1] == x.shape[0]
    bounds = [0, *ends]
    return [
        Described(x.values[None, start:end], x.dtype) for start, end in itertools.pairwise(bounds)
    ]


def statistics(x: T, of_queries: list[T], heads: int) -> list[T]:
    """The statistics ``[1, heads, s, 8]`` of each sequence, which follow one another in memory."""
    sizes = [heads * one.shape[1] for one in of_queries]
    parts = x.values.view(-1, 8).split(sizes)
    return [Described(part.view(1, heads, -1, 8), x.dtype) for part in parts]


@formula("aclnnFlashAttentionScoreV4")
def flash_attention(*arguments: Any) -> None:
    query, key, value, _pse, _drop, _padding, mask = arguments[:7]
    _prefix, ends, key_ends = arguments[13:16]
    scale, keep, before, after, heads, layout, _inner, mode = arguments[18:26]
    largest, total, _softmax, out = arguments[-4:]
    assert keep == 1.0
    given = {"mask": mask, "scale": scale, "band": (before, after), "heads": heads, "mode": mode}
    if layout != "TND":
        attend((query, key, value), (largest, total, out), layout=layout, **given)
        return
    inputs = (sequences(query, ends), sequences(key, key_ends), sequences(value, key_ends))
    stats = (statistics(one, inputs[0], heads) for one in (largest, total))
    for one in zip(*inputs, *stats, sequences(out, ends), strict=True):
        assert mode != 3 or one[0].shape[1] <= one[1].shape[1]  # as the document asks for TND
        attend(one[:3], one[3:], layout="BSND", **given)


def attend(
    inputs: Any,
    results: Any,
    *,
    mask: Optional,
    scale: float,
    band: tuple[int, int],
    heads: int,
    layout: str,
    mode: int,
) -> None:
    query, key, value = inputs
    largest, total, out = results
    q = heads_first(query, layout, heads)
    groups = key.shape[-1] // q.shape[-1] if layout == "SBH" else key.shape[2]
    k, v = (
        heads_first(x, layout, groups).repeat_interleave(heads // groups, 1) for x in (key, value)
    )
    sizes = (q.shape[2], k.shape[2])
    logits = weights_of(q, k, scale, excluded(mode, mask, sizes, band))
    top = logits.amax(-1, keepdim=True)
    exponentials = torch.exp(logits - top)
    sums = exponentials.sum(-1, keepdim=True)
    largest.values.copy_(top.expand(*top.shape[:-1], 8))
    total.values.copy_(sums.expand(*sums.shape[:-1], 8))
    put_heads(out, (exponentials / sums) @ v, layout)


@formula("aclnnFlashAttentionScoreGradV4")
def flash_attention_grad(*arguments: Any) -> None:
    query, key, value, grad, _pse, _drop, _padding, mask = arguments[:8]
    largest, total, _softmax, result = arguments[8:12]
    _prefix, ends, key_ends = arguments[20:23]
    scale, keep, before, after, heads, layout, _layout, _inner, mode = arguments[25:34]
    grad_q, grad_k, grad_v = arguments[-7:-4]
    assert keep == 1.0
    given = {"mask": mask, "scale": scale, "band": (before, after), "heads": heads, "mode": mode}
    if layout != "TND":
        inputs = (query, key, value, grad, result, largest, total)
        attend_grad(inputs, (grad_q, grad_k, grad_v), layout=layout, **given)
        return
    of_queries = [sequences(one, ends) for one in (query, grad, result, grad_q)]
    of_keys = [sequences(one, key_ends) for one in (key, value, grad_k, grad_v)]
    stats = (statistics(one, of_queries[0], heads) for one in (largest, total))
    for q, g, o, to_q, k, v, to_k, to_v, top, sums in zip(
        *of_queries, *of_keys, *stats, strict=True
    ):
        attend_grad((q, k, v, g, o, top, sums), (to_q, to_k, to_v), layout="BSND", **given)


def attend_grad(
    inputs: Any,
    results: Any,
    *,
    mask: Optional,
    scale: float,
    band: tuple[int, int],
    heads: int,
    layout: str,
    mode: int,
) -> None:
    query, key, value, grad, result, largest, total = inputs
    grad_q, grad_k, grad_v = results
    q, g, o = (heads_first(x, layout, heads) for x in (query, grad, result))
    groups = key.shape[-1] // q.shape[-1] if layout == "SBH" else key.shape[2]
    k, v = (
        heads_first(x, layout, groups).repeat_interleave(heads // groups, 1) for x in (key, value)
    )
    sizes = (q.shape[2], k.shape[2])
    logits = weights_of(q, k, scale, excluded(mode, mask, sizes, band))
    weights = torch.exp(logits - largest.values[..., :1]) / total.values[..., :1]
    slopes = weights * (g @ v.transpose(-1, -2) - (g * o).sum(-1, keepdim=True))
    put_heads(grad_q, scale * (slopes @ k), layout)
    for to, found in (
        (grad_k, scale * (slopes.transpose(-1, -2) @ q)),
        (grad_v, weights.transpose(-1, -2) @ g),
    ):
        put_heads(to, found.unflatten(1, (groups, -1)).sum(2), layout)


def turned(x: torch.Tensor, mode: int) -> torch.Tensor:
    if mode == 1:
        return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


@formula("aclnnRotaryPositionEmbedding")
def rotary(x: T, cos: T, sin: T, mode: int, y: T) -> None:
    store(y, decode(x) * decode(cos) + turned(decode(x), mode) * decode(sin))


@formula("aclnnRotaryPositionEmbeddingGrad")
def rotary_grad(*arguments: Any) -> None:
    grad, cos, sin, _x, mode, grad_x, *_ = arguments
    g = decode(grad)
    store(grad_x, g * decode(cos) - turned(g * decode(sin), mode))
