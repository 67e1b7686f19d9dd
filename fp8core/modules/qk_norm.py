"""Norms of queries and keys, over the size of a head."""

from __future__ import annotations

import torch

from fp8core.errors import RecipeError, did_you_mean
from fp8core.modules.norm import LayerNorm, RMSNorm
from fp8core.modules.tensor_operations import L2Normalization

__all__ = ["make_qk_norms"]

_WITH_WEIGHT = {"RMSNorm": RMSNorm, "LayerNorm": LayerNorm}


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
        return L2Normalization(eps=eps), L2Normalization(eps=eps)
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
