"""Causal attention with the roundings of cuDNN's bfloat16 kernels, as the golden layers ran it.

Operands of each matrix product are bfloat16, products are summed in float32: forward rounds the
exponentials before they are divided by their sum, backward the weights and the scaled gradients of
the logits, and the gradients of keys and values for each query head before they are summed over the
heads of a group.
"""

from __future__ import annotations

import math
from typing import Any

import torch

__all__ = ["CudnnAttention"]


def rounded(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16().float()


class _Attention(torch.autograd.Function):
    """Of ``q [b, h, s, d]``, ``k`` and ``v [b, g, s, d]``."""

    @staticmethod
    def forward(ctx: Any, *heads: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.float() for x in heads)
        share, scale = q.shape[1] // k.shape[1], 1 / math.sqrt(q.shape[-1])
        k, v = (x.repeat_interleave(share, 1) for x in (k, v))
        logits = q @ k.mT * scale
        later = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1)
        logits = logits.masked_fill(later, -math.inf)
        exponentials = (logits - logits.amax(-1, keepdim=True)).exp()
        total = exponentials.sum(-1, keepdim=True)
        out = ((rounded(exponentials) @ v) / total).bfloat16()
        ctx.save_for_backward(q, k, v, out, exponentials / total)
        ctx.share, ctx.scale = share, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k, v, out, weights = ctx.saved_tensors
        grad = grad.float()
        grad_weights = grad @ v.mT
        mean = (grad * out.float()).sum(-1, keepdim=True)
        grad_logits = rounded(weights * (grad_weights - mean) * ctx.scale)
        grad_q, grad_k = grad_logits @ k, grad_logits.mT @ q
        grad_v = rounded(weights).mT @ grad
        if ctx.share > 1:
            grad_k, grad_v = (
                rounded(x).unflatten(1, (-1, ctx.share)).sum(2) for x in (grad_k, grad_v)
            )
        return grad_q.bfloat16(), grad_k.bfloat16(), grad_v.bfloat16()


class CudnnAttention(torch.nn.Module):
    """Takes the place of a layer's ``core_attention``; sbhd, causal, without dropout."""

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
    ) -> torch.Tensor:
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out: torch.Tensor = _Attention.apply(q, k, v)
        return out.permute(2, 0, 1, 3).flatten(-2)
