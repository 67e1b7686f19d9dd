"""Attention by torch's operators for cuDNN: no mask or a causal one, without padding.

torch keeps a graph for each shape and for the strides of queries, keys and values, and not for
those of the result and its gradient. So queries, keys and values come with their dimensions in the
order of the layout, and the others contiguous: their strides follow from what the graph is kept
for.
"""

from __future__ import annotations

from typing import TypeAlias

import torch

from fp8core.backend_api import AttentionBackwardDesc, AttentionDesc
from fp8core_backends.cuda.attention_operands import (
    Kind,
    by_heads,
    check_operands,
    check_rows,
    in_layout,
    in_order,
    kind_of,
    out_size,
)
from fp8core_backends.cuda.attention_support import KernelNames
from fp8core_backends.cuda.private import cudnn_attention, cudnn_attention_backward
from fp8core_backends.cuda.stream import index_of

Gradients: TypeAlias = "tuple[torch.Tensor, torch.Tensor, torch.Tensor, None, None]"


class TorchAttention:
    """``(out, stats, None)`` of attention that torch's operator computes; see AttentionDesc."""

    __slots__ = ("_causal", "_checked", "_desc", "_device", "kernel", "other_kernels")

    def __init__(self, desc: AttentionDesc, device: torch.device, names: KernelNames) -> None:
        self._desc = desc
        self._device = torch.device("cuda", index_of(device))
        self._causal = desc.window[1] == 0
        self._checked: Kind | None = None  # of the last call whose operands were as they should be
        self.kernel, self.other_kernels = names

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, None]:
        """Attend; see the backend API."""
        desc, layout = self._desc, self._desc.layout
        kind = kind_of(q, k, v)
        if kind is None or kind != self._checked:
            check_operands(desc, q, k, v, self._device)
            if not (q.numel() and k.numel()):
                stats = q.new_full(by_heads(q, layout).shape[:-1], -torch.inf, dtype=torch.float32)
                return q.new_zeros(out_size(desc, q)), stats, None
            arguments = q, k, v
            q, k, v = (in_order(x) for x in arguments)
            if all(before is after for before, after in zip(arguments, (q, k, v), strict=True)):
                self._checked = kind
        queries, keys, values = by_heads(q, layout), by_heads(k, layout), by_heads(v, layout)
        out, stats, *_ = cudnn_attention(
            queries, keys, values, None, True, 0.0, self._causal, scale=desc.scale
        )
        return in_layout(out, layout), stats.view(queries.shape[:-1]), None


class TorchAttentionBackward:
    """The gradients of attention that torch's operator computes; see AttentionBackwardDesc."""

    __slots__ = ("_causal", "_checked", "_desc", "_device", "_unused", "kernel", "other_kernels")

    def __init__(
        self, desc: AttentionBackwardDesc, device: torch.device, names: KernelNames
    ) -> None:
        self._desc = desc.attention
        self._device = torch.device("cuda", index_of(device))
        self._causal = desc.attention.window[1] == 0
        self._checked: Kind | None = None  # as in forward
        # Seed and offset, which nothing reads without dropout.
        self._unused = torch.empty((), dtype=torch.int64, device=self._device)
        self.kernel, self.other_kernels = names

    def __call__(
        self,
        grad_out: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        stats: torch.Tensor,
    ) -> Gradients:
        """Return the gradients; see the backend API."""
        desc, layout = self._desc, self._desc.layout
        kind = kind_of(grad_out, q, k, v, out, stats)
        if kind is None or kind != self._checked:
            check_operands(desc, q, k, v, self._device)
            check_rows(desc, q, grad_out, out, stats)
            if not (q.numel() and k.numel()):
                grads = (x.new_zeros(x.shape) for x in (q, k, v))
                return next(grads), next(grads), next(grads), None, None
            if by_heads(q, layout).shape[2] == by_heads(k, layout).shape[2] == 1:
                return self._of_single_key(grad_out, q, k, v)
            arguments = grad_out, q, k, v, out, stats
            q, k, v = (in_order(x) for x in (q, k, v))
            grad_out, out = (in_order(x.contiguous()) for x in (grad_out, out))
            stats = stats.contiguous()
            used = grad_out, q, k, v, out, stats
            if all(before is after for before, after in zip(arguments, used, strict=True)):
                self._checked = kind
        queries, keys, values = by_heads(q, layout), by_heads(k, layout), by_heads(v, layout)
        length_q, length_kv = queries.shape[2], keys.shape[2]
        rows_grad, rows_out = by_heads(grad_out, layout), by_heads(out, layout)
        grads = cudnn_attention_backward(
            *(rows_grad, queries, keys, values, rows_out, stats.unsqueeze(-1)),
            *(self._unused, self._unused, None, None, None, length_q, length_kv),
            *(0.0, self._causal),
            scale=desc.scale,
        )
        grad_q, grad_k, grad_v = (in_layout(grad, layout) for grad in grads)
        return grad_q, grad_k, grad_v, None, None

    def _of_single_key(
        self, grad_out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> Gradients:
        """Return the gradients where each query sees one key, which cuDNN refuses: the weight is 1
        whatever queries and keys are."""
        size = (*v.shape[:2], self._desc.groups, -1, v.shape[-1])
        grad_v = grad_out.reshape(size).sum(3, dtype=torch.float32).to(v.dtype)
        contiguous = torch.contiguous_format
        grad_q, grad_k = (torch.zeros_like(x, memory_format=contiguous) for x in (q, k))
        return grad_q, grad_k, grad_v, None, None
