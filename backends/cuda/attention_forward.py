"""Forward of attention by cuDNN's frontend."""

from __future__ import annotations

import torch

from fp8core.backend_api import AttentionDesc
from fp8core_backends.cuda import attention_graph
from fp8core_backends.cuda.attention_call import GraphCall, GraphOperation, first_alone
from fp8core_backends.cuda.attention_graph import Uid
from fp8core_backends.cuda.attention_lengths import Keywords, in_rows, sequences_of, unseen
from fp8core_backends.cuda.attention_operands import by_heads, check_operands, out_size
from fp8core_backends.cuda.attention_support import KernelNames

__all__ = ["GraphAttention"]


class GraphAttention(GraphOperation):
    """``(out, stats, max_logit)``; see AttentionDesc."""

    __slots__ = ()

    def __init__(self, desc: AttentionDesc, device: torch.device, names: KernelNames) -> None:
        super().__init__(desc, device, names, attention_graph.forward)

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
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
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Attend; see the backend API."""
        desc = self.desc
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
            results = self._attend(call, sink)
        if call.q.shape == q.shape:
            return results
        return _of_first_query(*results, desc.layout)

    def _attend(
        self, call: GraphCall, sink: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        desc = self.desc
        # In thd cuDNN writes the rows of sequences alone.
        out = (torch.zeros if desc.layout == "thd" else torch.empty)(
            out_size(desc, call.q),
            dtype=desc.dtype,
            device=self.device,
        )
        stats = torch.empty(self._statistics(call.q), dtype=torch.float32, device=self.device)
        tensors = call.tensors | {Uid.OUT: out}
        largest = None
        if sink is not None:
            tensors[Uid.SINK] = sink
        if desc.max_logit:
            largest = torch.empty_like(stats)
            tensors |= {Uid.MAX_LOGIT: largest, Uid.SUM: stats}
        else:
            tensors[Uid.STATS] = stats
        self.graphs.run(call.problem, tensors)
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


def _of_first_query(
    out: torch.Tensor, stats: torch.Tensor, largest: torch.Tensor | None, layout: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return the results without those of the second query of each sequence."""
    return first_alone(out, layout), stats[..., :1].contiguous(), largest


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
