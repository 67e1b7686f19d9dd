"""Arguments for any descriptor, on the device under test."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from fp8core.backend_api import (
    GATED,
    ActivationBackwardDesc,
    ActivationDesc,
    AddNormDesc,
    AmaxDesc,
    AttentionBackwardDesc,
    AttentionDesc,
    AttentionPartBackwardDesc,
    ColumnSumsDesc,
    DequantizeDesc,
    FusedDesc,
    GemmDesc,
    GroupedGemmDesc,
    NormBackwardDesc,
    NormDesc,
    OpDesc,
    Operand,
    OperandSpec,
    QuantizeByAmaxDesc,
    QuantizeDesc,
    RotaryDesc,
    ScaleUpdateDesc,
)
from fp8core.conformance import inputs
from fp8core.conformance.compare import F64
from fp8core.conformance.operands import (
    SEED,
    gemm_operands,
    grouped_operands,
    offsets_for,
    operand,
    quantize_keywords,
    quantize_size,
    up,
)
from fp8core.conformance.subject import Size, Subject, on_cpu, storage_step
from fp8core.conformance.training_calls import TRAINING_DESCS, training_call
from fp8core.torch_ops.private import pytree

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


class OpCall(NamedTuple):
    """The arguments of one call of an operation, which ``call.run(subject)`` runs.

    ``written`` holds the positions and the names of the arguments that the call may write.
    """

    desc: OpDesc
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    written: frozenset[str | int] = frozenset()

    def run(self, subject: Subject) -> Any:
        """Return the results of the backend under test."""
        return subject.run(self.desc, *self.arguments, **self.keywords)

    def protected(self) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments that the call must not write."""
        unwritten = [value for at, value in enumerate(self.arguments) if at not in self.written]
        return unwritten, {k: value for k, value in self.keywords.items() if k not in self.written}

    def again(self) -> OpCall:
        """Return the same call with copies of the arguments."""
        arguments, keywords = pytree.tree_map_only(
            torch.Tensor, lambda x: x.clone(), (self.arguments, self.keywords)
        )
        return self._replace(arguments=arguments, keywords=keywords)


class Case(NamedTuple):
    """The size and the values of a call's arguments.

    ``size`` is ``(rows, cols)`` of the tensors or ``(m, n, k)`` of the product; an empty one stands
    for each operation's default. Another ``seed`` gives other values.
    """

    seed: int = 0
    size: tuple[int, ...] = ()


ORDINARY = Case()
POINTWISE = (9, 70)


def _quantize(subject: Subject, desc: QuantizeDesc, case: Case) -> OpCall:
    offsets: tuple[torch.Tensor, ...] = ()
    sizes, (rows, cols) = [0], case.size or (33, 70)
    if desc.grouped:
        step = storage_step(subject, desc.columnwise)
        sizes = [0, up(rows, step), up(1, step), 0, up(9, step)]
        rows = sum(sizes)
        offsets = (offsets_for(subject, desc, sizes),)
    shape = quantize_size(subject, desc, rows, cols)
    x = inputs.matrix("holes", *shape, desc.dtype, case.seed)
    keywords = quantize_keywords(subject, desc, len(sizes), SEED + case.seed)
    return OpCall(desc, (subject.here(x), *offsets), keywords, frozenset({"amax_out"}))


def amax_of(subject: Subject, desc: QuantizeDesc, *arguments: torch.Tensor) -> torch.Tensor:
    """Return the amaxes of ``x`` and its groups, of the judge if the backend does not take them."""
    amax: torch.Tensor
    if subject.refuses(AmaxDesc(desc)) is None:
        amax = subject.run(AmaxDesc(desc), *arguments)
    else:
        amax = subject.here(subject.judged(AmaxDesc(desc), *arguments))
    return amax


def _quantize_by_amax(subject: Subject, desc: QuantizeByAmaxDesc, case: Case) -> OpCall:
    call = _quantize(subject, desc.plain(), case)
    amax = amax_of(subject, desc.plain(), *call.arguments)
    return OpCall(desc, call.arguments, {"amax": amax, **call.keywords})


def _dequantize(subject: Subject, desc: DequantizeDesc, case: Case) -> OpCall:
    step = storage_step(subject, desc.operand)
    rows, cols = case.size or (17, 70)
    x = inputs.matrix("holes", up(rows, step), up(cols, step), torch.float32, case.seed)
    quantized = operand(subject, desc.operand, subject.here(x), seed=SEED + case.seed)
    return OpCall(desc, (quantized,), {})


def _gemm(subject: Subject, desc: GemmDesc, case: Case) -> OpCall:
    a, b = gemm_operands(subject, desc, *(case.size or (5, 7, 160)), seed=case.seed)
    m, n = len(a.data), len(b.data)
    bias = inputs.moderate(1, n, desc.out_dtype, _seed(2, case))[0]
    keywords: dict[str, Any] = {"bias": subject.here(bias)}
    if desc.accumulate:
        keywords["out"] = subject.here(inputs.moderate(m, n, desc.out_dtype, _seed(3, case)))
    return OpCall(desc, (a, b), keywords, frozenset({"out"}))


def _seed(tensor: int, case: Case) -> int:
    """Return the seed of the case's tensor number ``tensor``, which is below 100."""
    return tensor + 100 * case.seed


def _grouped_gemm(subject: Subject, desc: GroupedGemmDesc, case: Case) -> OpCall:
    groups = grouped_operands(subject, desc, seed=case.seed)
    keywords: dict[str, Any] = {}
    if not desc.contract_groups:
        biases = inputs.moderate(len(groups.sizes), groups.n, desc.out_dtype, _seed(2, case))
        keywords["bias"] = list(subject.here(biases))
    if desc.accumulate:
        out = inputs.moderate(groups.m, groups.n, desc.out_dtype, _seed(3, case))
        count = len(groups.sizes)
        keywords["out"] = (
            [subject.here(out) for _ in range(count)] if desc.contract_groups else subject.here(out)
        )
    return OpCall(desc, groups.arguments, keywords, frozenset({"out"}))


def _scale_update(subject: Subject, desc: ScaleUpdateDesc, case: Case) -> OpCall:
    sizes = ((4, 3), (1, 2), (4, 1))
    histories = [inputs.matrix("decades", *size, torch.float32, case.seed).abs() for size in sizes]
    histories[0] = torch.tensor([[0.0, torch.inf, 2.0], *[[3.0, 0.5, 8.0]] * 3]) * (1 + case.seed)
    scales = [torch.arange(1, size[1] + 1) * (0.5 + case.seed) for size in sizes]
    targets = [torch.full((size[1],), 448.0 - case.seed) for size in sizes]
    counts = [torch.full((1,), 3 + case.seed) for _ in sizes]
    states = subject.here((histories, scales, targets, counts))
    return OpCall(desc, tuple(states), {}, frozenset({0, 1, 3}))


def _norm(subject: Subject, desc: NormDesc, case: Case) -> OpCall:
    rows, cols = case.size or POINTWISE
    x = inputs.moderate(rows, cols, desc.dtype, _seed(1, case))
    parameters = [inputs.moderate(1, cols, desc.dtype, _seed(at, case))[0] / 4 for at in (2, 3)]
    return OpCall(
        desc, tuple(subject.here((x, *parameters[: 2 if desc.kind == "layernorm" else 1]))), {}
    )


def _norm_backward(subject: Subject, desc: NormBackwardDesc, case: Case) -> OpCall:
    x, weight, *_ = _norm(subject, desc.norm, case).arguments
    values = on_cpu(x).double()  # some devices have no float64
    mean = values.mean(-1) if desc.norm.kind == "layernorm" else None
    centered = values if mean is None else values - mean[:, None]
    rstd = torch.rsqrt(centered.square().mean(-1) + desc.norm.eps).float()
    grad = inputs.moderate(*values.shape, desc.norm.dtype, _seed(4, case))
    saved = (None if mean is None else mean.float(), rstd)
    return OpCall(desc, (subject.here(grad), x, weight, *subject.here(saved)), {})


def _activation(subject: Subject, desc: ActivationDesc, case: Case) -> OpCall:
    return OpCall(desc, (subject.here(_preactivation(desc, case)),), {})


def _activation_backward(subject: Subject, desc: ActivationBackwardDesc, case: Case) -> OpCall:
    grad = inputs.moderate(*(case.size or POINTWISE), desc.dtype, _seed(4, case))
    return OpCall(desc, tuple(subject.here((grad, _preactivation(desc, case)))), {})


def _preactivation(desc: ActivationDesc | ActivationBackwardDesc, case: Case) -> torch.Tensor:
    rows, cols = case.size or POINTWISE
    wide = 2 * cols if desc.name in GATED else cols
    return inputs.moderate(rows, wide, desc.dtype, _seed(1, case))


def _column_sums(subject: Subject, desc: ColumnSumsDesc, case: Case) -> OpCall:
    x = inputs.moderate(*(case.size or POINTWISE), desc.dtype, _seed(1, case))
    return OpCall(desc, (subject.here(x),), {})


def _rotary(subject: Subject, desc: RotaryDesc, case: Case) -> OpCall:
    sizes = (8, 8, 8, 8) if case.size else (5, 3, 2, 10)
    x = rotary_input(desc, sizes, _seed(1, case))
    batch, size = sizes[1], sizes[3]
    keywords = {"start_positions": torch.arange(2, 2 + batch, dtype=torch.int32)}
    if desc.layout == "thd":
        bounds = torch.linspace(1, len(x) - 2, batch + 1).round()
        keywords["cu_seqlens"] = bounds.to(torch.int32)
    freqs = rotary_angles(sizes[0] * batch + 2 + batch, size - 2)
    return OpCall(desc, tuple(subject.here((x, freqs))), subject.here(keywords))


def rotary_input(desc: RotaryDesc, sizes: tuple[int, ...], seed: int) -> torch.Tensor:
    """Return x of ``sizes`` (sequence, batch, heads, head size) in the layout of ``desc``, on the
    CPU: in thd the sequences one after the other."""
    length, batch, heads, size = sizes
    x = inputs.moderate(length * batch, heads * size, desc.dtype, seed)
    if desc.layout == "thd":
        return x.reshape(-1, heads, size)
    x = x.reshape(length, batch, heads, size)
    return x if desc.layout == "sbhd" else x.transpose(0, 1).contiguous()


def rotary_angles(positions: int, size: int) -> torch.Tensor:
    """Return angles ``[positions, 1, 1, size]`` that are all different, from thousandths of a turn
    to many turns; also those of one pair differ."""
    factors = 10000.0 ** (-torch.arange(size, dtype=torch.float32) / size)
    return (torch.arange(positions)[:, None] * factors)[:, None, None, :]


def _attention(subject: Subject, desc: AttentionDesc, case: Case) -> OpCall:
    arguments, keywords = attention_call(desc, case.seed, case.size)
    inputs = tuple(_in_heads(subject, desc.qkv, x, SEED + case.seed) for x in arguments)
    named = _here_but_rng(subject, keywords)
    if desc.s is not None:
        named["s_scale"] = torch.full((1,), 400.0 - 10 * case.seed, device=subject.device)
        named["s_amax_out"] = torch.full((1,), 0.5, device=subject.device)
    return OpCall(desc, inputs, named, frozenset({"s_amax_out"}))


def _attention_backward(subject: Subject, desc: AttentionBackwardDesc, case: Case) -> OpCall:
    """Return a call whose result and statistics of forward are the backend's, if it computes
    them: another cannot drop what it drops."""
    forward = _attention(subject, desc.attention, case)
    if subject.refuses(desc.attention) is None:
        out, stats, _ = forward.run(subject)
    else:
        positional, named = forward.arguments, forward.keywords
        out, stats, _ = subject.here(subject.judged(desc.attention, *positional, **named))
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


def _amax(subject: Subject, desc: AmaxDesc, case: Case) -> OpCall:
    return OpCall(desc, _quantize(subject, desc.quantize, case).arguments, {})


def _fused(subject: Subject, desc: FusedDesc, case: Case) -> OpCall:
    """Return a call of a fused op, in a size that operands of its cast can have."""
    step = storage_step(subject, desc.quantize.rowwise, desc.quantize.columnwise)
    rows, cols = case.size or POINTWISE
    stored = case._replace(size=(up(rows, step), up(cols, step)))
    call = _MAKERS[type(desc.producer)](subject, desc.producer, stored)
    keywords = quantize_keywords(subject, desc.quantize, seed=SEED + case.seed)
    return OpCall(desc, call.arguments, keywords, frozenset({"amax_out"}))


def _add_norm(subject: Subject, desc: AddNormDesc, case: Case) -> OpCall:
    x, *parameters = _norm(subject, desc.norm, case).arguments
    residual = subject.here(inputs.moderate(*x.shape, desc.norm.dtype, _seed(7, case)))
    return OpCall(desc, (x, residual, *parameters), {})


def _training(subject: Subject, desc: OpDesc, case: Case) -> OpCall:
    positional, named, written = training_call(desc, case.seed, case.size)
    return OpCall(desc, subject.here(positional), subject.here(named), written)


_MAKERS: dict[type, Callable[[Subject, Any, Case], OpCall]] = {
    QuantizeDesc: _quantize,
    QuantizeByAmaxDesc: _quantize_by_amax,
    DequantizeDesc: _dequantize,
    GemmDesc: _gemm,
    GroupedGemmDesc: _grouped_gemm,
    AmaxDesc: _amax,
    ColumnSumsDesc: _column_sums,
    RotaryDesc: _rotary,
    ScaleUpdateDesc: _scale_update,
    NormDesc: _norm,
    NormBackwardDesc: _norm_backward,
    ActivationDesc: _activation,
    ActivationBackwardDesc: _activation_backward,
    FusedDesc: _fused,
    AddNormDesc: _add_norm,
    AttentionDesc: _attention,
    AttentionBackwardDesc: _attention_backward,
    AttentionPartBackwardDesc: _attention_part_backward,
    **dict.fromkeys(TRAINING_DESCS, _training),
}


def exact(subject: Subject, desc: OpDesc, *arguments: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return what the judge computes in float64, and the arguments in it, on the CPU."""
    wide: tuple[Any, ...] = pytree.tree_map_only(
        torch.Tensor, lambda x: x.double() if x.is_floating_point() else x, on_cpu(arguments)
    )
    return subject.judged(_wide(desc), *wide), wide


def _wide(desc: Any) -> Any:
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(desc):
        value = getattr(desc, field.name)
        if field.name in ("dtype", "out_dtype"):
            changes[field.name] = F64
        elif isinstance(value, NormDesc):
            changes[field.name] = _wide(value)
    return dataclasses.replace(desc, **changes)


def arguments(subject: Subject, desc: OpDesc, case: Case = ORDINARY) -> OpCall:
    """Return a call of ``desc``; the default has odd sizes, and zeros and -0 among the values."""
    return _MAKERS[type(desc)](subject, desc, case)


def calls_of(subject: Subject, desc: OpDesc, *sizes: Size) -> Iterator[OpCall]:
    """Yield a call in each of ``sizes``, or in each that ``subject`` gives for the operation."""
    for size in subject.sizes(desc.op, *sizes):
        yield arguments(subject, desc, Case(size=size))
