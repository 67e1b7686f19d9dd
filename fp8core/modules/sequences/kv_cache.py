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
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.nn.functional import pad
from typing_extensions import override

from fp8core.chain.attention.pages import Pages, codes_of
from fp8core.errors import OperandError
from fp8core.modules.calls.parameters import resolve_device
from fp8core.torch_ops.capture import is_captured
from fp8core.torch_ops.private import (
    at_static_address,
    copy_all,
    is_capturing,
    is_transform_active,
)

Sequences: TypeAlias = "OrderedDict[Hashable, int]"
"""A number of tokens for each sequence of the batch, by the sequence's id, in the batch's order."""

Writes: TypeAlias = "list[tuple[torch.Tensor, torch.Tensor]]"
"""Memory, and the values that it gets."""

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
        """Return the tokens ``[t, ..]`` of keys or values ``[.., heads, head size]`` in
        ``qkv_format``, or of both as :func:`_joined` returns them."""
        if qkv_format == "thd":
            return new[: len(self.slot)] if self.row is None else new[self.row]
        if qkv_format == "sbhd":
            new = new.transpose(0, 1)
        if len(self.slot) == new.shape[0] * new.shape[1]:
            return new.flatten(0, 1)
        return new[self.batch, self.offset]


class _ManagerBase(KVCacheManager):
    """The base of the managers of this module."""

    spare, num_spare = 0, 1
    """The slot of tokens that have no place, behind all others, and how many are behind them."""

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
        self._before: Sequences = OrderedDict()
        # The sequences of a layer that took part in the last step, and whether its slots stay.
        self._last: Sequences = OrderedDict()
        self._keeps, self._batch = False, 0
        self._num_unread = 0  # steps on the device since the host knew lengths
        # By layer what ``cache`` has, as one dimension of slots, and the spare ones behind them.
        self._memory: dict[int, tuple[torch.Tensor, ...]] = {}
        self._tokens: _Tokens | None = None
        self._numbers: torch.Tensor | None = None
        self._order: torch.Tensor | None = None  # 0, 1, ..., on the device

    @override
    def reset(self) -> None:
        super().reset()
        self._stored = {}
        self._before = OrderedDict()
        self._last, self._keeps = self.sequences, False
        self._tokens = None

    def pre_step(self, step_dict: Sequences) -> Sequences:
        """Begin a step that brings so many tokens of each sequence; return their lengths.

        The batch has the order of ``step_dict``. Sequences without an entry are finished.

        Raises:
            OperandError: the cache is full, or a number of tokens makes no sense. Nothing changed.
        """
        write(self.begin(step_dict))
        return self.sequences

    def begin(self, step_dict: Sequences) -> Writes:
        """As :meth:`pre_step` on the host; return what brings the memory of slots there."""
        steps = OrderedDict(step_dict)
        before = OrderedDict((name, self.sequences.get(name, 0)) for name in steps)
        after = OrderedDict((name, before[name] + count) for name, count in steps.items())
        self._check(steps, before)
        tokens, writes = self._laid_out(steps, before, after)
        # An id that ended and begins again: a layer that took no part since holds other tokens.
        for layer, stored in self._stored.items():
            if stored is not self.sequences:
                now = self.sequences  # also of tokens that were taken back
                lengths = ((name, min(n, now.get(name, 0))) for name, n in stored.items())
                self._stored[layer] = OrderedDict(lengths)
        self._keeps = self._keeps_slots(before, after)
        self._last, self.sequences = self.sequences, after
        self._before, self._tokens, self._batch = before, tokens, len(after)
        self._num_unread = 0
        return writes

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
        if stored is not self._last:
            self._check_earlier(layer_number, stored)
        if layer_number not in self.cache:
            refuse_capture(f"the first step of layer {layer_number}", "Make a step with it before")
            self.allocate_memory(layer_number)
        with torch.no_grad():
            if stored is not self._last or not self._keeps:
                self._arrange(layer_number, stored)
                self._stored[layer_number] = self._before
            memory = self._memory.get(layer_number, ())
            new: Sequence[torch.Tensor] = (new_k, new_v)
            joined = [*map(_joined, (new_k, *memory[::2]), (new_v, *memory[1::2]))]
            pairs = [pair for pair in joined if pair is not None]
            is_joined = 1 < len(pairs) == len(joined)
            if is_joined:  # each is written in one launch
                new, memory = pairs[:1], tuple(pairs[1:])
            elif tokens.row is None:
                memory = tuple(part.flatten(0, 1) for part in self.cache[layer_number])
            new = [tokens.of(each, qkv_format) for each in new]
            if self.stores_codes:
                excluded = None if tokens.row is None else tokens.slot == self.spare
                new = [*itertools.chain(*zip(*(codes_of(x, excluded) for x in new), strict=True))]
            for slots, part in zip(memory, new, strict=True):
                if is_joined:  # the memory is contiguous so
                    slots, part = slots.transpose(0, 1), part.transpose(0, 1)
                slots.index_copy_(int(is_joined), tokens.slot, part)
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
    ) -> Writes:
        """Begin a step of the sequences of the last one, which get ``counts [b]`` new tokens each,
        at most ``most``; return what brings ``state`` and the memory of slots there. The host reads
        nothing.

        ``state`` int32 ``[6, > b]``: sums of new tokens and of lengths, from 0; lengths before and
        after the step, of which users may lower the latter; bits of :data:`FAULTS` of sequences
        that brought nothing; how many tokens the cache has. Without ``stores`` all tokens go to the
        spare slot.
        """
        batch, order = len(counts), self._order
        assert order is not None
        _, lengths, faults, longest = state[2:, :batch].unbind(0)
        if counts.dtype == torch.int64:
            counts = counts.clamp(-1, most + 1)  # which int32 holds
        is_wrong = lengths != lengths.clamp(min=0).minimum(longest)
        tokens, before = counts.clamp(0, most).int(), torch.where(is_wrong, longest, lengths)
        ends = before + tokens
        faulty = is_wrong + 2 * (tokens != counts) + 4 * (ends > self.max_seqlen)
        faulty, table, writes = self._placed_on_device(before, ends, most, faulty)
        fits = faulty == 0
        stored = tokens * fits
        seen = before * fits
        sums = torch.stack((tokens, seen + stored))
        sums = pad(sums, (0, state.shape[1] - 1 - batch)).cumsum(1, dtype=state.dtype)
        rows = torch.stack((seen, lengths + stored, faults | faulty, before + stored))
        writes += [(state[2:, :batch], rows), (state[:2, 1:], sums)]
        sequence, offset = order[:batch, None], order[:most]
        slots = self._slots_of(sequence, before[:, None] + offset, table)
        slots.masked_fill_(offset >= stored[:, None] if stores else sequence >= 0, self.spare)
        in_thd = (sums[0, :batch] - tokens)[:, None] + offset
        places = slots, sequence.expand_as(slots), offset.expand_as(slots), in_thd
        self._tokens = _Tokens(*[place.flatten() for place in places])
        self._last = self.sequences
        if not torch.compiler.is_compiling():  # where this stays as it is in a replay
            self._num_unread += 1
            self._before = self.sequences  # and more, which a layer lacks that leaves the step out
            self.sequences = OrderedDict((name, n + 1) for name, n in self._before.items())
        return writes

    def catch_up(self, before: Sequence[int], lengths: Sequence[int]) -> None:
        """Note the lengths of the sequences before and after the last of steps on the device."""
        if self._num_unread:
            self._last.update(zip(self._last, before, strict=True))
            for layer, stored in self._stored.items():
                if stored is not self._last and stored is not self.sequences:
                    # Of layers that a step before the last one left out nobody knows what is left.
                    left = ((name, min(n, self._last.get(name, 0))) for name, n in stored.items())
                    self._stored[layer] = OrderedDict(left if self._num_unread == 1 else ())
        self._num_unread = 0
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
    ) -> tuple[torch.Tensor, torch.Tensor | None, Writes]:
        """Find room for the tokens from ``before`` to ``ends`` of sequences without faults, and
        note what layers have to arrange; return the faults with those of sequences without room,
        the pages of each sequence, if there are pages, and what notes all that on the device."""
        raise NotImplementedError

    def _slots_of(
        self, sequence: torch.Tensor, positions: torch.Tensor, table: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the slots of ``positions [b, n]``, anything for such that have none."""
        raise NotImplementedError

    def _allocate(self, layer_number: int, *sizes: int) -> None:
        """Have zeros for keys and for values of a layer, ``[*sizes, heads, head size]``, and for
        their scales, and behind them the memory of ``num_spare`` tokens; for both in one memory if
        their heads are of one size.

        Ordinary tensors also within inference_mode, so that later writes outside of it are allowed.
        """
        count = math.prod(sizes)
        dtype = torch.uint8 if self.stores_codes else self.dtype
        pairs = [(self.head_dim_k, self.head_dim_v, dtype)]
        pairs += [(1, 1, torch.float32)] * self.stores_codes
        rows = count + self.num_spare, self.num_heads
        memory: list[torch.Tensor] = []
        with torch.inference_mode(False):
            for size_k, size_v, dtype in pairs:
                if size_k == size_v:
                    both = zeros((2, *rows, size_k), dtype, self._on())
                    memory.extend([at_static_address(both[0]), at_static_address(both[1])])
                else:
                    memory.extend([zeros((*rows, n), dtype, self._on()) for n in (size_k, size_v)])
            views = [part[:count].view(*sizes, *part.shape[1:]) for part in memory]
        self._memory[layer_number], self.cache[layer_number] = tuple(memory), tuple(views)

    def _in_rows(self, layer_number: int, count: int, length: int) -> list[torch.Tensor]:
        """Return ``cache`` of a layer as ``count`` rows of ``length`` tokens; in a step on the
        device of the memory that has the spare ones too."""
        if self._tokens is None or self._tokens.row is None:
            return list(self.cache[layer_number])
        sizes, num = (count, length), count * length
        return [part[:num].view(*sizes, *part.shape[1:]) for part in self._memory[layer_number]]

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_memory": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        for layer, parts in self.cache.items():
            slots = [part.flatten(0, 1) for part in parts]
            sizes = [(len(part) + self.num_spare, *part.shape[1:]) for part in slots]
            memory = map(torch.Tensor.as_strided, slots, sizes, map(torch.Tensor.stride, slots))
            self._memory[layer] = tuple(map(at_static_address, memory))

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

    def _laid_out(
        self, steps: Sequences, before: Sequences, after: Sequences
    ) -> tuple[_Tokens, Writes]:
        """Choose the slots of the new tokens; return these, and what notes them on the device."""
        raise NotImplementedError

    def _arrange(self, layer_number: int, stored: Mapping[Hashable, int]) -> None:
        """Move a layer's stored rows to their slots of this step, and clear the free slots that
        sequences take over."""
        raise NotImplementedError

    def _uploaded(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the CPU on the device of the cache, without waiting for that."""
        return numbers.to(self._on(), non_blocking=True)

    def _ordinary(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return memory for numbers on the CPU, in which later steps may write."""
        with torch.inference_mode(False):
            return torch.empty(numbers.shape, dtype=numbers.dtype, device=self._on())

    def _placed(self, numbers: torch.Tensor) -> tuple[_Tokens, Writes]:
        """Return the new tokens whose fields are the rows of ``numbers``, on the CPU, in the memory
        of those before if they are as many, as a captured graph of a step finds them there."""
        if self._numbers is None or self._numbers.shape != numbers.shape:
            self._numbers = self._ordinary(numbers)
        if self._order is None:
            order = torch.arange(max(self.max_batch_size, self.max_seqlen) + 1, device="cpu")
            self._order = self._ordinary(order).copy_(order, non_blocking=True)
        return _Tokens(*self._numbers.unbind(0)), [(self._numbers, numbers)]

    def _of_layer(self, layer_number: int) -> Sequence[torch.Tensor]:
        """Return the keys and values of a layer, and their scales."""
        raise NotImplementedError


def _places(steps: Sequences, before: Sequences) -> tuple[torch.Tensor, ...]:
    """Return of each new token the sequence's place in the batch, the place in the sequence's new
    tokens and the position in the sequence, int64 ``[t]`` on the CPU."""
    counts = torch.tensor([*steps.values()], dtype=torch.int64, device="cpu")
    starts = torch.tensor([*before.values()], dtype=torch.int64, device="cpu")
    places = torch.arange(len(steps), device="cpu")
    batch = places.repeat_interleave(counts, output_size=sum(steps.values()))
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
        self._allocate(layer_number, self.max_batch_size, self.max_seqlen)

    def _laid_out(
        self, steps: Sequences, before: Sequences, after: Sequences
    ) -> tuple[_Tokens, Writes]:
        batch, offset, position = _places(steps, before)
        slot = batch * self.max_seqlen + position
        self._changes = None
        if self.stores_codes:  # which are copied where no kernel reads them
            self.read_length = _power_of_two(max(after.values(), default=0), self.max_seqlen)
        return self._placed(torch.stack((slot, batch, offset)))

    @override
    def _placed_on_device(
        self, before: torch.Tensor, ends: torch.Tensor, most: int, faults: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None, Writes]:
        self._keeps, self._changes, self.read_length = True, None, 0
        return faults, None, []

    @override
    def _slots_of(
        self, sequence: torch.Tensor, positions: torch.Tensor, table: torch.Tensor | None
    ) -> torch.Tensor:
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

        def move() -> None:
            self._stored[layer_number] = OrderedDict()  # a move that fails leaves no layer in use
            for part, rows in zip(parts, moved, strict=True):
                part.index_fill_(0, cleared, 0)
                part[target, :length] = rows
            self._stored[layer_number] = self._before

        finish(move)

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

    def _of_layer(self, layer_number: int) -> Sequence[torch.Tensor]:
        parts = self._in_rows(layer_number, self.max_batch_size, self.max_seqlen)
        return [part[: self._batch] for part in parts]

    @override
    def in_pages(self, layer_number: int) -> Pages:
        """Return the rows of a layer, each of which is a page."""
        if self._table is None:
            rows = torch.arange(self.max_batch_size, dtype=torch.int32, device="cpu")
            self._table = self._ordinary(rows[:, None]).copy_(rows[:, None], non_blocking=True)
        keys, values, *scales = self._in_rows(layer_number, self.max_batch_size, self.max_seqlen)
        return Pages(keys, values, self._table[: self._batch], *scales)


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
        self.page_size = self.num_spare = page_size
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
            self._table = zeros(sizes, torch.int32, self._on())
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
        self._allocate(layer_number, self.total_num_pages, self.page_size)

    def _keeps_slots(self, before: Sequences, after: Sequences) -> bool:
        return super()._keeps_slots(before, after) and self._new_pages is None

    def _laid_out(
        self, steps: Sequences, before: Sequences, after: Sequences
    ) -> tuple[_Tokens, Writes]:
        pages = self._with_new_pages(after)
        rows = [
            [*numbers, *[0] * (self.max_pages_per_seq - len(numbers))] for numbers in pages.values()
        ]
        table = torch.tensor(rows, dtype=torch.int64, device="cpu")
        table = table.reshape(len(rows), self.max_pages_per_seq)
        batch, offset, position = _places(steps, before)
        slot = table[batch, position // self.page_size] * self.page_size
        slot += position % self.page_size
        tokens, writes = self._placed(torch.stack((slot, batch, offset)))
        read = self._read_pages(pages.values())
        writes.append((self.page_table[: len(rows)], table))
        writes.append((self._reading(len(rows))[:, : read.shape[1]], read))
        self.read_length = read.shape[1] * self.page_size
        new = (numbers[len(self._pages.get(name, ())) :] for name, numbers in pages.items())
        new_pages = [*itertools.chain.from_iterable(new)]
        self._new_pages = (
            self._uploaded(torch.tensor(new_pages, device="cpu")) if new_pages else None
        )
        self._pages = pages
        return tokens, writes

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
            self._read = zeros(self.page_table.shape, torch.int32, self._on())
        return self._read[:batch]

    @override
    def _placed_on_device(
        self, before: torch.Tensor, ends: torch.Tensor, most: int, faults: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None, Writes]:
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
        gets_page = (numbers > 0) & (numbers <= num_new) & fits
        after = torch.where(gets_page, new, table).to(table.dtype)
        numbers = self._order[1 : 1 - (-most // size)]
        is_new = (numbers <= num_new) & fits
        self._new_pages = chosen(numbers).masked_fill_(~is_new, pages).flatten()
        last = after.gather(1, (num_all - 1).clamp(0, len(columns) - 1).long())
        read = torch.where(columns < num_all, after, last).masked_fill_(~fits, pages)
        self.read_length = len(columns) * size
        self._keeps = False  # the layers clear pages
        return faults, after, [(table, after), (self._reading(len(table)), read)]

    @override
    def _slots_of(
        self, sequence: torch.Tensor, positions: torch.Tensor, table: torch.Tensor | None
    ) -> torch.Tensor:
        assert table is not None
        columns = (positions // self.page_size).clamp_(max=self.max_pages_per_seq - 1)
        return torch.add(positions % self.page_size, table.gather(1, columns), alpha=self.page_size)

    @override
    def catch_up(self, before: Sequence[int], lengths: Sequence[int]) -> None:
        super().catch_up(before, lengths)
        rows = self.page_table[: len(lengths)].tolist()
        self._pages = {
            name: row[: -(-length // self.page_size)]
            for (name, length), row in zip(self.sequences.items(), rows, strict=True)
        }

    def _arrange(self, layer_number: int, stored: Mapping[Hashable, int]) -> None:
        if self._new_pages is not None:
            for cache in self._of_layer(layer_number):
                cache.index_fill_(0, self._new_pages, 0)

    def _of_layer(self, layer_number: int) -> Sequence[torch.Tensor]:
        """Return the pages of a layer, in a step on the device with the spare one behind them."""
        return self._in_rows(layer_number, self.total_num_pages + 1, self.page_size)

    @override
    def in_pages(self, layer_number: int) -> Pages:
        """Return the pages of a layer, of which attention reads :attr:`read_length` tokens: those
        of a power of two of pages, so that it meets few sizes while sequences grow."""
        keys, values, *scales = self._of_layer(layer_number)
        return Pages(keys, values, self._reading(self._batch), *scales)

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


def _joined(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor | None:
    """Return two tensors ``[.., heads, head size]`` as one view ``[.., 2, heads, head size]`` of
    the memory that holds both, as that of a projection or of a cache does; None of others."""
    if is_captured(first) or is_captured(second) or is_transform_active():
        return None
    step = second.storage_offset() - first.storage_offset()
    if step <= 0 or first.dtype != second.dtype:
        return None
    if (first.shape, first.stride()) != (second.shape, second.stride()):
        return None
    if first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr():
        return None
    sizes = (*first.shape[:-2], 2, *first.shape[-2:])
    return first.as_strided(sizes, (*first.stride()[:-2], step, *first.stride()[-2:]))


def _power_of_two(count: int, most: int) -> int:
    """Return the power of two from ``count`` on, from 1 to ``most``."""
    return min(1 << max(0, count - 1).bit_length(), most)


def zeros(sizes: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return memory that steps write, also outside of inference_mode, and graphs of torch.compile,
    which take its address for a constant."""
    with torch.inference_mode(False):
        return at_static_address(torch.zeros(tuple(sizes), dtype=dtype, device=device))


def finish(run: Callable[[], None]) -> None:
    """Do what can be done twice, and once more if an exception, of any kind, came in between."""
    try:
        run()
    except BaseException:
        run()
        raise


def write(writes: Writes) -> None:
    """Have memory get its values, all in one call, without waiting for a device."""
    if writes:
        copy_all(*map(list, zip(*writes, strict=True)), non_blocking=True)


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
