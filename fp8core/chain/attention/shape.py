"""Attention as a part of a chain, bound to operations of backends, also over the ranks of a
context-parallel group."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch

from fp8core.backend_api import (
    AttentionBackwardDesc,
    AttentionDesc,
    AttentionPartBackwardDesc,
    CachedAttentionDesc,
    DequantizeDesc,
    OperandSpec,
    PagedAttentionDesc,
)
from fp8core.chain.attention.link import AttentionLink
from fp8core.chain.attention.low_precision import LowPrecisionAttentionLink
from fp8core.chain.attention.spec import AttentionSpec
from fp8core.chain.context_parallel import GatheredKeys, HeadExchange, Pair
from fp8core.chain.protocol import OnlyOnce, in_low_precision
from fp8core.chain.ring_attention import KeysInParts, descs_of_parts
from fp8core.chain.shape import BindContext
from fp8core.collectives import Communicator, named
from fp8core.dispatch.select import Choice, is_fallback
from fp8core.dispatch.table import Resolved
from fp8core.errors import UnsupportedError
from fp8core.recipe.plan import AttentionPlan
from fp8core.tensors.quantizer import TensorQuantizer
from fp8core.tensors.quantizer_binding import ReduceAmax, bind_quantizer

CONTEXT_WAYS = ("p2p", "all_gather", "a2a", "a2a+p2p")
"""How the ranks of a context-parallel group share attention, as Transformer Engine names it."""

Resolve = Callable[[AttentionDesc, AttentionBackwardDesc], Pair]


def bind_context(
    context: tuple[str, ...],
    desc: AttentionDesc,
    backward: AttentionBackwardDesc,
    resolve: Resolve,
) -> Pair:
    """Return attention by ``desc``, and its gradients by ``backward``, over the ranks of
    ``context``: one of :data:`CONTEXT_WAYS`, and the names of its groups. ``resolve`` returns what
    a backend computes."""
    way, *names = context
    groups = [named(name) for name in names]
    if way == "p2p":
        return _in_parts(desc, backward, groups[0], resolve)
    if way == "all_gather":
        part = GatheredKeys.desc_of_parts(desc)
        inner = resolve(part, _of(backward, GatheredKeys.desc_of_parts(backward.attention)))
        gathered = GatheredKeys(desc, groups[0], inner)
        return Pair(gathered.forward, gathered.backward)
    size = groups[0].size
    fewer = _with_heads(desc, size)
    fewer_backward = _of(backward, _with_heads(backward.attention, size))
    if way == "a2a":
        inner, outer_size = resolve(fewer, fewer_backward), 1
    else:
        inner = _in_parts(fewer, fewer_backward, groups[1], resolve)
        outer_size = groups[1].size
    exchange = HeadExchange(fewer, groups[0], inner, outer_size)
    return Pair(exchange.forward, exchange.backward)


def _in_parts(
    desc: AttentionDesc,
    backward: AttentionBackwardDesc,
    communicator: Communicator,
    resolve: Resolve,
) -> Pair:
    pairs = [
        resolve(
            forward,
            AttentionPartBackwardDesc(of, False, backward.grad_output, backward.dp),
        )
        for forward, of in zip(
            descs_of_parts(desc), descs_of_parts(backward.attention), strict=True
        )
    ]
    parts = KeysInParts(desc, communicator, *pairs)
    return Pair(parts.forward, parts.backward)


def _with_heads(desc: AttentionDesc, size: int) -> AttentionDesc:
    return dataclasses.replace(desc, heads=desc.heads // size, groups=desc.groups // size)


def _of(backward: AttentionBackwardDesc, desc: AttentionDesc) -> AttentionBackwardDesc:
    return dataclasses.replace(backward, attention=desc)


class AttentionShape(AttentionSpec):
    """The shape of attention, which binds itself to operations of backends."""

    __slots__ = ()

    plan_type: ClassVar[type[AttentionPlan]] = AttentionPlan

    def bind(self, context: BindContext) -> AttentionLink:
        """Return the link; while amaxes are only observed it computes in high precision."""
        desc = self.desc(context.dtype)
        plan = context.attention
        if plan is None or plan.is_high_precision:
            return _bound(self, context, desc, AttentionBackwardDesc(desc))
        if not context.binding.is_observing:
            return _bound_low_precision(self, context, plan)
        link = _bound(self, context, desc, AttentionBackwardDesc(desc))
        observed = _observed(link.run, _casts(context, plan, "qkv"))
        return dataclasses.replace(link, run=observed, run_cached=None, run_paged=None)


_STEP, _BACKWARD_STEP = "attention", "attention backward"


def _bound(
    shape: AttentionShape,
    context: BindContext,
    desc: AttentionDesc,
    backward_desc: AttentionBackwardDesc,
) -> AttentionLink:
    """Return the link that runs these operations."""
    if shape.context:
        return _bound_in_context(shape, context, desc, backward_desc)
    forward, backward = _bound_pair(context, desc, backward_desc)
    bias_backward = backward
    if shape.has_bias:
        with_bias = dataclasses.replace(backward_desc, bias_grad=True)
        bias_backward = _backward_of(context, with_bias, forward)
    all_choices = (forward.choice, backward.choice, bias_backward.choice)
    return AttentionLink(
        shape,
        forward.run,
        backward.run,
        bias_backward.run,
        shape.num_params,
        needs_rng=shape.dropout > 0,
        only_once=_only_once(shape, context.owner),
        fallback=next(filter(is_fallback, all_choices), None),
        run_cached=_cached(shape, context, desc, forward, CachedAttentionDesc),
        run_paged=_cached(shape, context, desc, forward, PagedAttentionDesc, kv=shape.kv)
        if shape.paged
        else None,
    )


def _cached(
    shape: AttentionShape,
    context: BindContext,
    desc: AttentionDesc,
    forward: Resolved,
    kind: type[CachedAttentionDesc],
    **more: Any,
) -> Callable[..., Any] | None:
    """Return what reads a cache as ``kind`` has it, if the backend of ``forward`` offers it."""
    if not shape.cached or desc.low_precision:
        return None
    values = {f.name: getattr(desc, f.name) for f in dataclasses.fields(desc)}
    cached = kind(**values, **more)
    resolved = context.resolve_optional(_STEP, cached, forward.choice.backend)
    return None if resolved is None else resolved.run


def _bound_in_context(
    shape: AttentionShape,
    context: BindContext,
    desc: AttentionDesc,
    backward_desc: AttentionBackwardDesc,
) -> AttentionLink:
    """Return the link that runs these operations on parts of the heads or of the keys."""
    choices: list[Choice] = []

    def resolve(desc: AttentionDesc, backward_desc: AttentionBackwardDesc) -> Pair:
        forward, backward = _bound_pair(context, desc, backward_desc)
        choices.extend((forward.choice, backward.choice))
        return Pair(forward.run, backward.run)

    pair = bind_context(shape.context, desc, backward_desc, resolve)
    remedy = "Leave the group out: set_context_parallel_group(None)."
    return AttentionLink(
        shape,
        pair.forward,
        pair.backward,
        pair.backward,
        shape.num_params,
        needs_rng=shape.dropout > 0,
        only_once=OnlyOnce(context.owner, "with context parallelism", remedy),
        fallback=next(filter(is_fallback, choices), None),
        run_cached=None,
        run_paged=None,
    )


def _bound_low_precision(
    shape: AttentionShape, context: BindContext, plan: AttentionPlan
) -> LowPrecisionAttentionLink:
    """Return the link that quantizes as ``plan`` says."""
    high = shape.desc(context.dtype)
    assert plan.qkv is not None
    assert plan.s is not None
    if shape.context:
        _check_context(context.owner, plan, len(shape.context) - 1)
    # Results of parts of the keys are merged before they could be rounded.
    is_whole = not shape.context or shape.context[0] == "a2a"
    result = None if plan.o is None or not is_whole else _with_scale_argument(plan.o)
    desc = dataclasses.replace(high, qkv=plan.qkv, s=_with_scale_argument(plan.s), out=result)
    is_quantized = plan.grad_output is not None and not shape.bf16_backward
    if is_quantized:
        backward_desc = AttentionBackwardDesc(desc, grad_output=plan.grad_output, dp=plan.dp)
    else:
        backward_desc = _high_precision_backward(context, desc, high)
    states = context.states
    link = _bound(shape, context, desc, backward_desc)
    s_slot = states.slot("s") if plan.s.delayed and states is not None else None
    dp_slot, gradient_state = None, None
    if is_quantized and plan.delayed is not None and states is not None:
        dp_slot, gradient_state = states.slot("dp"), states.backward
    return LowPrecisionAttentionLink(
        shape,
        link.run,
        link.run_backward,
        link.run_bias_backward,
        link.num_params,
        link.needs_rng,
        only_once=in_low_precision(context.owner),
        fallback=link.fallback,
        run_cached=None,
        run_paged=None,
        casts=_casts(
            context,
            plan,
            ("q", "k", "v", *(("grad_output",) if is_quantized else ())),
            _reduce_amax(shape),
        ),
        dequantize=context.resolve("dequantize", DequantizeDesc(plan.qkv, context.dtype)).run,
        dequantize_out=(
            None
            if result is None
            else context.resolve("dequantize", DequantizeDesc(result, context.dtype)).run
        ),
        s_slot=s_slot,
        s_scale=plan.s.target * (1 - shape.dropout),
        dp_slot=dp_slot,
        gradient_state=gradient_state,
        spec=plan.qkv,
        dtype=context.dtype,
        reads_codes=backward_desc.low_precision,
    )


def _high_precision_backward(
    context: BindContext, desc: AttentionDesc, high: AttentionDesc
) -> AttentionBackwardDesc:
    """Return the backward that reads the codes of ``desc``, if its backend offers it, else the one
    of tensors dequantized to the dtype of the activations, ``high``.

    Rounded to bfloat16, queries and keys have other logits than those whose statistics forward
    kept.
    """
    codes = AttentionBackwardDesc(desc)
    backend = context.resolve(_STEP, desc).choice.backend
    offered = context.resolve_optional(_BACKWARD_STEP, codes, backend)
    return AttentionBackwardDesc(high) if offered is None else codes


def _with_scale_argument(spec: OperandSpec) -> OperandSpec:
    """Return ``spec`` with a scale that does not follow from the tensor."""
    return OperandSpec(spec.format, spec.block, spec.target, delayed=True)


def _check_context(owner: str, plan: AttentionPlan, num_groups: int) -> None:
    """Refuse a plan whose scales are not those of all ranks of a context-parallel group."""
    if plan.delayed is not None and num_groups > 1:
        raise UnsupportedError(
            f"{owner}: fp8_dpa with delayed scaling and cp_comm_type='a2a+p2p' is not offered: "
            f"scales are reduced over one group. Use another cp_comm_type, "
            f"Float8CurrentScaling(fp8_dpa=True), or attention in high precision, fp8_dpa=False."
        )


def _reduce_amax(shape: AttentionShape) -> ReduceAmax | None:
    """Return how the ranks that share the tokens find one scale for all of them."""
    if not shape.context:
        return None
    communicators = [named(name) for name in shape.process_groups]

    def reduce(amaxes: torch.Tensor) -> torch.Tensor:
        for communicator in communicators:
            amaxes = communicator.max(amaxes, "amax", at_once=True).wait()
        return amaxes

    return reduce


def _casts(
    context: BindContext,
    plan: AttentionPlan,
    names: Sequence[str],
    reduce_amax: ReduceAmax | None = None,
) -> Mapping[str, TensorQuantizer]:
    """Return the quantizers of the tensors called ``names``."""
    states = context.states
    return {
        name: bind_quantizer(
            plan.tensors[name],
            context.dtype,
            context.binding,
            purpose=context.purpose("gradient" if name == "grad_output" else name),
            slot=states.slot(name) if states is not None and plan.delayed is not None else None,
            nonfinite=context.nonfinite,
            propagates=plan.nonfinite == "propagate",
            reduce_amax=reduce_amax,
        )
        for name in names
    }


def _observed(run: Callable[..., Any], casts: Mapping[str, TensorQuantizer]) -> Callable[..., Any]:
    """Return ``run`` of queries, keys and values whose amaxes are recorded before."""

    def observe(*qkv: torch.Tensor, **keywords: Any) -> Any:
        for quantizer, x in zip(casts.values(), qkv, strict=True):
            quantizer(x.flatten(0, -2), columnwise=False)
        return run(*qkv, **keywords)

    return observe


def _bound_pair(
    context: BindContext, desc: AttentionDesc, backward_desc: AttentionBackwardDesc
) -> tuple[Resolved, Resolved]:
    """Return forward and backward; with dropout of one backend, as only that one repeats what it
    dropped."""
    forward = context.resolve(_STEP, desc)
    backward = context.resolve(_BACKWARD_STEP, backward_desc)
    chosen, first = backward.choice.backend, forward.choice.backend
    if not desc.dropout or chosen == first:
        return forward, backward
    repeated = context.resolve_optional(_STEP, desc, chosen)
    if repeated is None:
        raise UnsupportedError(
            f"{desc}: {first} runs it, and {chosen} its backward, which cannot repeat what {first} "
            f"dropped. Choose one backend for both with use_backend(), or attention_dropout=0."
        )
    return repeated, backward


def _backward_of(context: BindContext, desc: AttentionBackwardDesc, forward: Resolved) -> Resolved:
    """Return the backward with the gradient of the bias; with dropout, by the backend of
    forward."""
    resolved = context.resolve(_BACKWARD_STEP, desc)
    chosen = forward.choice.backend
    if not desc.attention.dropout or resolved.choice.backend == chosen:
        return resolved
    repeated = context.resolve_optional(_BACKWARD_STEP, desc, chosen)
    if repeated is None:
        raise UnsupportedError(
            f"{desc}: {chosen} has no gradient of the bias, and another backend cannot repeat what "
            f"it drops. Choose another backend with use_backend(), or attention_dropout=0."
        )
    return repeated


def _only_once(shape: AttentionShape, owner: str) -> OnlyOnce | None:
    if shape.dropout:
        remedy = "Evaluate (model.eval()), or make the layer with attention_dropout=0."
        return OnlyOnce(owner, "with attention dropout", remedy)
    if shape.max_logit:
        return OnlyOnce(owner, "with return_max_logit=True", "Make the layer without it.")
    return None
