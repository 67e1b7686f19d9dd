"""Attention of sequences with lengths: packed ones, and those with padding behind them.

torch_npu's kernels take the tokens of all sequences without gaps, and on the host where each ends,
for which the host waits once a call. Padding, and queries and keys without a counterpart, are left
out before the call, and are zeros behind it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from fp8core.backend_api import AttentionBackwardDesc, AttentionDesc
from fp8core.errors import OperandError
from fp8core_backends.ascend.attention_mask import NEVER, Mask, mask_of
from fp8core_backends.ascend.operators import fused_attention

Lengths = torch.Tensor | None


class _Sequence(NamedTuple):
    """The queries and the keys of a sequence: where they begin, and how many there are."""

    query: int
    queries: int
    key: int
    keys: int


class _Tokens(NamedTuple):
    """Rows of a tensor ``[rows, heads, d]`` that are tokens of sequences, in order.

    ``lengths`` and ``starts`` are those of the sequences, ``step`` is from a token of a sequence to
    its next.
    """

    lengths: list[int]
    starts: list[int]
    step: int

    @property
    def ends(self) -> list[int]:
        """Where each sequence ends among the tokens."""
        return list(itertools.accumulate(self.lengths))

    def is_dense(self) -> bool:
        """Whether the tokens are the first rows."""
        return self.step == 1 and self.starts == [0, *self.ends[:-1]]

    def rows(self, device: torch.device) -> torch.Tensor:
        """Return the rows, int64."""
        parts = [
            torch.arange(length, device="cpu") * self.step + start
            for start, length in zip(self.starts, self.lengths, strict=True)
        ]
        return torch.cat(parts).pin_memory().to(device, non_blocking=True)

    def gathered(self, x: torch.Tensor) -> torch.Tensor:
        """Return the tokens ``[t, heads, d]`` of ``x``, in the layout of the descriptor."""
        rows = _by_row(x)
        if self.is_dense():
            return rows[: self.ends[-1]].contiguous()
        return rows.index_select(0, self.rows(x.device))

    def placed(self, tokens: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
        """Write the tokens to the rows of the contiguous ``to``, and return it."""
        rows = _by_row(to)
        if self.is_dense():
            rows[: self.ends[-1]] = tokens
        else:
            rows.index_copy_(0, self.rows(to.device), tokens)
        return to


def _by_row(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` with one dimension for sequences and positions."""
    return x.flatten(0, 1) if x.dim() == 4 else x


class _Packing(NamedTuple):
    """The sequences that have queries which look at keys."""

    queries: _Tokens
    keys: _Tokens

    def mask(self, desc: AttentionDesc, device: torch.device) -> Mask:
        """Return the arguments of the mask, with the ends of the sequences."""
        unpacked = mask_of(desc, device)
        return unpacked._replace(query_ends=self.queries.ends, key_ends=self.keys.ends)


def _packing(
    desc: AttentionDesc,
    q: torch.Tensor,
    k: torch.Tensor,
    cu_seqlens: tuple[Lengths, Lengths],
    cu_seqlens_padded: tuple[Lengths, Lengths],
) -> _Packing | None:
    """Return where the tokens are, None if no query looks at a key.

    Raises:
        OperandError: a sequence ends behind its tensor, or is of another number than its keys.
    """
    present = [offsets for offsets in (*cu_seqlens, *cu_seqlens_padded) if offsets is not None]
    read = torch.stack([offsets.to(torch.int64) for offsets in present]).tolist()  # waits once
    values = iter(read)
    lists = [
        None if offsets is None else next(values) for offsets in (*cu_seqlens, *cu_seqlens_padded)
    ]
    sides = [_side(desc, x, lists[at], lists[at + 2]) for at, x in enumerate((q, k))]
    right = desc.window[1]
    live = []
    for (query, queries), (key, keys) in zip(*(side.spans for side in sides), strict=True):
        blind = max(0, queries - keys - right) if desc.bottom_right and right >= 0 else 0
        if queries > blind and keys:
            start = query + blind * sides[0].step
            live.append(_Sequence(start, queries - blind, key, keys))
    if not live:
        return None
    return _Packing(
        _Tokens(
            [sequence.queries for sequence in live],
            [sequence.query for sequence in live],
            sides[0].step,
        ),
        _Tokens(
            [sequence.keys for sequence in live], [sequence.key for sequence in live], sides[1].step
        ),
    )


class _Side(NamedTuple):
    """First row and number of tokens of each sequence, and the step to a sequence's next token."""

    spans: list[tuple[int, int]]
    step: int


def _side(
    desc: AttentionDesc, x: torch.Tensor, ends: list[int] | None, padded: list[int] | None
) -> _Side:
    assert ends is not None
    lengths = [end - start for start, end in itertools.pairwise(ends)]
    if desc.layout == "thd":
        starts, rows, step = (ends if padded is None else padded)[:-1], x.shape[0], 1
        limits: Iterator[int] = (rows - start for start in starts)
    elif desc.layout == "bshd":
        starts, step = [x.shape[1] * at for at in range(len(lengths))], 1
        limits = itertools.repeat(x.shape[1], len(lengths))
    else:
        starts, step = list(range(len(lengths))), x.shape[1]
        limits = itertools.repeat(x.shape[0], len(lengths))
    spans = list(zip(starts, lengths, strict=True))
    for (start, length), limit in zip(spans, limits, strict=True):
        if start < 0 or not 0 <= length <= limit:
            raise OperandError(
                f"attention in {desc.layout}: a sequence of {length} tokens from row {start} does "
                f"not fit into {list(x.shape)}; lengths are those of cu_seqlens {ends}"
            )
    return _Side(spans, step)


def packed_attention(
    desc: AttentionDesc,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens: tuple[Lengths, Lengths],
    cu_seqlens_padded: tuple[Lengths, Lengths],
) -> tuple[torch.Tensor, torch.Tensor, None]:
    """Return the output, the statistics and None; see the backend API."""
    out = q.new_zeros((*q.shape[:-1], v.shape[-1]))
    stats = torch.full(out.shape[:-1], -torch.inf, dtype=torch.float32, device=q.device)
    packing = _packing(desc, q, k, cu_seqlens, cu_seqlens_padded)
    if packing is None:
        return out, _laid(desc, stats), None
    result, largest, total = fused_attention.fusion_attention(
        packing.queries.gathered(q),
        packing.keys.gathered(k),
        packing.keys.gathered(v),
        heads=desc.heads,
        layout="TND",
        scale=desc.scale,
        mask=packing.mask(desc, q.device),
    )
    logarithms = largest.view(-1, 8)[:, 0] + torch.log(total.view(-1, 8)[:, 0])
    by_token = _tokens_first(logarithms, packing.queries.lengths, desc.heads)
    packing.queries.placed(by_token[..., None], stats[..., None])
    return packing.queries.placed(result, out), _laid(desc, stats), None


def _tokens_first(flat: torch.Tensor, lengths: Sequence[int], heads: int) -> torch.Tensor:
    """Return ``[t, heads]`` of ``[heads, s]`` of each sequence, one after the other."""
    if len(lengths) == 1:
        return flat.view(heads, -1).t()
    parts = torch.split(flat, [heads * length for length in lengths])
    return torch.cat([part.view(heads, -1).t() for part in parts])


def _heads_first(by_token: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """Return the flat ``[heads, s]`` of each sequence, of ``[t, heads]``."""
    return torch.cat([part.t().reshape(-1) for part in torch.split(by_token, list(lengths))])


def _laid(desc: AttentionDesc, stats: torch.Tensor) -> torch.Tensor:
    """Return statistics ``[.., heads]`` in the layout of the queries as the contract has them."""
    order = {"thd": (0, 1), "bshd": (0, 2, 1), "sbhd": (1, 2, 0)}[desc.layout]
    return stats.permute(order).contiguous()


def packed_attention_backward(
    desc: AttentionBackwardDesc,
    grad_out: torch.Tensor,
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    out: torch.Tensor,
    stats: torch.Tensor,
    *,
    cu_seqlens: tuple[Lengths, Lengths],
    cu_seqlens_padded: tuple[Lengths, Lengths],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None, None]:
    """Return the gradients of q, k and v, and None twice; see the backend API."""
    forward = desc.attention
    q, k, v = qkv
    grads = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in qkv]
    packing = _packing(forward, q, k, cu_seqlens, cu_seqlens_padded)
    if packing is None:
        return grads[0], grads[1], grads[2], None, None
    queries, keys = packing.queries, packing.keys
    order = {"thd": (0, 1), "bshd": (0, 2, 1), "sbhd": (2, 0, 1)}[forward.layout]
    seen = queries.gathered(stats.permute(order)[..., None])[..., 0]  # [t, heads]
    seen = seen.masked_fill(seen == -torch.inf, NEVER)
    flat = _heads_first(seen, queries.lengths)
    largest = flat[:, None].expand(-1, 8).reshape(seen.shape[0], forward.heads, 8)
    gradients = fused_attention.fusion_attention_grad(
        queries.gathered(grad_out),
        (queries.gathered(q), keys.gathered(k), keys.gathered(v)),
        queries.gathered(out),
        (largest.contiguous(), torch.ones_like(largest, memory_format=torch.contiguous_format)),
        heads=forward.heads,
        layout="TND",
        scale=forward.scale,
        mask=packing.mask(forward, q.device),
    )
    for tokens, grad, to in zip((queries, keys, keys), gradients, grads, strict=True):
        tokens.placed(grad, to)
    return grads[0], grads[1], grads[2], None, None
