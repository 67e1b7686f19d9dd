"""The loss, the router and the routes of experts, and steps of optimizers, in float32 throughout
(float64 for float64)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from fp8core.backend_api import (
    MASTER_KINDS,
    ROUTE_KINDS,
    SCORE_FUNCTIONS,
    AdamDesc,
    CombineBackwardDesc,
    CombineDesc,
    CrossEntropyBackwardDesc,
    CrossEntropyDesc,
    DispatchDesc,
    RouteDesc,
    RouterBackwardDesc,
    RouterDesc,
)
from fp8core_backends.reference.operations import computes, float_problem, wide

INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def _loss_problem(desc: CrossEntropyDesc | CrossEntropyBackwardDesc) -> str | None:
    if not 0 <= desc.label_smoothing <= 1:
        return f"no label smoothing of {desc.label_smoothing}"
    return float_problem(desc.dtype, torch.float64)


@computes(CrossEntropyDesc, refuses=_loss_problem)
def cross_entropy(
    desc: CrossEntropyDesc, x: torch.Tensor, target: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return ``loss``, ``largest`` and ``log_sum``, each ``[t]``; see the backend API."""
    values, smoothing = x.to(wide(x.dtype)), desc.label_smoothing
    largest = values.detach().amax(-1)  # a constant: the loss is the same for any other number
    below = largest[:, None] - values
    log_sum = (-below).exp().sum(-1).log()
    is_class = (target >= 0) & (target < x.shape[1])
    at_target = below.gather(1, torch.where(is_class, target, 0)[:, None])[:, 0]
    loss = torch.where(is_class, at_target, torch.inf)
    if smoothing:
        loss = (1 - smoothing) * loss + smoothing * below.mean(-1)
    return torch.where(target == desc.ignore_index, 0, loss + log_sum), largest, log_sum


@computes(CrossEntropyBackwardDesc, refuses=_loss_problem)
def cross_entropy_backward(
    desc: CrossEntropyBackwardDesc,
    grad: torch.Tensor,
    x: torch.Tensor,
    target: torch.Tensor,
    largest: torch.Tensor,
    log_sum: torch.Tensor,
) -> torch.Tensor:
    """Return ``grad_x [t, v]``; see the backend API."""
    values, smoothing = x.to(wide(x.dtype)), desc.label_smoothing
    is_class = (target >= 0) & (target < x.shape[1])
    part = is_class.to(values.dtype) * (1 - smoothing)
    slope = (values - largest[:, None] - log_sum[:, None]).exp() - smoothing / x.shape[1]
    at_target = torch.where(is_class, target, 0)[:, None]
    slope = slope.scatter_add(1, at_target, -part[:, None])
    is_ignored = (target == desc.ignore_index)[:, None]
    return torch.where(is_ignored, 0, grad[:, None] * slope).to(desc.dtype)


TINY = 1e-20  # what a sum of scores is increased by before something is divided by it


def _router_problem(desc: RouterDesc | RouterBackwardDesc) -> str | None:
    is_softmax = desc.score_function == "softmax"
    problems = (
        (desc.score_function not in SCORE_FUNCTIONS, f"no scores {desc.score_function!r}"),
        (desc.topk < 1, f"top {desc.topk} of the experts"),
        (desc.pre_softmax and not is_softmax, f"no softmax before {desc.score_function}"),
        (bool(desc.num_groups) != bool(desc.group_topk), "num_groups or group_topk alone"),
        (desc.group_topk > desc.num_groups, "more groups are chosen than there are"),
        (bool(desc.group_topk) and desc.topk % (desc.group_topk or 1) != 0, "unequal groups"),
        (desc.of_all and bool(desc.num_groups), "no groups for the probabilities of all"),
    )
    reason = next((text for wrong, text in problems if wrong), None)
    return reason or float_problem(desc.dtype)


@computes(RouterDesc, refuses=_router_problem)
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


@computes(RouterBackwardDesc, refuses=_router_problem)
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


def _route_problem(desc: RouteDesc) -> str | None:
    if desc.dtype not in INTEGERS:
        return f"no route of {desc.dtype}"
    return None if desc.kind in ROUTE_KINDS else f"no route from {desc.kind!r}"


def _rows_problem(desc: DispatchDesc | CombineDesc | CombineBackwardDesc) -> str | None:
    return float_problem(desc.dtype, torch.float64)


@computes(RouteDesc, refuses=_route_problem)
def route(desc: RouteDesc, routing: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``index [t, k]`` and ``sources [rows]``; see the backend API."""
    if desc.kind == "rows":
        places = routing.long()
    else:
        places = _by_mask(routing) if desc.kind == "mask" else _by_experts(routing)
    is_row = (places >= 0) & (places < rows)
    index = torch.where(is_row, places, -1).to(torch.int32).contiguous()
    return index, _inverse(index, rows)


def _by_mask(routing: torch.Tensor) -> torch.Tensor:
    """Return the rows ``[t, e]``, expert by expert, -1 where a token does not go."""
    goes = (routing != 0).t()
    places = goes.flatten().cumsum(0).reshape(goes.shape) - 1
    return torch.where(goes, places, -1).t()


def _by_experts(routing: torch.Tensor) -> torch.Tensor:
    """Return the rows ``[t, k]``, expert by expert; negative for an expert that is negative."""
    experts = routing.flatten().long()
    order = experts.argsort(stable=True)
    places = torch.empty_like(order).scatter_(
        0, order, torch.arange(len(order), device=order.device)
    )
    return (places - (experts < 0).sum()).reshape(routing.shape)


def _inverse(index: torch.Tensor, rows: int) -> torch.Tensor:
    """Return the sources ``[rows]`` of a route; behind them lies a row for what goes nowhere."""
    flat = index.flatten().long()
    sources = torch.full((rows + 1,), -1, dtype=torch.int32, device=index.device)
    entries = torch.arange(len(flat), dtype=torch.int32, device=index.device)
    sources[torch.where(flat >= 0, flat, rows)] = entries
    return sources[:rows].clone()


@computes(DispatchDesc, refuses=_rows_problem)
def dispatch_rows(
    desc: DispatchDesc,
    x: torch.Tensor,
    index: torch.Tensor,
    sources: torch.Tensor,
    *,
    probs: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return ``y [m, n]``, and the probabilities of its rows; see the backend API."""
    is_row, entries = _valid(sources, index.numel())
    permuted = None
    if probs is not None:
        permuted = _picked(probs.flatten(), entries, is_row)
        if desc.skips_improbable:
            is_row = is_row & (permuted != 0)
    return _picked(x, entries // max(index.shape[1], 1), is_row), permuted


@computes(CombineDesc, refuses=_rows_problem)
def combine_rows(
    desc: CombineDesc,
    x: torch.Tensor,
    index: torch.Tensor,
    *,
    weights: torch.Tensor | None = None,
    row_values: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return ``y [t, n]``, and the values of each token's rows; see the backend API."""
    dtype = wide(desc.dtype)
    total = torch.zeros(index.shape[0], x.shape[1], dtype=dtype, device=x.device)
    is_row, rows = _valid(index, x.shape[0])
    for slot in range(index.shape[1]):
        row = _picked(x, rows[:, slot], is_row[:, slot]).to(dtype)
        if weights is not None:
            weight = torch.where(is_row[:, slot], weights[:, slot].to(dtype), 0)
            row = row * weight[:, None]
        total = total + row
    values = None if row_values is None else _picked(row_values, rows, is_row)
    return total.to(desc.dtype), values


@computes(CombineBackwardDesc, refuses=_rows_problem)
def combine_rows_backward(
    desc: CombineBackwardDesc,
    grad: torch.Tensor,
    x: torch.Tensor,
    index: torch.Tensor,
    sources: torch.Tensor,
    weights: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of ``x [m, n]`` and of ``weights [t, k]``; see the backend API."""
    dtype, slots = wide(desc.dtype), index.shape[1]
    is_row, entries = _valid(sources, index.numel())
    weight = _picked(weights.flatten().to(dtype), entries, is_row)
    grad_x = _picked(grad.to(dtype), entries // max(slots, 1), is_row) * weight[:, None]
    is_row, rows = _valid(index, x.shape[0])
    products = [
        (grad.to(dtype) * _picked(x, rows[:, slot], is_row[:, slot]).to(dtype)).sum(-1)
        for slot in range(slots)
    ]
    grad_weights = torch.stack(products, dim=1) if products else weights.new_zeros(weights.shape)
    grad_weights = torch.where(is_row, grad_weights, 0)
    return grad_x.to(desc.dtype), grad_weights.to(weights.dtype)


def _valid(numbers: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which of ``numbers`` are below ``count`` and not negative, and those, 0 elsewhere."""
    is_valid = (numbers >= 0) & (numbers < count)
    return is_valid, torch.where(is_valid, numbers, 0).long()


def _picked(x: torch.Tensor, rows: torch.Tensor, is_row: torch.Tensor) -> torch.Tensor:
    """Return ``x[rows]``, zeros where there is no row."""
    if not x.shape[0]:
        return x.new_zeros(*rows.shape, *x.shape[1:])
    mask = is_row.reshape(*is_row.shape, *(1,) * (x.dim() - 1))
    return torch.where(mask, x[rows], torch.zeros((), dtype=x.dtype, device=x.device)).contiguous()


Tensors = Sequence[torch.Tensor]
Number = float | torch.Tensor


def _adam_problem(desc: AdamDesc) -> str | None:
    is_short = desc.master == "remainder"
    averages = (torch.float32, torch.bfloat16)
    problems = (
        (desc.master not in MASTER_KINDS, f"no masters {desc.master!r}"),
        (is_short and desc.dtype != torch.bfloat16, f"no remainders of {desc.dtype}"),
        (desc.state_dtype not in averages, f"no averages in {desc.state_dtype}"),
    )
    reason = next((text for wrong, text in problems if wrong), None)
    return reason or float_problem(desc.dtype) or float_problem(desc.grad_dtype)


@computes(AdamDesc, refuses=_adam_problem)
def adam(
    desc: AdamDesc,
    grads: Tensors,
    params: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    masters: Tensors,
    *,
    lr: Number,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: Number,
    bias_correction: bool = True,
    inv_scale: Number = 1.0,
    found_inf: torch.Tensor | None = None,
) -> None:
    """Update all tensors but the gradients in place; see the backend API."""
    lr, inv_scale, step = _scalar(lr), _scalar(inv_scale), _scalar(step)
    count = step.double() if isinstance(step, torch.Tensor) else step
    divisors = [1.0 - beta**count if bias_correction else 1.0 for beta in (beta1, beta2)]
    # A scalar parameter would become float64 with divisors of float64.
    divisors = [
        divisor.float() if isinstance(divisor, torch.Tensor) else divisor for divisor in divisors
    ]
    sets = itertools.zip_longest(grads, params, exp_avgs, exp_avg_sqs, masters)
    for grad, param, exp_avg, exp_avg_sq, master in sets:
        value = _stepped_value(desc, param, master)
        g = grad.float() * inv_scale
        if not desc.decoupled:
            g = g + weight_decay * value
        m = beta1 * exp_avg.float() + (1 - beta1) * g
        v = beta2 * exp_avg_sq.float() + (1 - beta2) * g * g
        update = (m / divisors[0]) / ((v / divisors[1]).sqrt() + eps)
        if desc.decoupled:
            update = update + weight_decay * value
        _write(exp_avg, m, found_inf)
        _write(exp_avg_sq, v, found_inf)
        _write_value(desc, param, master, value - lr * update, found_inf)


def _scalar(number: Number) -> Number:
    """Return a tensor of one element without dimensions, which parameters without any need."""
    return number.reshape(()) if isinstance(number, torch.Tensor) else number


def _stepped_value(
    desc: AdamDesc, param: torch.Tensor, master: torch.Tensor | None
) -> torch.Tensor:
    """Return the value that is stepped, float32."""
    if master is None:
        return param.float()
    if desc.master == "float32":
        return master
    bits = (param.view(torch.int16).to(torch.int32) << 16) + master.to(torch.int32)
    return bits.view(torch.float32)


def _write_value(
    desc: AdamDesc,
    param: torch.Tensor,
    master: torch.Tensor | None,
    value: torch.Tensor,
    found_inf: torch.Tensor | None,
) -> None:
    """Write the value after the step to the parameter and to its master."""
    if master is None or desc.master == "float32":
        _write(param, value, found_inf)
        if master is not None:
            _write(master, value, found_inf)
        return
    value = value.masked_fill(value.isnan(), torch.nan)  # whose lower bits are 0
    bits = value.view(torch.int32)
    remainder = bits.to(torch.int16)  # the lower bits, as a signed number
    upper = ((bits - remainder.to(torch.int32)) >> 16).to(torch.int16)
    _write(param, upper.view(torch.bfloat16), found_inf)
    _write(master, remainder, found_inf)


def _write(to: torch.Tensor, value: torch.Tensor, found_inf: torch.Tensor | None) -> None:
    """Copy ``value`` unless ``found_inf`` says that nothing is to be updated."""
    if found_inf is not None:
        value = torch.where(found_inf.reshape(()) != 0, to, value.to(to.dtype))
    to.copy_(value)
