"""Sequences of different lengths: where they begin and end, and which queries see no key.

Everything stays on the device. Whatever offsets a caller gives, no row outside of a tensor results.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

import torch

from fp8core.backend_api import AttentionDesc, OperandError
from fp8core_backends.cuda.autotune import bucket
from fp8core_backends.cuda.stream import raw_stream


class Keywords(NamedTuple):
    """The lengths in a call's keywords: ``cu_seqlens`` and those with padding, int32 ``[b + 1]``,
    and, in thd, the longest sequences."""

    cu_seqlens_q: torch.Tensor | None
    cu_seqlens_kv: torch.Tensor | None
    cu_seqlens_q_padded: torch.Tensor | None
    cu_seqlens_kv_padded: torch.Tensor | None
    max_seqlen_q: int | None
    max_seqlen_kv: int | None


_T = TypeVar("_T")


class OfLengths(Generic[_T]):
    """The value computed from the lengths of the last call, for later calls with the same tensors:
    the layers of a model share them in a step.

    Lengths are the same while no write to them is counted. In a CUDA graph the value is neither
    stored nor read: a replay computes it from the lengths of then.
    """

    __slots__ = ("_last",)

    def __init__(self) -> None:
        self._last: tuple[tuple[object, ...], Keywords, _T] | None = None

    def of(
        self, keywords: Keywords, sizes: tuple[object, ...], index: int, compute: Callable[[], _T]
    ) -> _T:
        """Return what ``compute`` returns for lengths on the CUDA device of ``index``, which
        depends on them and on ``sizes`` alone."""
        tensors = [tensor for tensor in keywords[:4] if tensor is not None]
        if any([tensor.is_inference() for tensor in tensors]):  # whose writes are not counted
            return compute()
        if torch.cuda.is_current_stream_capturing():
            return compute()
        key = (raw_stream(index), *sizes, *[id(tensor) for tensor in keywords[:4]])
        key = (*key, *keywords[4:], *[tensor._version for tensor in tensors])
        last = self._last
        if last is None or last[0] != key:
            self._last = last = key, keywords, compute()
        return last[2]


class Sequences(NamedTuple):
    """``lengths`` int32 ``[b]`` of queries and of keys, and in thd ``starts`` int64 ``[b + 1]``,
    the rows where they begin."""

    lengths_q: torch.Tensor
    lengths_kv: torch.Tensor
    starts_q: torch.Tensor | None = None
    starts_kv: torch.Tensor | None = None

    def padded(self, batch: int) -> Sequences:
        """Return ``batch`` sequences, of which those that are added are empty."""
        added = batch - len(self.lengths_q)
        grown = [
            None if part is None else torch.nn.functional.pad(part, (0, added)) for part in self
        ]
        lengths_q, lengths_kv, starts_q, starts_kv = grown
        assert lengths_q is not None
        assert lengths_kv is not None
        return Sequences(lengths_q, lengths_kv, starts_q, starts_kv)


def sequences_of(
    desc: AttentionDesc, q: torch.Tensor, k: torch.Tensor, keywords: Keywords
) -> Sequences:
    """Return the sequences of a call with padding.

    Raises:
        OperandError: offsets are missing, or of another form.
    """
    pairs = (
        (q, keywords.cu_seqlens_q, keywords.cu_seqlens_q_padded, keywords.max_seqlen_q),
        (k, keywords.cu_seqlens_kv, keywords.cu_seqlens_kv_padded, keywords.max_seqlen_kv),
    )
    batch = None if keywords.cu_seqlens_q is None else len(keywords.cu_seqlens_q)
    if desc.layout != "thd":
        batch = q.shape[1 if desc.layout == "sbhd" else 0] + 1
    lengths, starts = [], []
    for x, offsets, padded, longest in pairs:
        for edges in (offsets, padded):
            check_offsets(desc, x, offsets if edges is None else edges, batch)
        assert offsets is not None
        if desc.layout != "thd":
            lengths.append(offsets.diff().clamp(0, x.shape[0 if desc.layout == "sbhd" else 1]))
            continue
        if longest is None:
            raise OperandError(f"{desc}: max_seqlen_q and max_seqlen_kv are missing.")
        begin = (offsets if padded is None else padded).long().clamp(0, x.shape[0])
        starts.append(begin)
        inside = torch.minimum(offsets.diff().clamp(0, longest), x.shape[0] - begin[:-1])
        lengths.append(inside.int())
    return Sequences(*lengths, *starts)


def check_offsets(
    desc: AttentionDesc, x: torch.Tensor, offsets: torch.Tensor | None, count: int | None
) -> None:
    """Refuse offsets of sequences of ``x`` that are not int32 ``[count]`` beside it.

    Raises:
        OperandError: names them.
    """
    is_right = (
        offsets is not None
        and offsets.dtype == torch.int32
        and offsets.device == x.device
        and offsets.dim() == 1
        and len(offsets) == count
        and len(offsets) > 0
    )
    if not is_right:
        shown = None
        if offsets is not None:
            shown = f"{offsets.dtype} {list(offsets.shape)} on {offsets.device}"
        raise OperandError(
            f"{desc}: cu_seqlens are {shown}; expected torch.int32 [{count}], one more than "
            f"there are sequences, on {x.device}."
        )


def whole(batch: int, length_q: int, length_kv: int, device: torch.device) -> Sequences:
    """Return sequences that fill their rows."""
    lengths = (
        torch.full((batch,), length, dtype=torch.int32, device=device)
        for length in (length_q, length_kv)
    )
    return Sequences(*lengths)


class Unseen(NamedTuple):
    """Queries that see no key, and among them those that are in no sequence; both broadcast to the
    statistics, ``[b, heads, s]`` or ``[t, heads]``."""

    blind: torch.Tensor
    outside: torch.Tensor | None

    def of_mask(self, blind: torch.Tensor) -> Unseen:
        """Return the queries with those besides to which a mask shows no key."""
        return Unseen(self.blind | blind, self.outside)


class _Places(NamedTuple):
    """The position of each row in its sequence, and the lengths there; these broadcast."""

    positions: torch.Tensor
    lengths_q: torch.Tensor
    lengths_kv: torch.Tensor


def _places(sequences: Sequences, starts: torch.Tensor | None, rows: int) -> _Places:
    lengths_q, lengths_kv = sequences.lengths_q, sequences.lengths_kv
    i = torch.arange(rows, device=lengths_q.device)
    if starts is None:
        return _Places(i, lengths_q[:, None], lengths_kv[:, None])
    if not len(lengths_q):  # no sequences: each row is behind the end
        nothing = torch.zeros_like(i)
        return _Places(nothing, nothing, nothing)
    at = torch.bucketize(i, starts[1:], right=True).clamp(max=len(lengths_q) - 1)
    return _Places(i - starts[at], lengths_q[at], lengths_kv[at])


def unseen(desc: AttentionDesc, sequences: Sequences, rows: int) -> Unseen:
    """Return which of the ``rows`` queries of a sequence, in thd of all, see no key."""
    i, lengths_q, lengths_kv = _places(sequences, sequences.starts_q, rows)
    outside = (i < 0) | (i >= lengths_q)
    seen_at = i + (lengths_kv - lengths_q) if desc.bottom_right else i
    left, right = desc.window
    blind = outside | (lengths_kv == 0)
    if right >= 0:
        blind = blind | (seen_at + right < 0)
    if left >= 0:
        blind = blind | (seen_at - left >= lengths_kv)
    return Unseen(blind.unsqueeze(1), outside.unsqueeze(1))


def keys_outside(sequences: Sequences, rows: int) -> torch.Tensor:
    """Return which of the ``rows`` keys of a sequence, in thd of all, are in none; the mask has the
    form of :class:`Unseen`'s."""
    j, _, lengths_kv = _places(sequences, sequences.starts_kv, rows)
    return ((j < 0) | (j >= lengths_kv)).unsqueeze(1)


def in_rows(mask: torch.Tensor, layout: str) -> torch.Tensor:
    """Return a mask of statistics as one that broadcasts to the rows ``[.., heads, d]``."""
    if layout == "sbhd":
        mask = mask.permute(2, 0, 1)
    elif layout == "bshd":
        mask = mask.transpose(1, 2)
    return mask.unsqueeze(-1)


def steady(length: int) -> int:
    """Return the size that stands for a length or a number of sequences or rows that changes from
    call to call, so that few graphs are built."""
    return bucket(max(length, 64))
