"""Attention as a link: the rows of the chain are the queries, keys and values are parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from fp8core.backend_api import AttentionBackwardDesc, AttentionDesc
from fp8core.chain.call import Call
from fp8core.chain.link_defaults import LinkDefaults
from fp8core.chain.once import OnlyOnce
from fp8core.chain.protocol import Backward, Forward, Out, Params, Saved, TensorProgram
from fp8core.chain.shape import BindContext, CallInputs, LinkShape
from fp8core.dispatch.table import Resolved
from fp8core.errors import UnsupportedError

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
    whose groups are ``gqa_groups`` here: the rows of a call have no groups.

    Its parameters are ``(k, v)``, then the bias and the learned offset of the softmax, if any.
    """

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
        """Return the link."""
        desc = self.desc(context.dtype)
        forward, backward = _bound_pair(context, desc, AttentionBackwardDesc(desc))
        bias_backward = backward
        if self.has_bias:
            with_bias = AttentionBackwardDesc(desc, bias_grad=True)
            bias_backward = _backward_of(context, with_bias, forward)
        return AttentionLink(
            self,
            forward.run,
            backward.run,
            bias_backward.run,
            self.num_params,
            needs_rng=self.dropout > 0,
            only_once=_only_once(self, context.owner),
        )


_STEP, _BACKWARD_STEP = "attention", "attention backward"


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

    ``run_bias_backward`` also returns the gradient of the bias.
    """

    shape: AttentionShape
    run: Callable[..., Any]
    run_backward: Callable[..., Any]
    run_bias_backward: Callable[..., Any]
    num_params: int = field()  # these three have no defaults, unlike in LinkDefaults
    needs_rng: bool = field()
    only_once: OnlyOnce | None = field()

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
        keywords: dict[str, Any] = dict(AttentionTensors(*call.tensors).keywords())
        extra = list(params[2:])
        if shape.has_bias:
            keywords["bias"] = extra.pop(0)
        if shape.has_offset:
            keywords["softmax_offset"] = extra.pop(0)
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
        y, stats, max_logit = link.run(q, params[0], params[1], **keywords)
        max_logit_out = AttentionTensors(*call.tensors).max_logit_out
        if max_logit_out is not None:
            max_logit_out.copy_(max_logit)
        rows = y.reshape(x.shape[0], shape.heads * shape.head_dim_v)
        saved = (x, *params, rows, stats) if True in self._needs_grad else ()
        return rows if out is None else out(rows), saved, None

    def backward(
        self, grad: Any, saved: Saved, context: Any, call: Call, out: Out = None
    ) -> Backward:
        """Compute the gradients of the queries and of the parameters."""
        link, shape, needs = self._link, self._link.shape, self._needs_grad
        x, *params, rows, stats = saved
        assert x is not None
        assert rows is not None
        keywords = link.keywords(params, call)
        needs_bias = shape.has_bias and needs[3]
        run = link.run_bias_backward if needs_bias else link.run_backward
        grad_q, grad_k, grad_v, grad_bias, grad_offset = run(
            self._in_layout(grad, shape.head_dim_v, call),
            self._in_layout(x, shape.head_dim, call),
            *params[:2],
            self._in_layout(rows, shape.head_dim_v, call),
            stats,
            **keywords,
        )
        grads = [grad_k, grad_v]
        if shape.has_bias:
            grads.append(grad_bias)
        if shape.has_offset:
            assert params[-1] is not None
            grads.append(grad_offset.to(params[-1].dtype))
        grad_params = [
            one if needed else None for one, needed in zip(grads, needs[1:], strict=True)
        ]
        if not needs[0]:
            return (None, *grad_params)
        grad_x = grad_q.reshape(x.shape)
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
        assert x is not None
        q = self._in_layout(x, link.shape.head_dim, call)
        y, stats, _ = link.run(q, *params[:2], **link.keywords(params, call))
        again = (x, *params, y.reshape(x.shape[0], y.shape[-2] * y.shape[-1]), stats)
        return AttentionProgram.backward(self, grad, again, context, call, out)
