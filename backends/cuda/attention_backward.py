"""Backward of attention by cuDNN's frontend."""

from __future__ import annotations

from typing import TypeAlias

import torch

from fp8core.backend_api import AttentionBackwardDesc
from fp8core_backends.cuda import attention_graph
from fp8core_backends.cuda.attention_bias import grad_of_bias
from fp8core_backends.cuda.attention_call import (
    GraphCall,
    GraphOperation,
    first_rows,
    with_rows,
)
from fp8core_backends.cuda.attention_graph import Uid
from fp8core_backends.cuda.attention_lengths import Keywords, in_rows
from fp8core_backends.cuda.attention_operands import aligned, check_operands, check_rows
from fp8core_backends.cuda.attention_support import KernelNames

Gradients: TypeAlias = (
    "tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]"
)


class GraphAttentionBackward(GraphOperation):
    """The gradients; see AttentionBackwardDesc. A ``logit_scale`` as in forward."""

    __slots__ = ("_bias_grad",)

    def __init__(
        self, desc: AttentionBackwardDesc, device: torch.device, names: KernelNames
    ) -> None:
        super().__init__(desc.attention, device, names, attention_graph.backward)
        self._bias_grad = desc.bias_grad

    def __call__(
        self,
        grad_out: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        stats: torch.Tensor,
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
        logit_scale: torch.Tensor | None = None,
    ) -> Gradients:
        """Return the gradients; see the backend API."""
        desc = self.desc
        check_operands(desc, q, k, v, self.device)
        check_rows(desc, q, grad_out, out, stats)
        lengths = Keywords(
            *(cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded),
            *(max_seqlen_q, max_seqlen_kv),
        )
        with torch.cuda.device(self.device):
            if self.is_empty(q, k, lengths):
                offset = self._grad_of_sink(grad_out, out, stats, softmax_offset)
                return (*self._of_nothing((q, k, v), bias), offset)
            call = self.prepare((q, k, v), lengths, bias, mask, rng, in_backward=True)
            if call.q.shape != q.shape:
                grad_out, out = (with_rows(x, desc.layout, 2) for x in (grad_out, out))
                stats = torch.nn.functional.pad(stats, (0, 1), value=-torch.inf)
            if call.unseen is not None:
                grad_out = grad_out.masked_fill(in_rows(call.unseen.blind, desc.layout), 0)
            grad_out, out = (_contiguous(x) for x in (grad_out, out))
            grads = self._differentiate(call.scaled_by(logit_scale), grad_out, out, stats, bias)
            grad_q, grad_k, grad_v, grad_bias = grads
            grad_offset = self._grad_of_sink(grad_out, out, stats, softmax_offset)
        if call.q.shape != q.shape:
            grad_q = first_rows(grad_q, desc.layout, 1)
        return grad_q, grad_k, grad_v, grad_bias, grad_offset

    def _differentiate(
        self,
        call: GraphCall,
        grad_out: torch.Tensor,
        out: torch.Tensor,
        stats: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Run the graph of ``call``; return the gradients but that of the sink."""
        desc = self.desc
        # With lengths, cuDNN writes the rows of sequences alone.
        new = torch.empty if call.sequences is None else torch.zeros
        grad_q, grad_k, grad_v = (
            new(x.shape, dtype=desc.dtype, device=self.device) for x in (call.q, call.k, call.v)
        )
        if call.unseen is not None:
            # Weights of such rows are exp(.. - inf) = 0, and exp(.. + inf) = inf with -inf.
            stats = stats.masked_fill(stats == -torch.inf, torch.inf)
        tensors = call.tensors | {
            Uid.GRAD_OUT: grad_out,
            Uid.OUT: out,
            Uid.STATS: _contiguous(stats),
            Uid.GRAD_Q: grad_q,
            Uid.GRAD_K: grad_k,
            Uid.GRAD_V: grad_v,
        }
        problem = call.problem._replace(
            bias_grad=self._bias_grad,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        if not self._bias_grad:
            self.graphs.run(problem, tensors)
            return grad_q, grad_k, grad_v, None
        assert bias is not None
        full = (problem.batch, desc.heads, problem.s_q, problem.s_kv)
        tensors[Uid.GRAD_BIAS] = grad_full = call.q.new_zeros(full)
        self.graphs.run(problem, tensors)
        return grad_q, grad_k, grad_v, grad_of_bias(desc, grad_full, bias)

    def _of_nothing(
        self,
        operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        bias: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return the gradients but that of the sink, without queries or keys."""
        grad_q, grad_k, grad_v = (x.new_zeros(x.shape) for x in operands)
        grad_bias = None
        if self._bias_grad:
            assert bias is not None
            grad_bias = bias.new_zeros(bias.shape)
        return grad_q, grad_k, grad_v, grad_bias

    def _grad_of_sink(
        self,
        grad_out: torch.Tensor,
        out: torch.Tensor,
        stats: torch.Tensor,
        softmax_offset: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """Return the gradient of a learned sink, float32 ``[heads]``."""
        desc = self.desc
        if desc.softmax != "learnable":
            return None
        sink = self.sink(softmax_offset)
        assert sink is not None
        row_sums = (grad_out.float() * out.float()).sum(-1)
        by_rows = stats
        if desc.layout == "sbhd":
            by_rows = stats.permute(2, 0, 1)
        elif desc.layout == "bshd":
            by_rows = stats.transpose(1, 2)
        weights = torch.exp(sink - by_rows).masked_fill(by_rows == -torch.inf, 0)
        return -(weights * row_sums).flatten(0, -2).sum(0)


def _contiguous(x: torch.Tensor) -> torch.Tensor:
    return aligned(x.contiguous())
