"""Attention whose keys and values come from one rank after the other, merged by log-sum-exp."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fp8core.backend_api import AttentionDesc
from fp8core.backend_api.record import computing_dtype
from fp8core.chain.context_parallel import (
    RECORDS,
    Pair,
    Payload,
    Sides,
    codes_of,
    over_all,
    seed_of,
    with_codes,
)
from fp8core.collectives import Communicator, Started


def descs_of_parts(desc: AttentionDesc) -> tuple[AttentionDesc, AttentionDesc]:
    """Return the descriptor of a rank's queries and its keys, which alone are masked, and that of
    its queries and the keys of another rank: a sink adds to the first of them alone."""
    mine = dataclasses.replace(desc, bottom_right=False)
    return mine, dataclasses.replace(mine, window=(-1, -1), softmax="vanilla")


class _Part(NamedTuple):
    """Which chunks take part: 0 or 1, or None for both."""

    queries: int | None = None
    keys: int | None = None


def _part(rank: int, source: int, *, is_causal: bool) -> _Part:
    """Return the chunks of the queries of ``rank`` and of the keys of ``source`` that take part.

    Chunk numbers: ``rank < source`` means that both chunks of the source lie between the two of the
    rank, and the other way round.
    """
    if not is_causal or rank == source:
        return _Part()
    return _Part(queries=1) if rank < source else _Part(keys=0)


class Merged:
    """The result of parts of the keys so far, ``out`` in float32 (float64 from float64)."""

    def __init__(self, layout: str, out: torch.Tensor, stats: torch.Tensor) -> None:
        self._order = {"thd": (0, 1), "sbhd": (2, 0, 1), "bshd": (0, 2, 1)}[layout]
        self.out, self.stats = out.to(stats.dtype), stats

    def add(self, out: torch.Tensor, stats: torch.Tensor) -> None:
        """Take other keys into account: ``stats`` is -inf for a query that sees none of them."""
        total = torch.logaddexp(self.stats, stats)
        shift = total.masked_fill(total == -torch.inf, 0)
        before, share = (
            torch.exp(sums - shift).permute(self._order)[..., None] for sums in (self.stats, stats)
        )
        self.out, self.stats = self.out * before + out * share, total


class KeysInParts:
    """In step i a rank has the keys and values of the rank i before it, while the next ones come.

    They come from the rank that holds them, the chunks alone that are seen. In backward they come
    again, and their gradients go to that rank, which adds them up in float32.

    ``mine`` and ``remote`` compute by :func:`descs_of_parts`; their gradients are those of
    :class:`~fp8core.backend_api.AttentionPartBackwardDesc`.
    """

    def __init__(
        self, desc: AttentionDesc, communicator: Communicator, mine: Pair, remote: Pair
    ) -> None:
        self._desc, self._communicator = desc, communicator
        self._mine, self._remote = mine, remote
        self._is_causal = desc.window[1] == 0

    def forward(self, q: Payload, k: Payload, v: Payload, **keywords: Any) -> Any:
        """Return ``(out, stats, max_logit)`` of the queries of this rank."""
        rank, size = self._communicator.rank, self._communicator.size
        sides = Sides(self._desc, size, keywords, q, k)
        coming = self._start(sides, 1, k, v) if size > 1 else None
        out, stats, largest = self._mine.forward(q, k, v, **self._keywords(sides, keywords, rank))
        if size > 1:
            out, stats, largest = self._with_remote_keys(
                sides, keywords, (q, k, v), coming, (out, stats, largest)
            )
        return out, stats, over_all(self._communicator, largest)

    def _with_remote_keys(
        self,
        sides: Sides,
        keywords: Mapping[str, Any],
        qkv: tuple[Payload, Payload, Payload],
        coming: Started | None,
        first: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return the results with the keys of the other ranks taken into account."""
        q, k, v = qkv
        merged, largest = Merged(self._desc.layout, *first[:2]), first[2]
        for source, part, keys, values in self._rounds(sides, coming, k, v):
            queries = sides.half(q, part.queries)
            out, stats, part_largest = self._remote.forward(
                queries, keys, values, **self._keywords(sides, keywords, source)
            )
            if part.queries is not None:  # the other chunk sees none of these keys
                every = merged.out.new_zeros(merged.out.shape)
                sides.queries.write_half(every, out.to(every.dtype), part.queries)
                rows = merged.stats.new_full(merged.stats.shape, -torch.inf)
                sides.queries.write_half(rows, stats, part.queries, sides.along)
                out, stats = every, rows
            merged.add(out, stats)
            if largest is not None:
                largest = torch.maximum(largest, part_largest)
        return merged.out.to(self._desc.dtype), merged.stats, largest

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
        rank, size = self._communicator.rank, self._communicator.size
        sides, dtype = Sides(self._desc, size, keywords, q, k), self._desc.dtype
        coming = self._start(sides, 1, k, v) if size > 1 else None
        first = self._mine.backward(
            grad, q, k, v, out, stats, **self._keywords(sides, keywords, rank)
        )
        grad_q, *grads, _, offset = first
        if size == 1:
            return (grad_q, *grads, None, offset)
        totals = [grad.to(computing_dtype(dtype)) for grad in (grad_q, *grads)]
        returning: list[tuple[Started, int | None]] = []
        for step, (source, part, keys, values) in enumerate(
            self._rounds(sides, coming, k, v), start=1
        ):
            half = part.queries
            grad_q, *grads, _, _ = self._remote.backward(
                *(sides.half(x, half) for x in (grad, q)),
                *(keys, values),
                sides.half(out, half),
                stats if half is None else sides.queries.half(stats, half, sides.along),
                **self._keywords(sides, keywords, source),
            )
            if part.queries is None:
                totals[0] += grad_q
            else:
                sides.queries.add_half(totals[0], grad_q, part.queries)
            returning.append(self._return(sides, step, grads, (k, v)))
        for started, half in returning:
            self._add_returned(sides, totals[1:], started.wait(), half)
        return (*[total.to(dtype) for total in totals], None, offset)

    def _rounds(
        self, sides: Sides, coming: Started | None, k: Payload, v: Payload
    ) -> Iterator[tuple[int, _Part, Payload, Payload]]:
        """Yield each other rank, the chunks that take part, and its keys and values, the first of
        which are ``coming``; those of the next rank come while the caller computes."""
        rank, size = self._communicator.rank, self._communicator.size
        for step in range(1, size):
            source = (rank - step) % size
            part = _part(rank, source, is_causal=self._is_causal)
            assert coming is not None
            keys, values = self._arrived(sides, coming, part.keys, k, v)
            coming = self._start(sides, step + 1, k, v) if step + 1 < size else None
            yield source, part, keys, values

    def _keywords(self, sides: Sides, keywords: Mapping[str, Any], source: int) -> dict[str, Any]:
        """Return the keywords for the keys of ``source``."""
        rank, size = self._communicator.rank, self._communicator.size
        part = _part(rank, source, is_causal=self._is_causal)
        named = sides.of_call(*RECORDS) | seed_of(keywords, rank * size + source)
        if rank == source:
            named |= sides.of_call("softmax_offset")
        if not self._desc.padding:
            return named
        named |= sides.of_rank("q", rank, part.queries)
        return named | sides.of_rank("kv", source, part.keys)

    def _start(self, sides: Sides, step: int, *keys_and_values: Payload) -> Started:
        """Start to send keys and values to the rank ``step`` behind this one, and to receive those
        of the rank as far before it."""
        rank, size = self._communicator.rank, self._communicator.size
        to, source = (rank + step) % size, (rank - step) % size
        sent = _part(to, rank, is_causal=self._is_causal).keys
        received = _part(rank, source, is_causal=self._is_causal).keys
        tensors = [codes_of(x) for x in keys_and_values]
        if sent is not None:
            tensors = [sides.keys.half(x, sent) for x in tensors]
        sizes = sum(codes_of(x).numel() for x in keys_and_values) // (1 if received is None else 2)
        return self._exchange(tensors, (to, source), sizes, "keys and values")

    def _arrived(
        self, sides: Sides, started: Started, half: int | None, *like: Payload
    ) -> list[Payload]:
        """Return the keys and values that have come, of one chunk or of both."""
        arrived = _split(sides, started.wait(), half, [codes_of(x) for x in like])
        return [with_codes(x, codes) for x, codes in zip(like, arrived, strict=True)]

    def _return(
        self,
        sides: Sides,
        step: int,
        grads: Sequence[torch.Tensor],
        like: tuple[Payload, Payload],
    ) -> tuple[Started, int | None]:
        """Start to send the gradients of another rank's keys and values to it, and to receive those
        of the keys and values of this rank, with the chunk that they are of."""
        rank, size = self._communicator.rank, self._communicator.size
        to, source = (rank - step) % size, (rank + step) % size
        half = _part(source, rank, is_causal=self._is_causal).keys
        sizes = sum(codes_of(x).numel() for x in like) // (1 if half is None else 2)
        return self._exchange(grads, (to, source), sizes, "gradients"), half

    def _add_returned(
        self, sides: Sides, totals: Sequence[torch.Tensor], flat: torch.Tensor, half: int | None
    ) -> None:
        for total, part in zip(totals, _split(sides, flat, half, totals), strict=True):
            if half is None:
                total += part
            else:
                sides.keys.add_half(total, part, half)

    def _exchange(
        self, tensors: Sequence[torch.Tensor], peers: tuple[int, int], received: int, purpose: str
    ) -> Started:
        """Start to send ``tensors`` to the first of ``peers`` and to receive from the second."""
        flat = torch.cat([x.reshape(-1) for x in tensors])
        send, receive = [0] * self._communicator.size, [0] * self._communicator.size
        send[peers[0]], receive[peers[1]] = flat.numel(), received
        return self._communicator.exchange(flat, send, receive, purpose)


def _split(
    sides: Sides, flat: torch.Tensor, half: int | None, like: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Return tensors of the sizes of ``like``, or of one chunk of them, that were sent one after
    the other."""
    sizes = [list(x.shape) for x in like]
    if half is not None:
        for size in sizes:
            size[sides.keys.dim] //= 2
    counts = [torch.Size(size).numel() for size in sizes]
    return [part.view(*size) for part, size in zip(torch.split(flat, counts), sizes, strict=True)]
