"""Attention over a cache: of one query a sequence by a kernel of this backend, else by cuDNN."""

from __future__ import annotations

from typing import Any

import torch

from fp8core.backend_api import (
    AttentionDesc,
    CachedAttentionDesc,
    Operand,
    OperandError,
    PagedAttentionDesc,
    SingleQueryDesc,
)
from fp8core_backends.cuda.attention_call import strides_of
from fp8core_backends.cuda.attention_forward import GraphAttention
from fp8core_backends.cuda.attention_lengths import check_offsets
from fp8core_backends.cuda.attention_operands import aligned, by_heads, check_operands, out_size
from fp8core_backends.cuda.attention_support import KernelNames, form_problem
from fp8core_backends.cuda.layout import DTYPES, scale_mode, spec_problem
from fp8core_backends.cuda.memory import allocator
from fp8core_backends.cuda.operations import first_problem
from fp8core_backends.cuda.stream import index_of, raw_stream

_HEAD_SIZES = (64, 128, 256)


def _kernel_problem(desc: AttentionDesc) -> str | None:
    """Say why no kernel of this backend attends by one query a sequence, or None."""
    return first_problem(
        (
            desc.head_dim not in _HEAD_SIZES or desc.head_dim_v != desc.head_dim,
            f"heads of {desc.head_dim} and {desc.head_dim_v} elements, not 64, 128 or 256",
        ),
        (desc.low_precision, "no FP8"),
        (desc.bias is not None, "no bias"),
        (desc.softcap != 0, "no cap of logits"),
        (desc.softmax != "vanilla", "no sink"),
        (desc.dropout > 0, "no dropout"),
        (desc.max_logit, "no largest logit"),
    )


def cached_problem(desc: AttentionDesc) -> str | None:
    """Say why no kernel of this backend reads a cache of sequences with lengths, or None."""
    return first_problem(
        (not isinstance(desc, CachedAttentionDesc), "it reads a cache"),
        (desc.arbitrary, "no mask beside lengths"),
    ) or _kernel_problem(desc)


def single_query_problem(desc: SingleQueryDesc, device: torch.device) -> str | None:
    """Say why no kernel of this backend reads another library's cache, or None."""
    has_lengths = desc.padding or desc.layout == "thd"
    return (
        form_problem(desc, device)
        or _kernel_problem(desc)
        or ("its mask says what padding would" if has_lengths else None)
    )


def paged_problem(desc: PagedAttentionDesc, device: torch.device) -> str | None:
    """Say why no kernel of this backend reads pages, or None."""
    reason = form_problem(desc, device) or cached_problem(desc)
    if reason is not None or desc.kv is None:
        return reason or (None if desc.padding else "a cache has sequences with lengths")
    is_plain = desc.kv.format == "e4m3" and scale_mode(desc.kv) == "row" and not desc.kv.delayed
    return spec_problem(desc.kv) or (None if is_plain else "codes are e4m3, with a scale a row")


class _SingleQueries:
    """The kernel of one query a sequence: what it is given, and what it returns."""

    __slots__ = ("_desc", "_empty", "_index", "_native")

    def __init__(self, desc: AttentionDesc, index: int, native: Any) -> None:
        self._desc, self._index = desc, index
        self._empty = allocator(index)
        self._native = native.SingleQuery(
            native.InputType.__members__[DTYPES[desc.dtype]],
            *(desc.heads, desc.groups, desc.head_dim, desc.scale, *desc.window),
            desc.bottom_right,
            index,
        )

    def __call__(
        self,
        q: torch.Tensor,
        rows: tuple[list[int], list[int]],
        lengths: tuple[torch.Tensor | None, ...],
        capacity: int,
        pages: tuple[int, ...] = (),
        mask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, None]:
        """Return the results of sequences of which each has a query or none.

        ``rows`` say where keys and values are, ``pages`` which: see the kernel's arguments.
        ``lengths`` are the offsets of queries and keys, and in thd of the rows of queries; None,
        without pages, where each has a query. ``mask [batch, capacity]`` has adjacent elements.
        """
        desc, layout = self._desc, self._desc.layout
        q = aligned(q)
        cu_seqlens_q, cu_seqlens_kv, starts = (
            None if edges is None else edges.contiguous() for edges in lengths
        )
        size = out_size(desc, q)
        batch = q.shape[layout.index("b")] if cu_seqlens_q is None else len(cu_seqlens_q) - 1
        if layout == "thd":  # rows of no sequence are not written
            out, stats = q.new_zeros(size), q.new_full(size[:-1], -torch.inf, dtype=torch.float32)
            q = q.unsqueeze(1)
        else:
            row = desc.heads * desc.head_dim
            out = self._empty(size, (size[1] * row, row, desc.head_dim, 1), desc.dtype)
            stats = self._empty((batch, desc.heads, 1), (desc.heads, 1, 1), torch.float32)
        arguments = (
            *rows_of(by_heads(q, "bshd" if layout == "thd" else layout)),
            *(*rows[0], *rows[1], batch, capacity),
            *(_address(cu_seqlens_q), _address(cu_seqlens_kv), out.data_ptr(), stats.data_ptr()),
        )
        if mask is not None:
            arguments = (*arguments, *(0,) * _BEFORE_MASK, mask.data_ptr(), mask.stride(0))
        elif starts is not None:
            arguments = (*arguments, starts.data_ptr(), len(q), *pages)
        elif pages:
            arguments = (*arguments, 0, 0, *pages)
        self._native(arguments, raw_stream(self._index))
        return out, stats, None


_BEFORE_MASK = 13
"""Optional arguments of the kernel before its mask."""


def _address(x: torch.Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def rows_of(x: torch.Tensor) -> list[int]:
    """Return the address of ``x [b, heads, s, d]``, and its strides of b, s and heads."""
    of_batch, of_head, of_row, _ = strides_of(x)
    return [x.data_ptr(), of_batch, of_row, of_head]


class CachedAttention(GraphAttention):
    """``(out, stats, None)``; see CachedAttentionDesc. The lengths are read by the kernel."""

    __slots__ = ("_single",)

    def __init__(
        self, desc: AttentionDesc, device: torch.device, names: KernelNames, native: Any
    ) -> None:
        chosen = f"fp8core::attend_once of one query a sequence, else {names.chosen}"
        super().__init__(desc, device, names._replace(chosen=chosen))
        self._single = _SingleQueries(desc, self._index, native)

    def __call__(  # type: ignore[override]  # a cache has no other keywords
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_kv: torch.Tensor | None = None,
        cu_seqlens_q_padded: torch.Tensor | None = None,
        **keywords: Any,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Attend; see the backend API."""
        layout = self.desc.layout
        is_ragged = layout == "thd"
        rows = keywords.get("max_seqlen_q") if is_ragged else q.shape[layout.index("s")]
        is_single = rows == 1 and cu_seqlens_q is not None and q.numel() and k.numel()
        if is_single and is_ragged:
            assert cu_seqlens_q is not None
            sequences = len(cu_seqlens_q) - 1
            capacity = keywords.get("max_seqlen_kv") or 0  # None is refused where lengths are read
            is_single = sequences > 0 and len(k) == sequences * capacity
        if not is_single:
            return super().__call__(
                *(q, k, v),
                cu_seqlens_q=cu_seqlens_q,
                cu_seqlens_kv=cu_seqlens_kv,
                cu_seqlens_q_padded=cu_seqlens_q_padded,
                **keywords,
            )
        assert cu_seqlens_q is not None
        check_operands(self.desc, q, k, v, self.device)
        batch = len(cu_seqlens_q) - 1 if is_ragged else q.shape[layout.index("b")]
        for x, offsets in ((q, cu_seqlens_q), (k, cu_seqlens_kv)):
            check_offsets(self.desc, x, offsets, batch + 1)
        starts = None
        if is_ragged:
            starts = cu_seqlens_q if cu_seqlens_q_padded is None else cu_seqlens_q_padded
            check_offsets(self.desc, q, starts, batch + 1)
        k, v = aligned(k), aligned(v)
        if is_ragged:
            k, v = (x.view(batch, -1, *x.shape[1:]) for x in (k, v))
        views = [by_heads(x, "bshd" if is_ragged else layout) for x in (k, v)]
        rows = rows_of(views[0]), rows_of(views[1])
        lengths = cu_seqlens_q, cu_seqlens_kv, starts
        return self._single(q, rows, lengths, views[0].shape[2])


class _OfSingleQueries:
    """Attention by the kernel of one query alone."""

    __slots__ = ("_single", "desc", "device")

    def __init__(self, desc: AttentionDesc, device: torch.device, native: Any) -> None:
        index = index_of(device)
        self.desc, self.device = desc, torch.device("cuda", index)
        self._single = _SingleQueries(desc, index, native)


class SingleQueryAttention(_OfSingleQueries):
    """``(out, stats, None)``; see SingleQueryDesc. Keys, values and mask are read by the kernel."""

    __slots__ = ()

    kernel = "fp8core::attend_once of another library's cache"

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        mask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, None]:
        """Attend; see the backend API."""
        desc, layout = self.desc, self.desc.layout
        check_operands(desc, q, k, v, self.device)
        views = [by_heads(aligned(x), layout) for x in (k, v)]
        batch, _, capacity, _ = views[0].shape
        if q.shape[layout.index("s")] != 1 or not (q.numel() and k.numel()):
            raise OperandError(
                f"{desc}: q {list(q.shape)}, k {list(k.shape)}; expected one query a sequence, and "
                f"a key."
            )
        rows = rows_of(views[0]), rows_of(views[1])
        excluded = self._excluded(mask, batch, capacity)
        return self._single(q, rows, (None, None, None), capacity, mask=excluded)

    def _excluded(
        self, mask: torch.Tensor | None, batch: int, capacity: int
    ) -> torch.Tensor | None:
        """Return the mask ``[batch, capacity]``, None without one.

        Raises:
            OperandError: it is missing, of another form, or not asked for.
        """
        if mask is None and not self.desc.arbitrary:
            return None
        is_right = (
            mask is not None
            and self.desc.arbitrary
            and (mask.dtype, mask.device) == (torch.bool, self.device)
            and tuple(mask.shape) in ((batch, 1, 1, capacity), (1, 1, 1, capacity))
        )
        if mask is None or not is_right:
            shown = None if mask is None else f"{mask.dtype} {list(mask.shape)} on {mask.device}"
            form = f"torch.bool [{batch} or 1, 1, 1, {capacity}] on {self.device}"
            form = form if self.desc.arbitrary else "None"
            raise OperandError(f"{self.desc}: mask is {shown}; expected {form}.")
        rows = mask[:, 0, 0]
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        return rows.expand(batch, capacity)


class PagedAttention(_OfSingleQueries):
    """``(out, stats, None)``; see PagedAttentionDesc. Lengths and pages are read by the kernel."""

    __slots__ = ()

    desc: PagedAttentionDesc
    kernel = "fp8core::attend_once of pages"

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor | Operand,
        v: torch.Tensor | Operand,
        *,
        page_table: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_kv: torch.Tensor,
        cu_seqlens_q_padded: torch.Tensor | None = None,
        **lengths: Any,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Attend; see the backend API."""
        keys, values = (x if isinstance(x, Operand) else Operand(x) for x in (k, v))
        self._check(q, keys, values, page_table)
        batch, columns = page_table.shape
        starts = None
        if self.desc.layout == "thd":
            starts = cu_seqlens_q if cu_seqlens_q_padded is None else cu_seqlens_q_padded
        for offsets in (cu_seqlens_q, cu_seqlens_kv, *(() if starts is None else (starts,))):
            check_offsets(self.desc, q, offsets, batch + 1)
        num_pages, page_size = keys.data.shape[:2]
        table = page_table.contiguous()
        stored = [aligned(x.data) for x in (keys, values)]
        pages = [table.data_ptr(), page_size, num_pages]
        for scales in (keys.scale_inv, values.scale_inv):
            if scales is not None:
                pages += rows_of(scales.transpose(1, 2))
        rows = [rows_of(x.transpose(1, 2)) for x in stored]
        sequences = cu_seqlens_q, cu_seqlens_kv, starts
        return self._single(q, (rows[0], rows[1]), sequences, columns * page_size, tuple(pages))

    def _check(
        self, q: torch.Tensor, keys: Operand, values: Operand, page_table: torch.Tensor
    ) -> None:
        """Refuse tensors that the descriptor does not describe.

        Raises:
            OperandError: names them.
        """
        desc, layout = self.desc, self.desc.layout
        lead = q.shape[:-2] if layout != "sbhd" else q.shape[1::-1]
        size = (*keys.data.shape[:2], desc.groups)
        element, scale_sizes = (
            (desc.dtype, []) if desc.kv is None else (torch.uint8, [(*size, 1)] * 2)
        )
        stored = (keys.data, values.data)
        scale_inv = [x.scale_inv for x in (keys, values) if x.scale_inv is not None]
        is_right = (
            q.dim() == (3 if layout == "thd" else 4)
            and q.shape[-2:] == (desc.heads, desc.head_dim)
            and q.dtype == desc.dtype
            and all(x.shape == (*size, desc.head_dim) and x.dtype == element for x in stored)
            and [tuple(x.shape) for x in scale_inv] == scale_sizes
            and all(x.dtype == torch.float32 for x in scale_inv)
            and (page_table.dim(), page_table.dtype) == (2, torch.int32)
            and (layout == "thd" or tuple(lead) == (len(page_table), 1))
            and min(keys.data.numel(), page_table.numel(), q.numel()) > 0
            and all(x.device == self.device for x in (q, page_table, *stored, *scale_inv))
        )
        if is_right:
            return
        names = ("q", "k", "v", "page_table", *("scale_inv",) * len(scale_inv))
        shown = ", ".join(
            f"{name} {list(x.shape)} {x.dtype} on {x.device}"
            for name, x in zip(names, (q, *stored, page_table, *scale_inv), strict=True)
        )
        raise OperandError(
            f"{desc}: {shown}; expected one query of {desc.heads} heads of {desc.head_dim} a "
            f"sequence, k and v [pages, page size, {desc.groups}, {desc.head_dim}] of {element}, "
            f"scales [.., 1] of float32 for codes alone, and a page_table [batch, n] of int32, "
            f"none of them empty, on {self.device}."
        )
