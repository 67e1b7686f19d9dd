"""Where a KV cache keeps the keys and values of each layer: rows of a tensor, or pages of it.

A manager knows the sequences of the current step and their lengths, and holds two tensors a layer.
Each token has a slot in them, a position in the first two dimensions taken as one. Slots are chosen
once a step, in :meth:`KVCacheManager.pre_step`, which touches no layer.

Attention reads slots behind the end of a sequence with a weight of 0, so that the managers of this
module clear what a sequence takes over, once, when it does: what a token wrote, NaN included, meets
no other sequence.

A step on the device, :meth:`_ManagerBase.advance`, finds the slots there, so that a captured graph
finds others in each replay. A token that has no place goes to a spare one behind all slots.
"""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import torch
from typing_extensions import override

from fp8core.chain.attention.pages import Pages, codes_of
from fp8core.errors import OperandError
from fp8core.modules.calls.parameters import resolve_device
from fp8core.torch_ops.private import is_capturing

Sequences: TypeAlias = "OrderedDict[Hashable, int]"
"""A number of tokens for each sequence of the batch, by the sequence's id, in the batch's order."""

FAULTS = (
    "began at a length that is not from 0 to the number of tokens that the cache has of it",
    "got a number of new tokens that is not from 0 to max_seqlen_q",
    "is full: its new tokens reach beyond max_sequence_length",
    "has a page that is none of the cache's",
    "got no page: all of them are in use",
)
"""Why a step on the device leaves a sequence out: bit i of a number stands for entry i."""


class KVCacheManager:
    """Base of the managers, and of a ``custom_cache_manager``, whose class
    :class:`fp8core.InferenceParams` calls with the arguments of :class:`NonPagedKVCacheManager` or,
    for a paged cache, of :class:`PagedKVCacheManager`, but for ``device``.

    Attributes:
        cache: by layer number, the keys and the values: ``[batch, tokens, heads, head size]``, or
            ``[pages, page size, heads, head size]``.
        sequences: the lengths of the sequences, those of the current step's tokens included.
        device: of the tensors; :class:`fp8core.InferenceParams` sets it before memory is allocated.
    """

    device: torch.device | None = None
    read_length = 0
    """How many tokens hold the longest sequence of this step, of pages whole ones; 0 says nothing:
    as many as a sequence may have."""

    def __init__(self) -> None:
        self.cache: dict[int, tuple[torch.Tensor, ...]] = {}
        self.sequences: Sequences = OrderedDict()

    def reset(self) -> None:
        """Forget every sequence; the memory stays."""
        self.sequences = OrderedDict()

    def allocate_memory(self, layer_number: int) -> None:
        """Allocate ``cache[layer_number]``."""
        raise NotImplementedError

    def pre_step(self, step_dict: Sequences) -> Sequences:
        """Begin a step that brings so many tokens of each sequence; return ``sequences``.

        Sequences without an entry are finished. Raises without a change if a token has no place.
        """
        raise NotImplementedError

    def step(
        self,
        layer_number: int,
        new_k: torch.Tensor,
        new_v: torch.Tensor,
        cu_new_seqlens: torch.Tensor,
        cu_cached_seqlens: torch.Tensor,
        qkv_format: str,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the step's keys and values of a layer; return the layer's keys and values.

        The keys and values of a cache without pages are ``[b, tokens, heads, head size]`` in the
        batch's order, each sequence from the first token on; a paged cache returns its pages, and
        says in ``page_table [b, pages]`` which of them belong to each sequence.
        """
        raise NotImplementedError


class _Tokens(NamedTuple):
    """The new tokens of a step: of each its slot, the sequence's place in the batch and the place
    in the sequence's new tokens; int64 ``[t]`` on the device of the cache.

    A step on the device has as many of each sequence, those that it does not bring in the spare
    slot, and their ``row`` in thd; others are in thd as they are here.
    """

    slot: torch.Tensor
    batch: torch.Tensor
    offset: torch.Tensor
    row: torch.Tensor | None = None

    def of(self, new: torch.Tensor, qkv_format: str) -> torch.Tensor:
        """Return the tokens ``[t, heads, head size]`` of keys or values in ``qkv_format``."""
        if qkv_format == "thd":
            return new[: len(self.slot)] if self.row is None else new[self.row]
        if qkv_format == "sbhd":
            new = new.transpose(0, 1)
        if len(self.slot) == new.shape[0] * new.shape[1]:
            return new.flatten(0, 1)
        return new[self.batch, self.offset]


class _ManagerBase(KVCacheManager):
    """The base of the managers of this module."""

    spare = 0
    """The slot of tokens that have no place, behind all others."""

    stores_codes = False
    """Whether ``cache`` has e4m3 codes of keys and values, uint8, and behind them the scales of
    both, float32 ``[.., heads, 1]``, a scale for each head of a token.
    :class:`fp8core.InferenceParams` sets it before memory is allocated."""

    def __init__(
        self,
        num_heads: int,
        head_dims: tuple[int, int | None],
        dtype: torch.dtype,
        limits: tuple[int, int],
        device: torch.device | str | None,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim_k, size_of_values = head_dims
        self.head_dim_v = self.head_dim_k if size_of_values is None else size_of_values
        self.dtype = dtype
        self.max_batch_size, self.max_seqlen = limits
        self.device = None if device is None else resolve_device(device)
        # By layer, the sequences whose tokens it holds and how many, in the order of its last step.
        self._stored: dict[int, Sequences] = {}
        self._before: Mapping[Hashable, int] = {}
        # The sequences of a layer that took part in the last step, if their slots stay the same.
        self._settled: Sequences | None = None
        self._tokens: _Tokens | None = None
        self._numbers: torch.Tensor | None = None
        self._order: torch.Tensor | None = None  # 0, 1, ..., on the device

    @override
    def reset(self) -> None:
        super().reset()
        self._stored = {}
        self._before = {}
        self._settled = None
        self._tokens = None

    def pre_step(self, step_dict: Sequences) -> Sequences:
        """Begin a step that brings so many tokens of each sequence; return their lengths.

        The batch has the order of ``step_dict``. Sequences without an entry are finished.

        Raises:
            OperandError: the cache is full, or a number of tokens makes no sense. Nothing changed.
        """
        steps = OrderedDict(step_dict)
        before = OrderedDict((name, self.sequences.get(name, 0)) for name in steps)
        after = OrderedDict((name, before[name] + count) for name, count in steps.items())
        self._check(steps, before)
        tokens = self._laid_out(steps, before, after)
        # An id that ended and begins again: a layer that took no part since holds other tokens.
        for layer, stored in self._stored.items():
            if stored is not self.sequences:
                lengths = ((name, n if name in self.sequences else 0) for name, n in stored.items())
                self._stored[layer] = OrderedDict(lengths)
        self._settled = self.sequences if self._keeps_slots(before, after) else None
        self.sequences, self._before, self._tokens = after, before, tokens
        return after

    @override
    def step(
        self,
        layer_number: int,
        new_k: torch.Tensor,
        new_v: torch.Tensor,
        cu_new_seqlens: torch.Tensor,
        cu_cached_seqlens: torch.Tensor,
        qkv_format: str,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, stored = self._tokens, self._stored.get(layer_number, OrderedDict())
        if tokens is None:
            raise OperandError("KV cache: step() without a pre_step() that says what it brings.")
        is_settled = stored is self._settled
        if not is_settled:
            self._check_earlier(layer_number, stored)
        if layer_number not in self.cache:
            refuse_capture(f"the first step of layer {layer_number}", "Make a step with it before")
            self.allocate_memory(layer_number)
        with torch.no_grad():
            if not is_settled:
                self._arrange(layer_number, stored)
                self._stored[layer_number] = OrderedDict(self._before)
            new = [tokens.of(each, qkv_format) for each in (new_k, new_v)]
            if self.stores_codes:
                excluded = None if tokens.row is None else tokens.slot == self.spare
                new = [*itertools.chain(*zip(*(codes_of(x, excluded) for x in new), strict=True))]
            for cache, part in zip(self.cache[layer_number], new, strict=True):
                slots = cache.flatten(0, 1)
                slots = slots if tokens.row is None else _with_spare(slots)
                slots.index_copy_(0, tokens.slot, part)
        self._stored[layer_number] = self.sequences
        keys, values, *_ = self._of_layer(layer_number)
        return keys, values

    def in_pages(self, layer_number: int) -> Pages:
        """Return the keys and values of a layer as pages of the batch's sequences, whose table is
        the same memory in every step."""
        raise NotImplementedError

    def _check_earlier(self, layer_number: int, stored: Mapping[Hashable, int]) -> None:
        """Refuse a layer that lacks tokens of earlier steps."""
        for name, length in self._before.items():
            if stored.get(name, 0) < length:
                raise OperandError(
                    f"KV cache: layer {layer_number} holds {stored.get(name, 0)} of the {length} "
                    f"earlier tokens of sequence {name!r}; every layer takes part in every step. "
                    f"After a step that failed write the lengths before it to seqlens, and read "
                    f"sequences; or reset()."
                )

    def _keeps_slots(self, before: Sequences, after: Sequences) -> bool:
        """Whether the step after ``self.sequences`` leaves what layers hold in its slots, and takes
        no slot over."""
        return list(before.items()) == list(self.sequences.items()) and all(before.values())

    def advance(
        self, state: torch.Tensor, counts: torch.Tensor, most: int, *, stores: bool
    ) -> None:
        """Begin a step of the sequences of the last one, which get ``counts [b]`` new tokens each,
        at most ``most``, and bring ``state`` there. The host reads neither.

        ``state`` int32 ``[6, > b]``: sums of new tokens and of lengths, from 0; lengths before and
        after the step, of which users may lower the latter; bits of :data:`FAULTS` of sequences
        that brought nothing; how many tokens the cache has. Without ``stores`` all tokens go to the
        spare slot.
        """
        batch = len(counts)
        lengths, longest = state[3:6:2, :batch].unbind(0)
        if counts.dtype == torch.int64:
            counts = counts.clamp(-1, most + 1)  # which int32 holds
        is_wrong = lengths != lengths.clamp(min=0).minimum(longest)
        tokens, before = counts.clamp(0, most).int(), torch.where(is_wrong, longest, lengths)
        ends = before + tokens
        faults = is_wrong + 2 * (tokens != counts) + 4 * (ends > self.max_seqlen)
        faults = self._placed_on_device(before, ends, most, faults)
        fits = faults == 0
        stored = tokens * fits
        torch.mul(before, fits, out=state[2, :batch])
        seen = state[2, :batch] + stored
        torch.add(before, stored, out=longest)
        torch.add(lengths, stored, out=lengths)
        sums = state[:2, 1:]
        torch.cumsum(torch.stack((tokens, seen)), 1, dtype=sums.dtype, out=sums[:, :batch])
        sums[:, batch:] = sums[:, batch - 1 : batch]
        state[4, :batch] |= faults
        order = self._order
        assert order is not None
        sequence, offset = order[:batch, None], order[:most]
        slots = self._slots_of(sequence, before[:, None] + offset)
        slots.masked_fill_(offset >= stored[:, None] if stores else sequence >= 0, self.spare)
        rows = state[0, :batch, None] + offset
        places = slots, sequence.expand_as(slots), offset.expand_as(slots), rows
        self._tokens = _Tokens(*[place.flatten() for place in places])
        self._before = self.sequences  # and more, which a layer lacks that leaves the step out
        self.sequences = OrderedDict((name, n + 1) for name, n in self._before.items())

    def catch_up(self, lengths: Sequence[int]) -> None:
        """Note the lengths of the sequences after steps on the device, which every layer took."""
        self.sequences.update(zip(self.sequences, lengths, strict=True))

    def settle(self) -> None:
        """Have layers that took part in all steps move what they have now, and not in their next
        step: a captured graph of that does not."""
        before = OrderedDict(self._before)
        settled = self.sequences if before == self.sequences else before
        for layer, stored in self._stored.items():
            if all(stored.get(name, 0) >= length for name, length in before.items()):
                self._arrange(layer, stored)
                self._stored[layer] = settled

    def _placed_on_device(
        self, before: torch.Tensor, ends: torch.Tensor, most: int, faults: torch.Tensor
    ) -> torch.Tensor:
        """Make room for the tokens from ``before`` to ``ends`` of sequences without faults, and
        note what layers have to arrange; return the faults with those of sequences without room."""
        raise NotImplementedError

    def _slots_of(self, sequence: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the slots of ``positions [b, n]``, anything for such that have none."""
        raise NotImplementedError

    def _allocated(self, *sizes: int, spare: int) -> tuple[torch.Tensor, ...]:
        """Return zeros for keys and for values, ``[*sizes, heads, head size]``, and for their
        scales, and behind them the memory of ``spare`` tokens.

        Ordinary tensors also within inference_mode, so that later writes outside of it are allowed.
        """
        count, heads, device = math.prod(sizes), self.num_heads, self._on()
        dtype = torch.uint8 if self.stores_codes else self.dtype
        parts = [(self.head_dim_k, dtype), (self.head_dim_v, dtype)]
        parts += [(1, torch.float32)] * (2 * self.stores_codes)
        with torch.inference_mode(False):
            return tuple(
                torch.zeros(count + spare, heads, size, dtype=dtype, device=device)[:count].view(
                    *sizes, heads, size
                )
                for size, dtype in parts
            )

    def _on(self) -> torch.device:
        return resolve_device(self.device)

    def _check(self, steps: Sequences, before: Sequences) -> None:
        """Refuse a batch or a sequence that is too large."""
        if len(steps) > self.max_batch_size:
            raise OperandError(
                f"KV cache is full: a step of {len(steps)} sequences, and max_batch_size is "
                f"{self.max_batch_size}."
            )
        for name, count in steps.items():
            if before[name] + count > self.max_seqlen:
                raise OperandError(
                    f"KV cache is full: sequence {name!r} has {before[name]} tokens and gets "
                    f"{count} more, and max_sequence_length is {self.max_seqlen}."
                )

    def _laid_out(self, steps: Sequences, before: Sequences, after: Sequences) -> _Tokens:
        """Choose the slots of the new tokens; the last thing before the step counts as begun."""
        raise NotImplementedError

    def _arrange(self, layer_number: int, stored: Mapping[Hashable, int]) -> None:
        """Move a layer's stored rows to their slots of this step, and clear the free slots that
        sequences take over."""
        raise NotImplementedError

    def _uploaded(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the CPU on the device of the cache, without waiting for that."""
        return numbers.to(self._on(), non_blocking=True)

    def _refreshed(self, last: torch.Tensor | None, numbers: torch.Tensor) -> torch.Tensor:
        """Return :meth:`_uploaded` numbers, in the memory of ``last`` if they are as many: there a
        captured graph of a step finds them."""
        if last is None or last.shape != numbers.shape:
            with torch.inference_mode(False):
                last = torch.empty(numbers.shape, dtype=numbers.dtype, device=self._on())
        return last.copy_(numbers, non_blocking=True)

    def _placed(self, numbers: torch.Tensor) -> _Tokens:
        """Return the new tokens whose fields are the rows of ``numbers``, on the CPU."""
        self._numbers = self._refreshed(self._numbers, numbers)
        if self._order is None:
            order = torch.arange(max(self.max_batch_size, self.max_seqlen) + 1, device="cpu")
            self._order = self._refreshed(None, order)
        return _Tokens(*self._numbers.unbind(0))

    def _of_layer(self, layer_number: int) -> tuple[torch.Tensor, ...]:
        """Return the keys and values of a layer, and their scales."""
        return self.cache[layer_number]


def _places(steps: Sequences, before: Sequences) -> tuple[torch.Tensor, ...]:
    """Return of each new token the sequence's place in the batch, the place in the sequence's new
    tokens and the position in the sequence, int64 ``[t]`` on the CPU."""
    counts = torch.tensor([*steps.values()], dtype=torch.int64, device="cpu")
    starts = torch.tensor([*before.values()], dtype=torch.int64, device="cpu")
    batch = torch.arange(len(steps), device="cpu").repeat_interleave(counts)
    offset = torch.arange(len(batch), device="cpu") - (counts.cumsum(0) - counts)[batch]
    return batch, offset, starts[batch] + offset


class _Changes(NamedTuple):
    """The changes of rows since a step after which layers held ``stored``: the rows that sequences
    take over, int64 on the device of the cache, and for each row that moves both places."""

    stored: Mapping[Hashable, int]
    cleared: torch.Tensor
    source: torch.Tensor
    target: torch.Tensor


class NonPagedKVCacheManager(_ManagerBase):
    """Keeps each sequence in a row of ``[max_batch_size, max_seqlen]`` tokens.

    Rows are in the order of the batch; where that order changes, as after a sequence has ended, a
    layer moves its rows in its next step.
    """

    _table: torch.Tensor | None = None

    def __init__(
        self,
        max_batch_size: int,
        max_seqlen: int,
        num_heads: int,
        head_dim_k: int,
        dtype: torch.dtype,
        head_dim_v: int | None = None,
        *,
        device: torch.device | str | None = None,
    ) -> None:
        limits = max_batch_size, max_seqlen
        super().__init__(num_heads, (head_dim_k, head_dim_v), dtype, limits, device)
        self.spare = max_batch_size * max_seqlen
        self._changes: _Changes | None = None  # of this step, for the layers that hold the same

    def allocate_memory(self, layer_number: int) -> None:
        """Allocate the layer's keys and values, ``[max_batch_size, max_seqlen, heads, size]``."""
        self.cache[layer_number] = self._allocated(self.max_batch_size, self.max_seqlen, spare=1)

    def _laid_out(self, steps: Sequences, before: Sequences, after: Sequences) -> _Tokens:
        batch, offset, position = _places(steps, before)
        slot = batch * self.max_seqlen + position
        self._changes = None
        if self.stores_codes:  # which are copied where no kernel reads them
            self.read_length = _power_of_two(max(after.values(), default=0), self.max_seqlen)
        return self._placed(torch.stack((slot, batch, offset)))

    @override
    def _placed_on_device(
        self, before: torch.Tensor, ends: torch.Tensor, most: int, faults: torch.Tensor
    ) -> torch.Tensor:
        self._settled, self._changes, self.read_length = self.sequences, None, 0
        return faults

    @override
    def _slots_of(self, sequence: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return torch.add(positions, sequence, alpha=self.max_seqlen)

    def _arrange(self, layer_number: int, stored: Mapping[Hashable, int]) -> None:
        if self._changes is None or self._changes.stored is not stored:
            self._changes = self._changes_since(stored)
        _, cleared, source, target = self._changes
        if not len(cleared):
            return
        length = max(self._before.values())
        parts = self.cache[layer_number]
        moved = [part[source, :length] for part in parts]
        self._stored[layer_number] = OrderedDict()  # whoever interrupts this leaves no layer in use
        for part, rows in zip(parts, moved, strict=True):
            part.index_fill_(0, cleared, 0)
            part[target, :length] = rows

    def _changes_since(self, stored: Mapping[Hashable, int]) -> _Changes:
        """Return the changes of the rows of layers that have ``stored``."""
        refuse_capture("rows of other sequences", "Make a step with the layers before")
        rows = {name: row for row, name in enumerate(stored)}
        moves, rows_to_clear = [], []
        for at, (name, length) in enumerate(self._before.items()):
            if length and rows[name] == at:
                continue
            rows_to_clear.append(at)
            if length:
                moves.append((rows[name], at))
        pairs = torch.tensor(moves, dtype=torch.int64, device="cpu").view(-1, 2)
        cleared = self._uploaded(torch.tensor(rows_to_clear, dtype=torch.int64, device="cpu"))
        return _Changes(stored, cleared, *self._uploaded(pairs).unbind(1))

    def _of_layer(self, layer_number: int) -> tuple[torch.Tensor, ...]:
        return tuple(part[: len(self.sequences)] for part in self.cache[layer_number])

    @override
    def in_pages(self, layer_number: int) -> Pages:
        """Return the rows of a layer, each of which is a page."""
        if self._table is None:
            rows = torch.arange(self.max_batch_size, dtype=torch.int32, device="cpu")
            self._table = self._refreshed(None, rows[:, None])
        keys, values, *scales = self.cache[layer_number]
        return Pages(keys, values, self._table[: len(self.sequences)], *scales)


class PagedKVCacheManager(_ManagerBase):
    """Keeps each sequence in pages of ``page_size`` tokens, out of ``total_num_pages`` for all.

    Attributes:
        page_table: int32 ``[max_batch_size, max_seqlen / page_size]``: the pages of each sequence
            of the batch, then 0.
    """

    def __init__(
        self,
        total_num_pages: int,
        page_size: int,
        num_heads: int,
        head_dim_k: int,
        dtype: torch.dtype,
        *,
        max_batch_size: int,
        max_seqlen: int,
        head_dim_v: int | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        limits = max_batch_size, max_seqlen
        super().__init__(num_heads, (head_dim_k, head_dim_v), dtype, limits, device)
        self.total_num_pages = total_num_pages
        self.page_size = page_size
        self.spare = total_num_pages * page_size
        self.max_pages_per_seq = max_seqlen // page_size
        self._pages: dict[Hashable, list[int]] = {}
        self._table: torch.Tensor | None = None
        # Of this step: the pages that attention reads, in the same memory in every step, and those
        # that sequences took.
        self._read: torch.Tensor | None = None
        self._new_pages: torch.Tensor | None = None

    @property
    def page_table(self) -> torch.Tensor:
        """The pages of each sequence of the batch; the same tensor in every step."""
        if self._table is None:
            sizes = (self.max_batch_size, self.max_pages_per_seq)
            with torch.inference_mode(False):
                self._table = torch.zeros(sizes, dtype=torch.int32, device=self._on())
        return self._table

    def reset(self) -> None:
        """Forget every sequence, and free its pages; the memory stays."""
        super().reset()
        self._pages = {}
        self._new_pages = None
        self.read_length = 0
        self.page_table.zero_()

    def allocate_memory(self, layer_number: int) -> None:
        """Allocate the layer's keys and values, ``[total_num_pages, page_size, heads, size]``."""
        size = self.page_size
        self.cache[layer_number] = self._allocated(self.total_num_pages, size, spare=size)

    def _keeps_slots(self, before: Sequences, after: Sequences) -> bool:
        return super()._keeps_slots(before, after) and self._new_pages is None

    def _laid_out(self, steps: Sequences, before: Sequences, after: Sequences) -> _Tokens:
        pages = self._with_new_pages(after)
        rows = [
            [*numbers, *[0] * (self.max_pages_per_seq - len(numbers))] for numbers in pages.values()
        ]
        table = torch.tensor(rows, dtype=torch.int64, device="cpu")
        table = table.reshape(len(rows), self.max_pages_per_seq)
        batch, offset, position = _places(steps, before)
        slot = table[batch, position // self.page_size] * self.page_size
        slot += position % self.page_size
        tokens = self._placed(torch.stack((slot, batch, offset)))
        self.page_table[: len(rows)].copy_(table, non_blocking=True)
        read = self._read_pages(pages.values())
        self._reading(len(rows))[:, : read.shape[1]].copy_(read, non_blocking=True)
        self.read_length = read.shape[1] * self.page_size
        new = (numbers[len(self._pages.get(name, ())) :] for name, numbers in pages.items())
        new_pages = [*itertools.chain.from_iterable(new)]
        self._new_pages = (
            self._uploaded(torch.tensor(new_pages, device="cpu")) if new_pages else None
        )
        self._pages = pages
        return tokens

    def _read_pages(self, pages: Collection[Sequence[int]]) -> torch.Tensor:
        """Return the pages of each sequence, int32 ``[b, n]`` on the CPU, the last one repeated: a
        page of another sequence would bring what its tokens wrote. n is a power of two, or all
        pages that a sequence may have."""
        count = _power_of_two(max(map(len, pages), default=0), self.max_pages_per_seq)
        last = [numbers[-1] if numbers else 0 for numbers in pages]
        rows = [
            [*numbers, *[at] * (count - len(numbers))]
            for numbers, at in zip(pages, last, strict=True)
        ]
        return torch.tensor(rows, dtype=torch.int32, device="cpu").reshape(len(rows), count)

    def _reading(self, batch: int) -> torch.Tensor:
        """Return the memory of the pages that attention reads of the first ``batch`` sequences."""
        if self._read is None or self._read.dtype != torch.int32:  # of an earlier pickle
            with torch.inference_mode(False):
                self._read = torch.zeros_like(self.page_table)
        return self._read[:batch]

    @override
    def _placed_on_device(
        self, before: torch.Tensor, ends: torch.Tensor, most: int, faults: torch.Tensor
    ) -> torch.Tensor:
        size, pages = self.page_size, self.total_num_pages  # which is the number of the spare page
        assert self._order is not None
        table, columns = self.page_table[: len(before)], self._order[: self.max_pages_per_seq]
        num_old, num_all = ((torch.stack((before, ends)) + (size - 1)) // size).unsqueeze(-1)
        is_old, is_outside = columns < num_old, table != table.clamp(0, pages - 1)
        faults = faults + 8 * (is_old & is_outside).any(1)
        used = table.masked_fill(~is_old | is_outside, pages).flatten().long()
        num_free = torch.ones(pages + 1, dtype=torch.int64, device=table.device)
        num_free = num_free.index_fill_(0, used, 0)[:pages].cumsum(0)
        num_new = (num_all - num_old) * (faults == 0)[:, None]
        first = num_new.cumsum(0) - num_new

        def chosen(numbers: torch.Tensor) -> torch.Tensor:
            """Return the free pages that sequences get as their ``numbers``-th, from 1; the spare
            one if none is left, 0 for others."""
            free = torch.searchsorted(num_free, first + numbers)
            return free.mul((numbers > 0) & (numbers <= num_new))

        numbers = columns - num_old + 1
        new = chosen(numbers)
        faults = faults + 16 * (new == pages).any(1)
        fits = (faults == 0)[:, None]
        table.copy_(torch.where((numbers > 0) & (numbers <= num_new) & fits, new, table))
        numbers = self._order[1 : 1 - (-most // size)]
        is_new = (numbers <= num_new) & fits
        self._new_pages = chosen(numbers).masked_fill_(~is_new, pages).flatten()
        last = table.gather(1, (num_all - 1).clamp(0, len(columns) - 1).long())
        read = torch.where(columns < num_all, table, last).masked_fill_(~fits, pages)
        self._reading(len(table)).copy_(read)
        self.read_length = len(columns) * size
        self._settled = None  # the layers clear pages
        return faults

    @override
    def _slots_of(self, sequence: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        columns = (positions // self.page_size).clamp_(max=self.max_pages_per_seq - 1)
        pages = self.page_table.gather(1, columns)
        return torch.add(positions % self.page_size, pages, alpha=self.page_size)

    @override
    def catch_up(self, lengths: Sequence[int]) -> None:
        super().catch_up(lengths)
        rows = self.page_table[: len(lengths)].tolist()
        self._pages = {
            name: row[: -(-length // self.page_size)]
            for (name, length), row in zip(self.sequences.items(), rows, strict=True)
        }

    def _arrange(self, layer_number: int, stored: Mapping[Hashable, int]) -> None:
        if self._new_pages is not None:
            for cache in self._pages_of(layer_number):
                cache.index_fill_(0, self._new_pages, 0)

    def _pages_of(self, layer_number: int) -> list[torch.Tensor]:
        """Return the pages of the keys and of the values of a layer, in a step on the device with
        the spare one behind them."""
        is_on_device = self._tokens is not None and self._tokens.row is not None
        return [_with_spare(part) if is_on_device else part for part in self.cache[layer_number]]

    @override
    def in_pages(self, layer_number: int) -> Pages:
        """Return the pages of a layer, of which attention reads :attr:`read_length` tokens: those
        of a power of two of pages, so that it meets few sizes while sequences grow."""
        keys, values, *scales = self._pages_of(layer_number)
        return Pages(keys, values, self._reading(len(self.sequences)), *scales)

    def _with_new_pages(self, after: Sequences) -> dict[Hashable, list[int]]:
        """Return the pages of each sequence after this step."""
        pages = {name: self._pages.get(name, []) for name in after}
        used = {*itertools.chain(*pages.values())}
        free = [page for page in range(self.total_num_pages) if page not in used]
        missing = {
            name: -(-length // self.page_size) - len(pages[name]) for name, length in after.items()
        }
        if sum(missing.values()) > len(free):
            raise OperandError(
                f"KV cache is full: the step needs {sum(missing.values())} more pages of "
                f"{self.page_size} tokens, and {len(free)} of {self.total_num_pages} are free. End "
                f"a sequence, by a step without it, or give InferenceParams more total_num_pages."
            )
        numbers = iter(free)
        return {name: [*pages[name], *itertools.islice(numbers, missing[name])] for name in after}


def _power_of_two(count: int, most: int) -> int:
    """Return the power of two from ``count`` on, from 1 to ``most``."""
    return min(1 << max(0, count - 1).bit_length(), most)


def _with_spare(memory: torch.Tensor) -> torch.Tensor:
    """Return slots or pages with the spare one, whose memory is behind theirs."""
    size = len(memory) + 1, *memory.shape[1:]
    return memory.as_strided(size, memory.stride(), memory.storage_offset())


def first_fault(bits: int) -> str:
    """Return the text of the lowest bit of those of :data:`FAULTS`."""
    return FAULTS[(bits & -bits).bit_length() - 1]


def refuse_capture(call: str, remedy: str) -> None:
    """Refuse what the replays of a CUDA graph would do with the numbers of now.

    Raises:
        OperandError: a graph is captured.
    """
    if is_capturing():
        raise OperandError(f"KV cache: {call} while a CUDA graph is captured. {remedy}.")
