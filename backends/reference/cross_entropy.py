"""Cross entropy of logits, in float32 throughout (float64 for float64)."""

from __future__ import annotations

import torch

from fp8core.backend_api import CrossEntropyBackwardDesc, CrossEntropyDesc

__all__ = ["cross_entropy", "cross_entropy_backward"]


def cross_entropy(
    desc: CrossEntropyDesc, x: torch.Tensor, target: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return ``loss``, ``largest`` and ``log_sum``, each ``[t]``; see the backend API."""
    values, smoothing = _wide(x), desc.label_smoothing
    largest = values.detach().amax(-1)  # a constant: the loss is the same for any other number
    below = largest[:, None] - values
    log_sum = (-below).exp().sum(-1).log()
    is_class = (target >= 0) & (target < x.shape[1])
    at_target = below.gather(1, torch.where(is_class, target, 0)[:, None])[:, 0]
    loss = torch.where(is_class, at_target, torch.inf)
    if smoothing:
        loss = (1 - smoothing) * loss + smoothing * below.mean(-1)
    return torch.where(target == desc.ignore_index, 0, loss + log_sum), largest, log_sum


def cross_entropy_backward(
    desc: CrossEntropyBackwardDesc,
    grad: torch.Tensor,
    x: torch.Tensor,
    target: torch.Tensor,
    largest: torch.Tensor,
    log_sum: torch.Tensor,
) -> torch.Tensor:
    """Return ``grad_x [t, v]``; see the backend API."""
    values, smoothing = _wide(x), desc.label_smoothing
    is_class = (target >= 0) & (target < x.shape[1])
    part = is_class.to(values.dtype) * (1 - smoothing)
    slope = (values - largest[:, None] - log_sum[:, None]).exp() - smoothing / x.shape[1]
    at_target = torch.where(is_class, target, 0)[:, None]
    slope = slope.scatter_add(1, at_target, -part[:, None])
    is_ignored = (target == desc.ignore_index)[:, None]
    return torch.where(is_ignored, 0, grad[:, None] * slope).to(desc.dtype)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
