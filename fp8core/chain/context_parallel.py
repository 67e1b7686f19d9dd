"""Attention over sequences that the ranks of a group share: each rank has some tokens of each.

Three ways, which compute the same. All take and return what a rank holds, as the operations of a
backend do (:class:`~fp8core.backend_api.AttentionDesc`); tokens are shared as
:mod:`fp8core.chain.sequence_chunks` says, and lengths are those of whole sequences.

- :class:`HeadExchange` (a2a): ranks exchange tokens for heads, and each attends to whole sequences
  with some of the heads.
- :class:`GatheredKeys` (all_gather): each rank gathers all keys and values.
- :class:`~fp8core.chain.ring_attention.KeysInParts` (p2p): keys and values come from one rank
  after the other.

Quantized tensors travel as codes; ranks have to cast by equal scales.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from fp8core.backend_api import AttentionDesc, Operand
from fp8core.backend_api.record import computing_dtype
from fp8core.chain.sequence_chunks import Chunks, lengths_of_chunks
from fp8core.collectives import Communicator, Started

Payload = torch.Tensor | Operand
Run = Callable[..., Any]


class Pair(NamedTuple):
    """Attention and its gradients, for one descriptor each."""

    forward: Run
    backward: Run


def codes_of(x: Payload) -> torch.Tensor:
    """Return a tensor, or the codes of a quantized one."""
    return x.data if isinstance(x, Operand) else x


def with_codes(x: Payload, codes: torch.Tensor) -> Payload:
    """Return ``codes`` quantized as ``x`` is."""
    return x._replace(data=codes) if isinstance(x, Operand) else codes


def cu_seqlens_of(lengths: torch.Tensor) -> torch.Tensor:
    """Return the lengths added up, int32 ``[b + 1]``."""
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


def seed_of(keywords: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Return the seed of dropout for one of several parts of a call, each of which drops others."""
    rng = keywords.get("rng")
    if rng is None:
        return {}
    step = torch.tensor([number * 0x9E3779B97F4A7C1, 0], dtype=torch.int64, device=rng.device)
    return {"rng": (rng + step) & (2**62 - 1)}


def added_up(parts: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the sum of ``parts [n, ...]`` in their order, rounded once to ``dtype``."""
    total = parts[0].to(computing_dtype(parts.dtype))
    for part in parts[1:]:
        total = total + part
    return total.to(dtype)


def over_all(communicator: Communicator, largest: torch.Tensor | None) -> torch.Tensor | None:
    """Return the largest logits of all ranks; None if they are not asked for."""
    if largest is None:
        return None
    return communicator.max(largest, "largest logits", at_once=True).wait()


def starts_of(desc: AttentionDesc, side: str, keywords: Mapping[str, Any]) -> torch.Tensor | None:
    """Return where sequences begin in thd, with their padding; None in other layouts."""
    if desc.layout != "thd":
        return None
    padded: torch.Tensor | None = keywords.get(f"cu_seqlens_{side}_padded")
    return keywords[f"cu_seqlens_{side}"] if padded is None else padded


class Sides:
    """Where the tokens of one call are, for a group of ``size`` ranks: of queries and of keys.

    ``keywords`` are those of the call, with whole sequences; ``q`` and ``k`` what a rank holds.
    ``along`` is the dimension of the tokens in statistics.
    """

    def __init__(
        self, desc: AttentionDesc, size: int, keywords: Mapping[str, Any], q: Payload, k: Payload
    ) -> None:
        self._desc, self._size, self._keywords = desc, size, keywords
        self._local = codes_of(q), codes_of(k)
        self.queries = Chunks(desc.layout, size, self.starts("q"))
        self.keys = Chunks(desc.layout, size, self.starts("kv"))
        self.along = 0 if desc.layout == "thd" else 2

    def starts(self, side: str) -> torch.Tensor | None:
        """Return :func:`starts_of` the call."""
        return starts_of(self._desc, side, self._keywords)

    def half(self, x: Payload, half: int | None) -> Payload:
        """Return a chunk of the queries of each sequence, or both if None."""
        return x if half is None else with_codes(x, self.queries.half(codes_of(x), half))

    def chunk(self, side: str) -> torch.Tensor | int:
        """Return the length of a chunk of each sequence."""
        starts = self.starts(side)
        if starts is not None:
            return starts.diff() // (2 * self._size)
        chunks = self.queries if side == "q" else self.keys
        return self._local[side != "q"].shape[chunks.dim] // 2

    def of_rank(self, side: str, rank: int, half: int | None) -> dict[str, Any]:
        """Return the keywords of one side for a chunk of ``rank``, or for both if None."""
        lengths = lengths_of_chunks(
            self._keywords[f"cu_seqlens_{side}"], self.chunk(side), self._size, rank
        )
        if half is None:
            return self._of_chunks(side, lengths.both, 2)
        return self._of_chunks(side, lengths[half], 1)

    def of_sequences(self, side: str, lengths: torch.Tensor | None) -> dict[str, Any]:
        """Return the keywords of one side for tokens that are those of whole sequences, of which
        the first ``lengths`` count; None: all that the call has."""
        if not self._desc.padding:
            return {}
        whole: torch.Tensor = self._keywords[f"cu_seqlens_{side}"]
        cu_seqlens = whole if lengths is None else cu_seqlens_of(lengths)
        named: dict[str, Any] = {f"cu_seqlens_{side}": cu_seqlens}
        starts = self.starts(side)
        if starts is not None:
            if starts is not whole or lengths is not None:
                named[f"cu_seqlens_{side}_padded"] = starts
            named[f"max_seqlen_{side}"] = self._keywords[f"max_seqlen_{side}"]
        return named

    def _of_chunks(self, side: str, lengths: torch.Tensor, num_chunks: int) -> dict[str, Any]:
        """Return the keywords of one side for ``num_chunks`` chunks of each sequence, of which the
        first ``lengths`` tokens count."""
        named: dict[str, Any] = {f"cu_seqlens_{side}": cu_seqlens_of(lengths)}
        starts = self.starts(side)
        if starts is not None:
            parts = 2 * self._size // num_chunks
            named[f"cu_seqlens_{side}_padded"] = starts // parts
            longest = self._keywords[f"max_seqlen_{side}"]
            if starts is self._keywords[f"cu_seqlens_{side}"]:
                longest = -(-longest // parts)
            else:  # without padding a sequence may be shorter than its share
                local = self._local[side != "q"].shape[0]
                longest = min(longest, local * num_chunks // 2)
            named[f"max_seqlen_{side}"] = longest
        return named

    def of_call(self, *names: str) -> dict[str, Any]:
        """Return those of the call's keywords called ``names``."""
        return {name: self._keywords[name] for name in names if name in self._keywords}


RECORDS = ("s_scale", "s_amax_out", "dp_scale", "dp_amax_out")
"""Keywords that are the same for each part of a call."""


class HeadExchange:
    """Exchanges tokens for heads: each rank computes ``heads / size`` heads of whole sequences.

    ``inner`` computes them, by ``desc``, that of fewer heads. ``outer_size``: how many groups
    like this one share the sequences, where ``inner`` moves keys and values between those.
    """

    def __init__(
        self, desc: AttentionDesc, communicator: Communicator, inner: Pair, outer_size: int = 1
    ) -> None:
        self._desc, self._communicator, self._inner = desc, communicator, inner
        self._outer_size = outer_size

    def forward(self, q: Payload, k: Payload, v: Payload, **keywords: Any) -> Any:
        """Return ``out``; the statistics of this rank's heads, for backward; and ``max_logit``."""
        queries, keys = self._chunks(keywords)
        whole = self._whole((q, queries), (k, keys), (v, keys))
        out, stats, largest = self._inner.forward(*whole, **self._of_heads(keywords))
        moved = self._to_tokens(out, queries).wait()
        if largest is not None:
            largest = self._communicator.gather(largest, "largest logits").wait()
        return _joined(moved), stats, largest

    def backward(
        self,
        grad: Payload,
        q: Payload,
        k: Payload,
        v: Payload,
        out: torch.Tensor,
        stats: torch.Tensor,
        **keywords: Any,
    ) -> Any:
        """Return the gradients of what forward was given."""
        queries, keys = self._chunks(keywords)
        whole = self._whole((grad, queries), (q, queries), (k, keys), (v, keys), (out, queries))
        results = self._inner.backward(*whole, stats, **self._of_heads(keywords))
        moved = [
            self._to_tokens(x, chunks)
            for x, chunks in zip(results[:3], (queries, keys, keys), strict=True)
        ]
        offset = results[4]
        if offset is not None:
            every = offset.new_zeros(self._communicator.size, *offset.shape)
            every[self._communicator.rank] = offset
            offset = every.flatten()
        return (*[_joined(started.wait()) for started in moved], None, offset)

    def _whole(self, *parts: tuple[Payload, Chunks]) -> list[Payload]:
        """Return whole sequences, of the heads of this rank, of tensors with its tokens."""
        started = [self._to_heads(codes_of(x)) for x, _ in parts]
        return [
            with_codes(x, chunks.whole(arriving.wait()))
            for (x, chunks), arriving in zip(parts, started, strict=True)
        ]

    def _chunks(self, keywords: Mapping[str, Any]) -> tuple[Chunks, Chunks]:
        whole = (starts_of(self._desc, side, keywords) for side in ("q", "kv"))
        starts = (None if begins is None else begins // self._outer_size for begins in whole)
        queries, keys = (
            Chunks(self._desc.layout, self._communicator.size, begins) for begins in starts
        )
        return queries, keys

    def _of_heads(self, keywords: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keywords for the heads of this rank."""
        named, rank = dict(keywords), self._communicator.rank
        heads = slice(rank * self._desc.heads, (rank + 1) * self._desc.heads)
        for name in ("alibi_slopes", "softmax_offset"):
            if name in named:
                named[name] = named[name][..., heads].contiguous()
        mask = named.get("mask")
        if mask is not None and mask.shape[1] > 1:
            named["mask"] = mask[:, heads]
        return named | seed_of(named, rank)

    def _to_heads(self, x: torch.Tensor) -> Started:
        """Start to send each rank its heads of ``x [.., heads, d]``: ``[size, .., heads / size,
        d]``, one part a rank."""
        size = self._communicator.size
        heads, width = x.shape[-2:]
        parts = x.reshape(*x.shape[:-2], size, heads // size, width).movedim(-3, 0)
        return self._communicator.exchange(parts, [1] * size, [1] * size, "heads")

    def _to_tokens(self, x: torch.Tensor, chunks: Chunks) -> Started:
        """Start to send each rank its tokens of whole sequences."""
        size = self._communicator.size
        return self._communicator.exchange(chunks.parts(x), [1] * size, [1] * size, "tokens")


def _joined(parts: torch.Tensor) -> torch.Tensor:
    """Return ``[.., heads, d]`` of ``parts [size, .., heads / size, d]``."""
    return parts.movedim(0, -3).flatten(-3, -2).contiguous()


class GatheredKeys:
    """Gathers keys and values of whole sequences on each rank.

    Under a causal mask each of a rank's two chunks of queries sees the keys up to its end:
    ``masked`` then has its diagonal at the bottom right corner.
    """

    def __init__(self, desc: AttentionDesc, communicator: Communicator, inner: Pair) -> None:
        self._desc, self._communicator, self._inner = desc, communicator, inner
        self._is_causal = desc.window[1] == 0

    @staticmethod
    def desc_of_parts(desc: AttentionDesc) -> AttentionDesc:
        """Return the descriptor of the parts of a call of ``desc``."""
        return dataclasses.replace(desc, bottom_right=desc.window[1] == 0)

    def forward(self, q: Payload, k: Payload, v: Payload, **keywords: Any) -> Any:
        """Return ``(out, stats, max_logit)`` of the queries of this rank."""
        sides = Sides(self._desc, self._communicator.size, keywords, q, k)
        keys, values = self._gathered(sides, k, v)
        if not self._is_causal:
            named = self._keywords(sides, keywords, None)
            out, stats, largest = self._inner.forward(q, keys, values, **named)
            return out, stats, over_all(self._communicator, largest)
        results = [
            self._inner.forward(
                sides.half(q, half),
                self._up_to(keys, number),
                self._up_to(values, number),
                **self._keywords(sides, keywords, half),
            )
            for half, number in enumerate(self._numbers)
        ]
        local, first = codes_of(q), results[0]
        out = first[0].new_empty((*local.shape[:-1], self._desc.head_dim_v))
        size = list(first[1].shape)
        size[sides.along] *= 2
        stats = first[1].new_empty(size)
        for half, result in enumerate(results):
            sides.queries.write_half(out, result[0], half)
            sides.queries.write_half(stats, result[1], half, sides.along)
        largest = None if first[2] is None else torch.maximum(first[2], results[1][2])
        return out, stats, over_all(self._communicator, largest)

    def backward(
        self,
        grad: Payload,
        q: Payload,
        k: Payload,
        v: Payload,
        out: torch.Tensor,
        stats: torch.Tensor,
        **keywords: Any,
    ) -> Any:
        """Return the gradients of what forward was given."""
        sides = Sides(self._desc, self._communicator.size, keywords, q, k)
        dtype = self._desc.dtype
        keys, values = self._gathered(sides, k, v)
        if not self._is_causal:
            named = self._keywords(sides, keywords, None)
            grad_q, *grads, _, offset = self._inner.backward(
                grad, q, keys, values, out, stats, **named
            )
            return (grad_q, *self._scattered(sides, grads), None, offset)
        grad_q = torch.empty(codes_of(q).shape, dtype=dtype, device=out.device)
        totals = [
            torch.zeros(codes_of(x).shape, dtype=computing_dtype(dtype), device=out.device)
            for x in (keys, values)
        ]
        offset = None
        for half, number in enumerate(self._numbers):
            result = self._inner.backward(
                *(sides.half(x, half) for x in (grad, q)),
                self._up_to(keys, number),
                self._up_to(values, number),
                sides.queries.half(out, half),
                sides.queries.half(stats, half, sides.along),
                **self._keywords(sides, keywords, half),
            )
            sides.queries.write_half(grad_q, result[0], half)
            for total, part in zip(totals, result[1:3], strict=True):
                total.narrow(sides.keys.dim, 0, part.shape[sides.keys.dim]).add_(part)
            if result[4] is not None:
                offset = result[4] if offset is None else offset + result[4]
        grads = [total.to(dtype) for total in totals]
        return (grad_q, *self._scattered(sides, grads), None, offset)

    @property
    def _numbers(self) -> tuple[int, int]:
        """The numbers of this rank's two chunks."""
        rank = self._communicator.rank
        return rank, 2 * self._communicator.size - 1 - rank

    def _gathered(self, sides: Sides, *tensors: Payload) -> list[Payload]:
        size = self._communicator.size
        started = [
            self._communicator.gather(codes_of(x).contiguous(), "keys and values") for x in tensors
        ]
        return [
            with_codes(x, sides.keys.whole(arriving.wait().view(size, *codes_of(x).shape)))
            for x, arriving in zip(tensors, started, strict=True)
        ]

    def _up_to(self, x: Payload, number: int) -> Payload:
        """Return the keys up to the end of chunk ``number``; in thd lengths say so."""
        if self._desc.layout == "thd":
            return x
        codes, dim = codes_of(x), 1 if self._desc.layout == "bshd" else 0
        chunk = codes.shape[dim] // (2 * self._communicator.size)
        return with_codes(x, codes.narrow(dim, 0, (number + 1) * chunk))

    def _keywords(
        self, sides: Sides, keywords: Mapping[str, Any], half: int | None
    ) -> dict[str, Any]:
        """Return the keywords for one chunk of queries, or for both if None."""
        rank, named = self._communicator.rank, sides.of_call("alibi_slopes", "softmax_offset")
        named |= sides.of_call(*RECORDS) | seed_of(keywords, 2 * rank + (half or 0))
        if not self._desc.padding:
            return named
        named |= sides.of_rank("q", rank, half)
        if half is None:
            return named | sides.of_sequences("kv", None)
        whole = keywords["cu_seqlens_kv"].diff()
        end = (self._numbers[half] + 1) * torch.as_tensor(sides.chunk("kv")).to(whole)
        return named | sides.of_sequences("kv", torch.minimum(whole, end))

    def _scattered(self, sides: Sides, grads: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return this rank's part of the gradients of whole sequences, added up over the ranks."""
        size = self._communicator.size
        started = [
            self._communicator.exchange(sides.keys.parts(grad), [1] * size, [1] * size, "gradients")
            for grad in grads
        ]
        return [added_up(arriving.wait(), self._desc.dtype) for arriving in started]
