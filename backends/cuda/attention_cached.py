"""Attention over a cache: of one query a sequence by a kernel of this backend, else by cuDNN."""

from __future__ import annotations

from typing import Any

import torch

from fp8core.backend_api import AttentionDesc, CachedAttentionDesc
from fp8core_backends.cuda.attention_call import strides_of
from fp8core_backends.cuda.attention_forward import GraphAttention
from fp8core_backends.cuda.attention_lengths import check_offsets
from fp8core_backends.cuda.attention_operands import aligned, by_heads, check_operands, out_size
from fp8core_backends.cuda.attention_support import KernelNames
from fp8core_backends.cuda.layout import DTYPES
from fp8core_backends.cuda.memory import allocator
from fp8core_backends.cuda.operations import first_problem
from fp8core_backends.cuda.stream import raw_stream

_HEAD_SIZES = (64, 128, 256)


def single_query_problem(desc: AttentionDesc) -> str | None:
    """Say why no kernel of this backend attends by one query a sequence, or None."""
    return first_problem(
        (type(desc) is not CachedAttentionDesc, "it reads a cache"),
        (
            desc.head_dim not in _HEAD_SIZES or desc.head_dim_v != desc.head_dim,
            f"heads of {desc.head_dim} and {desc.head_dim_v} elements, not 64, 128 or 256",
        ),
        (desc.low_precision, "no FP8"),
        (desc.arbitrary or desc.bias is not None, "no bias and no mask"),
        (desc.softcap != 0, "no cap of logits"),
        (desc.softmax != "vanilla", "no sink"),
        (desc.dropout > 0, "no dropout"),
        (desc.max_logit, "no largest logit"),
    )


class CachedAttention(GraphAttention):
    """``(out, stats, None)``; see CachedAttentionDesc. The lengths are read by the kernel."""

    __slots__ = ("_empty", "_native")

    def __init__(
        self, desc: AttentionDesc, device: torch.device, names: KernelNames, native: Any
    ) -> None:
        chosen = f"fp8core::attend_once of one query a sequence, else {names.chosen}"
        super().__init__(desc, device, names._replace(chosen=chosen))
        self._empty = allocator(self._index)
        self._native = native.SingleQuery(
            native.InputType.__members__[DTYPES[desc.dtype]],
            *(desc.heads, desc.groups, desc.head_dim, desc.scale, *desc.window),
            desc.bottom_right,
            self._index,
        )

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
        return self._of_single_queries((q, k, v), (cu_seqlens_q, cu_seqlens_kv, starts), batch)

    def _of_single_queries(
        self,
        operands: tuple[torch.Tensor, ...],
        lengths: tuple[torch.Tensor | None, ...],
        batch: int,
    ) -> tuple[torch.Tensor, torch.Tensor, None]:
        """Return the results of ``batch`` sequences, of which each has a query or none."""
        desc, layout = self.desc, self.desc.layout
        q, k, v = map(aligned, operands)
        cu_seqlens_q, cu_seqlens_kv, starts = (
            None if edges is None else edges.contiguous() for edges in lengths
        )
        assert cu_seqlens_q is not None
        assert cu_seqlens_kv is not None
        size = out_size(desc, q)
        if layout == "thd":  # rows of no sequence are not written
            k, v = (x.view(batch, -1, *x.shape[1:]) for x in (k, v))
            q = q.unsqueeze(1)
            out, stats = q.new_zeros(size), q.new_full(size[:-1], -torch.inf, dtype=torch.float32)
        else:
            row = desc.heads * desc.head_dim
            out = self._empty(size, (size[1] * row, row, desc.head_dim, 1), desc.dtype)
            stats = self._empty((batch, desc.heads, 1), (desc.heads, 1, 1), torch.float32)
        views = [by_heads(x, "bshd" if layout == "thd" else layout) for x in (q, k, v)]
        rows = []
        for x in views:
            of_batch, of_head, of_row, _ = strides_of(x)
            rows += [x.data_ptr(), of_batch, of_row, of_head]
        arguments = (
            *(*rows, batch, views[1].shape[2]),
            *(cu_seqlens_q.data_ptr(), cu_seqlens_kv.data_ptr(), out.data_ptr(), stats.data_ptr()),
        )
        if starts is not None:
            arguments = (*arguments, starts.data_ptr(), len(q))
        self._native(arguments, raw_stream(self._index))
        return out, stats, None
