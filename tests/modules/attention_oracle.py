"""Attention of one query at a time, in float64, for the tests of attention.

Every mask is an if-statement, every sum a loop: nothing is shared with the library.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import torch

__all__ = ["Asked", "attend"]


@dataclass(frozen=True, slots=True)
class Asked:
    """What one call asks for, in the words of the layer's arguments."""

    mask_type: str = "no_mask"
    window: tuple[int, int] = (-1, -1)
    bottom_right: bool = True
    scale: float = 1.0
    softcap: float = 0.0
    bias_type: str = "no_bias"
    bias: torch.Tensor | None = None
    slopes: torch.Tensor | None = None
    softmax: str = "vanilla"
    offset: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    max_logits: list[torch.Tensor] = field(default_factory=list)


def _sees(asked: Asked, i: int, j: int, shift: int) -> bool:
    if "causal" in asked.mask_type and j > i + shift:
        return False
    left, right = asked.window
    if left >= 0 and j < i + shift - left:
        return False
    return not (right >= 0 and j > i + shift + right)


def attend(
    asked: Asked, at: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    """Return ``[s_q, heads, d_v]`` of sequence ``at``, whose tensors are ``[length, heads, d]``."""
    heads, repeats = q.shape[1], q.shape[1] // k.shape[1]
    is_at_the_end = asked.bottom_right or "bottom_right" in asked.mask_type
    if asked.mask_type in ("causal", "padding_causal"):
        is_at_the_end = False
    shift = len(k) - len(q) if is_at_the_end else 0
    rows = q.new_zeros(len(q), heads, v.shape[2])
    for i, h in itertools.product(range(len(q)), range(heads)):
        group = h // repeats
        logits, values = [], []
        for j in range(len(k)):
            if not _sees(asked, i, j, shift):
                continue
            if asked.mask is not None and bool(_entry(asked.mask, at, h, i, j)):
                continue
            logits.append(_logit(asked, (at, h, i, j), q[i, h] @ k[j, group], abs(i + shift - j)))
            values.append(v[j, group])
        if logits:
            rows[i, h] = _mean(asked, h, torch.stack(logits), torch.stack(values))
            asked.max_logits.append(torch.stack(logits).max())
    return rows


def _entry(x: torch.Tensor, *where: int) -> torch.Tensor:
    return x[tuple(min(index, size - 1) for index, size in zip(where, x.shape, strict=True))]


def _logit(
    asked: Asked, where: tuple[int, int, int, int], product: torch.Tensor, distance: int
) -> torch.Tensor:
    if asked.bias_type == "pre_scale_bias":
        assert asked.bias is not None
        product = product + _entry(asked.bias, *where)
    logit = product * asked.scale
    if asked.softcap:
        logit = asked.softcap * torch.tanh(logit / asked.softcap)
    if asked.bias_type == "post_scale_bias":
        assert asked.bias is not None
        logit = logit + _entry(asked.bias, *where)
    if asked.bias_type == "alibi":
        assert asked.slopes is not None
        slopes = asked.slopes if asked.slopes.dim() == 1 else asked.slopes[where[0]]
        logit = logit - slopes[where[1]].double() * distance
    return logit


def _mean(asked: Asked, head: int, logits: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    total = torch.exp(logits).sum()
    if asked.softmax == "off-by-one":
        total = total + 1
    if asked.softmax == "learnable":
        assert asked.offset is not None
        total = total + torch.exp(asked.offset[head])
    return (torch.exp(logits) / total) @ values
