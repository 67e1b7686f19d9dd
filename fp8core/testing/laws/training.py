"""Law 4 for what training needs around the layers: routes bit for bit, sums within the bound."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from fp8core.backend_api import (
    AdamDesc,
    CombineBackwardDesc,
    CombineDesc,
    CrossEntropyBackwardDesc,
    CrossEntropyDesc,
    DispatchDesc,
    RouteDesc,
    RouterBackwardDesc,
    RouterDesc,
    SgdDesc,
)
from fp8core.testing import inputs
from fp8core.testing.calls import Case, OpCall, arguments
from fp8core.testing.checks import law
from fp8core.testing.compare import require, same_bits, same_form, ulp, within
from fp8core.testing.laws.pointwise import FUNCTION, ROUND
from fp8core.testing.subject import Subject, on_cpu
from fp8core.testing.training_calls import Route, route_of, routing_of, step_lists

F64 = torch.float64
SIZES = ((9, 70), (64, 64), (1, 1), (300, 8), (33, 1030), (3, 4100))
EMPTY = ((0, 9), (9, 0), (0, 0))


# Routes


@law(4, "route")
def route_equals_the_reference(subject: Subject, desc: RouteDesc) -> None:
    """Every number of tokens and experts, with rows that are too few and too many."""
    sizes = ((9, 6), (1, 1), (70, 3), (1030, 8), (33, 260), (0, 4), (5, 1), (4100, 2))
    for tokens, experts in sizes:
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
    """A permutation of many rows, and numbers that are no rows."""
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
    for word, ours, theirs in zip(("index", "sources"), results, expected, strict=True):
        same_bits(f"{word} of {name} to {rows} rows", ours, theirs)


def _strange(route: Route) -> Route:
    """Return ``route`` with numbers that are no rows and no entries."""
    index, sources = (one.clone() for one in route)
    lowest, highest = torch.iinfo(torch.int32).min, torch.iinfo(torch.int32).max
    index[0, 0], index[-1, -1], index[1, 0] = highest, lowest, len(sources)
    sources[0], sources[-1], sources[1] = highest, lowest, index.numel()
    return Route(index, sources)


@law(4, "dispatch_rows")
def dispatch_copies_the_rows(subject: Subject, desc: DispatchDesc) -> None:
    """Bit for bit, inf and NaN too; zeros where no token goes, or an improbable one."""
    for size in (*SIZES, *EMPTY):
        call = arguments(subject, desc, Case(size=size))
        _same_rows(subject, call, f"{list(size)}")
        _same_rows(subject, call._replace(keywords={}), f"{list(size)} without probs")
    route = _strange(route_of(9, 6, 1))
    x = inputs.matrix("nonfinite", 9, 70, desc.dtype) if desc.dtype != F64 else None
    assert x is not None
    given = subject.here((x, *route))
    _same_rows(subject, OpCall(desc, given, {}), "a route with strange numbers")


def _same_rows(subject: Subject, call: OpCall, name: str) -> None:
    expected = subject.judged(call.desc, *call.arguments, **call.keywords)
    y, permuted = call.run(subject)
    require(y.is_contiguous(), f"y of {name} is not contiguous")
    same_bits(f"y of {name}", y, expected[0])
    require((permuted is None) == (expected[1] is None), f"probs of {name}: None or not")
    if permuted is not None:
        same_bits(f"probs of {name}", permuted, expected[1])


@law(4, "combine_rows")
def combine_is_within_the_bound(subject: Subject, desc: CombineDesc) -> float:
    """Added in float32, in the order of the slots, and rounded once; values are copied."""
    worst = 0.0
    for size in (*SIZES, *EMPTY):
        call = arguments(subject, desc, Case(size=size))
        worst = max(worst, _combine_within(subject, call, f"{list(size)}"))
        plain = call._replace(keywords={})
        worst = max(worst, _combine_within(subject, plain, f"{list(size)} without weights"))
    route = _strange(route_of(9, 6, 1))
    x = subject.here(inputs.moderate(len(route.sources), 70, desc.dtype))
    call = OpCall(desc, (x, subject.here(route.places)), {})
    return max(worst, _combine_within(subject, call, "a route with strange numbers"))


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
        kept = torch.where(is_row, row_values[torch.where(is_row, index, 0).long()], 0)
        same_bits(f"values of {name}", values, kept) if len(x) else None
    else:
        require(values is None, f"values of {name}: expected None")
    return within(f"y of {name}", y, expected, bound)


@law(4, "combine_rows")
def combine_passes_on_nan_and_inf(subject: Subject, desc: CombineDesc) -> None:
    """They reach their token alone, also with a weight of 0, and no token from a row of nobody."""
    route = route_of(9, 6, 2)
    x = inputs.moderate(len(route.sources), 70, desc.dtype).clone()
    hit = int((route.sources >= 0).nonzero()[0])
    idle = int((route.sources < 0).nonzero()[0])
    weights = torch.ones(9, 6)
    weights.view(-1)[int(route.sources[hit])] = 0.0
    index = subject.here(route.places)
    plain, _ = on_cpu(subject.run(desc, subject.here(x), index, weights=subject.here(weights)))
    for value in (torch.nan, torch.inf):
        x[hit, 3] = x[idle, 5] = value
        y, _ = on_cpu(subject.run(desc, subject.here(x), index, weights=subject.here(weights)))
        token = int(route.sources[hit]) // 6
        require(bool(y[token, 3].isnan()), f"{value} times 0 is not NaN")
        y[token, 3] = plain[token, 3]
        same_bits(f"the other values beside {value}", y, plain)


@law(4, "combine_rows_backward")
def combine_backward_is_within_the_bound(subject: Subject, desc: CombineBackwardDesc) -> float:
    """Products and sums in float32, rounded once; zeros where no token goes."""
    worst = 0.0
    for size in (*SIZES, *EMPTY):
        worst = max(worst, _combine_backward_within(subject, desc, size))
    return worst


def _combine_backward_within(
    subject: Subject, desc: CombineBackwardDesc, size: tuple[int, int]
) -> float:
    call = arguments(subject, desc, Case(size=size))
    grad_x, grad_weights = call.run(subject)
    grad, x, index, sources, weights = on_cpu(call.arguments)
    wide = replace(desc, dtype=F64)
    given = (grad.double(), x.double(), index, sources, weights.double())
    expected = subject.judged(wide, *given)
    sizes = subject.judged(wide, *(one.abs() if one.is_floating_point() else one for one in given))
    same_form("grad_x", grad_x, x)
    same_form("grad_weights", grad_weights, weights)
    bounds = (
        2 * ROUND * sizes[0] + ulp(expected[0], desc.dtype) / 2 * (sizes[0] > 0),
        (x.shape[1] + 4) * ROUND * sizes[1] + ulp(expected[1], weights.dtype) * (sizes[1] > 0),
    )
    results = zip(("grad_x", "grad_weights"), (grad_x, grad_weights), expected, bounds, strict=True)
    return max(within(f"{name} {list(size)}", *rest) for name, *rest in results)


# Routers

EXPERTS = (6, 12, 30, 33, 129, 516)
"""Numbers of experts, which the groups of the catalogue divide where they are a multiple of 3."""


def _experts(desc: RouterDesc | RouterBackwardDesc) -> list[int]:
    return [count for count in EXPERTS if not desc.num_groups or count % desc.num_groups == 0]


def _apart(desc: RouterDesc, tokens: int, experts: int, seed: int) -> torch.Tensor:
    """Return logits that are all different in a row, in steps that the dtype tells apart."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(tokens, experts, generator=generator).argsort(1)
    return (order / experts * 8 - 4).to(desc.dtype)


@law(4, "router")
def router_chooses_as_the_reference(subject: Subject, desc: RouterDesc) -> float:
    """The experts with the highest scores, of any number, and their probabilities."""
    worst = 0.0
    for tokens, experts in ((9, count) for count in _experts(desc)):
        # 16 bits do not tell this many logits apart: those that are alike are in the order of
        # their experts, which functions of them may lose.
        is_exact = desc.dtype == torch.float32 and experts <= 129
        logits = _apart(desc, tokens, experts, experts)
        if is_exact or desc.score_function == "softmax":
            worst = max(worst, _router_within(subject, desc, logits, {}, f"{experts} experts"))
    for tokens in (0, 1, 1030):
        call = arguments(subject, desc, Case(size=(tokens, 1)))
        logits = on_cpu(call.arguments)[0]
        worst = max(worst, _router_within(subject, desc, logits, call.keywords, f"{tokens} tokens"))
    return worst


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
def router_takes_the_lower_expert_of_two_alike(subject: Subject, desc: RouterDesc) -> float:
    """Of equal scores the expert with the lower number comes first; -inf ranks as a number."""
    worst = 0.0
    for experts in _experts(desc)[:4]:
        logits = torch.zeros(5, experts, dtype=desc.dtype)
        logits[1, experts // 2 :] = 1.0
        logits[2, ::2] = -1.0
        logits[3, -1] = 3.0
        logits[4, 1::3] = -torch.inf
        if desc.topk > 2 * experts // 3:
            logits[4] = 0.0
        worst = max(worst, _router_within(subject, desc, logits, {}, f"{experts} alike experts"))
    return worst


@law(4, "router")
def router_passes_on_nan(subject: Subject, desc: RouterDesc) -> None:
    """A token with a NaN still goes to topk different experts, and the NaN reaches probs."""
    for experts in _experts(desc)[:3]:
        logits = _apart(desc, 4, experts, 7)
        logits[1, 2], logits[3] = torch.nan, torch.nan
        probs, chosen, _ = on_cpu(subject.run(desc, subject.here(logits)))
        counts = chosen.sum(1).tolist()
        require(counts == [desc.topk] * 4, f"{counts} experts chosen, expected {desc.topk} each")
        require(bool(probs[3][chosen[3]].isnan().all()), "NaN logits give finite probs")
        require(bool(probs[1].isnan().any()), "a NaN logit gives finite probs")
        require(bool(probs[::2].isfinite().all()), "the NaN of a token reaches another")


@law(4, "router_backward")
def router_backward_is_within_the_bound(subject: Subject, desc: RouterBackwardDesc) -> float:
    """Computed in float32, rounded once; the choice has no gradient."""
    worst = 0.0
    for tokens in (9, 0, 1, 1030):
        call = arguments(subject, desc, Case(size=(tokens, 1)))
        grad, chosen, scores = on_cpu(call.arguments)
        expected = _router_gradient(desc, grad.double(), chosen, scores.double())
        size = _router_gradient(desc, grad.double().abs(), chosen, scores.double(), sign=-1)
        result = call.run(subject)
        same_form("grad_logits", result, torch.empty(scores.shape, dtype=desc.dtype))
        bound = 64 * ROUND * size.abs() + ulp(expected, desc.dtype)
        worst = max(worst, within(f"grad_logits of {tokens} tokens", result, expected, bound))
    return worst


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
    """Return the gradient in float64; from magnitudes with ``sign`` -1, what errors grow with."""
    if not desc.of_all:
        grad = torch.where(chosen, grad * desc.scaling_factor, 0)
    if desc.score_function == "softmax":
        return scores * (grad - sign * (grad * scores).sum(1, keepdim=True))
    part = scores if desc.of_all else torch.where(chosen, scores, 0)
    if desc.topk > 1:
        total = part.sum(1, keepdim=True) + 1e-20
        grad = (grad - sign * (grad * part / total).sum(1, keepdim=True)) / total
        grad = grad if desc.of_all else torch.where(chosen, grad, 0)
    if desc.score_function == "sigmoid":
        return grad * scores * (1 - sign * scores)
    return grad * -torch.expm1(-scores.square()) / (2 * scores)


# Cross entropy


@law(4, "cross_entropy")
def cross_entropy_is_within_the_bound(subject: Subject, desc: CrossEntropyDesc) -> float:
    """Computed in float32, of any number of classes, ignored and unknown targets among them."""
    worst = 0.0
    for size in ((9, 70), (64, 64), (1, 1), (4100, 3), (5, 4100), (3, 33000), (0, 9)):
        call = arguments(subject, desc, Case(size=size))
        worst = max(worst, _cross_entropy_within(subject, desc, *on_cpu(call.arguments)))
    x = inputs.moderate(9, 70, desc.dtype)
    far = torch.tensor([0, 69, 70, -1, -100, 2**62, -(2**62), 2**31, 5])
    worst = max(worst, _cross_entropy_within(subject, desc, x, far))
    large = (x * 1e3).clamp(-6e4, 6e4)
    return max(worst, _cross_entropy_within(subject, desc, large, torch.arange(9)))


def _cross_entropy_within(
    subject: Subject, desc: CrossEntropyDesc, x: torch.Tensor, target: torch.Tensor
) -> float:
    loss, log_sum = subject.run(desc, subject.here(x), subject.here(target))
    expected = subject.judged(replace(desc, dtype=F64), x.double(), target)
    largest = x.double().abs().amax(1) if x.shape[1] else x.new_zeros(len(x), dtype=F64)
    bound = (x.shape[1] + 64) * ROUND * (1 + 2 * largest)
    same_form("loss", loss, torch.empty(len(x)))
    same_form("log_sum", log_sum, torch.empty(len(x)))
    worst = within(f"log_sum {list(x.shape)}", log_sum, expected[1], bound)
    return max(worst, within(f"loss {list(x.shape)}", loss, expected[0], bound))


@law(4, "cross_entropy")
def cross_entropy_takes_infinite_logits(subject: Subject, desc: CrossEntropyDesc) -> None:
    """-inf is a class of probability 0; NaN and inf give no finite loss, in their row alone."""
    x = inputs.moderate(6, 1030, desc.dtype).clone()
    x[1, ::2] = -torch.inf
    x[2, 5], x[3, 700] = torch.nan, torch.inf
    x[4] = -torch.inf
    target = torch.tensor([3, 3, 3, 3, 3, 3])
    loss, log_sum = on_cpu(subject.run(desc, subject.here(x), subject.here(target)))
    wide = subject.judged(replace(desc, dtype=F64), x.double(), target)
    finite = [0, 5] if desc.label_smoothing else [0, 1, 5]
    rows = torch.tensor(finite)
    within("loss", loss[rows], wide[0][rows], wide[0][rows].abs() * 2.0**-12)
    within("log_sum", log_sum[:2], wide[1][:2], wide[1][:2].abs() * 2.0**-12)
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
    log_sum = x.double().logsumexp(1)
    if isinstance(desc, CrossEntropyDesc):
        plain = replace(desc, label_smoothing=0.0)
        result = on_cpu(subject.run(plain, subject.here(x), subject.here(target)))[1].double()
        within("log_sum", result, log_sum, log_sum.abs() * 2.0**-20)
        return
    kept = log_sum.to(torch.float64 if desc.dtype == torch.float64 else torch.float32)
    one = torch.ones_like(kept)
    result = subject.run(desc, *subject.here((one, x, target, kept)))
    expected = subject.judged(desc, one, x, target, kept)
    within("grad_x", result, expected, 2.0**-18 + ulp(expected.double(), desc.dtype))


@law(4, "cross_entropy_backward")
def cross_entropy_backward_is_within_the_bound(
    subject: Subject, desc: CrossEntropyBackwardDesc
) -> float:
    """Computed in float32, rounded once; a gradient of stride 0 is read right."""
    worst = 0.0
    for size in ((9, 70), (64, 64), (1, 1), (4100, 3), (5, 4100), (3, 33000), (0, 9)):
        call = arguments(subject, desc, Case(size=size))
        worst = max(worst, _cross_entropy_backward_within(subject, desc, *on_cpu(call.arguments)))
    x = inputs.moderate(9, 70, desc.dtype)
    far = torch.tensor([0, 69, 70, -1, -100, 2**62, -(2**62), 2**31, 5])
    one = torch.tensor(0.125).expand(9)
    log_sum = x.float().logsumexp(1)
    return max(worst, _cross_entropy_backward_within(subject, desc, one, x, far, log_sum))


def _cross_entropy_backward_within(
    subject: Subject,
    desc: CrossEntropyBackwardDesc,
    grad: torch.Tensor,
    x: torch.Tensor,
    target: torch.Tensor,
    log_sum: torch.Tensor,
) -> float:
    moved = grad.to(subject.device)  # its stride is kept
    result = subject.run(desc, moved, *subject.here((x, target, log_sum)))
    wide = replace(desc, dtype=F64)
    expected = subject.judged(wide, grad.double(), x.double(), target, log_sum.double())
    same_form("grad_x", result, x)
    slope = (x.double() - log_sum.double()[:, None]).exp()
    near = (x.double().abs() + log_sum.double().abs()[:, None] + 4) * slope + 1
    bound = FUNCTION * grad.double().abs()[:, None] * near + ulp(expected, desc.dtype)
    return within(f"grad_x {list(x.shape)}", result, expected, bound)


# Steps of optimizers

BETAS = {"beta1": 0.9, "beta2": 0.999}
LISTS = ("grads", "params", "exp_avgs", "exp_avg_sqs", "masters")
SHAPES = ((70, 130), (1,), (), (0, 5), (9,), (65537,), (3, 4, 5))


@law(4, "adam")
def adam_steps_as_the_reference(subject: Subject, desc: AdamDesc) -> float:
    """Three steps of tensors of any size and number, with and without corrections and decay."""
    worst = 0.0
    variants = (
        (0.0, True, 1.0, SHAPES),
        (0.1, True, 0.25, ((5,),) * 130),
        (0.1, False, 1.0, SHAPES),
    )
    for decay, corrects, scale, shapes in variants:
        ours = subject.here(step_lists(desc, 1, shapes))
        for step in (1, 2, 7):
            keywords = dict(lr=1e-2, eps=1e-8, weight_decay=decay, step=step, **BETAS)
            keywords |= {"bias_correction": corrects, "inv_scale": scale}
            theirs = on_cpu(ours)  # so that errors do not add up
            subject.run(desc, *ours, **keywords)
            subject.judging(desc)(*theirs, **keywords)
            worst = max(worst, _lists_within(desc, ours, theirs))
    return worst


def _lists_within(desc: AdamDesc, ours: Any, theirs: Any) -> float:
    worst = 0.0
    for word, results, expected in zip(LISTS, ours, theirs, strict=True):
        is_bits = word == "masters" and desc.master == "remainder"
        for at, (one, other) in enumerate(zip(results, expected, strict=True)):
            if is_bits:
                one, other = _joined(ours[1][at], one), _joined(theirs[1][at], other)
            want = other.double()
            bound = 2.0**-19 * want.abs() + 1e-2 * 2.0**-18 + ulp(want, one.dtype)
            worst = max(worst, within(f"{word} {at}", one, want, bound))
    return worst


def _joined(param: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """Return the float32 values of upper bits ``param`` and lower ones ``remainder``."""
    upper, lower = on_cpu((param, remainder))
    bits: torch.Tensor = (upper.view(torch.int16).to(torch.int32) << 16) + lower.to(torch.int32)
    return bits.view(torch.float32)


@law(4, "adam", applies=lambda desc: desc.master != "none")
def adam_rounds_the_parameter_from_its_master(subject: Subject, desc: AdamDesc) -> None:
    """The parameter is the new master, rounded once; beside remainders halves away from 0."""
    lists = subject.here(step_lists(desc, 2, SHAPES))
    subject.run(desc, *lists, lr=0.1, eps=1e-8, weight_decay=0.0, step=1, **BETAS)
    _, params, _, _, masters = on_cpu(lists)
    for at, (param, master) in enumerate(zip(params, masters, strict=True)):
        if desc.master == "float32":
            same_bits(f"parameter {at}", param, master.to(desc.dtype))
            continue
        value = _joined(param, master)
        bits = value.view(torch.int32) + 0x8000
        rounded = (bits >> 16).to(torch.int16).view(torch.bfloat16)
        same_bits(f"parameter {at}", param, rounded)


@law(4, "adam")
def adam_takes_its_numbers_from_the_device(subject: Subject, desc: AdamDesc) -> float:
    """lr, step and inv_scale as tensors give what the numbers give, also to a scalar parameter."""
    ours = subject.here(step_lists(desc, 3, ((70, 13), ())))
    theirs = on_cpu(ours)
    keywords: dict[str, Any] = dict(eps=1e-8, weight_decay=0.1, **BETAS)
    numbers = {"lr": torch.tensor([0.01]), "inv_scale": torch.tensor([0.5])}
    numbers["step"] = torch.tensor([4], dtype=torch.int32)
    subject.run(desc, *ours, **keywords, **subject.here(numbers))
    subject.judging(desc)(*theirs, lr=0.01, step=4, inv_scale=0.5, **keywords)
    return _lists_within(desc, ours, theirs)


@law(4, "adam", "sgd")
def steps_stop_where_something_is_not_finite(subject: Subject, desc: AdamDesc | SgdDesc) -> None:
    """Nothing is updated if found_inf is not 0; all is if it is 0."""
    call = arguments(subject, desc)
    for dtype in (torch.float32, torch.int32):
        stopped, before = call.again(), on_cpu(call.arguments)
        stopped.keywords["found_inf"] = subject.here(torch.ones(1, dtype=dtype))
        stopped.run(subject)
        for ours, theirs in zip(_flat(stopped.arguments), _flat(before), strict=True):
            same_bits(f"a tensor of a step that is stopped ({dtype})", ours, theirs)
        going, plain = call.again(), call.again()
        going.keywords["found_inf"] = subject.here(torch.zeros(1, dtype=dtype))
        going.run(subject)
        plain.run(subject)
        for ours, theirs in zip(_flat(going.arguments), _flat(plain.arguments), strict=True):
            same_bits(f"a tensor of a step that goes on ({dtype})", ours, theirs)


@law(4, "adam", "sgd")
def steps_take_tensors_of_any_strides(subject: Subject, desc: AdamDesc | SgdDesc) -> None:
    """Transposed tensors, with gaps and at odd addresses, are stepped as contiguous ones."""
    call = arguments(subject, desc)
    for view in (inputs.strided, inputs.shifted, inputs.transposed):
        spread = [[view(one) for one in group] for group in call.arguments]
        plain = call.again()
        plain.run(subject)
        subject.run(desc, *spread, **call.keywords)
        for ours, theirs in zip(_flat(spread), _flat(plain.arguments), strict=True):
            same_bits(f"a tensor, {view.__name__}", ours, theirs)


def _flat(lists: Any) -> list[torch.Tensor]:
    return [one for group in lists for one in group]


@law(4, "sgd")
def sgd_steps_as_the_reference(subject: Subject, desc: SgdDesc) -> float:
    """With and without momentum, Nesterov's among them, first steps and later ones."""
    worst = 0.0
    variants = ((0.0, 0.0, False), (0.9, 0.0, False), (0.9, 0.5, False), (0.9, 0.0, True))
    for momentum, dampening, nesterov in variants:
        ours = subject.here(step_lists(desc, 1, SHAPES))
        for is_first in (True, False):
            theirs = on_cpu(ours)
            keywords = dict(lr=0.1, weight_decay=0.01, momentum=momentum, dampening=dampening)
            keywords |= dict(nesterov=nesterov, is_first=is_first, scale=0.5)
            subject.run(desc, *ours, **keywords)
            subject.judging(desc)(*theirs, **keywords)
            for at, (one, other) in enumerate(zip(_flat(ours), _flat(theirs), strict=True)):
                want = other.double()
                bound = 2.0**-20 * (want.abs() + 0.25) + ulp(want, one.dtype)
                worst = max(worst, within(f"tensor {at}", one, want, bound))
    return worst
