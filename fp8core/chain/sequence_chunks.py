"""Where the tokens of sequences are that the ranks of a context-parallel group share.

A sequence is cut into ``2 * size`` chunks of equal length, of which rank r holds chunk r and chunk
``2 * size - 1 - r``, in this order: under a causal mask all ranks then have equally many products
to compute. In thd each sequence, with its padding, is cut so; rank r holds its two chunks of the
first sequence, then those of the second, and so on.

For a group of ``size`` ranks ``local`` is what one rank holds, and the whole is what all hold.
``starts`` says, in thd alone, where sequences begin in the whole, int32 ``[b + 1]``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


def partition(starts: torch.Tensor, num_tokens: int, size: int, rank: int) -> torch.Tensor:
    """Return which of ``num_tokens`` tokens in thd ``rank`` holds, int64 ``[num_tokens / size]``.

    Tokens behind the last sequence are cut like a sequence. ``2 * size`` divides the length of
    each sequence with its padding; the host does not read ``starts``.

    >>> partition(torch.tensor([0, 8, 12]), 12, 2, 0).tolist()
    [0, 1, 6, 7, 8, 11]
    """
    begin, length, offset = _places(starts.long(), num_tokens, size)
    chunk = length // (2 * size)  # of a rank's tokens of a sequence the first half
    skipped = torch.where(offset >= chunk, (2 * size - 2 - rank) * chunk, rank * chunk)
    return begin + offset + skipped


def _places(starts: torch.Tensor, num_tokens: int, share: int) -> tuple[torch.Tensor, ...]:
    """Return, for each token of a holder of one ``share``-th of every sequence, where the sequence
    begins, how long it is, and the token's number among those that the holder has of it."""
    begins = torch.nn.functional.pad(starts, (0, 1), value=num_tokens)
    at, local = torch.arange(num_tokens // share, device=starts.device), begins // share
    sequence = torch.searchsorted(local, at, right=True) - 1
    sequence = sequence.clamp(0, begins.shape[0] - 2)
    return begins[sequence], begins[sequence + 1] - begins[sequence], at - local[sequence]


class Lengths(NamedTuple):
    """How many tokens of each sequence are in a rank's two chunks, without padding, int32 ``[b]``:
    padding is at the end of a sequence, so that what a rank holds of it is at the end too."""

    first: torch.Tensor
    second: torch.Tensor

    @property
    def both(self) -> torch.Tensor:
        """The tokens of both chunks."""
        return self.first + self.second


def lengths_of_chunks(
    cu_seqlens: torch.Tensor, chunk: torch.Tensor | int, size: int, rank: int
) -> Lengths:
    """Return the lengths of the chunks of ``rank``, where a sequence has chunks of ``chunk``."""
    lengths = cu_seqlens.diff()
    counts = []
    for number in (rank, 2 * size - 1 - rank):
        rest = (lengths - number * chunk).clamp(min=0)
        counts.append(torch.minimum(rest, torch.as_tensor(chunk).to(rest)))
    return Lengths(*counts)


class Chunks(NamedTuple):
    """How the tensors of one side, queries or keys, are cut for a group of ``size`` ranks."""

    layout: str
    size: int
    starts: torch.Tensor | None = None

    @property
    def dim(self) -> int:
        """The dimension of the tokens."""
        return 1 if self.layout == "bshd" else 0

    def whole(self, parts: torch.Tensor) -> torch.Tensor:
        """Return the whole from ``parts [size, *local]``, one a rank."""
        if self.layout == "thd":
            flat = parts.flatten(0, 1)
            return flat.index_select(0, self._order(flat.shape[0], flat.device).argsort())
        halves = [part.chunk(2, self.dim) for part in parts.unbind(0)]
        first, second = zip(*halves, strict=True)
        return torch.cat((*first, *reversed(second)), self.dim)

    def parts(self, whole: torch.Tensor) -> torch.Tensor:
        """Return ``[size, *local]``: the inverse of :meth:`whole`."""
        if self.layout == "thd":
            order = self._order(whole.shape[0], whole.device)
            rows = whole.index_select(0, order)
            return rows.view(self.size, rows.shape[0] // self.size, *rows.shape[1:])
        chunks = whole.chunk(2 * self.size, self.dim)
        pairs = zip(chunks[: self.size], reversed(chunks[self.size :]), strict=True)
        return torch.stack([torch.cat(pair, self.dim) for pair in pairs])

    def half(self, local: torch.Tensor, second: int, dim: int | None = None) -> torch.Tensor:
        """Return the first chunk, or the second one, of all sequences of a rank's tensor."""
        dim = self.dim if dim is None else dim
        if self.layout != "thd":
            return local.chunk(2, dim)[second]
        return local.index_select(dim, self._half_order(local.shape[dim], second, local.device))

    def add_half(self, local: torch.Tensor, half: torch.Tensor, second: int) -> None:
        """Add to the first chunk, or to the second one, of a rank's tensor."""
        if self.layout != "thd":
            local.chunk(2, self.dim)[second].add_(half)
        else:
            order = self._half_order(local.shape[0], second, local.device)
            local.index_add_(0, order, half.to(local.dtype))

    def write_half(
        self, local: torch.Tensor, half: torch.Tensor, second: int, dim: int | None = None
    ) -> None:
        """Replace the first chunk, or the second one, of a rank's tensor."""
        dim = self.dim if dim is None else dim
        if self.layout != "thd":
            local.chunk(2, dim)[second].copy_(half)
        else:
            order = self._half_order(local.shape[dim], second, local.device)
            local.index_copy_(dim, order, half)

    def _order(self, num_tokens: int, device: torch.device) -> torch.Tensor:
        assert self.starts is not None
        starts = self.starts.to(device)
        ranks = range(self.size)
        return torch.cat([partition(starts, num_tokens, self.size, rank) for rank in ranks])

    def _half_order(self, num_tokens: int, second: int, device: torch.device) -> torch.Tensor:
        """Return the places of one of the two chunks among a rank's tokens."""
        assert self.starts is not None
        starts = self.starts.to(device).long() // self.size
        begin, length, offset = _places(starts, num_tokens, 2)
        return begin + offset + second * (length // 2)
