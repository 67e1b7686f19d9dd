"""Law 4 for the gradients of attention over a part of the keys, as on one rank of several."""

from __future__ import annotations

import torch

from fp8core.backend_api import AttentionBackwardDesc, AttentionPartBackwardDesc
from fp8core.conformance.calls import arguments
from fp8core.conformance.checks import law
from fp8core.conformance.compare import same_form, ulp, within
from fp8core.conformance.laws.attention import cases
from fp8core.conformance.sequences import F64, ROUND, Sequence, sequence, sides_of
from fp8core.conformance.subject import Subject, on_cpu


def _is_part(desc: AttentionBackwardDesc) -> bool:
    return isinstance(desc, AttentionPartBackwardDesc) and not desc.low_precision


@law(4, "attention_backward", applies=_is_part)
def attention_backward_of_a_part_uses_the_given_result(
    subject: Subject, desc: AttentionPartBackwardDesc
) -> float:
    """The gradients of the keys at hand, where the result and its statistics are of more keys."""
    forward, shares = desc.attention, []
    for case in cases():
        call = arguments(subject, desc, case)
        results = on_cpu(call.run(subject))
        grad, q, k, v, out, stats = on_cpu(call.arguments)
        keywords = on_cpu(call.keywords)
        queries, keys = sides_of(call, forward, q, k)
        expected, bound = ([torch.zeros(x.shape, dtype=F64) for x in (q, k, v)] for _ in range(2))
        offset, offset_bound = (torch.zeros(forward.heads, dtype=F64) for _ in range(2))
        for at in range(len(queries.lengths)):
            tensors = queries.part(q, at), keys.part(k, at), keys.part(v, at)
            exact = sequence(forward, at, tensors, keywords)
            rows = _Rows(
                queries.part(grad, at).double(),
                queries.part(out, at).double(),
                queries.statistics(stats, at).double(),
            )
            results_of, limits = _gradients(desc, exact, rows)
            for number, side in enumerate((queries, keys, keys)):
                side.part(expected[number], at).copy_(results_of[number])
                side.part(bound[number], at).copy_(limits[number])
            if forward.softmax == "learnable":
                sums = -rows.products.t()
                sink = torch.exp(keywords["softmax_offset"].double()[:, None] - rows.stats)
                sink = sink.masked_fill(rows.stats == -torch.inf, 0)
                offset += (sink * sums).sum(1)
                sizes = (rows.grad.abs() * rows.out.abs()).sum(-1).t()
                offset_bound += (sink * sizes).sum(1) * (forward.head_dim_v + 16) * 2 * ROUND
        names = ("grad_q", "grad_k", "grad_v")
        for name, got, want, limit in zip(names, results, expected, bound, strict=False):
            same_form(name, got, torch.empty(want.shape, dtype=forward.dtype))
            shares.append(within(name, got, want, limit + ulp(want, forward.dtype)))
        if forward.softmax == "learnable":
            shares.append(within("grad_softmax_offset", results[4], offset, offset_bound + ROUND))
    return max(shares)


class _Rows:
    """The arguments of a sequence's queries in float64: ``grad`` and ``out [s_q, heads, d]``, and
    ``stats [heads, s_q]``."""

    def __init__(self, grad: torch.Tensor, out: torch.Tensor, stats: torch.Tensor) -> None:
        self.grad, self.out, self.stats = grad, out, stats
        self.products = (grad * out).sum(-1)


def _gradients(
    desc: AttentionPartBackwardDesc, exact: Sequence, rows: _Rows
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the gradients of a sequence's q, k and v, and how far a backend's may be from them."""
    forward, eps = desc.attention, torch.finfo(desc.attention.dtype).eps
    repeats = forward.heads // forward.groups
    q, k, v = (leaf.detach() for leaf in exact.leaves)
    keys, values = (x.repeat_interleave(repeats, 1) for x in (k, v))
    shift = rows.stats.masked_fill(rows.stats == -torch.inf, 0)[..., None]
    weights = torch.exp(exact.logits.detach() - shift)
    flow = torch.einsum("ihd,jhd->hij", rows.grad, values)
    size = torch.einsum("ihd,jhd->hij", rows.grad.abs(), values.abs())
    mean = (rows.grad.abs() * rows.out.abs()).sum(-1).t()[..., None]
    grads = forward.scale * weights * (flow - rows.products.t()[..., None])
    off = 2 * exact.error + 4 * eps  # of the weights, which may be rounded to the dtype
    errors = 4 * forward.scale * weights * off * (size + mean)

    def shared(x: torch.Tensor) -> torch.Tensor:
        return x.reshape(len(x), forward.groups, repeats, x.shape[-1]).sum(2)

    def products(
        of_logits: torch.Tensor, q: torch.Tensor, keys: torch.Tensor
    ) -> list[torch.Tensor]:
        of_keys = torch.einsum("hij,ihd->jhd", of_logits, q)
        return [torch.einsum("hij,jhd->ihd", of_logits, keys), shared(of_keys)]

    of_values = shared(torch.einsum("hij,ihd->jhd", weights, rows.grad))
    of_values_error = shared(torch.einsum("hij,ihd->jhd", off * weights, rows.grad.abs()))
    return (
        [*products(grads, q, keys), of_values],
        [*products(errors, q.abs(), keys.abs()), of_values_error],
    )
