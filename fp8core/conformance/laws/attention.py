"""Law 4 for attention: each mask, layout, bias and softmax against single sequences in float64, and
gradients over a part of the keys, as on one rank of several.

The float64 uses torch's triangles and autograd, and shares nothing with the judge.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from fp8core import formats
from fp8core.backend_api import (
    AttentionBackwardDesc,
    AttentionDesc,
    AttentionPartBackwardDesc,
    Numerics,
    Operand,
    OperandSpec,
)
from fp8core.conformance import (
    attention_calls,  # noqa: F401  it makes the calls of attention
    inputs,
)
from fp8core.conformance.calls import Case, OpCall, arguments
from fp8core.conformance.checks import law
from fp8core.conformance.compare import (
    F64,
    FUNCTION,
    ROUND,
    require,
    same_bits,
    same_form,
    ulp,
    within,
)
from fp8core.conformance.subject import Subject, on_cpu


def _is_part(desc: AttentionBackwardDesc) -> bool:
    return isinstance(desc, AttentionPartBackwardDesc) and not desc.low_precision


@law(4, "attention_backward", applies=_is_part)
def attention_backward_of_a_part_uses_the_given_result(
    subject: Subject, desc: AttentionPartBackwardDesc
) -> Iterator[float]:
    """The gradients of the keys at hand, where the result and its statistics are of more keys."""
    for case in cases():
        yield from _backward_within(subject, arguments(subject, desc, case))


class _Part(NamedTuple):
    """A sequence whose result is of more keys than it has: ``exact`` with the weights among all of
    them, ``total``, whose gradients are those of its tensors, and sizes of their errors: ``mean
    [heads, s_q, 1]``, and ``sink [heads]`` for the offset of the softmax."""

    exact: Sequence
    total: torch.Tensor
    mean: torch.Tensor
    sink: torch.Tensor


def _part_of(
    desc: AttentionDesc,
    exact: Sequence,
    grad: torch.Tensor,
    out: torch.Tensor,
    stats: torch.Tensor,
    keywords: dict[str, Any],
) -> _Part:
    """Return the part for ``grad`` and ``out [s_q, heads, d]``, and ``stats [heads, s_q]``, all in
    float64."""
    shift = stats.masked_fill(stats == -torch.inf, 0)[..., None]
    weights = torch.exp(exact.logits - shift)
    values = exact.leaves[2].repeat_interleave(desc.heads // desc.groups, 1)
    flow = torch.einsum("ihd,jhd->hij", grad, values)
    sums, mean = ((x * y).sum(-1).t() for x, y in ((grad, out), (grad.abs(), out.abs())))
    total, sink = (weights * (flow - sums[..., None])).sum(), torch.zeros(desc.heads, dtype=F64)
    if desc.softmax == "learnable":
        offset = torch.exp(keywords["softmax_offset"][:, None, None] - shift)[..., 0]
        offset = offset.masked_fill(stats == -torch.inf, 0)
        total = total - (offset * sums).sum()
        sink = (offset.detach() * mean).sum(1) * (desc.head_dim_v + 16) * 2 * ROUND
    return _Part(exact._replace(weights=weights), total, mean[..., None], sink)


def _of_groups(desc: AttentionDesc, x: torch.Tensor) -> torch.Tensor:
    """Return ``x [s_kv, heads, d]``, summed over the heads that share a group of keys."""
    return x.reshape(len(x), desc.groups, desc.heads // desc.groups, x.shape[-1]).sum(2)


def _grads_within(desc: AttentionDesc, results: Any, expected: Any, bound: Any) -> Iterator[float]:
    """Require the gradients of queries, keys and values to be within their bounds."""
    names = ("grad_q", "grad_k", "grad_v")
    for name, got, want, limit in zip(names, results, expected, bound, strict=False):
        same_form(name, got, torch.empty(want.shape, dtype=desc.dtype))
        yield within(name, got, want, limit + ulp(want, desc.dtype))


SIZES = ((21, 37), (37, 21), (64, 64), (1, 70), (130, 5))
EMPTY = ((0, 7), (7, 0), (0, 0), (7, 9, 0))


def _values(subject: Subject, spec: OperandSpec | None, x: torch.Tensor | Operand) -> torch.Tensor:
    """Return the values of an argument on the CPU; in float64 if it is quantized."""
    if isinstance(x, torch.Tensor):
        plain: torch.Tensor = on_cpu(x)
        return plain
    flat = x._replace(data=x.data.flatten(0, -2))
    return subject.values(spec, flat).reshape(x.data.shape)


def _rounding(spec: OperandSpec | None) -> float:
    """Return twice the largest relative error of a normal value that ``spec`` rounds: the spacing
    of the format above 1. The other half is for values that are subnormal in it."""
    if spec is None:
        return 0.0
    return min(value for value in formats.by_name(spec.format).values if value > 1) - 1


def _smallest(spec: OperandSpec) -> float:
    """Return the smallest positive value of the format of ``spec``."""
    return min(value for value in formats.by_name(spec.format).values if value > 0)


def cases() -> Iterator[Case]:
    """Yield the sizes that the laws are tried with."""
    for size in (*SIZES, *EMPTY):
        yield Case(size=size)


def _without_dropout(desc: AttentionDesc | AttentionBackwardDesc) -> bool:
    if isinstance(desc, AttentionPartBackwardDesc):  # it has a law of its own
        return False
    return not (desc if isinstance(desc, AttentionDesc) else desc.attention).dropout


def _with_dropout(desc: AttentionDesc | AttentionBackwardDesc) -> bool:
    """Whether weights are dropped, and seen unrounded."""
    forward = desc if isinstance(desc, AttentionDesc) else desc.attention
    return forward.dropout > 0 and not forward.low_precision


@law(4, "attention", applies=_without_dropout, is_core=True)
def attention_is_within_the_bound(subject: Subject, desc: AttentionDesc) -> Iterator[float]:
    """Result, statistics and largest logit of float64, zeros and -inf where nothing is seen.

    Also without queries, keys or sequences.
    """
    for case in cases():
        yield from _attention_within(subject, arguments(subject, desc, case))


def _attention_within(subject: Subject, call: OpCall) -> Iterator[float]:
    desc: Any = call.desc
    out, stats, max_logit = on_cpu(call.run(subject))
    q, k, v = (_values(subject, desc.qkv, x) for x in call.arguments)
    keywords = _wide(on_cpu(call.keywords))
    queries, keys = sides_of(call, desc, q, k)
    expected, bound = (torch.zeros(*q.shape[:-1], desc.head_dim_v, dtype=F64) for _ in range(2))
    logs, allowed = (
        torch.full(stats.shape, -torch.inf, dtype=F64),
        torch.zeros(stats.shape).double(),
    )
    largest, error = torch.full((desc.heads,), -torch.inf, dtype=F64), 0.0
    amax = 0.0
    eps = torch.finfo(desc.dtype).eps + _rounding(desc.s)
    for at in range(len(queries.lengths)):
        parts = queries.part(q, at), keys.part(k, at), keys.part(v, at)
        exact = sequence(desc, at, parts, keywords, subject.numerics(desc))
        weights, values = exact.weights.detach(), parts[2].double().abs()
        values = values.repeat_interleave(desc.heads // desc.groups, 1)
        off = exact.error + (weights * exact.error).sum(-1, keepdim=True) + 2 * eps
        queries.part(expected, at).copy_(exact.out.detach())
        queries.part(bound, at).copy_(torch.einsum("hij,jhd->ihd", 2 * off * weights, values))
        queries.statistics(logs, at).copy_(exact.log_sums.detach())
        if exact.error.numel():
            amax = max(amax, float(weights.max()))
            worst = exact.error.amax(-1) + 16 * ROUND * (1 + exact.log_sums.detach().abs())
            queries.statistics(allowed, at).copy_(worst.nan_to_num(0.0, 0.0))
            largest = torch.maximum(largest, exact.logits.detach().amax((1, 2)))
            error = max(error, float(exact.error.max()))
    if desc.out is None:
        same_form("out", out, torch.empty(expected.shape, dtype=desc.dtype))
        yield within("out", out, expected, bound + ulp(expected, desc.dtype))
    else:
        same_form("out", out, torch.empty(expected.shape, dtype=torch.uint8))
        scale_inv = on_cpu(call.arguments[2].scale_inv) / (1 - desc.dropout)
        out = _values(subject, desc.out, Operand(out, scale_inv))
        # Half a step of normal and of subnormal codes.
        rounded = _rounding(desc.out) / 2 * (expected.abs() + bound)
        subnormal = _smallest(desc.out) / 2 * scale_inv.double()
        yield within("out", out, expected, bound + rounded + subnormal)
    yield within("stats", stats, logs, allowed + 16 * ROUND)
    if desc.max_logit:
        spread = error + 4 * ROUND * largest.abs().nan_to_num(0.0, 0.0, 0.0)
        yield within("max_logit", max_logit, largest, spread)
    require((max_logit is not None) == desc.max_logit, "max_logit is returned if it is asked for")
    if desc.s is not None:
        yield _record_within("s_amax_out", call, amax)


def _record_within(name: str, call: OpCall, amax: float) -> float:
    """Require that the record of an amax, 0.5 before the call, holds ``amax`` if that is larger.

    A record is of values before their cast, so that only sums in other orders, and the result that
    forward rounded, part it from float64.
    """
    want = torch.tensor([max(0.5, amax)], dtype=F64)
    return within(name, call.keywords[name], want, want / 16)


def _wide(keywords: dict[str, Any]) -> dict[str, Any]:
    """Return the keywords with the differentiable ones as float64 leaves."""
    trained = {"bias", "softmax_offset"}
    return {
        name: value.double().requires_grad_() if name in trained else value
        for name, value in keywords.items()
    }


@law(4, "attention_backward", applies=_without_dropout, is_core=True)
def attention_backward_is_within_the_bound(
    subject: Subject, desc: AttentionBackwardDesc
) -> Iterator[float]:
    """The gradients of float64; zeros where nothing is seen, also of tensors without elements."""
    for case in cases():
        yield from _backward_within(subject, arguments(subject, desc, case))


def _backward_within(subject: Subject, call: OpCall) -> Iterator[float]:
    backward: Any = call.desc
    desc, is_part = backward.attention, isinstance(backward, AttentionPartBackwardDesc)
    results = on_cpu(call.run(subject))
    specs = (backward.grad_output, *(desc.qkv,) * 3)
    grad, q, k, v = (
        _values(subject, spec, x) for spec, x in zip(specs, call.arguments, strict=False)
    )
    keywords = _wide(on_cpu(call.keywords))
    queries, keys = sides_of(call, desc, q, k)
    expected, bound = ([torch.zeros(x.shape, dtype=F64) for x in (q, k, v)] for _ in range(2))
    bias_bound = amax = 0.0
    offset_bound = torch.full((desc.heads,), ROUND, dtype=F64)
    for at in range(len(queries.lengths)):
        parts = queries.part(q, at), keys.part(k, at), keys.part(v, at)
        exact = sequence(desc, at, parts, keywords)
        part = queries.part(grad, at).double()
        exact.logits.retain_grad()
        if is_part:
            out, stats = on_cpu(call.arguments[4:])
            of_result = queries.part(out, at).double(), queries.statistics(stats, at).double()
            exact, total, mean, sink = _part_of(desc, exact, part, *of_result, keywords)
            torch.autograd.backward(total)
            limits = _limits(backward, exact, part, mean)
            offset_bound += sink
        else:
            torch.autograd.backward(exact.out, part)
            limits = _limits(backward, exact, part)
            offset_bound += float(limits[3].sum((1, 2)).max()) if limits[3].numel() else 0.0
        for number, (side, leaf) in enumerate(
            zip((queries, keys, keys), exact.leaves, strict=True)
        ):
            side.part(expected[number], at).copy_(_grad(leaf))
            side.part(bound[number], at).copy_(limits[number])
        if exact.error.numel():
            amax = max(amax, float(_grad(exact.logits).abs().max()))
        bias_bound += float(limits[3].sum(0).max()) if limits[3].numel() else 0.0
    yield from _grads_within(desc, results, expected, bound)
    if backward.dp is not None and backward.dp.delayed:
        yield _record_within("dp_amax_out", call, amax)
    of_bias, of_offset = results[3:]
    require((of_bias is not None) == backward.bias_grad, "grad_bias is returned if it is asked for")
    if of_bias is not None:
        want = _grad(keywords["bias"])
        limit = torch.full_like(want, bias_bound) + ulp(want, of_bias.dtype)
        yield within("grad_bias", of_bias, want, limit)
    if desc.softmax == "learnable":
        want = _grad(keywords["softmax_offset"])
        same_form("grad_softmax_offset", of_offset, torch.empty(desc.heads))
        yield within("grad_softmax_offset", of_offset, want, offset_bound)


def _grad(leaf: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def _limits(
    backward: AttentionBackwardDesc,
    exact: Sequence,
    grad: torch.Tensor,
    mean: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """Return the errors that the gradients of one sequence may have, and those of its logits;
    ``mean [heads, s_q, 1]`` is the size of the sum over all keys, if these are a part.

    Weights and gradients of logits may be rounded to the dtype before they are multiplied.
    """
    desc = backward.attention
    repeats, eps = desc.heads // desc.groups, torch.finfo(desc.dtype).eps
    q, k, v = (leaf.detach().abs() for leaf in exact.leaves)
    keys, values = (x.repeat_interleave(repeats, 1) for x in (k, v))
    weights = exact.weights.detach()
    off = 2 * (exact.error + (weights * exact.error).sum(-1, keepdim=True)) + 4 * eps
    flow = torch.einsum("ihd,jhd->hij", grad.abs(), values)
    of_mean = 0.0 if mean is not None else (weights * off * flow).sum(-1, keepdim=True)
    mean = (weights * flow).sum(-1, keepdim=True) if mean is None else mean
    of_logits = 4 * weights * (off * (flow + mean) + of_mean)
    of_logits = of_logits + _rounding(backward.dp) * weights * (flow + mean)
    scaled = desc.scale * of_logits * (4 if desc.softcap else 1)
    rounded = off + (0.0 if backward.grad_output is None else _rounding(desc.s))
    of_v = torch.einsum("hij,ihd->jhd", rounded * weights, grad.abs())
    of_k = torch.einsum("hij,ihd->jhd", scaled, q)
    of_q = torch.einsum("hij,jhd->ihd", scaled, keys)

    return [of_q, _of_groups(desc, of_k), _of_groups(desc, of_v), of_logits]


@law(4, "attention", applies=_with_dropout)
def attention_drops_as_often_as_asked(subject: Subject, desc: AttentionDesc) -> None:
    """Each weight is dropped or scaled, at the rate of the descriptor; the seed decides which."""
    size = min(desc.head_dim_v, 64)
    call = _identity_call(subject, desc, size)
    dropped = on_cpu(call.run(subject)[0]).double()
    (q, k, _), keywords = on_cpu(call.arguments), _wide(on_cpu(call.keywords))
    eps, num_passed, total = torch.finfo(desc.dtype).eps, 0, 0
    queries, keys = sides_of(call, desc, q, k)
    for at in range(len(queries.lengths)):
        parts = queries.part(q, at), keys.part(k, at), keys.part(k, at)
        weights = sequence(desc, at, parts, keywords).weights.detach().transpose(0, 1)
        got = queries.part(dropped, at)[..., : weights.shape[-1]]
        scaled = weights / (1 - desc.dropout)
        is_passed = (got - scaled).abs() <= (8 * eps + 2.0**-12) * scaled
        require(bool((is_passed | (got == 0)).all()), "a weight is neither dropped nor scaled")
        is_large = weights > 2.0**-10
        num_passed += int((is_passed & is_large).sum())
        total += int(is_large.sum())
    spread = 6 * (total * desc.dropout * (1 - desc.dropout)) ** 0.5
    rate = total * (1 - desc.dropout)
    require(
        abs(num_passed - rate) <= spread,
        f"{num_passed} of {total} weights are kept, expected about {rate}",
    )
    again = call.again()
    same_bits("with the same seed", on_cpu(again.run(subject)[0]).double(), dropped)
    rng = call.keywords["rng"].to(subject.device)
    there = call._replace(keywords=call.keywords | {"rng": rng})
    same_bits("with the seed on the device", on_cpu(there.run(subject)[0]).double(), dropped)
    for change in ((1, 0), (0, 1)):
        changed = call._replace(
            keywords=call.keywords | {"rng": call.keywords["rng"] + torch.tensor(change)}
        )
        changed_out = on_cpu(changed.run(subject)[0]).double()
        require(
            not torch.equal(changed_out, dropped), f"rng {change} further drops the same weights"
        )


def _identity_call(subject: Subject, desc: AttentionDesc, size: int) -> OpCall:
    """Return a call whose values are the identity matrix, so that the result is the weights."""
    call = arguments(subject, desc, Case(size=(size, size)))
    q, k, v = call.arguments
    values = torch.zeros(v.shape, dtype=v.dtype)
    sides = sides_of(call, desc, q, k)
    for at, length in enumerate(sides[1].lengths):
        eye = torch.eye(length, desc.head_dim_v, dtype=v.dtype)
        sides[1].part(values, at).copy_(eye[:, None].expand(-1, desc.groups, -1))
    return call._replace(arguments=(q, k, subject.here(values)))


@law(4, "attention_backward", applies=_with_dropout)
def attention_backward_drops_what_forward_dropped(
    subject: Subject, desc: AttentionBackwardDesc
) -> float:
    """The gradient of the values is that of the weights that forward kept."""
    forward = desc.attention
    if subject.refuses(forward) is not None:
        return 0.0
    size = min(forward.head_dim_v, 64)
    call = _identity_call(subject, forward, size)
    out, stats, _ = call.run(subject)
    grad = inputs.normal(tuple(out.shape), forward.dtype, 7)
    positional = (subject.here(grad), *call.arguments, out, stats)
    grad_v = on_cpu(subject.run(desc, *positional, **call.keywords)[2])
    (q, k, v), weights = on_cpu(call.arguments), on_cpu(out).double()
    queries, keys = sides_of(call, forward, q, k)
    expected, bound = (torch.zeros(v.shape, dtype=F64) for _ in range(2))
    eps = torch.finfo(forward.dtype).eps
    for at, length in enumerate(keys.lengths):
        passed = queries.part(weights, at)[..., :length]
        part = queries.part(grad, at).double()
        for target, addend in ((expected, part), (bound, part.abs() * (4 * eps + 2.0**-10))):
            sums = torch.einsum("ihj,ihd->jhd", passed, addend)
            keys.part(target, at).copy_(_of_groups(forward, sums))
    return within("grad_v", grad_v, expected, bound + ulp(expected, forward.dtype))


DEFAULT = Numerics()


class Side(NamedTuple):
    """Where one side's sequences are: ``starts`` and ``lengths``; ``starts`` only in thd."""

    layout: str
    starts: list[int]
    lengths: list[int]

    def part(self, x: torch.Tensor, at: int) -> torch.Tensor:
        """Return sequence ``at`` of ``x``, a view ``[length, heads, d]``."""
        length = self.lengths[at]
        if self.layout == "thd":
            return x[self.starts[at] : self.starts[at] + length]
        return x[:length, at] if self.layout == "sbhd" else x[at, :length]

    def statistics(self, stats: torch.Tensor, at: int) -> torch.Tensor:
        """Return the statistics of sequence ``at``, a view ``[heads, length]``."""
        length = self.lengths[at]
        if self.layout == "thd":
            return stats[self.starts[at] : self.starts[at] + length].t()
        return stats[at, :, :length]


def sides_of(call: OpCall, desc: AttentionDesc, x: torch.Tensor, y: torch.Tensor) -> list[Side]:
    """Return the side of the queries ``x`` and that of the keys ``y``."""
    sides = []
    for name, tensor in (("q", x), ("kv", y)):
        if not desc.padding:
            length, batch = tensor.shape[:2] if desc.layout == "sbhd" else tensor.shape[:2][::-1]
            sides.append(Side(desc.layout, [], [length] * batch))
            continue
        offsets = on_cpu(call.keywords[f"cu_seqlens_{name}"])
        starts = on_cpu(call.keywords.get(f"cu_seqlens_{name}_padded", offsets))
        sides.append(Side(desc.layout, starts.tolist(), offsets.diff().tolist()))
    return sides


class Sequence(NamedTuple):
    """A sequence in float64: its inputs as leaves, and ``logits`` with ``weights``,
    ``[heads, s_q, s_kv]``; ``log_sums [heads, s_q]``, ``out [s_q, heads, d]``."""

    leaves: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    logits: torch.Tensor
    weights: torch.Tensor
    log_sums: torch.Tensor
    out: torch.Tensor
    error: torch.Tensor


def _seen(desc: AttentionDesc, num_q: int, num_kv: int) -> torch.Tensor:
    """Return bool ``[s_q, s_kv]``: the keys that the window leaves, as an intersection of a lower
    and an upper triangle."""
    shift = num_kv - num_q if desc.bottom_right else 0
    seen = torch.ones(num_q, num_kv, dtype=torch.bool)
    left, right = desc.window
    if right >= 0:
        seen = seen.tril(shift + right)
    return seen.triu(shift - left) if left >= 0 else seen


def sequence(
    desc: AttentionDesc,
    at: int,
    parts: tuple[torch.Tensor, ...],
    keywords: dict[str, Any],
    numerics: Numerics = DEFAULT,
) -> Sequence:
    """Compute sequence ``at`` from its queries, keys and values ``[length, heads, d]``.

    ``numerics`` bounds the sums of the products of queries and keys.
    """
    q, k, v = (part.double().detach().requires_grad_() for part in parts)
    repeats = desc.heads // desc.groups
    keys, values = (torch.repeat_interleave(x, repeats, 1) for x in (k, v))
    num_q, num_kv = len(q), len(k)
    products = torch.einsum("ihd,jhd->hij", q, keys)
    sizes = torch.einsum("ihd,jhd->hij", q.detach().abs(), keys.detach().abs())
    bias = keywords.get("bias")
    if bias is not None:
        bias = bias.expand(-1, desc.heads, -1, -1)[min(at, len(bias) - 1), :, :num_q, :num_kv]
        sizes = sizes + bias.detach().abs() * (1 if desc.bias == "pre_scale" else 1 / desc.scale)
        products = products + bias if desc.bias == "pre_scale" else products
    logits = desc.scale * products
    if desc.softcap:
        logits = desc.softcap * torch.tanh(logits / desc.softcap)
    if bias is not None and desc.bias == "post_scale":
        logits = logits + bias
    if desc.bias == "alibi":
        shift = num_kv - num_q if desc.bottom_right else 0
        far = (torch.arange(num_q)[:, None] + shift - torch.arange(num_kv)).abs().double()
        logits = logits - keywords["alibi_slopes"].double()[:, None, None] * far
    seen = _seen(desc, num_q, num_kv)
    if desc.arbitrary:
        seen = seen & ~keywords["mask"][at, :, :num_q, :num_kv]
    logits = logits.masked_fill(~seen, -torch.inf)
    sink = _sink(desc, keywords)
    every = logits if sink is None else torch.cat((logits, sink.expand(-1, num_q, 1)), -1)
    is_open = (every > -torch.inf).any(-1, keepdim=True)
    weights = every.masked_fill(~is_open, 0).softmax(-1).masked_fill(~is_open, 0)[..., :num_kv]
    out = torch.einsum("hij,jhd->ihd", weights, values)
    declared = numerics.sum_error - DEFAULT.sum_error
    declared += desc.head_dim * (numerics.sum_error_per_term - DEFAULT.sum_error_per_term)
    error = ((desc.head_dim + 16) * ROUND + declared) * desc.scale * sizes + FUNCTION
    return Sequence((q, k, v), logits, weights, every.logsumexp(-1), out, error)


def _sink(desc: AttentionDesc, keywords: dict[str, Any]) -> torch.Tensor | None:
    if desc.softmax == "vanilla":
        return None
    if desc.softmax == "off-by-one":
        return torch.zeros(desc.heads, 1, 1, dtype=F64)
    offset: torch.Tensor = keywords["softmax_offset"]
    return offset[:, None, None]
