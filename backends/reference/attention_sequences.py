"""Sequences of attention: one dense form of every layout, and which keys each query may see."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from fp8core.backend_api import (
    ATTENTION_BIASES,
    ATTENTION_LAYOUTS,
    ATTENTION_SOFTMAXES,
    AttentionDesc,
)


class _Tokens(NamedTuple):
    """Where the tokens of the sequences of one side, queries or keys, are.

    ``positions`` int64 ``[length]`` counts up to the longest sequence with its padding; ``lengths``
    int64 ``[b, 1]`` are those of the sequences, None without padding. ``row_of`` int64
    ``[b, length]`` has the row of each token in thd, and the number of rows, ``rows``, behind the
    end of a sequence; None in the other layouts.
    """

    positions: torch.Tensor
    lengths: torch.Tensor | None
    row_of: torch.Tensor | None
    rows: int

    def behind_the_end(self) -> torch.Tensor:
        """Return bool ``[b, length]``: which positions are not in the sequence."""
        assert self.lengths is not None
        return self.positions >= self.lengths

    def dense(self, x: torch.Tensor, layout: str) -> torch.Tensor:
        """Return ``x`` as ``[b, heads, length, d]``, with zeros behind the ends of sequences."""
        if self.row_of is not None:
            zero = x.new_zeros(1, *x.shape[1:])
            return torch.cat((x, zero))[self.row_of].transpose(1, 2)
        dense = x.permute(1, 2, 0, 3) if layout == "sbhd" else x.transpose(1, 2)
        if self.lengths is None:
            return dense
        return dense.masked_fill(self.behind_the_end()[:, None, :, None], 0)

    def in_layout(self, dense: torch.Tensor, layout: str) -> torch.Tensor:
        """Return ``dense [b, heads, length, d]`` in the layout, contiguous; rows of no sequence are
        zeros."""
        if self.row_of is not None:
            tokens = dense.transpose(1, 2).flatten(0, 1)
            rows = tokens.new_zeros(self.rows + 1, *tokens.shape[1:])
            return rows.index_copy(0, self.row_of.flatten(), tokens)[:-1].contiguous()
        order = (2, 0, 1, 3) if layout == "sbhd" else (0, 2, 1, 3)
        return dense.permute(order).contiguous()


class Sequences(NamedTuple):
    """The sequences of one call: their queries and their keys."""

    layout: str
    queries: _Tokens
    keys: _Tokens

    @property
    def shift(self) -> torch.Tensor | int:
        """How many more keys than queries a sequence has: ``[b, 1, 1, 1]``, or one number."""
        if self.queries.lengths is None or self.keys.lengths is None:
            return self.keys.positions.shape[0] - self.queries.positions.shape[0]
        return (self.keys.lengths - self.queries.lengths)[:, :, None, None]

    def without_padding(self, dense: torch.Tensor) -> torch.Tensor:
        """Return ``dense [b, heads, length]`` with -inf for the queries of no sequence."""
        if self.queries.lengths is None:
            return dense
        return dense.masked_fill(self.queries.behind_the_end()[:, None], -torch.inf)

    def statistics(self, dense: torch.Tensor) -> torch.Tensor:
        """Return ``dense [b, heads, length]`` as the contract has statistics: ``[t, heads]`` in
        thd, -inf in the rows of no sequence."""
        row_of = self.queries.row_of
        if row_of is None:
            return dense.contiguous()
        tokens = dense.transpose(1, 2).flatten(0, 1)
        rows = tokens.new_full((self.queries.rows + 1, tokens.shape[1]), -torch.inf)
        return rows.index_copy(0, row_of.flatten(), tokens)[:-1].contiguous()

    def dense_statistics(self, stats: torch.Tensor) -> torch.Tensor:
        """Return statistics as ``[b, heads, length]``: the inverse of :meth:`statistics`."""
        row_of = self.queries.row_of
        if row_of is None:
            return stats
        behind = stats.new_full((1, stats.shape[1]), -torch.inf)
        return torch.cat((stats, behind))[row_of].transpose(1, 2)


def sequences_of(
    desc: AttentionDesc,
    inputs: tuple[torch.Tensor, torch.Tensor],
    cu_seqlens: tuple[torch.Tensor | None, torch.Tensor | None],
    cu_seqlens_padded: tuple[torch.Tensor | None, torch.Tensor | None],
    max_seqlens: tuple[int | None, int | None],
) -> Sequences:
    """Return the sequences of a call; each pair is that of the queries and that of the keys."""
    queries, keys = (
        _tokens(desc, x, offsets, starts, longest)
        for x, offsets, starts, longest in zip(
            inputs, cu_seqlens, cu_seqlens_padded, max_seqlens, strict=True
        )
    )
    return Sequences(desc.layout, queries, keys)


def _tokens(
    desc: AttentionDesc,
    x: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    cu_seqlens_padded: torch.Tensor | None,
    max_seqlen: int | None,
) -> _Tokens:
    is_packed = desc.layout == "thd"
    length = max_seqlen if is_packed else x.shape[0 if desc.layout == "sbhd" else 1]
    assert length is not None
    positions = torch.arange(length, device=x.device)
    if not desc.padding:
        return _Tokens(positions, None, None, 0)
    assert cu_seqlens is not None
    offsets = cu_seqlens.long()
    lengths = (offsets[1:] - offsets[:-1])[:, None]
    if not is_packed:
        return _Tokens(positions, lengths, None, 0)
    starts = (offsets if cu_seqlens_padded is None else cu_seqlens_padded.long())[:-1, None]
    row_of = torch.where(positions < lengths, starts + positions, x.shape[0])
    row_of = row_of.clamp(0, x.shape[0])  # whatever the offsets are, no row is outside of x
    return _Tokens(positions, lengths, row_of, x.shape[0])


def excluded(
    desc: AttentionDesc, sequences: Sequences, mask: torch.Tensor | None
) -> torch.Tensor | None:
    """Return the union of the descriptor's masks, bool, of a shape that broadcasts to
    ``[b, heads, s_q, s_kv]``; True excludes the key. None if there is no mask."""
    masks = []
    if desc.padding:
        masks.append(_behind_the_end(sequences))
    if desc.window != (-1, -1):
        masks.append(_outside_the_window(desc.window, distance(desc, sequences)))
    if mask is not None:
        masks.append(mask)
    return functools.reduce(torch.logical_or, masks) if masks else None


def _behind_the_end(sequences: Sequences) -> torch.Tensor:
    """Padding: queries and keys behind the ends of their sequences."""
    queries, keys = (side.behind_the_end() for side in (sequences.queries, sequences.keys))
    return queries[:, None, :, None] | keys[:, None, None, :]


def _outside_the_window(window: tuple[int, int], distance: torch.Tensor) -> torch.Tensor:
    """Sliding window, and causal: keys too far behind the query's position or too far ahead."""
    left, right = window
    outside = torch.zeros_like(distance, dtype=torch.bool)
    if left >= 0:
        outside = outside | (distance > left)
    if right >= 0:
        outside = outside | (-distance > right)
    return outside


def distance(desc: AttentionDesc, sequences: Sequences) -> torch.Tensor:
    """Return ``i + shift - j`` for query i and key j: how far behind the query a key is.

    ``[s_q, s_kv]``, or ``[b, 1, s_q, s_kv]`` where sequences have lengths of their own.
    """
    i, j = sequences.queries.positions[:, None], sequences.keys.positions
    shift = sequences.shift if desc.bottom_right else 0
    return i + shift - j


def contradiction(desc: AttentionDesc) -> str | None:
    """Return why no call of ``desc`` is meaningful, None if there is one."""
    names = (
        ("layout", desc.layout, ATTENTION_LAYOUTS),
        ("bias", desc.bias, ATTENTION_BIASES),
        ("softmax", desc.softmax, ATTENTION_SOFTMAXES),
    )
    for field, value, choices in names:
        if value not in choices:
            return f"no {field} {value!r}"
    if min(desc.heads, desc.groups, desc.head_dim, desc.head_dim_v) < 1:
        return "heads, groups and head sizes are at least 1"
    if desc.heads % desc.groups:
        return f"{desc.heads} heads are no multiple of {desc.groups} groups"
    if min(desc.window) < -1:
        return f"no window {desc.window}"
    if not 0 <= desc.dropout < 1 or not desc.softcap >= 0:
        return "dropout is at least 0 and below 1, softcap at least 0"
    if desc.layout == "thd" and not desc.padding:
        return "thd without padding: its sequences have lengths"
    if (desc.qkv is None) != (desc.s is None):
        return "q, k and v are quantized, and the weights are not, or the other way round"
    if desc.out is not None and desc.qkv is None:
        return "the result is quantized, and q, k and v, whose scale it has, are not"
    if any(spec is not None and spec.block != (0, 0) for spec in (desc.qkv, desc.s, desc.out)):
        return "q, k, v, the weights and the result have one scale each"
    if any(spec is not None and not spec.delayed for spec in (desc.s, desc.out)):
        return "the scales of the weights and of the result are given: their specs are delayed"
    if desc.arbitrary and (desc.padding or desc.window != (-1, -1)):
        return "an arbitrary mask excludes padding and window: it says all of them itself"
    return None
