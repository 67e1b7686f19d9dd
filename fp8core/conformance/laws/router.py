"""Law 4 for routers, which choose experts as the reference does, with scores within the bound, and
for the cross entropy of logits and its gradient."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from fp8core.backend_api import (
    CrossEntropyBackwardDesc,
    CrossEntropyDesc,
    RouterBackwardDesc,
    RouterDesc,
)
from fp8core.conformance import inputs
from fp8core.conformance.calls import Case, arguments
from fp8core.conformance.checks import law
from fp8core.conformance.compare import require, same_bits, same_form, ulp, within
from fp8core.conformance.laws.pointwise import FUNCTION, ROUND
from fp8core.conformance.subject import Subject, on_cpu
from fp8core.conformance.training_calls import sums_of

F64 = torch.float64
SIZES = ((9, 70), (64, 64), (1, 1), (4100, 3), (5, 4100), (3, 33000), (0, 9))


@law(4, "cross_entropy", is_core=True)
def cross_entropy_is_within_the_bound(subject: Subject, desc: CrossEntropyDesc) -> float:
    """Computed in float32, of any number of classes, ignored and unknown targets among them."""
    worst = 0.0
    for size in subject.sizes(desc.op, *SIZES):
        call = arguments(subject, desc, Case(size=size))
        worst = max(worst, _cross_entropy_within(subject, desc, *on_cpu(call.arguments)))
    x = inputs.moderate(9, 70, desc.dtype)
    far = torch.tensor([0, 69, 70, -1, -100, 2**62, -(2**62), 2**31, 5])
    worst = max(worst, _cross_entropy_within(subject, desc, x, far))
    large = (x * 1e3).clamp(-6e4, 6e4)
    for logits in (large, _far_from_zero(desc.dtype)):
        worst = max(worst, _cross_entropy_within(subject, desc, logits, torch.arange(9)))
    return worst


def _far_from_zero(dtype: torch.dtype) -> torch.Tensor:
    """Return logits ``[9, 70]`` whose differences are small beside them."""
    offset = min(1e7, torch.finfo(dtype).max / 2)
    return (inputs.moderate(9, 70, torch.float64) + offset).to(dtype)


def _cross_entropy_within(
    subject: Subject, desc: CrossEntropyDesc, x: torch.Tensor, target: torch.Tensor
) -> float:
    results = subject.run(desc, subject.here(x), subject.here(target))
    expected = subject.judged(replace(desc, dtype=F64), x.double(), target)
    wide = x.double()
    spread = wide.amax(1) - wide.amin(1) if x.shape[1] else wide.new_zeros(len(x))
    steps = torch.full((len(x),), (x.shape[1] + 64) * ROUND, dtype=F64)
    bounds = {"loss": steps * (1 + 2 * spread), "largest": 0 * steps, "log_sum": steps}
    worst = 0.0
    for (name, bound), result, exact in zip(bounds.items(), results, expected, strict=True):
        same_form(name, result, torch.empty(len(x)))
        worst = max(worst, within(f"{name} {list(x.shape)}", result, exact, bound))
    return worst


@law(4, "cross_entropy")
def cross_entropy_takes_infinite_logits(subject: Subject, desc: CrossEntropyDesc) -> None:
    """-inf is a class of probability 0; NaN and inf give no finite loss, in their row alone."""
    x = inputs.moderate(6, 1030, desc.dtype).clone()
    x[1, ::2] = -torch.inf
    x[2, 5], x[3, 700] = torch.nan, torch.inf
    x[4] = -torch.inf
    target = torch.tensor([3, 3, 3, 3, 3, 3])
    loss, _, log_sum = on_cpu(subject.run(desc, subject.here(x), subject.here(target)))
    wide = subject.judged(replace(desc, dtype=F64), x.double(), target)
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
) -> float:
    """Computed in float32, rounded once; a gradient of stride 0 is read right."""
    worst = 0.0
    for size in subject.sizes(desc.op, *SIZES):
        call = arguments(subject, desc, Case(size=size))
        worst = max(worst, _cross_entropy_backward_within(subject, desc, on_cpu(call.arguments)))
    far = torch.tensor([0, 69, 70, -1, -100, 2**62, -(2**62), 2**31, 5])
    grad = torch.tensor(0.125).expand(9)
    for x in (inputs.moderate(9, 70, desc.dtype), _far_from_zero(desc.dtype)):
        largest, log_sum = sums_of(x.float())
        operands = (grad, x, far, largest, log_sum)
        worst = max(worst, _cross_entropy_backward_within(subject, desc, operands))
    return worst


def _cross_entropy_backward_within(
    subject: Subject, desc: CrossEntropyBackwardDesc, operands: tuple[torch.Tensor, ...]
) -> float:
    grad, x, target, largest, log_sum = operands
    moved = grad.to(subject.device)  # its stride is kept
    result = subject.run(desc, moved, *subject.here((x, target, largest, log_sum)))
    wide = replace(desc, dtype=F64)
    sums = largest.double(), log_sum.double()
    expected = subject.judged(wide, grad.double(), x.double(), target, *sums)
    same_form("grad_x", result, x)
    below, log_sums = sums[0][:, None] - x.double(), sums[1][:, None]
    near = (below + log_sums.abs() + 4) * (-below - log_sums).exp() + 1
    bound = FUNCTION * grad.double().abs()[:, None] * near + ulp(expected, desc.dtype)
    return within(f"grad_x {list(x.shape)}", result, expected, bound)


EXPERTS = (6, 12, 30, 33, 129, 516)
"""Numbers of experts, which the groups of the catalogue divide where they are a multiple of 3."""


def _experts(desc: RouterDesc | RouterBackwardDesc) -> list[int]:
    return [count for count in EXPERTS if not desc.num_groups or count % desc.num_groups == 0]


def _apart(desc: RouterDesc, tokens: int, experts: int, seed: int) -> torch.Tensor:
    """Return logits that are all different in a row, in steps that the dtype tells apart."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(tokens, experts, generator=generator).argsort(1)
    return (order / experts * 8 - 4).to(desc.dtype)


@law(4, "router", is_core=True)
def router_chooses_as_the_reference(subject: Subject, desc: RouterDesc) -> float:
    """The experts with the highest scores, of any number, and their probabilities."""
    worst = 0.0
    for tokens, experts in ((9, count) for count in _experts(desc)):
        # 16 bits do not tell this many logits apart: equal logits are in the order of
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


@law(4, "router_backward", is_core=True)
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
    if desc.of_all or desc.topk > 1:
        total = part.sum(1, keepdim=True) + 1e-20
        grad = (grad - sign * (grad * part / total).sum(1, keepdim=True)) / total
        grad = grad if desc.of_all else torch.where(chosen, grad, 0)
    if desc.score_function == "sigmoid":
        return grad * scores * (1 - sign * scores)
    return grad * -torch.expm1(-scores.square()) / (2 * scores)
