"""Shapes of attention, and its tensors."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

__all__ = ["CASES", "Case", "Tensors", "exact", "tensors"]


class Case(NamedTuple):
    """Attention of ``batch`` sequences of ``length`` tokens, in bfloat16 and ``sbhd``.

    ``is_causal``: with a causal mask, as long as keys are, in which half of the products count.
    """

    name: str
    batch: int
    length: int
    heads: int
    groups: int
    head_dim: int
    is_causal: bool = True

    @property
    def flops(self) -> float:
        """Return those of the two products of forward; backward has five."""
        whole = 4 * self.batch * self.heads * self.length**2 * self.head_dim
        return whole / 2 if self.is_causal else whole

    @property
    def scale(self) -> float:
        """Return what multiplies the logits."""
        return 1 / math.sqrt(self.head_dim)


CASES = {
    case.name: case
    for case in (
        Case("tiny", 1, 256, 8, 8, 64),
        Case("1.3B", 4, 2048, 16, 16, 128),
        Case("8B", 4, 2048, 32, 8, 128),
        Case("8B 4k", 2, 4096, 32, 8, 128),
        Case("8B 8k", 1, 8192, 32, 8, 128),
        Case("70B", 4, 2048, 64, 8, 128),
        Case("no mask", 32, 1024, 32, 8, 128, is_causal=False),
    )
}
"""The sizes of layers_gpu with 8192 tokens, longer sequences, and the layer of Transformer Engine's
published figures."""


class Tensors(NamedTuple):
    """Queries, keys and values ``[s, b, heads, d]``, which require gradients, and the gradient of
    the result ``[s, b, heads * d]``."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    grad: torch.Tensor


def tensors(case: Case, device: torch.device) -> Tensors:
    """Return normal values; the gradient is small, as in training."""
    torch.manual_seed(0)
    size = (case.length, case.batch)
    kind = {"device": device, "dtype": torch.bfloat16}
    q, k, v = (
        torch.randn(*size, heads, case.head_dim, **kind).requires_grad_()
        for heads in (case.heads, case.groups, case.groups)
    )
    return Tensors(q, k, v, 1e-2 * torch.randn(*size, case.heads * case.head_dim, **kind))


def exact(case: Case, given: Tensors) -> torch.Tensor:
    """Return the result of the first head of the first sequence ``[s, d]``, in float32."""
    q, k, v = (x.detach()[:, 0, 0].float() for x in given[:3])
    logits = case.scale * q @ k.mT
    if case.is_causal:
        later = torch.ones(logits.shape, dtype=torch.bool, device=q.device).triu(1)
        logits = logits.masked_fill(later, -torch.inf)
    return logits.softmax(-1) @ v
