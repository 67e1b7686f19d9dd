"""Calls of attention: sequences of several lengths, masks, biases, keys of other ranks."""

from __future__ import annotations

from typing import Any

import torch

from fp8core.backend_api import (
    AttentionBackwardDesc,
    AttentionDesc,
    AttentionPartBackwardDesc,
    Operand,
    OperandSpec,
)
from fp8core.conformance import inputs
from fp8core.conformance.calls import Case, OpCall, example
from fp8core.conformance.operands import SEED, operand
from fp8core.conformance.subject import Subject, on_cpu

_SIZE = (21, 37)
_BATCH = 3


def attention_call(
    desc: AttentionDesc, seed: int, size: tuple[int, ...]
) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
    """Return the arguments and the keywords of a call on the CPU.

    ``size`` is ``(s_q, s_kv)``, or also the batch, which is 3; an empty one stands for a default.
    With padding, the second sequence has no key and the third no query.
    """
    sequence_q, sequence_kv, batch = (*(size or _SIZE), _BATCH)[:3]
    lengths = [
        _lengths(length, batch, empty) for length, empty in ((sequence_q, 2), (sequence_kv, 1))
    ]
    keywords: dict[str, Any] = _lengths_of(desc, lengths) if desc.padding else {}
    tensors = []
    heads = (
        (desc.heads, desc.head_dim),
        (desc.groups, desc.head_dim),
        (desc.groups, desc.head_dim_v),
    )
    sides = ((0, sequence_q), (1, sequence_kv), (1, sequence_kv))
    for at, ((side, length), (count, dim)) in enumerate(zip(sides, heads, strict=True)):
        if desc.layout == "thd":
            tokens: tuple[int, ...] = (sum(lengths[side]) + 2 * batch,)
        else:
            tokens = (length, batch) if desc.layout == "sbhd" else (batch, length)
        tensors.append(inputs.normal((*tokens, count, dim), desc.dtype, 10 * seed + at))
    if desc.layout == "thd":
        sequence_q, sequence_kv = (max(sizes, default=0) for sizes in lengths)
    full = (batch, desc.heads, sequence_q, sequence_kv)
    return tuple(tensors), keywords | _options(desc, full, seed)


def _lengths(length: int, batch: int, empty: int) -> list[int]:
    """Return the lengths of a batch of sequences, of which number ``empty`` is 0."""
    return [0 if at == empty else max(0, length - 5 * at) for at in range(batch)]


def _lengths_of(desc: AttentionDesc, lengths: list[list[int]]) -> dict[str, Any]:
    """Return cu_seqlens; in thd with two rows of no sequence behind each one."""
    keywords: dict[str, Any] = {}
    for name, of in zip(("q", "kv"), lengths, strict=True):
        offsets = torch.tensor([0, *of]).cumsum(0)
        keywords[f"cu_seqlens_{name}"] = offsets.int()
        if desc.layout == "thd":
            gaps = 2 * torch.arange(len(of) + 1)
            keywords[f"cu_seqlens_{name}_padded"] = (offsets + gaps).int()
            keywords[f"max_seqlen_{name}"] = max(of, default=0)
    return keywords


def _options(desc: AttentionDesc, full: tuple[int, ...], seed: int) -> dict[str, Any]:
    """Return mask, bias, slopes, offset and seed, as the descriptor asks for them."""
    options: dict[str, Any] = {}
    if desc.bias in ("pre_scale", "post_scale"):
        options["bias"] = inputs.normal((1, *full[1:]), desc.dtype, 10 * seed + 4)
    if desc.bias == "alibi":
        options["alibi_slopes"] = 0.5 ** torch.arange(1, desc.heads + 1, dtype=torch.float32)
    if desc.arbitrary:
        mask = inputs.normal((full[0], 1, *full[2:]), torch.float32, 10 * seed + 5) > 0.3
        mask[:, :, 1:2] = True
        options["mask"] = mask
    if desc.softmax == "learnable":
        options["softmax_offset"] = inputs.normal((desc.heads,), torch.float32, 10 * seed + 6)
    if desc.dropout:
        options["rng"] = torch.tensor([11 + seed, 3])
    return options


def grad_of(desc: AttentionDesc, size: torch.Size, seed: int) -> torch.Tensor:
    """Return a gradient of ``out``, which has ``size``."""
    return inputs.normal(tuple(size), desc.dtype, 10 * seed + 7)


def merged_with_more_keys(
    desc: AttentionDesc, out: torch.Tensor, stats: torch.Tensor, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``out`` and ``stats`` of the keys of a call merged with those of other keys, of random
    values; queries without a key keep theirs if sequences have lengths."""
    values = inputs.normal(tuple(out.shape), desc.dtype, 10 * seed + 8).to(stats.dtype)
    logits = inputs.normal(tuple(stats.shape), stats.dtype, 10 * seed + 9)
    if desc.padding:
        logits = logits.masked_fill(stats == -torch.inf, -torch.inf)
    merged = torch.logaddexp(stats, logits)
    shift = merged.masked_fill(merged == -torch.inf, 0)
    order = {"thd": (0, 1), "sbhd": (2, 0, 1), "bshd": (0, 2, 1)}[desc.layout]
    mine, theirs = (
        torch.exp(logarithms - shift).permute(order)[..., None] for logarithms in (stats, logits)
    )
    return (mine * out.to(stats.dtype) + theirs * values).to(out.dtype), merged


@example(AttentionDesc)
def _attention(subject: Subject, desc: AttentionDesc, case: Case) -> OpCall:
    arguments, keywords = attention_call(desc, case.seed, case.size)
    inputs = tuple(_in_heads(subject, desc.qkv, x, SEED + case.seed) for x in arguments)
    named = _here_but_rng(subject, keywords)
    if desc.s is not None:
        named["s_scale"] = torch.full((1,), 400.0 - 10 * case.seed, device=subject.device)
        named["s_amax_out"] = torch.full((1,), 0.5, device=subject.device)
    return OpCall(desc, inputs, named, frozenset({"s_amax_out"}))


@example(AttentionBackwardDesc)
def _attention_backward(subject: Subject, desc: AttentionBackwardDesc, case: Case) -> OpCall:
    """Return a call whose result and statistics of forward are the backend's, if it computes
    them: another cannot drop what it drops."""
    forward = _attention(subject, desc.attention, case)
    if subject.refuses(desc.attention) is None:
        out, stats, _ = forward.run(subject)
    else:
        out, stats, _ = forward.judged(subject)
    if desc.attention.out is not None:
        out = _dequantized(subject, desc.attention, out, forward.arguments[2])
    size = out.shape
    grad = grad_of(desc.attention, size, case.seed)
    gradient = _in_heads(subject, desc.grad_output, grad, SEED + case.seed)
    unread = {"s_amax_out"} if desc.grad_output is not None else {"s_amax_out", "s_scale"}
    named = {name: value for name, value in forward.keywords.items() if name not in unread}
    if desc.dp is not None and desc.dp.delayed:
        named["dp_scale"] = torch.full((1,), 300.0 - 10 * case.seed, device=subject.device)
        named["dp_amax_out"] = torch.full((1,), 0.5, device=subject.device)
    positional = (gradient, *forward.arguments, out, stats)
    return OpCall(desc, positional, named, frozenset({"dp_amax_out"}))


@example(AttentionPartBackwardDesc)
def _attention_part_backward(
    subject: Subject, desc: AttentionPartBackwardDesc, case: Case
) -> OpCall:
    """Return a call whose result and statistics are those of the keys and of others, which no query
    behind the end of its sequence sees."""
    call = _attention_backward(subject, desc, case)
    *leading, out, stats = call.arguments
    merged, log_sums = merged_with_more_keys(desc.attention, on_cpu(out), on_cpu(stats), case.seed)
    return call._replace(arguments=(*leading, subject.here(merged), subject.here(log_sums)))


def _dequantized(
    subject: Subject, desc: AttentionDesc, codes: torch.Tensor, v: Operand
) -> torch.Tensor:
    """Return the values of a quantized result, in the dtype of the activations."""
    assert desc.out is not None
    assert v.scale_inv is not None
    operand = Operand(codes.flatten(0, -2), v.scale_inv / (1 - desc.dropout))
    here: torch.Tensor = subject.here(subject.values(desc.out, on_cpu(operand)).to(desc.dtype))
    return here.view(codes.shape)


def _in_heads(subject: Subject, spec: OperandSpec | None, x: torch.Tensor, seed: int) -> Any:
    """Return ``x [.., heads, d]`` on the device, quantized by ``spec`` if there is one."""
    here: torch.Tensor = subject.here(x)
    if spec is None:
        return here
    quantized = operand(subject, spec, here.flatten(0, -2), seed=seed)
    return quantized._replace(data=quantized.data.reshape(x.shape))


def _here_but_rng(subject: Subject, keywords: dict[str, Any]) -> dict[str, Any]:
    """Return copies on the device; a seed stays on the CPU."""
    moved: dict[str, Any] = subject.here(keywords)
    return moved | {name: value for name, value in keywords.items() if name == "rng"}
