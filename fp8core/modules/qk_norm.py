"""Norms of queries and keys, over the size of a head."""

from __future__ import annotations

import torch

from fp8core.errors import RecipeError, did_you_mean
from fp8core.modules.norm import LayerNorm, RMSNorm

__all__ = ["L2Normalization", "make_qk_norms"]

_WITH_WEIGHT = {"RMSNorm": RMSNorm, "LayerNorm": LayerNorm}


class L2Normalization(torch.nn.Module):
    """``x / sqrt(sum(x^2) + eps)`` over the last dimension, computed in float32; no parameters."""

    def __init__(self, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalize ``input [..., n]``; its dtype stays, and float64 is computed as such."""
        x = input if input.dtype == torch.float64 else input.float()
        return (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + self.eps)).to(input.dtype)

    def extra_repr(self) -> str:
        """Return the constant under the root."""
        return f"eps={self.eps}"


def make_qk_norms(
    kind: str | None,
    head_dim: int,
    eps: float,
    *,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
    name: str | None,
    splits_heads: bool,
) -> tuple[torch.nn.Module | None, torch.nn.Module | None]:
    """Return the norms of queries and of keys; both None if ``kind`` is.

    ``name`` is that of the attention layer, in which they are ``q_norm`` and ``k_norm``.
    ``splits_heads``: each rank of a group has some of the heads, and the gradients of those alone.

    Raises:
        RecipeError: an unknown kind; lists the known.
    """
    if kind is None:
        return None, None
    if kind == "L2Normalization":
        return L2Normalization(eps), L2Normalization(eps)
    if kind not in _WITH_WEIGHT:
        known = ("L2Normalization", *_WITH_WEIGHT)
        raise RecipeError(
            f"MultiheadAttention(qk_norm_type={kind!r}): kinds are None, {', '.join(known)}."
            f"{did_you_mean(str(kind), known)}"
        )
    norms = (
        _WITH_WEIGHT[kind](
            head_dim,
            eps,
            params_dtype=dtype,
            device=device,
            sequence_parallel=splits_heads,
            name=None if name is None else f"{name}.{part}",
        )
        for part in ("q_norm", "k_norm")
    )
    first, second = norms
    return first, second
