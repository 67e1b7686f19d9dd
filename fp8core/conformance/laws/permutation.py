"""Law 4 for the rows of experts: routes and copies bit for bit, sums within the bound."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from fp8core.backend_api import CombineBackwardDesc, CombineDesc, DispatchDesc, RouteDesc
from fp8core.conformance import inputs
from fp8core.conformance.calls import Case, OpCall, arguments
from fp8core.conformance.checks import law
from fp8core.conformance.compare import require, same_bits, same_form, ulp, within
from fp8core.conformance.laws.pointwise import ROUND
from fp8core.conformance.subject import Size, Subject, on_cpu
from fp8core.conformance.training_calls import Route, route_of, routing_of

F64 = torch.float64
SIZES = ((9, 70), (64, 64), (1, 1), (300, 8), (33, 1030), (3, 4100))
EMPTY = ((0, 9), (9, 0), (0, 0))


@law(4, "route", is_core=True)
def route_equals_the_reference(subject: Subject, desc: RouteDesc) -> None:
    """Every number of tokens and experts, with rows that are too few and too many."""
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
    index, sources = (numbers.clone() for numbers in route)
    lowest, highest = torch.iinfo(torch.int32).min, torch.iinfo(torch.int32).max
    index[0, 0], index[-1, -1], index[1, 0] = highest, lowest, len(sources)
    sources[0], sources[-1], sources[1] = highest, lowest, index.numel()
    return Route(index, sources)


@law(4, "dispatch_rows", is_core=True)
def dispatch_copies_the_rows(subject: Subject, desc: DispatchDesc) -> None:
    """Bit for bit, inf and NaN too; zeros where no token goes, or an improbable one."""
    for size in subject.sizes(desc.op, *SIZES, *EMPTY):
        call = arguments(subject, desc, Case(size=size))
        _same_rows(subject, call, f"{list(size)}")
        _same_rows(subject, call._replace(keywords={}), f"{list(size)} without probs")
    route = _strange(route_of(9, 6, 1))
    x = inputs.matrix("nonfinite", 9, 70, desc.dtype) if desc.dtype != F64 else None
    assert x is not None
    operands = subject.here((x, *route))
    _same_rows(subject, OpCall(desc, operands, {}), "a route with strange numbers")


def _same_rows(subject: Subject, call: OpCall, name: str) -> None:
    expected = subject.judged(call.desc, *call.arguments, **call.keywords)
    y, permuted = call.run(subject)
    require(y.is_contiguous(), f"y of {name} is not contiguous")
    same_bits(f"y of {name}", y, expected[0])
    require((permuted is None) == (expected[1] is None), f"probs of {name}: None or not")
    if permuted is not None:
        same_bits(f"probs of {name}", permuted, expected[1])


@law(4, "combine_rows", is_core=True)
def combine_is_within_the_bound(subject: Subject, desc: CombineDesc) -> float:
    """Added in float32, in the order of the slots, and rounded once; values are copied."""
    worst = 0.0
    for size in subject.sizes(desc.op, *SIZES, *EMPTY):
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
        expected_values = torch.where(is_row, row_values[torch.where(is_row, index, 0).long()], 0)
        same_bits(f"values of {name}", values, expected_values) if len(x) else None
    else:
        require(values is None, f"values of {name}: expected None")
    return within(f"y of {name}", y, expected, bound)


@law(4, "combine_rows")
def combine_passes_on_nan_and_inf(subject: Subject, desc: CombineDesc) -> None:
    """NaN and inf reach their token alone, also with a weight of 0; of a row of nobody, none."""
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


@law(4, "combine_rows_backward", is_core=True)
def combine_backward_is_within_the_bound(subject: Subject, desc: CombineBackwardDesc) -> float:
    """Products and sums in float32, rounded once; zeros where no token goes."""
    worst = 0.0
    for size in subject.sizes(desc.op, *SIZES, *EMPTY):
        worst = max(worst, _combine_backward_within(subject, desc, size))
    return worst


def _combine_backward_within(subject: Subject, desc: CombineBackwardDesc, size: Size) -> float:
    call = arguments(subject, desc, Case(size=size))
    grad_x, grad_weights = call.run(subject)
    grad, x, index, sources, weights = on_cpu(call.arguments)
    wide = replace(desc, dtype=F64)
    operands = (grad.double(), x.double(), index, sources, weights.double())
    expected = subject.judged(wide, *operands)
    sizes = subject.judged(
        wide, *(operand.abs() if operand.is_floating_point() else operand for operand in operands)
    )
    same_form("grad_x", grad_x, x)
    same_form("grad_weights", grad_weights, weights)
    bounds = (
        2 * ROUND * sizes[0] + ulp(expected[0], desc.dtype) / 2 * (sizes[0] > 0),
        (x.shape[1] + 4) * ROUND * sizes[1] + ulp(expected[1], weights.dtype) * (sizes[1] > 0),
    )
    results = zip(("grad_x", "grad_weights"), (grad_x, grad_weights), expected, bounds, strict=True)
    return max(within(f"{name} {list(size)}", *rest) for name, *rest in results)
