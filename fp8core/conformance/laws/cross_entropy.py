"""Law 4 for the cross entropy of logits and its gradient: within the bound of float32."""

from __future__ import annotations

from dataclasses import replace

import torch

from fp8core.backend_api import CrossEntropyBackwardDesc, CrossEntropyDesc
from fp8core.conformance import inputs
from fp8core.conformance.calls import Case, arguments
from fp8core.conformance.checks import law
from fp8core.conformance.compare import require, same_form, ulp, within
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
