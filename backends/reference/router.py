"""The router of a mixture of experts, in float32 throughout."""

from __future__ import annotations

import torch

from fp8core.backend_api import RouterBackwardDesc, RouterDesc

__all__ = ["router", "router_backward"]

TINY = 1e-20  # what a sum of scores is increased by before something is divided by it


def router(
    desc: RouterDesc, logits: torch.Tensor, *, expert_bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return ``probs``, ``routing_map`` and ``scores``, each ``[t, e]``; see the backend API."""
    x = logits.float()
    is_softmax = desc.score_function == "softmax"
    scores = _scores(desc, x)
    ranked = x if is_softmax and not (desc.pre_softmax or desc.of_all) else scores
    if expert_bias is not None:
        ranked = ranked + expert_bias.float()
    if desc.num_groups:
        ranked = _of_best_groups(desc, ranked)
    best = ranked.argsort(dim=-1, descending=True, stable=True)[:, : desc.topk]
    chosen = torch.zeros_like(x, dtype=torch.bool).scatter(1, best, True)
    if is_softmax and not (desc.pre_softmax or desc.of_all):
        scores = torch.where(chosen, x, -torch.inf).softmax(-1)
    probs = scores if desc.of_all else torch.where(chosen, scores, 0)
    if not is_softmax and _divides(desc):
        probs = probs / (probs.sum(-1, keepdim=True) + TINY)
    if desc.of_all:
        return probs, chosen, scores
    return (probs * desc.scaling_factor).to(desc.dtype), chosen, scores


def _scores(desc: RouterDesc, x: torch.Tensor) -> torch.Tensor:
    match desc.score_function:
        case "softmax":
            return x.softmax(-1)
        case "sigmoid":
            return x.sigmoid()
    # log(1 + exp(x)); torch's softplus is x itself above a threshold
    return (x.clamp(min=0) + (-x.abs()).exp().log1p()).sqrt()


def _divides(desc: RouterDesc | RouterBackwardDesc) -> bool:
    """Say whether scores other than softmax are divided by their sum."""
    return desc.of_all or desc.topk > 1


def _of_best_groups(desc: RouterDesc, ranked: torch.Tensor) -> torch.Tensor:
    """Return ``ranked``, -inf for the experts of groups that do not take part."""
    tokens, experts = ranked.shape
    groups = ranked.reshape(tokens, desc.num_groups, experts // desc.num_groups)
    count = desc.topk // desc.group_topk
    sums = groups.sort(dim=-1, descending=True).values[..., :count].sum(-1)
    best = sums.argsort(dim=-1, descending=True, stable=True)[:, : desc.group_topk]
    takes_part = torch.zeros_like(sums, dtype=torch.bool).scatter(1, best, True)
    return torch.where(takes_part[..., None], groups, -torch.inf).flatten(-2)


def router_backward(
    desc: RouterBackwardDesc,
    grad_probs: torch.Tensor,
    routing_map: torch.Tensor,
    scores: torch.Tensor,
) -> torch.Tensor:
    """Return ``grad_logits [t, e]``; see the backend API."""
    grad = grad_probs.float()
    if not desc.of_all:
        grad = torch.where(routing_map, grad * desc.scaling_factor, 0)
    if desc.score_function == "softmax":
        return (scores * (grad - (grad * scores).sum(-1, keepdim=True))).to(desc.dtype)
    if _divides(desc):
        part = scores if desc.of_all else torch.where(routing_map, scores, 0)
        total = part.sum(-1, keepdim=True) + TINY
        grad = grad / total - (grad * part).sum(-1, keepdim=True) / total.square()
        if not desc.of_all:
            grad = torch.where(routing_map, grad, 0)
    if desc.score_function == "sigmoid":
        slope = scores * (1 - scores)
    else:  # d sqrt(softplus(x)) / dx = sigmoid(x) / (2 * score), where sigmoid(x) = 1 - exp(-s^2)
        slope = torch.where(scores == 0, 0, -torch.expm1(-scores.square()) / (2 * scores))
    return (grad * slope).to(desc.dtype)
