"""Keys and values of earlier tokens, kept while a model generates the next ones."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from itertools import accumulate, chain
from operator import index
from typing import Any, NamedTuple, TypeAlias, TypeVar
from weakref import WeakValueDictionary

import torch

from fp8core.chain.attention.pages import CODES, Pages
from fp8core.chain.differentiable import without_gradient
from fp8core.errors import OperandError, UnsupportedError
from fp8core.modules.calls.parameters import check_size, resolve_device
from fp8core.modules.sequences.kv_cache import (
    KVCacheManager,
    NonPagedKVCacheManager,
    PagedKVCacheManager,
    Sequences,
    Writes,
    first_fault,
    refuse_capture,
    write,
    zeros,
)
from fp8core.tensors.parameter import DTYPES
from fp8core.tensors.storage import FLOATS
from fp8core.torch_ops.capture import untraced
from fp8core.torch_ops.private import is_capturing, is_exporting

_FORMATS = ("bshd", "sbhd", "thd")
_Stored = TypeVar("_Stored")
_Maker: TypeAlias = Callable[..., KVCacheManager]
_size = partial(check_size, "InferenceParams")


class CachedKeys(NamedTuple):
    """The result of :meth:`InferenceParams.step`, in the order of Transformer Engine.

    Attributes:
        k_cache, v_cache: ``[b, tokens, heads, head size]``: of each sequence the earlier and the
            new tokens, then values of no meaning.
        cu_seqlens_q, cu_seqlens_kv: int32 ``[b + 1]``: sums of the numbers of new tokens, and of
            the lengths of the sequences.
        max_seqlen_kv: the length of the longest sequence.
        qkv_format: the format of the queries; ``"thd_2bshd"`` if it is not that of the cache.
    """

    k_cache: torch.Tensor
    v_cache: torch.Tensor
    cu_seqlens_q: torch.Tensor
    cu_seqlens_kv: torch.Tensor
    max_seqlen_kv: int
    qkv_format: str


class _Views(NamedTuple):
    """The lengths of a step's sequences, int32 on the device: sums of the numbers of new tokens and
    of the lengths, ``[b + 1]``, and the lengths before it, ``[b]``."""

    sums_q: torch.Tensor
    sums_kv: torch.Tensor
    before: torch.Tensor


class InferenceParams:
    """The KV cache of a model: the state of its generation.

    A step gives the model the next tokens of each sequence. The first one of a sequence brings its
    prompt (prefill), the others a token each (decode), or several::

        cache = InferenceParams(...)
        with torch.no_grad():
            cache.pre_step(OrderedDict({0: 10, 1: 7}))  # prompts of 10 and of 7 tokens
            y = model(x, inference_params=cache)  # x [2, 10, h] in bshd, padded at the end
            cache.pre_step(OrderedDict({0: 1, 1: 1}))
            y = model(x, inference_params=cache)  # x [2, 1, h]
            cache.pre_step(OrderedDict({1: 1, 2: 5}))  # 0 has ended, 2 is new
            cache.pre_step(torch.tensor([1, 1], dtype=torch.int32))  # of 1 and 2, on the device

    A step's tensors have the sequences in the order of ``pre_step``. Each layer takes part in every
    step, under a ``layer_number`` of its own.

    Args:
        max_batch_size: how many sequences a step may have.
        max_sequence_length: how many tokens a sequence may have.
        num_heads_kv: the number of heads of keys and values, which are the groups of queries.
        head_dim_k: the size of a head of the keys.
        dtype: of the cache, that of keys and values.
        head_dim_v: the size of a head of the values; None is that of the keys.
        is_paged: sequences share pages of tokens, instead of a full length for each.
        total_num_pages: of a paged cache; None is enough for every sequence at full length.
        page_size: tokens of a page; divides ``max_sequence_length``.
        max_ctx_len: how many tokens a sequence may bring in one step; None is any number.
        qkv_format: the layout of queries, keys and values: ``"bshd"``, ``"sbhd"`` or ``"thd"``.
        custom_cache_manager: a subclass of :class:`fp8core.KVCacheManager` in the place of the
            cache's own.
        device: of the cache; None is the device of new layers.
        storage_format: ``"e4m3"`` stores keys and values as FP8 codes, with a float32 scale for
            each head of a token; None in ``dtype``, in which attention computes either way.

    Attributes:
        sequences, sequences_pre_step: the lengths of the sequences with and without the step's
            tokens. Of steps on the device they are read there, which waits for them.
        batch_size: the number of sequences of the step.
        max_seqlen_q, max_seqlen_kv: the largest number of new tokens, and the longest sequence; in
            a step on the device the most there may be.
        cu_seqlens_q, cu_seqlens_kv: int32 ``[max_batch_size + 1]``, as in :class:`CachedKeys`, the
            last sum repeated.
        cache_manager: holds the tensors.

    Raises:
        OperandError: a size that makes no sense, or a size that is missing.
        UnsupportedError: a dtype in which no attention computes, or another storage format; codes
            of a ``custom_cache_manager``.
    """

    storage_format: str | None = None

    def __init__(
        self,
        max_batch_size: int,
        max_sequence_length: int,
        num_heads_kv: int | None = None,
        head_dim_k: int | None = None,
        dtype: torch.dtype | None = None,
        head_dim_v: int | None = None,
        is_paged: bool = False,
        total_num_pages: int | None = None,
        page_size: int | None = None,
        max_ctx_len: int | None = None,
        qkv_format: str = "bshd",
        custom_cache_manager: type[KVCacheManager] | None = None,
        *,
        device: torch.device | str | None = None,
        storage_format: str | None = None,
    ) -> None:
        self.max_batch_size = _size("max_batch_size", max_batch_size)
        self.max_sequence_length = _size("max_sequence_length", max_sequence_length)
        self.num_heads_kv = _size("num_heads_kv", num_heads_kv)
        self.head_dim_k = _size("head_dim_k", head_dim_k)
        self.head_dim_v = _size("head_dim_v", head_dim_k if head_dim_v is None else head_dim_v)
        if dtype not in DTYPES:
            raise UnsupportedError(
                f"InferenceParams(dtype={dtype}): expected the dtype of keys and values, bfloat16, "
                f"float16 or float32."
            )
        self.dtype = dtype
        self.max_ctx_len = max_ctx_len
        if max_ctx_len is not None and _size("max_ctx_len", max_ctx_len) > max_sequence_length:
            raise OperandError(
                f"InferenceParams(max_ctx_len={max_ctx_len}): expected at most "
                f"max_sequence_length={max_sequence_length}."
            )
        self.device = resolve_device(device)
        self.is_paged = is_paged
        self.cache_manager = self._manager(custom_cache_manager, total_num_pages, page_size)
        self._is_built_in = custom_cache_manager is None
        self.cache_manager.device = self.device
        if storage_format is not None:
            self._store_codes(storage_format)
        self.cache_qkv_format = "bshd"
        self.input_qkv_format = self.output_qkv_format = ""
        self._take_format(qkv_format)
        # Rows: sums of new tokens, sums of lengths, lengths before the step and behind it, what
        # steps on the device found wrong, and the lengths that steps left, as users write to the
        # fourth. The host writes all by one copy a step.
        self._lengths = zeros((6, max_batch_size + 1), torch.int32, self.device)
        self._starts: dict[tuple[int, int], torch.Tensor] = {}
        self._is_on_device = False  # lengths may have changed there, since a step or a replay
        self._layers: WeakValueDictionary[int, torch.nn.Module] = WeakValueDictionary()
        self._forget()

    def _manager(
        self,
        custom: _Maker | None,
        total_num_pages: int | None,
        page_size: int | None,
    ) -> KVCacheManager:
        sizes = {
            "max_batch_size": self.max_batch_size,
            "max_seqlen": self.max_sequence_length,
            "num_heads": self.num_heads_kv,
            "head_dim_k": self.head_dim_k,
            "dtype": self.dtype,
            "head_dim_v": self.head_dim_v,
        }
        if not self.is_paged:
            plain: _Maker = NonPagedKVCacheManager if custom is None else custom
            return plain(**sizes)
        self.page_size = _size("page_size", page_size)
        if self.max_sequence_length % self.page_size:
            raise OperandError(
                f"InferenceParams(max_sequence_length={self.max_sequence_length}, "
                f"page_size={page_size}): expected a page size that divides the length."
            )
        most = self.max_batch_size * (self.max_sequence_length // self.page_size)
        self.total_num_pages = _size(
            "total_num_pages", most if total_num_pages is None else total_num_pages
        )
        paged: _Maker = PagedKVCacheManager if custom is None else custom
        return paged(total_num_pages=self.total_num_pages, page_size=self.page_size, **sizes)

    def _store_codes(self, storage_format: str) -> None:
        """Have the manager store codes."""
        if storage_format != CODES.format or self.dtype not in FLOATS:
            raise UnsupportedError(
                f"InferenceParams(storage_format={storage_format!r}, dtype={self.dtype}): expected "
                f"None or {CODES.format!r}, which takes bfloat16, float16 and float32."
            )
        if not self._is_built_in:
            raise UnsupportedError(
                f"InferenceParams(storage_format={storage_format!r}) with "
                f"{type(self.cache_manager).__name__} is not offered; leave out either."
            )
        self._built_in.stores_codes = True
        self.storage_format = storage_format

    @property
    def cu_seqlens_q(self) -> torch.Tensor:
        """Sums of the numbers of new tokens."""
        return self._lengths[0]

    @property
    def cu_seqlens_kv(self) -> torch.Tensor:
        """Sums of the lengths of the sequences."""
        return self._lengths[1]

    @property
    def pre_step_seqlens(self) -> torch.Tensor:
        """The lengths before the step."""
        return self._lengths[2, :-1]

    @property
    def seqlens(self) -> torch.Tensor:
        """The lengths of the sequences, int32 ``[max_batch_size]``, -1 behind those of the batch.
        The next step begins where it says: a smaller length takes back the last tokens, also one
        that is written on the device, as in a graph. Any other, as one above what the cache has of
        the sequence, is a fault of that step, as :meth:`pre_step` has them, or raises an
        OperandError where the host reads it next; then the cache has the length before. From the
        first look on steps of numbers on the host wait for the device, to read it; with a
        ``custom_cache_manager`` they do not, and the lengths are not to be written."""
        self._is_on_device = self._is_built_in
        return self._lengths[3, :-1]

    @property
    def sequences(self) -> Sequences:
        """The lengths of the sequences, those of the step's tokens included."""
        self._catch_up()
        return self._sequences

    @property
    def sequences_pre_step(self) -> Sequences:
        """The lengths of the sequences before the step."""
        self._catch_up()
        return self._sequences_pre_step

    def __repr__(self) -> str:
        pages = f"{self.total_num_pages} pages of {self.page_size}, " if self.is_paged else ""
        return (
            f"InferenceParams({pages}max_batch_size={self.max_batch_size}, "
            f"max_sequence_length={self.max_sequence_length}, num_heads_kv={self.num_heads_kv}, "
            f"head_dim_k={self.head_dim_k}, head_dim_v={self.head_dim_v}, dtype={self.dtype}, "
            f"layers={len(self.cache_manager.cache)}, sequences={dict(self._sequences)})"
        )

    @property
    def clears_rows(self) -> bool:
        """Whether rows behind the end of a sequence are finite, whatever sequences had their memory
        before. A custom manager promises nothing."""
        return self._is_built_in

    @property
    def has_pages(self) -> bool:
        """Whether attention reads keys and values by a table of pages, of which those of codes are
        whole rows if the cache itself has none. A custom manager's are copied."""
        return self._is_built_in and (self.is_paged or self.storage_format is not None)

    @property
    def read_length(self) -> int:
        """How many tokens hold the longest sequence of the step, of pages whole ones."""
        return self.cache_manager.read_length or self.max_sequence_length

    @property
    def _built_in(self) -> NonPagedKVCacheManager | PagedKVCacheManager:
        """The manager, for what it does on the device.

        Raises:
            UnsupportedError: it is a ``custom_cache_manager``.
        """
        manager = self.cache_manager
        if self._is_built_in and isinstance(manager, NonPagedKVCacheManager | PagedKVCacheManager):
            return manager
        raise UnsupportedError(
            f"KV cache: a step on the device with {type(manager).__name__} is not offered; leave "
            f"out custom_cache_manager, or give pre_step the numbers by sequence."
        )

    def allocate_memory(self, layer_number: int) -> None:
        """Allocate the memory of a layer, unless it has some; its first step does so otherwise."""
        if layer_number not in self.cache_manager.cache:
            self.cache_manager.allocate_memory(layer_number)

    @untraced
    def claim(self, layer_number: int, layer: torch.nn.Module) -> None:
        """Note that ``layer`` has the number, until the cache is reset."""
        self._layers[layer_number] = layer

    def check_claim(self, layer_number: int, layer: torch.nn.Module) -> None:
        """Refuse a layer whose number another one has.

        Raises:
            OperandError: the keys and values of the other layer would be overwritten.
        """
        if self._layers.get(layer_number, layer) is not layer:
            raise OperandError(
                f"KV cache: two layers have layer_number={layer_number}. Construct each layer of a "
                f"model with a number of its own."
            )

    def __getstate__(self) -> dict[str, Any]:
        """A copy belongs to no layers yet: those of a copied model are others."""
        return {**vars(self), "_layers": None, "_views": None, "_starts": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _layers=WeakValueDictionary(), _starts={})
        if len(self._lengths) == 5:  # of an earlier pickle, without what steps left
            with torch.inference_mode(False):
                self._lengths = torch.cat((self._lengths, self._lengths[3:4].clamp(min=0)))
        self._views = self._views_of(self.batch_size)

    def reset(self) -> None:
        """Forget every sequence, so that the cache can be used for others; the memory stays.

        Raises:
            OperandError: a step on the device had a fault; the sequences are forgotten as well.
        """
        try:
            self._catch_up()
        finally:
            self.cache_manager.reset()
            self._layers.clear()
            self._forget()

    def _forget(self) -> None:
        self._sequences: Sequences = OrderedDict()
        self._sequences_pre_step: Sequences = OrderedDict()
        ends = torch.tensor([[-1], [0], [0]], dtype=torch.int32, device=self.device)
        self._lengths[3:].copy_(ends)
        self.batch_size = self.max_seqlen_q = self.max_seqlen_kv = self._num_tokens = 0
        self._views = self._views_of(0)

    @property
    def _step_views(self) -> _Views:
        """The lengths of the step; in a graph, which may write them, views made there."""
        return self._views_of(self.batch_size) if torch.compiler.is_compiling() else self._views

    def _views_of(self, batch: int) -> _Views:
        """Return the lengths of the first ``batch`` sequences."""
        with torch.inference_mode(False):
            sums_q, sums_kv = self._lengths[:2, : batch + 1].unbind(0)
            return _Views(sums_q, sums_kv, self._lengths[2, :batch])

    def pre_step(
        self, step_dict: Mapping[Hashable, int] | torch.Tensor, max_seqlen_q: int | None = None
    ) -> None:
        """Begin a step that brings ``step_dict[id]`` new tokens of each sequence, in this order.

        An id that the step before had not is a new sequence; a sequence without an entry has ended,
        and its memory is free. 0 tokens keep a sequence.

        A step on the device gets a tensor instead: of each sequence of the step before the number
        of new tokens, int32 or int64 ``[b]`` on the device of the cache, none above
        ``max_seqlen_q``, which is 1 if it is None. The step and its layers read nothing on the
        host, so that a CUDA graph of them is replayed for other numbers and lengths; in thd their
        tensors have ``b * max_seqlen_q`` rows or more. A sequence whose step has a fault, as a full
        cache, is left as it was, and its queries give zeros; the next call of ``pre_step`` without
        a tensor, ``reset`` or ``sequences`` raises the fault, once.

        Raises:
            OperandError: the cache is full, or a number of tokens makes no sense; the cache is as
                it was. A step on the device, before this one, had a fault; this one has not begun.
                A CUDA graph captures a step without a tensor.
            UnsupportedError: torch.export captures the call; a step on the device with a
                ``custom_cache_manager``.
        """
        _refuse_export()
        if isinstance(step_dict, torch.Tensor):
            self._advance(step_dict, 1 if max_seqlen_q is None else max_seqlen_q)
            return
        if max_seqlen_q is not None:
            raise OperandError(
                f"KV cache: pre_step(max_seqlen_q={max_seqlen_q!r}) with the numbers of new tokens "
                f"on the host; expected it beside a tensor of them alone."
            )
        if not isinstance(step_dict, Mapping):
            raise OperandError(
                f"KV cache: pre_step({step_dict!r}); expected the number of new tokens by the id "
                f"of each sequence, as {{0: 10, 1: 7}}."
            )
        steps = OrderedDict((name, _count(name, count)) for name, count in step_dict.items())
        for name, count in steps.items():
            if self.max_ctx_len is not None and count > self.max_ctx_len:
                raise OperandError(
                    f"KV cache: {count} new tokens of sequence {name!r}, and max_ctx_len is "
                    f"{self.max_ctx_len}. Bring them in several steps."
                )
        refuse_capture("pre_step() of numbers on the host", "Give it a tensor of them")
        self._catch_up()
        self._begin(partial(self._begun, steps), settles=self._is_on_device)

    def _begin(self, begun: Callable[[], Writes], *, settles: bool = False) -> None:
        """Begin a step by ``begun``, which notes it on the host and returns what the device gets;
        all of it, or nothing if an exception, of any kind, comes before the device gets some."""
        earlier = [(each, dict(vars(each))) for each in (self, self.cache_manager)]
        writes: Writes = []

        def to_device() -> None:
            write(writes)
            if settles:
                self._built_in.settle()

        try:
            writes = begun()
            to_device()
        except BaseException:
            if writes:
                to_device()
            else:
                for each, fields in earlier:
                    vars(each).update(fields)
            raise

    def _begun(self, steps: Sequences) -> Writes:
        """Begin a step of numbers on the host but for what the device gets, which is returned."""
        manager = self.cache_manager
        writes = self._built_in.begin(steps) if self._is_built_in else []
        lengths = manager.sequences if self._is_built_in else manager.pre_step(steps)
        if list(lengths) != list(steps):
            raise OperandError(
                f"KV cache: {type(self.cache_manager).__name__}.pre_step returned the sequences "
                f"{list(lengths)}; expected those of the step, {list(steps)}, in this order."
            )
        before = [lengths[name] - count for name, count in steps.items()]
        self._sequences = OrderedDict(lengths)
        self._sequences_pre_step = OrderedDict(zip(steps, before, strict=True))
        if len(steps) != self.batch_size:  # the same tensors as long as it can be
            self._views = self._views_of(len(steps))
        self.batch_size = len(steps)
        self._num_tokens = sum(steps.values())
        self.max_seqlen_q = max(steps.values(), default=0)
        self.max_seqlen_kv = max(lengths.values(), default=0)
        rows = [
            list(accumulate(steps.values(), initial=0)),
            list(accumulate(lengths.values(), initial=0)),
            before,
        ]
        size = self.max_batch_size + 1
        rows = [[*row, *(row[-1:] or [0]) * (size - len(row))] for row in rows]
        behind = size - len(lengths)
        rows.append([*lengths.values(), *[-1] * behind])
        rows += [[0] * size, [*lengths.values(), *[0] * behind]]
        numbers = torch.tensor(rows, dtype=torch.int32, device="cpu")
        return [*writes, (self._lengths, numbers)]

    def _advance(self, counts: torch.Tensor, most: int) -> None:
        """Begin a step on the device, of at most ``most`` new tokens of a sequence."""
        manager, batch = self._built_in, self.batch_size
        limit = self.max_sequence_length if self.max_ctx_len is None else self.max_ctx_len
        if check_size("KV cache: pre_step", "max_seqlen_q", most) > limit:
            raise OperandError(
                f"KV cache: pre_step(max_seqlen_q={most}); expected at most {limit}, max_ctx_len "
                f"or max_sequence_length."
            )
        is_right = counts.dtype in (torch.int32, torch.int64) and counts.device == self.device
        if not is_right or tuple(counts.shape) != (batch,) or not batch:
            raise OperandError(
                f"KV cache: pre_step of {counts.dtype} {list(counts.shape)} on {counts.device}; "
                f"expected int32 [{batch}] on {self.device}, a number for each sequence of the "
                f"step before, which begins them by a number for each id."
            )
        if torch.compiler.is_compiling():
            for memory, value in self._advanced(counts, most, stores=True):
                memory.copy_(value)
            return
        watched = None if is_capturing() else _WATCHED.get()
        if watched is not None and self not in watched:
            pages = [manager.page_table] if isinstance(manager, PagedKVCacheManager) else []
            watched[self] = [(memory, memory.clone()) for memory in (self._lengths, *pages)]
        self._begin(partial(self._advanced, counts, most, stores=watched is None))

    def _advanced(self, counts: torch.Tensor, most: int, *, stores: bool) -> Writes:
        """Begin a step on the device but for the memory there; return what that gets."""
        with torch.no_grad():
            writes = self._built_in.advance(self._lengths, counts, most, stores=stores)
        self._is_on_device = True
        self.max_seqlen_q, self._num_tokens = most, self.batch_size * most
        self.max_seqlen_kv = self.max_sequence_length
        return writes

    def _catch_up(self) -> None:
        """Read the lengths on the device, if steps may have changed them there.

        Raises:
            OperandError: a step had a fault, which is forgotten.
        """
        if not self._is_on_device:
            return
        before, after, faults, longest = self._lengths[2:, :-1].tolist()
        names = list(self._sequences)
        lengths = [n if 0 <= n <= most else most for n, most in zip(after, longest, strict=True)]
        num = len(names)
        self._sequences.update(zip(names, lengths[:num], strict=True))
        self._sequences_pre_step.update(zip(names, before, strict=False))
        self._built_in.catch_up(before[:num], lengths[:num])
        for at in range(num):
            faults[at] |= lengths[at] != after[at]  # the first of FAULTS
        if any(faults) or lengths[:num] != longest[:num]:  # tokens that were taken back are gone
            rows = [[*lengths[:num], *after[num:]], [0] * len(after), lengths]
            self._lengths[3:, :-1].copy_(torch.tensor(rows, dtype=torch.int32, device="cpu"))
        if not any(faults):
            return
        texts = [
            f"sequence {names[at]!r} of {after[at]} tokens {first_fault(bits)}"
            if at < len(names)
            else f"sequence {at} is none of the {len(names)} that the last step on the host began"
            for at, bits in enumerate(faults)
            if bits
        ]
        raise OperandError(
            f"KV cache: {'; '.join(texts)} (max_sequence_length={self.max_sequence_length}). What "
            f"these sequences have is as it was; a step on the device stored what the others "
            f"brought."
        )

    def get_seqlens_pre_step(self) -> torch.Tensor:
        """Return how many tokens each sequence of the step had before it, int32 ``[b]``: the
        positions at which the new ones start."""
        return self._step_views.before

    @property
    def form(self) -> tuple[int, ...]:
        """The values that decide, with the sizes of the cache, the sizes of a step's tensors."""
        return (
            *(self.batch_size, self.max_seqlen_q, self._num_tokens),
            self.cache_manager.read_length,
        )

    @property
    def step_cu_seqlens(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Sums of the numbers of new tokens and of the lengths of the step's sequences, int32
        ``[b + 1]``."""
        return self._step_views[:2]

    def starts(self, capacity: int) -> torch.Tensor:
        """Return where the sequences of the step begin among rows that have ``capacity`` each,
        int32 ``[b + 1]``; for equal numbers the same tensor, which graphs read. With the first one
        also that of steps on the device: a graph would have it in its own memory."""
        count = self.batch_size + 1
        if (count, capacity) not in self._starts:
            for each in (capacity, self.max_sequence_length):
                with torch.inference_mode(False):
                    numbers = torch.arange(count, dtype=torch.int32, device=self.device) * each
                self._starts.setdefault((count, each), numbers)
        return self._starts[count, capacity]

    def convert_paged_to_nonpaged(self, layer_number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values of a layer of a paged cache, one sequence after the other:
        ``[b, pages * page size, heads, head size]``, as many pages as the longest one has.

        Raises:
            OperandError: the cache has no pages, or none of this layer.
        """
        manager = self.cache_manager
        if not self.is_paged or layer_number not in manager.cache:
            fault = f"holds layers {list(manager.cache)}" if self.is_paged else "has no pages"
            raise OperandError(
                f"KV cache: convert_paged_to_nonpaged({layer_number!r}), but the cache {fault}; "
                f"expected a layer that a paged cache holds."
            )
        table: torch.Tensor = manager.page_table  # type: ignore[attr-defined]  # a paged one has it
        pages = -(-max(self.sequences.values(), default=0) // self.page_size)
        keys, values, *scales = manager.cache[layer_number]
        in_pages = Pages(keys, values, table[: self.batch_size], *scales)
        return in_pages.gathered(pages * self.page_size, self.dtype)

    def step(
        self, layer_number: int, new_k: torch.Tensor, new_v: torch.Tensor, qkv_format: str
    ) -> CachedKeys:
        """Store the new keys and values of a layer; return all that the layer has.

        ``new_k [b, s, heads, head size]`` in bshd, batch second in sbhd, with the new tokens of
        each sequence first; ``[t, heads, head size]`` in thd, sequence by sequence.

        Raises:
            OperandError: shapes, dtypes or devices that do not fit; no ``pre_step`` before; a layer
                that did not take part in an earlier step. The cache is as it was.
            UnsupportedError: torch.export captures the call; in backward, if ``new_k`` or ``new_v``
                requires a gradient.
        """
        keys, values = self._checked_step(self.store, layer_number, new_k, new_v, qkv_format)
        if torch.is_grad_enabled() and (new_k.requires_grad or new_v.requires_grad):
            error = UnsupportedError(
                "backward through a KV cache: it keeps no history of earlier keys and values. "
                "Compute all tokens at once, without inference_params."
            )
            keys, values = without_gradient(error, (keys, values), (new_k, new_v))
        sums_q, sums_kv = self.step_cu_seqlens
        return CachedKeys(keys, values, sums_q, sums_kv, self.max_seqlen_kv, self.output_qkv_format)

    def step_in_pages(
        self, layer_number: int, new_k: torch.Tensor, new_v: torch.Tensor, qkv_format: str
    ) -> Pages:
        """As :meth:`step`, of a cache that :attr:`has_pages`; later steps write to the result."""
        return self._checked_step(self.store_in_pages, layer_number, new_k, new_v, qkv_format)

    def _checked_step(
        self,
        store: Callable[..., _Stored],
        layer_number: int,
        new_k: torch.Tensor,
        new_v: torch.Tensor,
        qkv_format: str,
    ) -> _Stored:
        """Return what ``store`` does, of keys and values that fit; else the cache is as it was."""
        _refuse_export()
        formats = self.input_qkv_format, self.output_qkv_format
        self._take_format(qkv_format)
        try:
            self._check_step(new_k, new_v)
            return store(layer_number, new_k, new_v, qkv_format)
        except BaseException:
            self.input_qkv_format, self.output_qkv_format = formats
            raise

    def _check_step(self, new_k: torch.Tensor, new_v: torch.Tensor) -> None:
        self._check("new_k", new_k, self.head_dim_k)
        self._check("new_v", new_v, self.head_dim_v)
        if new_k.shape[:-1] != new_v.shape[:-1]:
            raise OperandError(
                f"KV cache: new_k is {list(new_k.shape)}, new_v {list(new_v.shape)}; expected the "
                f"same tokens and heads."
            )

    def store(
        self, layer_number: int, new_k: torch.Tensor, new_v: torch.Tensor, qkv_format: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new keys and values like those that :meth:`step` took in a step of the same
        :attr:`form`; return all that the layer has, in high precision and without pages."""
        if self.has_pages:
            pages = self.store_in_pages(layer_number, new_k, new_v, qkv_format)
            return pages.gathered(self.read_length, self.dtype)
        keys, values = self._store(layer_number, new_k, new_v, qkv_format)
        return self.convert_paged_to_nonpaged(layer_number) if self.is_paged else (keys, values)

    def store_in_pages(
        self, layer_number: int, new_k: torch.Tensor, new_v: torch.Tensor, qkv_format: str
    ) -> Pages:
        """As :meth:`store`, of a cache that :attr:`has_pages`."""
        self._store(layer_number, new_k, new_v, qkv_format)
        return self._built_in.in_pages(layer_number)

    def _store(
        self, layer_number: int, new_k: torch.Tensor, new_v: torch.Tensor, qkv_format: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        sums_q, sums_kv = self.step_cu_seqlens
        new = new_k.detach(), new_v.detach()
        return self.cache_manager.step(layer_number, *new, sums_q, sums_kv, qkv_format)

    def _take_format(self, qkv_format: str) -> None:
        if qkv_format not in _FORMATS:
            raise OperandError(
                f"KV cache: qkv_format={qkv_format!r}; expected one of {', '.join(_FORMATS)}."
            )
        self.input_qkv_format, cached = qkv_format, self.cache_qkv_format
        is_same = qkv_format == cached
        self.output_qkv_format = cached if is_same else "_".join((qkv_format, f"2{cached}"))

    def _check(self, name: str, new: torch.Tensor, size: int) -> None:
        """Refuse keys or values that do not hold the step's tokens."""
        layout = self.input_qkv_format
        if not isinstance(new, torch.Tensor):
            raise OperandError(
                f"KV cache: {name} is {type(new).__name__}; expected a torch.Tensor."
            )
        needed = {"b": self.batch_size, "s": self.max_seqlen_q, "h": self.num_heads_kv, "d": size}
        needed["t"] = self._num_tokens
        sizes = dict(zip(layout, new.shape, strict=False))
        fits = new.dim() == len(layout) and all(
            length >= needed[dim] if dim in "st" else length == needed[dim]
            for dim, length in sizes.items()
        )
        if not fits:
            expected = ", ".join(
                f"{dim} {'>=' if dim in 'st' else '='} {needed[dim]}" for dim in layout
            )
            raise OperandError(
                f"KV cache: {name} is {list(new.shape)}; the step expects {layout!r} with "
                f"{expected}{'' if self.batch_size else ', as no pre_step() named a sequence'}."
            )
        if new.dtype != self.dtype or new.device != self.device:
            raise OperandError(
                f"KV cache: {name} is {new.dtype} on {new.device}, the cache {self.dtype} on "
                f"{self.device}. Give InferenceParams the dtype and the device of the model."
            )


_Copies: TypeAlias = "dict[InferenceParams, list[tuple[torch.Tensor, torch.Tensor]]]"
_WATCHED: ContextVar[_Copies | None] = ContextVar("_WATCHED", default=None)


@contextmanager
def restored_caches() -> Iterator[None]:
    """Have steps on the device within, unless a graph captures them, store nothing, and caches be
    as they were at the end."""
    watched: _Copies = {}
    token = _WATCHED.set(watched)
    try:
        yield
    finally:
        _WATCHED.reset(token)
        for memory, before in chain.from_iterable(watched.values()):
            memory.copy_(before)


def _refuse_export() -> None:
    if is_exporting():
        raise UnsupportedError(
            "a KV cache under torch.export is not offered: a program keeps no keys and values from "
            "one call to the next. Export the model without inference_params."
        )


def _count(name: Hashable, value: int) -> int:
    """Return a number of new tokens, of any type of integers.

    Raises:
        OperandError: it is none, or below 0.
    """
    with suppress(TypeError):  # of what is no integer
        if not isinstance(value, bool) and index(value) >= 0:
            return index(value)
    raise OperandError(
        f"KV cache: {value!r} new tokens of sequence {name!r}; expected an integer >= 0."
    )
