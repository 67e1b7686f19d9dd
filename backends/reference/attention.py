"""Attention and its gradients, written out in float32 (float64 for float64).

Inside, every layout is ``[b, heads, length, d]``: ``attention_sequences`` converts, and says which
keys a query may see. All weights of a call are in memory at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from fp8core.backend_api import (
    AttentionBackwardDesc,
    AttentionDesc,
    AttentionPartBackwardDesc,
    DequantizeDesc,
    Operand,
    OperandSpec,
    QuantizeDesc,
)
from fp8core_backends.reference.attention_sequences import (
    Sequences,
    contradiction,
    distance,
    excluded,
    sequences_of,
)
from fp8core_backends.reference.operations import computes, float_problem, spec_problem
from fp8core_backends.reference.products import product
from fp8core_backends.reference.quantize import dequantize, quantize
from fp8core_backends.reference.rounding import seed_of


class _Logits(NamedTuple):
    """``values [b, heads, s_q, s_kv]``, -inf where a mask excludes the key; ``capped`` are those
    that the cap returned, None without one."""

    values: torch.Tensor
    capped: torch.Tensor | None


class _Softmax(NamedTuple):
    """``weights [b, heads, s_q, s_kv]`` and ``stats [b, heads, s_q]``."""

    weights: torch.Tensor
    stats: torch.Tensor


def _problem(desc: AttentionDesc) -> str | None:
    wide = () if desc.low_precision else (torch.float64,)
    specs = map(spec_problem, (desc.qkv, desc.s, desc.out))
    return (
        float_problem(desc.dtype, *wide) or contradiction(desc) or next(filter(None, specs), None)
    )


def _backward_problem(desc: AttentionBackwardDesc) -> str | None:
    gradients = [spec is not None for spec in (desc.grad_output, desc.dp)]
    if len(set(gradients)) > 1 or (any(gradients) and not desc.low_precision):
        return "both the gradient and those of logits are quantized, with q, k and v, or neither"
    specs = map(spec_problem, (desc.grad_output, desc.dp))
    return _problem(desc.attention) or next(filter(None, specs), None)


@computes(AttentionDesc, refuses=_problem)
def attention(
    desc: AttentionDesc,
    q: torch.Tensor | Operand,
    k: torch.Tensor | Operand,
    v: torch.Tensor | Operand,
    *,
    bias: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    softmax_offset: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_kv: torch.Tensor | None = None,
    cu_seqlens_q_padded: torch.Tensor | None = None,
    cu_seqlens_kv_padded: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
    rng: torch.Tensor | None = None,
    s_scale: torch.Tensor | None = None,
    s_amax_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return ``(out, stats, max_logit or None)``; see the backend API."""
    scale_inv = v.scale_inv if isinstance(v, Operand) else None
    sequences, queries, keys, values = _operands(
        desc,
        (q, k, v),
        (cu_seqlens_q, cu_seqlens_kv),
        (cu_seqlens_q_padded, cu_seqlens_kv_padded),
        (max_seqlen_q, max_seqlen_kv),
    )
    terms = {"bias": bias, "alibi_slopes": alibi_slopes, "mask": mask}
    logits = _logits(desc, sequences, queries, keys, **terms).values
    softmax = _softmax(logits, _sink(desc, softmax_offset, logits))
    stats = sequences.without_padding(softmax.stats)
    weights = _drop(desc, softmax.weights, rng)
    if desc.s is not None:
        weights = _rounded(desc.s, weights, s_scale, s_amax_out)
    products = product(weights, values)
    if desc.out is None:
        products = products.to(desc.dtype)
    out = sequences.queries.in_layout(products, desc.layout)
    if desc.out is not None:
        assert scale_inv is not None
        out = _codes(desc.out, out, (1 - desc.dropout) / scale_inv.reshape(1), None).data
    max_logit = _largest(logits) if desc.max_logit else None
    return out, sequences.statistics(stats), max_logit


@computes(AttentionBackwardDesc, AttentionPartBackwardDesc, refuses=_backward_problem)
def attention_backward(
    desc: AttentionBackwardDesc,
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    stats: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    softmax_offset: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_kv: torch.Tensor | None = None,
    cu_seqlens_q_padded: torch.Tensor | None = None,
    cu_seqlens_kv_padded: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
    rng: torch.Tensor | None = None,
    s_scale: torch.Tensor | None = None,
    dp_scale: torch.Tensor | None = None,
    dp_amax_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return ``(grad_q, grad_k, grad_v, grad_bias or None, grad_softmax_offset or None)``; see the
    backend API.

    With weights ``p``, values ``v`` and ``g = grad_out @ v^T`` through the dropout, the gradient of
    a logit is ``p * (g - sum over the row of p * g)``; of a part of the keys, that sum over all
    keys is ``grad_out . out``.
    """
    forward = desc.attention
    grad_out = _values(desc.grad_output, grad_out)
    sequences, queries, keys, values = _operands(
        forward,
        (q, k, v),
        (cu_seqlens_q, cu_seqlens_kv),
        (cu_seqlens_q_padded, cu_seqlens_kv_padded),
        (max_seqlen_q, max_seqlen_kv),
    )
    grad = sequences.queries.dense(grad_out, forward.layout).to(values.dtype)
    terms = {"bias": bias, "alibi_slopes": alibi_slopes, "mask": mask}
    logits = _logits(forward, sequences, queries, keys, **terms)
    log_sums = sequences.dense_statistics(stats)
    weights = torch.exp(logits.values - _finite(log_sums)[..., None])
    dropped = _drop(forward, weights, rng)
    if desc.grad_output is not None:
        assert forward.s is not None
        dropped = _rounded(forward.s, dropped, s_scale, None)
    grad_values = product(dropped.mT, grad)
    grad_weights = _drop(forward, product(grad, values.mT), rng)
    if isinstance(desc, AttentionPartBackwardDesc):
        whole = sequences.queries.dense(out, forward.layout).to(values.dtype)
        row_sums = (grad * whole).sum(-1)
    else:
        row_sums = (weights * grad_weights).sum(-1)
    grad_logits = weights * (grad_weights - row_sums[..., None])
    if desc.dp is not None:
        grad_logits = _rounded(desc.dp, grad_logits, dp_scale, dp_amax_out)
    grad_products = grad_logits
    if logits.capped is not None:
        grad_products = grad_logits * (1 - (logits.capped / forward.softcap).square())
    grad_products = grad_products * forward.scale

    def shared(x: torch.Tensor) -> torch.Tensor:
        """Return the gradient of a group of keys or values: the sum over its heads."""
        size = (len(x), forward.groups, forward.heads // forward.groups, *x.shape[2:])
        groups = x.reshape(size).sum(2).to(forward.dtype)
        return sequences.keys.in_layout(groups, forward.layout)

    grad_q = sequences.queries.in_layout(
        product(grad_products, keys).to(forward.dtype), forward.layout
    )
    grad_bias = None
    if desc.bias_grad:
        assert bias is not None
        of_bias = grad_logits if forward.bias == "post_scale" else grad_products
        grad_bias = of_bias.sum_to_size(bias.shape).to(bias.dtype)
    return (
        grad_q,
        shared(product(grad_products.mT, queries)),
        shared(grad_values),
        grad_bias,
        _grad_of_sink(forward, softmax_offset, log_sums, row_sums),
    )


def _grad_of_sink(
    desc: AttentionDesc,
    softmax_offset: torch.Tensor | None,
    log_sums: torch.Tensor,
    row_sums: torch.Tensor,
) -> torch.Tensor | None:
    """Return the gradient of a learned sink ``[heads]``; None for another softmax."""
    if desc.softmax != "learnable":
        return None
    assert softmax_offset is not None
    sink = torch.exp(softmax_offset.to(log_sums.dtype)[:, None] - log_sums)
    return (-sink * row_sums).masked_fill(log_sums == -torch.inf, 0).sum((0, 2))


def _values(spec: OperandSpec | None, x: torch.Tensor | Operand) -> torch.Tensor:
    """Return the values of a tensor that may be quantized, in its shape."""
    if isinstance(x, torch.Tensor):
        return x
    assert spec is not None
    flat = x._replace(data=x.data.flatten(0, -2))
    return dequantize(DequantizeDesc(spec), flat).view(x.data.shape)


def _rounded(
    spec: OperandSpec,
    x: torch.Tensor,
    scale: torch.Tensor | None,
    amax_out: torch.Tensor | None,
) -> torch.Tensor:
    """Return ``x`` quantized, recording its amax, and dequantized."""
    operand = _codes(spec, x, scale, amax_out)
    flat = operand._replace(data=operand.data.flatten(0, -2))
    return dequantize(DequantizeDesc(spec), flat).view(x.shape)


def _codes(
    spec: OperandSpec,
    x: torch.Tensor,
    scale: torch.Tensor | None,
    amax_out: torch.Tensor | None,
) -> Operand:
    """Return ``x`` quantized, its codes in its shape, recording its amax."""
    desc = QuantizeDesc(torch.float32, spec, None)
    state = {"scale": scale, "amax_out": amax_out} if spec.delayed else {}
    operand = quantize(desc, x.flatten(0, -2), **state).rowwise
    assert operand is not None
    return operand._replace(data=operand.data.view(x.shape))


def _operands(
    desc: AttentionDesc,
    tensors: Iterable[torch.Tensor | Operand],
    *lengths: tuple[Any, Any],
) -> tuple[Sequences, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the sequences of the ``lengths`` of a call, and q, k and v in the dtype of the
    arithmetic, ``[b, heads, length, d]``: each head has the keys and values of its group."""
    q, k, v = (_values(desc.qkv, x) for x in tensors)
    sequences = sequences_of(desc, (q, k), *lengths)
    wide = torch.float64 if desc.dtype == torch.float64 else torch.float32
    queries = sequences.queries.dense(q, desc.layout).to(wide)
    keys, values = (
        sequences.keys.dense(x, desc.layout)
        .to(wide)
        .repeat_interleave(desc.heads // desc.groups, 1)
        for x in (k, v)
    )
    return sequences, queries, keys, values


def _logits(
    desc: AttentionDesc,
    sequences: Sequences,
    queries: torch.Tensor,
    keys: torch.Tensor,
    *,
    bias: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    mask: torch.Tensor | None,
) -> _Logits:
    logits = product(queries, keys.mT)
    if desc.bias == "pre_scale":
        assert bias is not None
        logits = logits + bias.to(logits.dtype)
    logits = logits * desc.scale
    capped = None
    if desc.softcap:
        logits = capped = desc.softcap * torch.tanh(logits / desc.softcap)
    if desc.bias == "post_scale":
        assert bias is not None
        logits = logits + bias.to(logits.dtype)
    if desc.bias == "alibi":
        assert alibi_slopes is not None
        slopes = alibi_slopes.to(logits.dtype).view(-1, desc.heads, 1, 1)
        logits = logits - slopes * distance(desc, sequences).abs()
    masked = excluded(desc, sequences, mask)
    return _Logits(logits if masked is None else logits.masked_fill(masked, -torch.inf), capped)


def _sink(
    desc: AttentionDesc, softmax_offset: torch.Tensor | None, logits: torch.Tensor
) -> torch.Tensor | None:
    """Return the logit that only adds to the sum, ``[heads, 1]``; None in a vanilla softmax."""
    if desc.softmax == "learnable":
        assert softmax_offset is not None
        return softmax_offset.to(logits.dtype)[:, None]
    return logits.new_zeros(desc.heads, 1) if desc.softmax == "off-by-one" else None


def _softmax(logits: torch.Tensor, sink: torch.Tensor | None) -> _Softmax:
    """Return the softmax of each row; zeros, and -inf as statistics, for a row of -inf alone."""
    shape = logits.shape[:-1]
    largest = logits.amax(-1) if logits.shape[-1] else logits.new_full(shape, -torch.inf)
    if sink is not None:
        largest = torch.maximum(largest, sink)
    shift = _finite(largest.detach())
    exponentials = torch.exp(logits - shift[..., None])
    total = exponentials.sum(-1)
    if sink is not None:
        total = total + torch.exp(sink - shift)
    is_empty = total == 0
    divisor = total.masked_fill(is_empty, 1)  # a gradient of log(0) would be NaN
    stats = (shift + torch.log(divisor)).masked_fill(is_empty, -torch.inf)
    return _Softmax(exponentials / divisor[..., None], stats)


def _finite(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` with 0 for -inf, so that -inf less it stays -inf."""
    return x.masked_fill(x == -torch.inf, 0)


def _drop(desc: AttentionDesc, x: torch.Tensor, rng: torch.Tensor | None) -> torch.Tensor:
    """Zero the elements that the seed and the offset choose and scale the others."""
    if not desc.dropout:
        return x
    drawn = seed_of(x, rng)
    if drawn is None:
        return x * 1
    seed, offset = drawn
    generator = torch.Generator(device=x.device)
    generator.manual_seed((seed * 0x9E3779B97F4A7C15 + offset) & (2**63 - 1))
    noise = torch.rand(x.shape, generator=generator, device=x.device, dtype=torch.float32)
    return x * ((noise >= desc.dropout).to(x.dtype) / (1 - desc.dropout))


def _largest(logits: torch.Tensor) -> torch.Tensor:
    """Return the largest logit of each head, -inf where there is none."""
    by_head = logits.detach().transpose(0, 1).flatten(1)
    return by_head.amax(1) if by_head.shape[1] else by_head.new_full(by_head.shape[:1], -torch.inf)
