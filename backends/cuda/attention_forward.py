"""Forward of attention by cuDNN's frontend, of operands in high precision and in FP8."""

from __future__ import annotations

from typing import NamedTuple

import torch

from fp8core.backend_api import AttentionDesc, Operand
from fp8core_backends.cuda import attention_graph
from fp8core_backends.cuda.attention_call import GraphCall, GraphOperation, first_rows
from fp8core_backends.cuda.attention_graph import Uid
from fp8core_backends.cuda.attention_lengths import Keywords, in_rows, sequences_of, unseen
from fp8core_backends.cuda.attention_operands import (
    by_heads,
    check_number,
    check_operands,
    out_size,
)
from fp8core_backends.cuda.attention_support import KernelNames

_LARGEST_E4M3 = 448.0
_NUMBER_STEP = 4  # floats: 16 bytes, the alignment that cuDNN assumes of any tensor


class _Scales(NamedTuple):
    """The scales of a call in low precision, float32 of one element each; ``amax`` is the record of
    the weights' amax, None without one."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    s: torch.Tensor
    amax: torch.Tensor | None


class GraphAttention(GraphOperation):
    """``(out, stats, max_logit)``; see AttentionDesc. A ``logit_scale`` on the device, float32 of
    one element, takes the place of the descriptor's scale."""

    __slots__ = ()

    def __init__(self, desc: AttentionDesc, device: torch.device, names: KernelNames) -> None:
        in_fp8 = attention_graph.quantized_forward
        add = in_fp8 if desc.low_precision else attention_graph.forward
        super().__init__(desc, device, names, add)

    def __call__(
        self,
        q: torch.Tensor | Operand,
        k: torch.Tensor | Operand,
        v: torch.Tensor | Operand,
        *,
        bias: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
        softmax_offset: torch.Tensor | None = None,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_kv: torch.Tensor | None = None,
        cu_seqlens_q_padded: torch.Tensor | None = None,
        cu_seqlens_kv_padded: torch.Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        rng: torch.Tensor | None = None,
        s_scale: torch.Tensor | None = None,
        s_amax_out: torch.Tensor | None = None,
        logit_scale: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Attend; see the backend API."""
        desc, scales = self.desc, None
        if desc.low_precision:
            scales = self._scales((q, k, v), s_scale, s_amax_out)
        q, k, v = (x.data if isinstance(x, Operand) else x for x in (q, k, v))
        check_operands(desc, q, k, v, self.device)
        lengths = Keywords(
            *(cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded),
            *(max_seqlen_q, max_seqlen_kv),
        )
        with torch.cuda.device(self.device):
            sink = self.sink(softmax_offset)
            if self.is_empty(q, k, lengths):
                return self._of_nothing(q, k, lengths, sink)
            call = self.prepare((q, k, v), lengths, bias, mask, rng, in_backward=False)
            results = self._attend(call.scaled_by(logit_scale), sink, scales)
        if call.q.shape == q.shape:
            return results
        return _of_first_queries(*results, desc.layout, q.shape[desc.layout.index("s")])

    def _attend(
        self, call: GraphCall, sink: torch.Tensor | None, scales: _Scales | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        desc = self.desc
        # In thd cuDNN writes the rows of sequences alone.
        out = (torch.zeros if desc.layout == "thd" else torch.empty)(
            out_size(desc, call.q),
            dtype=torch.uint8 if desc.low_precision else desc.dtype,
            device=self.device,
        )
        stats = torch.empty(self._statistics(call.q), dtype=torch.float32, device=self.device)
        tensors = call.tensors | {Uid.OUT: out}
        largest, amaxes = None, None
        if sink is not None:
            tensors[Uid.SINK] = sink
        if desc.max_logit:
            largest = torch.empty_like(stats)
            tensors |= {Uid.MAX_LOGIT: largest, Uid.SUM: stats}
        else:
            tensors[Uid.STATS] = stats
        if scales is not None:
            amaxes = stats.new_zeros(2, _NUMBER_STEP)
            tensors |= self._numbers(scales, amaxes)
        self.graphs.run(call.problem, tensors)
        if scales is not None and scales.amax is not None:
            assert amaxes is not None
            # A query without a key may leave NaN, which is no weight.
            torch.fmax(scales.amax, amaxes[0, :1], out=scales.amax)
        if largest is not None:
            stats = stats.log_().add_(largest)
        if call.unseen is not None:
            blind, outside = call.unseen
            out.masked_fill_(in_rows(blind, desc.layout), 0)
            stats = _without_keys(stats, blind, outside, sink, desc.layout)
            if largest is not None:
                largest.masked_fill_(blind, -torch.inf)
        if largest is None:
            return out, stats, None
        by_head = largest if desc.layout == "thd" else largest.transpose(0, 1).flatten(1).t()
        return out, stats, by_head.amax(0)

    def _scales(
        self,
        operands: tuple[torch.Tensor | Operand, ...],
        s_scale: torch.Tensor | None,
        s_amax_out: torch.Tensor | None,
    ) -> _Scales:
        """Return the scales of a call in low precision, checked: cuDNN reads them by address."""
        scale_inv = [x.scale_inv if isinstance(x, Operand) else None for x in operands]
        names = ("scale_inv of q", "scale_inv of k", "scale_inv of v", "s_scale")
        q, k, v, s = (
            check_number(self.desc, name, scale, self.device)
            for name, scale in zip(names, (*scale_inv, s_scale), strict=True)
        )
        if s_amax_out is not None:
            check_number(self.desc, "s_amax_out", s_amax_out, self.device)
        return _Scales(q, k, v, s, s_amax_out)

    def _numbers(self, scales: _Scales, amaxes: torch.Tensor) -> dict[Uid, torch.Tensor]:
        """Return the scales and the amaxes as the tensors of a graph.

        The result has the scale of the values, times ``1 - dropout``. cuDNN casts the weights of a
        row before it divides them by their sum, when the largest is 1, so that a scale above the
        format's largest value would saturate them; below it, a scale changes no rounding but that
        of subnormals.
        """
        s_scale = scales.s.clamp(max=_LARGEST_E4M3)
        of_out = scales.v.reciprocal()
        if self.desc.dropout:
            of_out *= 1 - self.desc.dropout
        return {
            Uid.SCALE_INV_Q: scales.q,
            Uid.SCALE_INV_K: scales.k,
            Uid.SCALE_INV_V: scales.v,
            Uid.SCALE_INV_S: s_scale.reciprocal(),
            Uid.SCALE_S: s_scale,
            Uid.SCALE_OUT: of_out,
            Uid.AMAX_S: amaxes[0],
            Uid.AMAX_OUT: amaxes[1],
        }

    def _statistics(self, q: torch.Tensor) -> tuple[int, ...]:
        layout = self.desc.layout
        return tuple(q.shape[:-1] if layout == "thd" else by_heads(q, layout).shape[:-1])

    def _of_nothing(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        lengths: Keywords,
        sink: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return the result without queries or keys."""
        desc = self.desc
        size = self._statistics(q)
        stats = q.new_full(size, -torch.inf, dtype=torch.float32)
        if sink is not None and stats.numel():
            hidden = None
            if desc.padding:
                sequences = sequences_of(desc, q, k, lengths)
                rows = len(q) if desc.layout == "thd" else size[2]
                hidden = unseen(desc, sequences, rows).outside
            blind = torch.ones((), dtype=torch.bool, device=self.device)
            stats = _without_keys(stats, blind, hidden, sink, desc.layout)
        largest = q.new_full((desc.heads,), -torch.inf, dtype=torch.float32)
        return q.new_zeros(out_size(desc, q)), stats, largest if desc.max_logit else None


def _of_first_queries(
    out: torch.Tensor, stats: torch.Tensor, largest: torch.Tensor | None, layout: str, count: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return the results of the first ``count`` queries of each sequence alone."""
    return first_rows(out, layout, count), stats[..., :count].contiguous(), largest


def _without_keys(
    stats: torch.Tensor,
    blind: torch.Tensor,
    outside: torch.Tensor | None,
    sink: torch.Tensor | None,
    layout: str,
) -> torch.Tensor:
    """Return the statistics with -inf, or the sink alone, for the queries that see no key, and -inf
    for those of no sequence."""
    if sink is None:
        return stats.masked_fill_(blind, -torch.inf)
    of_head = sink if layout == "thd" else sink[:, None]
    stats = torch.where(blind, of_head, stats)
    return stats if outside is None else stats.masked_fill_(outside, -torch.inf)
