"""Calls of what training needs around the layers, on the CPU: dropped tokens, experts without
tokens, ignored targets, parameters of odd sizes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from fp8core.backend_api import (
    AdamDesc,
    CombineBackwardDesc,
    CombineDesc,
    CrossEntropyBackwardDesc,
    CrossEntropyDesc,
    DispatchDesc,
    OpDesc,
    RouteDesc,
    RouterBackwardDesc,
    RouterDesc,
)
from fp8core.conformance import inputs

TRAINING_DESCS = (
    *(RouteDesc, DispatchDesc, CombineDesc, CombineBackwardDesc, RouterDesc, RouterBackwardDesc),
    *(CrossEntropyDesc, CrossEntropyBackwardDesc, AdamDesc),
)
EXPERTS, TOPK = 6, 3
SIZE = (9, 70)


class Arguments(NamedTuple):
    """The arguments of a call, its keywords, and the positions of what it may write."""

    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    written: frozenset[str | int] = frozenset()


class Route(NamedTuple):
    """``index [t, k]``, here called places, and ``sources [m]``."""

    places: torch.Tensor
    sources: torch.Tensor


def training_call(desc: OpDesc, seed: int, size: tuple[int, ...]) -> Arguments:
    """Return a call of ``desc``; ``size`` is ``(rows, cols)`` of its tensors, or empty."""
    rows, cols = size or SIZE
    match desc:
        case RouteDesc():
            routing = routing_of(desc, rows, EXPERTS, seed)
            return Arguments((routing, 2 * rows), {})
        case DispatchDesc():
            route = route_of(rows, EXPERTS, seed)
            x = inputs.moderate(rows, cols, desc.dtype, 1 + seed)
            probs = _weights(desc.dtype, rows, 2 + seed)
            return Arguments((x, *route), {"probs": probs})
        case CombineDesc():
            route = route_of(rows, EXPERTS, seed)
            x = inputs.moderate(len(route.sources), cols, desc.dtype, 1 + seed)
            values = inputs.moderate(1, len(route.sources), torch.float32, 3 + seed)[0]
            keywords = {"weights": _weights(desc.dtype, rows, 2 + seed), "row_values": values}
            return Arguments((x, route.places), keywords)
        case CombineBackwardDesc():
            route = route_of(rows, EXPERTS, seed)
            grad = inputs.moderate(rows, cols, desc.dtype, 4 + seed)
            x = inputs.moderate(len(route.sources), cols, desc.dtype, 1 + seed)
            return Arguments((grad, x, *route, _weights(desc.dtype, rows, 2 + seed)), {})
        case RouterDesc():
            bias = None if desc.score_function == "softmax" else _bias(EXPERTS, seed)
            keywords = {} if bias is None or desc.of_all else {"expert_bias": bias}
            return Arguments((_logits(desc.dtype, rows, seed),), keywords)
        case RouterBackwardDesc():
            return _router_backward(desc, rows, seed)
        case CrossEntropyDesc():
            return Arguments(
                (inputs.moderate(rows, cols, desc.dtype, 1 + seed), _target(rows, cols, seed)), {}
            )
        case CrossEntropyBackwardDesc():
            x, target = inputs.moderate(rows, cols, desc.dtype, 1 + seed), _target(rows, cols, seed)
            grad = inputs.moderate(1, rows, torch.float32, 4 + seed)[0].clone()
            return Arguments((grad, x, target, *sums_of(x.float())), {})
        case AdamDesc():
            return _adam(desc, seed)
    raise AssertionError(f"no call of {desc}")


def sums_of(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``largest`` and ``log_sum`` of a CrossEntropyDesc, in the dtype of ``x``."""
    largest = x.amax(-1)
    return largest, (x - largest[:, None]).logsumexp(-1)


def routing_of(desc: RouteDesc, tokens: int, experts: int, seed: int) -> torch.Tensor:
    """Return ``routing``: a token in five goes nowhere, and none goes to the expert 1."""
    if desc.kind == "rows":
        return route_of(tokens, experts, seed).places.to(desc.dtype)
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(tokens, experts, generator=generator)
    if experts > 1:
        scores[:, 1] = -1.0
    count = min(TOPK, max(experts - 1, 1))
    chosen = scores.argsort(dim=1, descending=True)[:, :count]
    idle = torch.rand(tokens, 1, generator=generator) < 0.2
    if desc.kind == "experts":
        return torch.where(idle, -1, chosen).to(desc.dtype)
    mask = torch.zeros(tokens, experts, dtype=torch.int64)
    values = torch.arange(1, count + 1).expand(tokens, -1) if desc.dtype != torch.bool else 1
    mask.scatter_(1, chosen, values)
    return torch.where(idle, 0, mask).to(desc.dtype)


def route_of(tokens: int, experts: int, seed: int) -> Route:
    """Return a route by which the last rows take no token, and a few tokens are dropped."""
    routing = routing_of(RouteDesc(torch.bool, "mask"), tokens, experts, seed)
    places = routing.t().flatten().cumsum(0).reshape(experts, tokens).t() - 1
    rows = max(2 * tokens, 1)
    is_row = routing & (places < rows) & (places % 7 != 5)
    index = torch.where(is_row, places, -1).to(torch.int32)
    sources = torch.full((rows,), -1, dtype=torch.int32)
    flat = index.flatten()
    sources[flat[flat >= 0].long()] = (flat >= 0).nonzero()[:, 0].to(torch.int32)
    return Route(index.contiguous(), sources)


def _weights(dtype: torch.dtype, tokens: int, seed: int) -> torch.Tensor:
    """Return probabilities ``[tokens, EXPERTS]``, a few of them 0; float32 where the tokens are
    bfloat16."""
    weights = inputs.moderate(tokens, EXPERTS, torch.float32, seed).abs().clamp(max=1.0)
    weights = torch.where(weights < 0.02, 0, weights)
    return weights if dtype == torch.bfloat16 else weights.to(dtype)


def _logits(dtype: torch.dtype, tokens: int, seed: int) -> torch.Tensor:
    """Return logits whose scores are apart by far more than their rounding errors."""
    generator = torch.Generator().manual_seed(40 + seed)
    order = torch.rand(tokens, EXPERTS, generator=generator).argsort(1)
    return (order * 0.75 - 2.0 + 0.125 * seed).to(dtype)


def _bias(experts: int, seed: int) -> torch.Tensor:
    return (torch.arange(experts) % 3 - 1) * (0.3125 + seed / 64)


def _router_backward(desc: RouterBackwardDesc, tokens: int, seed: int) -> Arguments:
    scores = torch.rand(tokens, EXPERTS, generator=torch.Generator().manual_seed(50 + seed)) + 0.01
    order = scores.argsort(1, descending=True)
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(1, order[:, : desc.topk], True)
    if desc.score_function == "softmax":
        if not (desc.pre_softmax or desc.of_all):
            scores = torch.where(chosen, scores, 0)
        scores = scores / scores.sum(1, keepdim=True)
    dtype = torch.float32 if desc.of_all else desc.dtype
    return Arguments((inputs.moderate(tokens, EXPERTS, dtype, 4 + seed), chosen, scores), {})


def _target(rows: int, classes: int, seed: int) -> torch.Tensor:
    """Return classes, one of them ignored."""
    target = (torch.arange(rows) * 13 + seed) % max(classes, 1)
    if rows > 2:
        target[2] = -100
    return target


_SHAPES = ((7, 5), (33,), (0,), (2, 3, 4), (1030,))


def step_lists(
    desc: AdamDesc, seed: int, shapes: tuple[tuple[int, ...], ...] = _SHAPES
) -> list[list[torch.Tensor]]:
    """Return the lists of a step: gradients, parameters, the averages, and masters."""

    def draw(number: int, dtype: torch.dtype) -> list[torch.Tensor]:
        return [
            inputs.normal(shape, dtype, 100 * number + 10 * at + seed).clone()
            for at, shape in enumerate(shapes)
        ]

    grads, params = draw(1, desc.grad_dtype), draw(2, torch.float32)
    averages = draw(3, desc.state_dtype)
    squares = [tensor.abs() * 0.1 for tensor in draw(4, desc.state_dtype)]
    if desc.master == "none":
        return [grads, [param.to(desc.dtype) for param in params], averages, squares, []]
    if desc.master == "float32":
        return [grads, [param.to(desc.dtype) for param in params], averages, squares, params]
    bits = [param.view(torch.int32) for param in params]
    remainders = [bit_pattern.to(torch.int16) for bit_pattern in bits]
    upper = [
        ((bit_pattern - rest.to(torch.int32)) >> 16).to(torch.int16).view(torch.bfloat16)
        for bit_pattern, rest in zip(bits, remainders, strict=True)
    ]
    return [grads, upper, averages, squares, remainders]


def _adam(desc: AdamDesc, seed: int) -> Arguments:
    lists = step_lists(desc, seed)
    keywords = {
        "lr": 0.01,
        "beta1": 0.9,
        "beta2": 0.95,
        "eps": 1e-6,
        "weight_decay": 0.1,
        "step": 3,
        "inv_scale": 0.5,
    }
    return Arguments(tuple(lists), keywords, frozenset({1, 2, 3, 4}))
