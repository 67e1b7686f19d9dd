"""Attention as a link: the rows of the chain are the queries, keys and values are parameters."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch

from fp8core.backend_api import (
    AttentionBackwardDesc,
    AttentionDesc,
    DequantizeDesc,
    Operand,
    OperandSpec,
)
from fp8core.chain.call import Call
from fp8core.chain.context_binding import bind_context, reduces_amax
from fp8core.chain.context_parallel import Pair
from fp8core.chain.link_defaults import LinkDefaults
from fp8core.chain.once import OnlyOnce, in_low_precision
from fp8core.chain.protocol import Backward, Forward, Out, Params, Saved, TensorProgram
from fp8core.chain.request import Handover, QuantizeRequest
from fp8core.chain.shape import BindContext, CallInputs, LinkShape
from fp8core.dispatch.select import Choice, is_fallback
from fp8core.dispatch.table import Resolved
from fp8core.errors import UnsupportedError
from fp8core.recipe.plan import AttentionPlan, Plan
from fp8core.tensors.quantizer import Quantizer, ReduceAmax, Slot, bind_quantizer
from fp8core.tensors.scaling import DelayedState, update_after_backward

__all__ = ["AttentionLink", "AttentionShape", "AttentionTensors"]


class AttentionTensors(NamedTuple):
    """What a call of attention brings in ``Call.tensors``, besides what is differentiated.

    The first six are keywords of :class:`~fp8core.backend_api.AttentionDesc`; ``max_logit_out``,
    of the statistics' dtype ``[heads]``, is filled with the largest logits. ``Call.sizes`` are, of
    a dense batch, the first two dimensions of the queries; in thd the longest sequence of queries
    and of keys.
    """

    alibi_slopes: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_kv: torch.Tensor | None = None
    cu_seqlens_q_padded: torch.Tensor | None = None
    cu_seqlens_kv_padded: torch.Tensor | None = None
    max_logit_out: torch.Tensor | None = None

    def keywords(self) -> dict[str, torch.Tensor]:
        """Return the operation's keywords among them that are given."""
        pairs = zip(self._fields[:-1], self[:-1], strict=True)
        return {name: tensor for name, tensor in pairs if tensor is not None}


@dataclass(frozen=True, slots=True)
class AttentionShape(LinkShape):
    """What attention computes; the fields are those of :class:`~fp8core.backend_api.AttentionDesc`,
    whose groups are ``gqa_groups`` here: the rows of a call have no groups. With ``bf16_backward``
    backward quantizes nothing, whatever the recipe says.

    ``context`` is how the ranks of a group share the tokens, and the names of its groups, see
    :func:`~fp8core.chain.context_binding.bind_context`; empty for one rank.

    Its parameters are ``(k, v)``, then the bias and the learned offset of the softmax, if any.
    """

    plan_type: ClassVar[type[Plan]] = AttentionPlan
    layout: str
    heads: int
    gqa_groups: int
    head_dim: int
    head_dim_v: int
    scale: float
    window: tuple[int, int] = (-1, -1)
    bottom_right: bool = False
    padding: bool = False
    arbitrary: bool = False
    bias: str | None = None
    softcap: float = 0.0
    softmax: str = "vanilla"
    dropout: float = 0.0
    max_logit: bool = False
    bf16_backward: bool = False
    context: tuple[str, ...] = ()

    @property
    def shares_scales_over(self) -> str | None:
        """The group that shares the tokens, where it is one."""
        return self.context[1] if len(self.context) == 2 else None

    @property
    def has_bias(self) -> bool:
        """Whether a bias is among its parameters."""
        return self.bias in ("pre_scale", "post_scale")

    @property
    def has_offset(self) -> bool:
        """Whether the offset of the softmax is among its parameters."""
        return self.softmax == "learnable"

    @property
    def num_params(self) -> int:
        """Keys, values, and the bias and the offset, if any."""
        return 2 + self.has_bias + self.has_offset

    def columns(self, columns: int) -> int:
        """Return the columns of the values of all heads."""
        return self.heads * self.head_dim_v

    def input_columns(self, columns: int | None) -> int:
        """Return the columns of the queries of all heads."""
        return self.heads * self.head_dim

    def expected_columns(self, columns: int) -> str | None:
        """Return the columns of the queries unless they are ``columns``."""
        width = self.heads * self.head_dim
        return None if columns == width else str(width)

    def desc(self, dtype: torch.dtype) -> AttentionDesc:
        """Return the descriptor for activations of ``dtype``."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        del values["bf16_backward"], values["context"]
        return AttentionDesc(dtype, groups=values.pop("gqa_groups"), **values)

    def example(self, x: torch.Tensor) -> CallInputs:
        """Return keys, values and the other tensors of a call of one sequence, self-attention."""
        rows = x.shape[0]
        tokens = {"thd": (rows,), "bshd": (1, rows), "sbhd": (rows, 1)}[self.layout]
        params = [
            x.new_empty(*tokens, self.gqa_groups, size).requires_grad_()
            for size in (self.head_dim, self.head_dim_v)
        ]
        if self.has_bias:
            params.append(x.new_empty(1, 1, 1, rows))
        cu_seqlens = x.new_empty(2, dtype=torch.int32) if self.padding else None
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        tensors = AttentionTensors(
            alibi_slopes=x.new_empty(self.heads) if self.bias == "alibi" else None,
            mask=x.new_empty(1, 1, 1, rows, dtype=torch.bool) if self.arbitrary else None,
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            max_logit_out=x.new_empty(self.heads, dtype=wide) if self.max_logit else None,
        )
        return CallInputs(params, tensors, (rows, rows) if self.layout == "thd" else tokens)

    def bind(self, context: BindContext) -> AttentionLink:
        """Return the link; while amaxes are only observed it computes in high precision."""
        desc = self.desc(context.dtype)
        plan = context.attention
        if plan is None or plan.is_high_precision:
            return _bound(self, context, desc, AttentionBackwardDesc(desc))
        if not context.binding.is_observing:
            return _bound_low_precision(self, context, plan)
        link = _bound(self, context, desc, AttentionBackwardDesc(desc))
        return dataclasses.replace(link, run=_observed(link.run, _casts(context, plan, "qkv")))


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
    )


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
    result = None if plan.o is None or not is_whole else _with_given_scale(plan.o)
    desc = dataclasses.replace(high, qkv=plan.qkv, s=_with_given_scale(plan.s), out=result)
    is_quantized = plan.grad_output is not None and not shape.bf16_backward
    backward_desc = (
        AttentionBackwardDesc(desc, grad_output=plan.grad_output, dp=plan.dp)
        if is_quantized
        else AttentionBackwardDesc(high)
    )
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
    )


def _with_given_scale(spec: OperandSpec) -> OperandSpec:
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
    communicators = reduces_amax(shape.context)

    def reduce(amaxes: torch.Tensor) -> torch.Tensor:
        for communicator in communicators:
            amaxes = communicator.max(amaxes, "amax").wait()
        return amaxes

    return reduce


def _casts(
    context: BindContext,
    plan: AttentionPlan,
    names: Sequence[str],
    reduce_amax: ReduceAmax | None = None,
) -> Mapping[str, Quantizer]:
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


def _observed(run: Callable[..., Any], casts: Mapping[str, Quantizer]) -> Callable[..., Any]:
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
    dropped.

    Raises:
        UnsupportedError: there is dropout, and the backend of backward has no forward.
    """
    forward = context.resolve(_STEP, desc)
    backward = context.resolve(_BACKWARD_STEP, backward_desc)
    chosen, other = backward.choice.backend, forward.choice.backend
    if not desc.dropout or chosen == other:
        return forward, backward
    repeated = context.resolve_optional(_STEP, desc, chosen)
    if repeated is None:
        raise UnsupportedError(
            f"{desc}: {other} runs it, and {chosen} its backward, which cannot repeat what {other} "
            f"dropped. Choose one backend for both with use_backend(), or attention_dropout=0."
        )
    return repeated, backward


def _backward_of(context: BindContext, desc: AttentionBackwardDesc, forward: Resolved) -> Resolved:
    """Return the backward with the gradient of the bias; with dropout, by the backend of forward.

    Raises:
        UnsupportedError: that backend does not offer it.
    """
    resolved = context.resolve(_BACKWARD_STEP, desc)
    chosen = forward.choice.backend
    if not desc.attention.dropout or resolved.choice.backend == chosen:
        return resolved
    own = context.resolve_optional(_BACKWARD_STEP, desc, chosen)
    if own is None:
        raise UnsupportedError(
            f"{desc}: {chosen} has no gradient of the bias, and another backend cannot repeat what "
            f"it drops. Choose another backend with use_backend(), or attention_dropout=0."
        )
    return own


def _only_once(shape: AttentionShape, owner: str) -> OnlyOnce | None:
    if shape.dropout:
        remedy = "Evaluate (model.eval()), or make the layer with attention_dropout=0."
        return OnlyOnce(owner, "with attention dropout", remedy)
    if shape.max_logit:
        return OnlyOnce(owner, "with return_max_logit=True", "Make the layer without it.")
    return None


@dataclass(frozen=True, slots=True, eq=False)
class AttentionLink(LinkDefaults):
    """Computes rows ``[tokens, heads * head_dim_v]`` from queries ``[tokens, heads * head_dim]``.

    ``run_bias_backward`` also returns the gradient of the bias. ``fallback`` is the choice of a
    backend for other devices that nobody asked for, whose memory may be that of all logits; None
    without such a choice.
    """

    shape: AttentionShape
    run: Callable[..., Any]
    run_backward: Callable[..., Any]
    run_bias_backward: Callable[..., Any]
    num_params: int = field()  # these three have no defaults, unlike in LinkDefaults
    needs_rng: bool = field()
    only_once: OnlyOnce | None = field()
    fallback: Choice | None

    def in_torch(self, bind: Callable[[Any], Any]) -> AttentionLink:
        """Return attention whose statistics belong to the graph, too."""
        link: AttentionLink = bind(self.shape)
        values = [getattr(link, f.name) for f in dataclasses.fields(link)]
        return _DifferentiableAttention(*values)

    def program(self, rows: int, needs_grad: Sequence[bool], call: Call) -> AttentionProgram:
        """Return the program; the sizes of the batch come with the call."""
        return AttentionProgram(self, needs_grad)

    def keywords(self, params: Params, call: Call) -> Mapping[str, Any]:
        """Return the operation's keywords in a call with the parameters ``params``."""
        shape = self.shape
        keywords: dict[str, Any] = {}
        if shape.padding or shape.arbitrary or shape.bias == "alibi":
            keywords |= AttentionTensors(*call.tensors).keywords()
        if shape.has_bias:
            keywords["bias"] = params[2]
        if shape.has_offset:
            keywords["softmax_offset"] = params[-1]
        if shape.layout == "thd":
            keywords["max_seqlen_q"], keywords["max_seqlen_kv"] = call.sizes
        if shape.dropout:
            keywords["rng"] = call.rng
        return keywords


class AttentionProgram(TensorProgram[AttentionLink]):
    """Attends; saves queries, keys, values, the result and its statistics."""

    __slots__ = ()

    def origins(self, saved: Saved) -> Sequence[torch.Tensor | None]:
        """Return queries, keys, values, and the bias and the offset, if any."""
        return saved[: 1 + self._link.num_params]

    def forward(self, x: Any, params: Params, call: Call, out: Out = None) -> Forward:
        """Compute the rows of the result, and fill ``max_logit_out``."""
        link, shape = self._link, self._link.shape
        keywords = link.keywords(params, call)
        q = self._in_layout(x, shape.head_dim, call)
        _check_memory(link, q, params[0], call)
        y, stats, max_logit = link.run(q, params[0], params[1], **keywords)
        if max_logit is not None:
            _hand_out(max_logit, call)
        rows = y.reshape(x.shape[0], shape.heads * shape.head_dim_v)
        saved: Saved = ()
        if True in self._needs_grad:
            saved = (x, *params, rows, stats, *_kept(call))
        return rows if out is None else out(rows), saved, None

    def backward(
        self, grad: Any, saved: Saved, context: Any, call: Call, out: Out = None
    ) -> Backward:
        """Compute the gradients of the queries and of the parameters."""
        link, shape = self._link, self._link.shape
        x, *params, rows, stats = saved[:-_NUM_KEPT]
        call = _of_forward(call, saved)
        assert x is not None
        assert rows is not None
        results = self._run_backward(
            self._in_layout(grad, shape.head_dim_v, call),
            self._in_layout(x, shape.head_dim, call),
            *params[:2],
            self._in_layout(rows, shape.head_dim_v, call),
            stats,
            **link.keywords(params, call),
        )
        return self._gradients(results, params, x.shape, out)

    def _run_backward(self, *given: Any, **keywords: Any) -> Any:
        """Run backward, with the gradient of the bias if it is needed."""
        link = self._link
        needs_bias = link.shape.has_bias and self._needs_grad[3]
        return (link.run_bias_backward if needs_bias else link.run_backward)(*given, **keywords)

    def _gradients(
        self, results: Any, params: Params, size: torch.Size, out: Out = None
    ) -> Backward:
        """Return the gradient of the rows of queries, of ``size``, and of ``params``."""
        shape, needs = self._link.shape, self._needs_grad
        grad_q, grad_k, grad_v, grad_bias, grad_offset = results
        grads = [grad_k, grad_v]
        if shape.has_bias:
            grads.append(grad_bias)
        if shape.has_offset:
            grads.append(grad_offset.to(params[-1].dtype))
        grad_params = [
            one if needed else None for one, needed in zip(grads, needs[1:], strict=True)
        ]
        if not needs[0]:
            return (None, *grad_params)
        grad_x = grad_q.reshape(size)
        return (grad_x if out is None else out(grad_x), *grad_params)

    def _in_layout(self, rows: torch.Tensor, head_dim: int, call: Call) -> torch.Tensor:
        """Return ``rows [tokens, heads * head_dim]`` in the layout of the queries."""
        shape = self._link.shape
        tokens = (rows.shape[0],) if shape.layout == "thd" else call.sizes
        return rows.reshape(*tokens, shape.heads, head_dim)


class _DifferentiableAttention(AttentionLink):
    """Attention whose result and statistics are differentiated, too."""

    __slots__ = ()

    def program(self, rows: int, needs_grad: Sequence[bool], call: Call) -> AttentionProgram:
        """Return the program, which computes the statistics again in backward."""
        return _DifferentiableAttentionProgram(self, needs_grad)


class _DifferentiableAttentionProgram(AttentionProgram):
    __slots__ = ()

    def backward(
        self, grad: Any, saved: Saved, context: Any, call: Call, out: Out = None
    ) -> Backward:
        """Compute the gradients from queries, keys and values, and the statistics from those."""
        link = self._link
        x, *params = saved[: 1 + link.num_params]
        call = _of_forward(call, saved)
        assert x is not None
        q = self._in_layout(x, link.shape.head_dim, call)
        y, stats, _ = link.run(q, *params[:2], **link.keywords(params, call))
        rows = y.reshape(x.shape[0], y.shape[-2] * y.shape[-1])
        again = [x, *params, rows, stats, *_kept(call)]
        return AttentionProgram.backward(self, grad, again, context, call, out)


@dataclass(frozen=True, slots=True, eq=False)
class LowPrecisionAttentionLink(AttentionLink):
    """Quantizes queries, keys and values, which backward reads as codes.

    ``casts`` are by the names of the plan's tensors; with ``"grad_output"`` among them backward
    computes in low precision, else in high precision from the dequantized tensors. ``s_slot`` and
    ``dp_slot`` hold the delayed scales of the weights and of the gradients of logits; without them
    the scale of the weights is ``s_scale``, and that of the gradients follows from them.
    ``dequantize_out`` is None where the result is not quantized. ``gradient_state`` is None without
    delayed scales in backward. ``spec`` is how q, k and v are quantized, ``dtype`` that of the
    activations.
    """

    casts: Mapping[str, Quantizer]
    dequantize: Callable[..., torch.Tensor]
    dequantize_out: Callable[..., torch.Tensor] | None
    s_slot: Slot | None
    s_scale: float
    dp_slot: Slot | None
    gradient_state: DelayedState | None
    spec: OperandSpec
    dtype: torch.dtype

    def in_torch(self, bind: Callable[[Any], Any]) -> AttentionLink:
        """Rounding has no derivative, so torch's operators never take its place."""
        raise AssertionError("only_once says why not")

    def program(self, rows: int, needs_grad: Sequence[bool], call: Call) -> AttentionProgram:
        """Return the program; the sizes of the batch come with the call."""
        return LowPrecisionAttentionProgram(self, needs_grad)


class _Result(NamedTuple):
    """How forward saved its result: queries came in ``size``; ``is_turned`` is None for the result
    as the kernel gave it, else whether the next link's codes are those of its transpose."""

    size: torch.Size
    is_turned: bool | None


class LowPrecisionAttentionProgram(AttentionProgram):
    """Attends to quantized tensors; saves their codes and scales.

    The result is saved as the next link quantized it, if that has one scale as the queries have:
    the same codes then serve backward of both.
    """

    __slots__ = ()

    _link: LowPrecisionAttentionLink

    def request_grad(self, call: Call) -> QuantizeRequest | None:
        """Return the request for the gradient of the result, if backward quantizes it.

        The cast will record an amax, so the update of the scales after backward is ordered first.
        """
        link = self._link
        cast = link.casts.get("grad_output")
        if cast is None:
            return None
        if link.gradient_state is not None:
            update_after_backward(link.gradient_state, call.backward_pass)
        return QuantizeRequest(
            cast,
            link.dtype,
            columnwise=False,
            is_gradient=True,
            cast=cast.cast_to(rowwise=True, columnwise=False),
        )

    def origins(self, saved: Saved) -> Sequence[torch.Tensor | None]:
        """Return nothing: codes are saved."""
        return ()

    def forward(self, x: Any, params: Params, call: Call, out: Out = None) -> Forward:
        """Quantize, and compute the rows of the result from the codes."""
        link = self._link
        q = self._in_layout(x, link.shape.head_dim, call)
        _check_memory(link, q, params[0], call)
        operands = [
            _quantized(link.casts[name], one)
            for name, one in zip("qkv", (q, *params[:2]), strict=True)
        ]
        slot, keywords = link.s_slot, dict(link.keywords(params, call))
        if slot is None:
            scale = x.new_full((1,), link.s_scale, dtype=torch.float32)
        else:
            scale = slot.scale.clone()  # of this forward, also after the autocast has ended
            keywords["s_amax_out"] = slot.amax
        y, stats, max_logit = link.run(*operands, **keywords, s_scale=scale)
        if max_logit is not None:
            _hand_out(max_logit, call)
        result: Operand | None
        rows = self._values_of(y.reshape(x.shape[0], link.shape.columns(0)), operands[2])
        given = rows if out is None else out(rows)
        if True not in self._needs_grad:
            return given, (), None
        codes = [part for operand in operands for part in operand[:2]]
        result, is_turned = _shared_codes(given, out, link.spec)
        if result is None:
            result = Operand(y.reshape(rows.shape))
        saved = (*codes, *params[2:], *result[:2], stats, scale, *_kept(call))
        return given, saved, _Result(x.shape, is_turned)

    def _values_of(self, result: torch.Tensor, values: Operand) -> torch.Tensor:
        """Return the rows of the result, dequantized if they are codes by the scale of ``values``.

        Dropout multiplies the weights that it keeps, so that the scale is that much larger.
        """
        link = self._link
        if link.dequantize_out is None:
            return result
        scale_inv, dropout = values.scale_inv, link.shape.dropout
        assert scale_inv is not None
        if dropout:
            scale_inv = scale_inv / (1 - dropout)
        return link.dequantize_out(Operand(result, scale_inv))

    def backward(
        self, grad: Any, saved: Saved, context: Any, call: Call, out: Out = None
    ) -> Backward:
        """Compute the gradients from the codes."""
        *codes, result, result_scale, stats, scale = saved[:-_NUM_KEPT]
        call = _of_forward(call, saved)
        operands, more = [Operand(*codes[at : at + 2]) for at in (0, 2, 4)], codes[6:]  # type: ignore[arg-type]  # present
        link, shape = self._link, self._link.shape
        size, is_turned = context
        assert result is not None
        if is_turned is None:
            rows = self._values_of(result, operands[2])
        else:
            rows = link.dequantize(Operand(result, result_scale))
            rows = rows.t() if is_turned else rows
        cast = link.casts.get("grad_output")
        if cast is None:
            values = [_dequantized(link.dequantize, operand) for operand in operands]
            plain = [values[0].reshape(size), *values[1:], *more, rows, stats, *_kept(call)]
            return AttentionProgram.backward(self, grad, plain, None, call, out)
        params = (*operands[1:], *more)
        keywords: dict[str, Any] = {**link.keywords(params, call), "s_scale": scale}
        if link.dp_slot is not None:
            keywords |= {"dp_scale": link.dp_slot.scale, "dp_amax_out": link.dp_slot.amax}
        results = self._run_backward(
            self._quantized_grad(grad, call),
            *operands,
            self._in_layout(rows, shape.head_dim_v, call),
            stats,
            **keywords,
        )
        return self._gradients(results, params, size, out)

    def _quantized_grad(self, grad: Any, call: Call) -> Operand:
        """Return the gradient of the result quantized, with its codes in the layout."""
        if not isinstance(grad, Handover):
            request = self.request_grad(call)
            assert request is not None
            grad = request(grad)
        operand = grad.take().rowwise
        assert isinstance(operand, Operand)
        codes = self._in_layout(operand.data, self._link.shape.head_dim_v, call)
        return operand._replace(data=codes)


def _shared_codes(given: Any, out: Out, spec: OperandSpec) -> tuple[Operand | None, bool | None]:
    """Return the operand of the result that the next link holds for its own backward, and whether
    that is the transpose; None if it is not quantized by ``spec``."""
    if out is None or not isinstance(given, Handover):
        return None, None
    plan = out.quantizer.plan
    if plan is None or out.padded is not None:
        return None, None
    if not all(_is_read_alike(one, spec) for one in plan):
        return None, None
    rowwise, columnwise = given.operands
    operand, is_turned = (rowwise, False) if columnwise is None else (columnwise, True)
    assert isinstance(operand, Operand)
    return operand, is_turned


def _is_read_alike(spec: OperandSpec | None, other: OperandSpec) -> bool:
    """Return whether codes of both have the same values: of one format, with one scale a tensor."""
    return spec is not None and all(
        (one.format, one.block, one.scale_format, one.transform)
        == (other.format, (0, 0), other.scale_format, None)
        for one in (spec, other)
    )


_MAX_FALLBACK_BYTES = 2 * 2**30
"""The logits of a call that a backend nobody asked for may hold at once."""


def _check_memory(link: AttentionLink, q: torch.Tensor, k: torch.Tensor, call: Call) -> None:
    """Refuse a call whose logits are many bytes where a backend for other devices runs it.

    Raises:
        UnsupportedError: says how many, and why no backend for the device runs it.
    """
    if link.fallback is None:
        return
    shape = link.shape
    if shape.layout == "thd":
        cu_seqlens = AttentionTensors(*call.tensors).cu_seqlens_q
        assert cu_seqlens is not None
        sizes = (cu_seqlens.shape[0] - 1, shape.heads, *call.sizes)
    else:
        batch, length = shape.layout.index("b"), shape.layout.index("s")
        sizes = (q.shape[batch], shape.heads, q.shape[length], k.shape[length])
    num_bytes = math.prod(sizes) * (8 if q.dtype == torch.float64 else 4)
    if num_bytes > _MAX_FALLBACK_BYTES:
        name, device = link.fallback.backend, q.device
        raise UnsupportedError(
            f"attention on {device} would run on {name}, which may hold all logits of a call at "
            f"once: {' x '.join(map(str, sizes))} of batch, heads, queries and keys are "
            f"{num_bytes / 2**30:.1f} GiB, and without being asked for it takes "
            f"{_MAX_FALLBACK_BYTES // 2**30} GiB. Call with less at a time, choose attention that "
            f"a backend for {device.type} runs, or use_backend({name!r}) to run it so. "
            f"{link.fallback}"
        )


_NUM_KEPT = len(AttentionTensors._fields) - 1


def _hand_out(max_logit: torch.Tensor, call: Call) -> None:
    """Write the largest logits where the call asks for them."""
    max_logit_out = AttentionTensors(*call.tensors).max_logit_out
    assert max_logit_out is not None
    max_logit_out.copy_(max_logit)


def _kept(call: Call) -> Saved:
    """Return the tensors of the call that backward reads: autograd then notices a write to them."""
    return AttentionTensors(*call.tensors)[:-1]


def _of_forward(call: Call, saved: Saved) -> Call:
    """Return ``call`` with the tensors that forward kept at the end of ``saved``."""
    kept = saved[-_NUM_KEPT:]
    is_empty = not any([one is not None for one in kept])
    return call if is_empty else call._replace(tensors=(*kept, None))


def _quantized(quantizer: Quantizer, x: torch.Tensor) -> Operand:
    """Return ``x [..., heads, d]`` quantized, with its codes in its shape."""
    operand: Operand = quantizer(x.flatten(0, -2), columnwise=False).rowwise
    return operand._replace(data=operand.data.reshape(x.shape))


def _dequantized(run: Callable[..., torch.Tensor], operand: Operand) -> torch.Tensor:
    """Return the values of an operand whose codes have any shape."""
    shape = operand.data.shape
    return run(operand._replace(data=operand.data.flatten(0, -2))).view(shape)
