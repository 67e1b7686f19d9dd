"""Law 4 for routers, routes and cross entropy.

A router chooses the reference's experts, with scores within the bound. Routes and copied rows equal
the reference's bit for bit; sums of rows, losses and gradients are within the bound.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, replace
from typing import Any, NamedTuple

import torch

from fp8core.backend_api import (
    CombineBackwardDesc,
    CombineDesc,
    CrossEntropyBackwardDesc,
    CrossEntropyDesc,
    DispatchDesc,
    RouteDesc,
    RouterBackwardDesc,
    RouterDesc,
)
from fp8core.conformance import inputs
from fp8core.conformance.calls import POINTWISE, Case, OpCall, arguments, calls_of, exact, example
from fp8core.conformance.checks import law
from fp8core.conformance.compare import (
    F64,
    FUNCTION,
    ROUND,
    require,
    same_bits,
    same_form,
    same_tensors,
    ulp,
    within,
)
from fp8core.conformance.subject import Subject, on_cpu

SIZES = ((9, 70), (64, 64), (1, 1), (4100, 3), (5, 4100), (3, 33000), (0, 9))
TARGETS = torch.tensor([0, 69, 70, -1, -100, 2**62, -(2**62), 2**31, 5])
"""Targets of 9 rows of 70 classes, some of which are no class."""


_EXPERTS, _TOPK = 6, 3


class Route(NamedTuple):
    """``index [t, k]``, here called places, and ``sources [m]``."""

    places: torch.Tensor
    sources: torch.Tensor


@example(CrossEntropyDesc)
def _cross_entropy(subject: Subject, desc: CrossEntropyDesc, case: Case) -> OpCall:
    rows, cols = case.size or POINTWISE
    x = inputs.moderate(rows, cols, desc.dtype, 1 + case.seed)
    return OpCall(desc, tuple(subject.here((x, _target(rows, cols, case.seed)))), {})


@example(CrossEntropyBackwardDesc)
def _cross_entropy_backward(subject: Subject, desc: CrossEntropyBackwardDesc, case: Case) -> OpCall:
    rows, cols = case.size or POINTWISE
    x = inputs.moderate(rows, cols, desc.dtype, 1 + case.seed)
    target = _target(rows, cols, case.seed)
    grad = inputs.moderate(1, rows, torch.float32, 4 + case.seed)[0].clone()
    return OpCall(desc, tuple(subject.here((grad, x, target, *sums_of(x.float())))), {})


def sums_of(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``largest`` and ``log_sum`` of a CrossEntropyDesc, in the dtype of ``x``."""
    largest = x.amax(-1)
    return largest, (x - largest[:, None]).logsumexp(-1)


def _target(rows: int, classes: int, seed: int) -> torch.Tensor:
    """Return classes, one of them ignored."""
    target = (torch.arange(rows) * 13 + seed) % max(classes, 1)
    if rows > 2:
        target[2] = -100
    return target


@example(RouteDesc)
def _route(subject: Subject, desc: RouteDesc, case: Case) -> OpCall:
    rows, _ = case.size or POINTWISE
    routing = routing_of(desc, rows, _EXPERTS, case.seed)
    return OpCall(desc, (subject.here(routing), 2 * rows), {})


@example(DispatchDesc)
def _dispatch_rows(subject: Subject, desc: DispatchDesc, case: Case) -> OpCall:
    rows, cols = case.size or POINTWISE
    route = route_of(rows, _EXPERTS, case.seed)
    x = inputs.moderate(rows, cols, desc.dtype, 1 + case.seed)
    probs = _weights(desc.dtype, rows, 2 + case.seed)
    return OpCall(desc, tuple(subject.here((x, *route))), {"probs": subject.here(probs)})


@example(CombineDesc)
def _combine_rows(subject: Subject, desc: CombineDesc, case: Case) -> OpCall:
    rows, cols = case.size or POINTWISE
    route = route_of(rows, _EXPERTS, case.seed)
    x = inputs.moderate(len(route.sources), cols, desc.dtype, 1 + case.seed)
    values = inputs.moderate(1, len(route.sources), torch.float32, 3 + case.seed)[0]
    keywords = {"weights": _weights(desc.dtype, rows, 2 + case.seed), "row_values": values}
    return OpCall(desc, tuple(subject.here((x, route.places))), subject.here(keywords))


@example(CombineBackwardDesc)
def _combine_rows_backward(subject: Subject, desc: CombineBackwardDesc, case: Case) -> OpCall:
    rows, cols = case.size or POINTWISE
    route = route_of(rows, _EXPERTS, case.seed)
    grad = inputs.moderate(rows, cols, desc.dtype, 4 + case.seed)
    x = inputs.moderate(len(route.sources), cols, desc.dtype, 1 + case.seed)
    weights = _weights(desc.dtype, rows, 2 + case.seed)
    return OpCall(desc, tuple(subject.here((grad, x, *route, weights))), {})


def routing_of(desc: RouteDesc, tokens: int, experts: int, seed: int) -> torch.Tensor:
    """Return ``routing``: a token in five goes nowhere, and none goes to the expert 1."""
    if desc.kind == "rows":
        return route_of(tokens, experts, seed).places.to(desc.dtype)
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(tokens, experts, generator=generator)
    if experts > 1:
        scores[:, 1] = -1.0
    count = min(_TOPK, max(experts - 1, 1))
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
    """Return probabilities ``[tokens, experts]``, a few of them 0; float32 where the tokens are
    bfloat16."""
    weights = inputs.moderate(tokens, _EXPERTS, torch.float32, seed).abs().clamp(max=1.0)
    weights = torch.where(weights < 0.02, 0, weights)
    return weights if dtype == torch.bfloat16 else weights.to(dtype)


@example(RouterDesc)
def _router(subject: Subject, desc: RouterDesc, case: Case) -> OpCall:
    rows, _ = case.size or POINTWISE
    takes_bias = desc.score_function != "softmax" and not desc.of_all
    keywords = {"expert_bias": _bias(_EXPERTS, case.seed)} if takes_bias else {}
    logits = _logits(desc.dtype, rows, case.seed)
    return OpCall(desc, (subject.here(logits),), subject.here(keywords))


@example(RouterBackwardDesc)
def _router_backward(subject: Subject, desc: RouterBackwardDesc, case: Case) -> OpCall:
    forward = _router(subject, RouterDesc(*astuple(desc)), case)
    probs, chosen, scores = forward.judged(subject)
    grad = inputs.moderate(*probs.shape, probs.dtype, 4 + case.seed)
    return OpCall(desc, (subject.here(grad), chosen, scores), {})


def _logits(dtype: torch.dtype, tokens: int, seed: int) -> torch.Tensor:
    """Return logits whose scores are apart by far more than their rounding errors."""
    generator = torch.Generator().manual_seed(40 + seed)
    order = torch.rand(tokens, _EXPERTS, generator=generator).argsort(1)
    return (order * 0.75 - 2.0 + 0.125 * seed).to(dtype)


def _bias(experts: int, seed: int) -> torch.Tensor:
    return (torch.arange(experts) % 3 - 1) * (0.3125 + seed / 64)


@law(4, "cross_entropy", is_core=True)
def cross_entropy_is_within_the_bound(subject: Subject, desc: CrossEntropyDesc) -> Iterator[float]:
    """The loss is of float32, for any number of classes, ignored and unknown targets too."""
    for call in calls_of(subject, desc, *SIZES):
        yield from _cross_entropy_within(subject, desc, *on_cpu(call.arguments))
    x = inputs.moderate(9, 70, desc.dtype)
    yield from _cross_entropy_within(subject, desc, x, TARGETS)
    large = (x * 1e3).clamp(-6e4, 6e4)
    for logits in (large, _far_from_zero(desc.dtype)):
        yield from _cross_entropy_within(subject, desc, logits, torch.arange(9))


def _far_from_zero(dtype: torch.dtype) -> torch.Tensor:
    """Return logits ``[9, 70]`` whose differences are small beside them."""
    offset = min(1e7, torch.finfo(dtype).max / 2)
    return (inputs.moderate(9, 70, torch.float64) + offset).to(dtype)


def _cross_entropy_within(
    subject: Subject, desc: CrossEntropyDesc, x: torch.Tensor, target: torch.Tensor
) -> Iterator[float]:
    results = subject.run(desc, subject.here(x), subject.here(target))
    expected, (wide, _) = exact(subject, desc, x, target)
    spread = wide.amax(1) - wide.amin(1) if x.shape[1] else wide.new_zeros(len(x))
    steps = torch.full((len(x),), (x.shape[1] + 64) * ROUND, dtype=F64)
    bounds = {"loss": steps * (1 + 2 * spread), "largest": 0 * steps, "log_sum": steps}
    for (name, bound), result, want in zip(bounds.items(), results, expected, strict=True):
        same_form(name, result, torch.empty(len(x)))
        yield within(f"{name} {list(x.shape)}", result, want, bound)


@law(4, "cross_entropy")
def cross_entropy_takes_infinite_logits(subject: Subject, desc: CrossEntropyDesc) -> None:
    """-inf is a class of probability 0; NaN and inf give no finite loss, in their row alone."""
    x = inputs.moderate(6, 1030, desc.dtype).clone()
    x[1, ::2] = -torch.inf
    x[2, 5], x[3, 700] = torch.nan, torch.inf
    x[4] = -torch.inf
    target = torch.tensor([3, 3, 3, 3, 3, 3])
    loss, _, log_sum = on_cpu(subject.run(desc, subject.here(x), subject.here(target)))
    wide, _ = exact(subject, desc, x, target)
    finite = [0, 5] if desc.label_smoothing else [0, 1, 5]
    rows = torch.tensor(finite)
    within("loss", loss[rows], wide[0][rows], wide[0][rows].abs() * 2.0**-12)
    within("log_sum", log_sum[:2], wide[2][:2], wide[2][:2].abs() * 2.0**-12)
    require(not bool(loss[2:5].isfinite().any()), "a row with NaN, inf or -inf alone is finite")


@law(4, "cross_entropy", "cross_entropy_backward")
def cross_entropy_takes_the_largest_floats(
    subject: Subject, desc: CrossEntropyDesc | CrossEntropyBackwardDesc
) -> None:
    """A row of equal logits has the loss log(classes), also at the ends of the dtype."""
    largest, classes = torch.finfo(desc.dtype).max, 1030
    ends = torch.tensor([largest, -largest, largest / 2, 0.0], dtype=desc.dtype)
    x = ends[:, None].expand(4, classes).contiguous()
    target = torch.tensor([0, 5, 1029, 7])
    if isinstance(desc, CrossEntropyDesc):
        plain = replace(desc, label_smoothing=0.0)
        loss = on_cpu(subject.run(plain, subject.here(x), subject.here(target)))[0].double()
        log_sum = torch.full((4,), float(classes), dtype=F64).log()
        within("loss", loss, log_sum, log_sum * 2.0**-20)
        return
    sums = sums_of(x.to(torch.float64 if desc.dtype == torch.float64 else torch.float32))
    unit = torch.ones_like(sums[0])
    result = subject.run(desc, *subject.here((unit, x, target, *sums)))
    expected = subject.judged(desc, unit, x, target, *sums)
    within("grad_x", result, expected, 2.0**-18 + ulp(expected.double(), desc.dtype))


@law(4, "cross_entropy_backward", is_core=True)
def cross_entropy_backward_is_within_the_bound(
    subject: Subject, desc: CrossEntropyBackwardDesc
) -> Iterator[float]:
    """The gradient is computed in float32 and rounded once; the argument may have stride 0."""
    for call in calls_of(subject, desc, *SIZES):
        yield _cross_entropy_backward_within(subject, desc, on_cpu(call.arguments))
    grad = torch.tensor(0.125).expand(9)
    for x in (inputs.moderate(9, 70, desc.dtype), _far_from_zero(desc.dtype)):
        largest, log_sum = sums_of(x.float())
        operands = (grad, x, TARGETS, largest, log_sum)
        yield _cross_entropy_backward_within(subject, desc, operands)


def _cross_entropy_backward_within(
    subject: Subject, desc: CrossEntropyBackwardDesc, operands: tuple[torch.Tensor, ...]
) -> float:
    grad, x, target, largest, log_sum = operands
    of_loss = grad.to(subject.device)  # which keeps a stride of 0
    result = subject.run(desc, of_loss, *subject.here((x, target, largest, log_sum)))
    expected, wide = exact(subject, desc, *operands)
    same_form("grad_x", result, x)
    below, log_sums = wide[3][:, None] - wide[1], wide[4][:, None]
    near = (below + log_sums.abs() + 4) * (-below - log_sums).exp() + 1
    bound = FUNCTION * wide[0].abs()[:, None] * near + ulp(expected, desc.dtype)
    return within(f"grad_x {list(x.shape)}", result, expected, bound)


EXPERTS = (6, 12, 30, 33, 129, 516)
"""Numbers of experts, all multiples of 3; a law takes those that ``num_groups`` divides."""


def _experts(desc: RouterDesc | RouterBackwardDesc) -> list[int]:
    return [count for count in EXPERTS if not desc.num_groups or count % desc.num_groups == 0]


def _permuted_logits(desc: RouterDesc, tokens: int, experts: int, seed: int) -> torch.Tensor:
    """Return logits from -4 to 4 in equal steps, in an order of its own for each row."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(tokens, experts, generator=generator).argsort(1)
    return (order / experts * 8 - 4).to(desc.dtype)


@law(4, "router", is_core=True)
def router_chooses_as_the_reference(subject: Subject, desc: RouterDesc) -> Iterator[float]:
    """The chosen experts have the highest scores, for any number of experts and of tokens."""
    for tokens, experts in ((9, count) for count in _experts(desc)):
        # In 16 bits, or of many experts, logits lie close or are equal. Equal logits rank in the
        # order of their experts, and a score function other than softmax may lose that order.
        is_exact = desc.dtype == torch.float32 and experts <= 129
        logits = _permuted_logits(desc, tokens, experts, experts)
        if is_exact or desc.score_function == "softmax":
            yield _router_within(subject, desc, logits, {}, f"{experts} experts")
    for tokens in (0, 1, 1030):
        call = arguments(subject, desc, Case(size=(tokens, 1)))
        logits = on_cpu(call.arguments)[0]
        yield _router_within(subject, desc, logits, call.keywords, f"{tokens} tokens")


def _router_within(
    subject: Subject, desc: RouterDesc, logits: torch.Tensor, keywords: Any, name: str
) -> float:
    results = subject.run(desc, subject.here(logits), **keywords)
    expected = subject.judged(replace(desc, dtype=torch.float32), logits.float(), **keywords)
    dtype = torch.float32 if desc.of_all else desc.dtype
    same_bits(f"routing_map of {name}", results[1], expected[1])
    probs, scores = expected[0].double(), expected[2].double()
    slack = FUNCTION * 8
    same_form(f"probs of {name}", results[0], torch.empty(logits.shape, dtype=dtype))
    same_form(f"scores of {name}", results[2], expected[2])
    worst = within(f"probs of {name}", results[0], probs, slack * probs.abs() + ulp(probs, dtype))
    bound = slack * scores.abs() + torch.finfo(torch.float32).tiny
    return max(worst, within(f"scores of {name}", results[2], scores, bound))


@law(4, "router")
def router_takes_the_lower_expert_of_two_alike(
    subject: Subject, desc: RouterDesc
) -> Iterator[float]:
    """Of equal scores the expert with the lower number comes first; -inf ranks as a number."""
    for experts in _experts(desc)[:4]:
        logits = torch.zeros(5, experts, dtype=desc.dtype)
        logits[1, experts // 2 :] = 1.0
        logits[2, ::2] = -1.0
        logits[3, -1] = 3.0
        logits[4, 1::3] = -torch.inf
        if desc.topk > 2 * experts // 3:
            logits[4] = 0.0
        yield _router_within(subject, desc, logits, {}, f"{experts} alike experts")


@law(4, "router")
def router_passes_on_nan(subject: Subject, desc: RouterDesc) -> None:
    """A token with a NaN still goes to topk different experts, and the NaN reaches probs."""
    for experts in _experts(desc)[:3]:
        logits = _permuted_logits(desc, 4, experts, 7)
        logits[1, 2], logits[3] = torch.nan, torch.nan
        probs, chosen, _ = on_cpu(subject.run(desc, subject.here(logits)))
        counts = chosen.sum(1).tolist()
        require(counts == [desc.topk] * 4, f"{counts} experts chosen, expected {desc.topk} each")
        require(bool(probs[3][chosen[3]].isnan().all()), "NaN logits give finite probs")
        require(bool(probs[1].isnan().any()), "a NaN logit gives finite probs")
        require(bool(probs[::2].isfinite().all()), "the NaN of a token reaches another")


@law(4, "router_backward", is_core=True)
def router_backward_is_within_the_bound(
    subject: Subject, desc: RouterBackwardDesc
) -> Iterator[float]:
    """The gradient is computed in float32 and rounded once; the choice of experts has none."""
    for tokens in (9, 0, 1, 1030):
        call = arguments(subject, desc, Case(size=(tokens, 1)))
        grad, chosen, scores = on_cpu(call.arguments)
        expected = _router_gradient(desc, grad.double(), chosen, scores.double())
        size = _router_gradient(desc, grad.double().abs(), chosen, scores.double(), sign=-1)
        result = call.run(subject)
        same_form("grad_logits", result, torch.empty(scores.shape, dtype=desc.dtype))
        bound = 64 * ROUND * size.abs() + ulp(expected, desc.dtype)
        yield within(f"grad_logits of {tokens} tokens", result, expected, bound)


@law(4, "router_backward")
def router_backward_passes_on_nan(subject: Subject, desc: RouterBackwardDesc) -> None:
    """The gradient of an expert whose score is NaN is NaN, and other tokens' gradients are not."""
    call = arguments(subject, desc, Case(size=(3, 1)))
    grad, chosen, scores = on_cpu(call.arguments)
    scores = torch.where((torch.arange(3) == 1)[:, None] & chosen, torch.nan, scores)
    result = subject.run(desc, *subject.here((grad, chosen, scores))).cpu()
    require(bool(result[1][chosen[1]].isnan().all()), "the gradient of a NaN score is a number")
    require(bool(result[::2].isfinite().all()), "the NaN of a token reaches another")


def _router_gradient(
    desc: RouterBackwardDesc,
    grad: torch.Tensor,
    chosen: torch.Tensor,
    scores: torch.Tensor,
    sign: int = 1,
) -> torch.Tensor:
    """Return the gradient of the logits in float64.

    From magnitudes, with ``sign`` -1, the sum of the magnitudes of its terms: rounding errors are
    a share of that sum.
    """
    if not desc.of_all:
        grad = torch.where(chosen, grad * desc.scaling_factor, 0)
    if desc.score_function == "softmax":
        return scores * (grad - sign * (grad * scores).sum(1, keepdim=True))
    part = scores if desc.of_all else torch.where(chosen, scores, 0)
    if desc.of_all or desc.topk > 1:
        total = part.sum(1, keepdim=True) + 1e-20
        grad = (grad - sign * (grad * part / total).sum(1, keepdim=True)) / total
        grad = grad if desc.of_all else torch.where(chosen, grad, 0)
    if desc.score_function == "sigmoid":
        return grad * scores * (1 - sign * scores)
    return grad * -torch.expm1(-scores.square()) / (2 * scores)


ROWS = ((9, 70), (64, 64), (1, 1), (300, 8), (33, 1030), (3, 4100), (0, 9), (9, 0), (0, 0))


@law(4, "route", is_core=True)
def route_equals_the_reference(subject: Subject, desc: RouteDesc) -> None:
    """Routes of any number of tokens and experts, to fewer and more rows than are taken."""
    sizes = ((9, 6), (1, 1), (70, 3), (1030, 8), (33, 260), (0, 4), (5, 1), (4100, 2))
    for tokens, experts in subject.sizes("route", *sizes):
        routing = routing_of(desc, tokens, experts, 3)
        for rows in sorted({0, 1, tokens, 2 * tokens + 5}):
            _same_route(subject, desc, f"{tokens} tokens, {experts} experts", routing, rows)


@law(4, "route", applies=lambda desc: desc.kind != "rows")
def route_of_all_or_nothing_equals_the_reference(subject: Subject, desc: RouteDesc) -> None:
    """All tokens go to every expert, to one, and nowhere."""
    nowhere = -1 if desc.kind == "experts" else 0
    for tokens, experts in ((9, 6), (130, 40), (2050, 3)):
        every = torch.arange(experts).expand(tokens, -1) if desc.kind == "experts" else 1
        for values in (torch.full((tokens, experts), nowhere), torch.ones(tokens, experts) * every):
            routing = values.to(desc.dtype)
            _same_route(subject, desc, f"{tokens} alike tokens", routing, tokens * experts)
        routing = torch.full((tokens, experts), nowhere)
        routing[:, -1] = experts - 1 if desc.kind == "experts" else 1
        _same_route(subject, desc, f"{tokens} of one", routing.to(desc.dtype), tokens)


@law(4, "route", applies=lambda desc: desc.kind == "rows")
def route_of_rows_is_inverted(subject: Subject, desc: RouteDesc) -> None:
    """Routes from the rows' numbers: a permutation of many rows, and numbers out of range."""
    order = torch.randperm(4100, generator=torch.Generator().manual_seed(1)).to(desc.dtype)
    for routing in (order[:, None], order.reshape(-1, 2)):
        _same_route(subject, desc, "a permutation", routing, 4100)
    strange = order[:9].reshape(3, 3).clone()
    limits = torch.iinfo(desc.dtype)
    strange[0, 0], strange[1, 1], strange[2, 2] = limits.max, limits.min, 4100
    _same_route(subject, desc, "strange numbers", strange, 4100)


def _same_route(
    subject: Subject, desc: RouteDesc, name: str, routing: torch.Tensor, rows: int
) -> None:
    expected = subject.judged(desc, routing, rows)
    results = subject.run(desc, subject.here(routing), rows)
    same_tensors(f"index and sources of {name} to {rows} rows", results, expected)


def _strange(route: Route) -> Route:
    """Return ``route`` with some row numbers and some sources out of range."""
    index, sources = (numbers.clone() for numbers in route)
    lowest, highest = torch.iinfo(torch.int32).min, torch.iinfo(torch.int32).max
    index[0, 0], index[-1, -1], index[1, 0] = highest, lowest, len(sources)
    sources[0], sources[-1], sources[1] = highest, lowest, index.numel()
    return Route(index, sources)


@law(4, "dispatch_rows", is_core=True)
def dispatch_copies_the_rows(subject: Subject, desc: DispatchDesc) -> None:
    """Rows are copied bit for bit, with inf and NaN; a row without a token is zeros.

    So is a row of probability 0 with ``skips_improbable``.
    """
    for call in calls_of(subject, desc, *ROWS):
        name = f"{list(call.arguments[0].shape)}"
        _same_rows(subject, call, name)
        _same_rows(subject, call._replace(keywords={}), f"{name} without probs")
    x = inputs.matrix("nonfinite", 9, 70, desc.dtype)
    operands = subject.here((x, *_strange(route_of(9, 6, 1))))
    _same_rows(subject, OpCall(desc, operands, {}), "a route with strange numbers")


def _same_rows(subject: Subject, call: OpCall, name: str) -> None:
    expected = subject.judged(call.desc, *call.arguments, **call.keywords)
    y, permuted = call.run(subject)
    require(y.is_contiguous(), f"y of {name} is not contiguous")
    same_tensors(f"y and probs of {name}", (y, permuted), expected)


@law(4, "combine_rows", is_core=True)
def combine_is_within_the_bound(subject: Subject, desc: CombineDesc) -> Iterator[float]:
    """Rows are added in float32, in the order of a token's slots, and rounded once.

    ``row_values`` are copied.
    """
    for call in calls_of(subject, desc, *ROWS):
        name = f"rows {list(call.arguments[0].shape)}"
        yield _combine_within(subject, call, name)
        yield _combine_within(subject, call._replace(keywords={}), f"{name} without weights")
    route = _strange(route_of(9, 6, 1))
    x = subject.here(inputs.moderate(len(route.sources), 70, desc.dtype))
    call = OpCall(desc, (x, subject.here(route.places)), {})
    yield _combine_within(subject, call, "a route with strange numbers")


def _combine_within(subject: Subject, call: OpCall, name: str) -> float:
    desc: Any = call.desc
    y, values = call.run(subject)
    (x, index), keywords = on_cpu((call.arguments, call.keywords))
    weights, row_values = keywords.get("weights"), keywords.get("row_values")
    is_row = (index >= 0) & (index < len(x))
    padded = torch.cat((x.double(), torch.zeros(1, x.shape[1], dtype=F64)))
    rows = padded[torch.where(is_row, index, len(x)).long()]  # [t, k, n]
    scaled = rows if weights is None else rows * weights.double()[..., None]
    expected, size = scaled.sum(1), scaled.abs().sum(1)
    same_form(f"y of {name}", y, torch.empty(expected.shape, dtype=desc.dtype))
    require(y.is_contiguous(), f"y of {name} is not contiguous")
    bound = (index.shape[1] + 2) * ROUND * size + ulp(expected, desc.dtype) / 2 * (size > 0)
    if row_values is not None:
        expected_values = torch.where(is_row, row_values[torch.where(is_row, index, 0).long()], 0)
        same_bits(f"values of {name}", values, expected_values) if len(x) else None
    else:
        require(values is None, f"values of {name}: expected None")
    return within(f"y of {name}", y, expected, bound)


@law(4, "combine_rows")
def combine_passes_on_nan_and_inf(subject: Subject, desc: CombineDesc) -> None:
    """NaN and inf of a row reach the row's token alone, also with a weight of 0.

    A row without a token reaches no token.
    """
    route = route_of(9, 6, 2)
    x = inputs.moderate(len(route.sources), 70, desc.dtype).clone()
    row_of_token = int((route.sources >= 0).nonzero()[0])
    row_of_none = int((route.sources < 0).nonzero()[0])
    weights = torch.ones(9, 6)
    weights.view(-1)[int(route.sources[row_of_token])] = 0.0
    index = subject.here(route.places)
    plain, _ = on_cpu(subject.run(desc, subject.here(x), index, weights=subject.here(weights)))
    for value in (torch.nan, torch.inf):
        x[row_of_token, 3] = x[row_of_none, 5] = value
        y, _ = on_cpu(subject.run(desc, subject.here(x), index, weights=subject.here(weights)))
        token = int(route.sources[row_of_token]) // 6
        require(bool(y[token, 3].isnan()), f"{value} times 0 is not NaN")
        y[token, 3] = plain[token, 3]
        same_bits(f"the other values beside {value}", y, plain)


@law(4, "combine_rows_backward", is_core=True)
def combine_backward_is_within_the_bound(
    subject: Subject, desc: CombineBackwardDesc
) -> Iterator[float]:
    """Products and sums are computed in float32 and rounded once.

    The gradient of a row without a token is 0.
    """
    for call in calls_of(subject, desc, *ROWS):
        yield from _combine_backward_within(subject, desc, call)


def _combine_backward_within(
    subject: Subject, desc: CombineBackwardDesc, call: OpCall
) -> Iterator[float]:
    grad_x, grad_weights = call.run(subject)
    _, x, _, _, weights = call.arguments
    expected, wide = exact(subject, desc, *call.arguments)
    sizes, _ = exact(
        subject,
        desc,
        *(operand.abs() if operand.is_floating_point() else operand for operand in wide),
    )
    same_form("grad_x", grad_x, x)
    same_form("grad_weights", grad_weights, weights)
    bounds = (
        2 * ROUND * sizes[0] + ulp(expected[0], desc.dtype) / 2 * (sizes[0] > 0),
        (x.shape[1] + 4) * ROUND * sizes[1] + ulp(expected[1], weights.dtype) * (sizes[1] > 0),
    )
    results = zip(("grad_x", "grad_weights"), (grad_x, grad_weights), expected, bounds, strict=True)
    for name, *rest in results:
        yield within(f"{name} {list(x.shape)}", *rest)
