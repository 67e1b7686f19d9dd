"""Attention in high precision as a link: the rows of the chain are the queries."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fp8core.chain.attention.spec import (
    NUM_SAVED,
    AttentionSpec,
    AttentionTensors,
    check_memory,
    hand_out,
    in_layout,
    of_forward,
    saved_tensors,
)
from fp8core.chain.call import Call
from fp8core.chain.protocol import (
    Backward,
    Forward,
    Link,
    OnlyOnce,
    Out,
    Params,
    Saved,
    TensorProgram,
)
from fp8core.chain.request import Handover, QuantizeRequest
from fp8core.dispatch.select import Choice


@dataclass(frozen=True, slots=True, eq=False)
class AttentionLink(Link):
    """Computes rows ``[tokens, heads * head_dim_v]`` from queries ``[tokens, heads * head_dim]``.

    ``run_bias_backward`` also returns the gradient of the bias. ``run_cached`` reads keys and
    values of a cache at its capacity, ``run_paged`` those of single queries in pages; None where no
    backend does. ``fallback`` is the choice of a
    backend for other devices that nobody asked for, whose memory may be that of all logits; None
    without such a choice.
    """

    shape: AttentionSpec
    run: Callable[..., Any]
    run_backward: Callable[..., Any]
    run_bias_backward: Callable[..., Any]
    num_params: int = field()  # these three have no defaults, unlike in Link
    needs_rng: bool = field()
    only_once: OnlyOnce | None = field()
    fallback: Choice | None
    run_cached: Callable[..., Any] | None
    run_paged: Callable[..., Any] | None
    keeps_input = True
    result = "attention"

    def program(self, rows: int, needs_grad: Sequence[bool], call: Call) -> AttentionProgram:
        """Return the program; the sizes of the batch come with the call."""
        return AttentionProgram(self, needs_grad)

    def keywords(self, params: Params, call: Call) -> Mapping[str, Any]:
        """Return the operation's keywords in a call with the parameters ``params``."""
        shape = self.shape
        keywords: dict[str, Any] = {}
        if shape.padding or shape.arbitrary or shape.bias == "alibi":
            keywords |= AttentionTensors(*call.tensors).keywords()
        if self.num_params > 2 and shape.has_bias:
            keywords["bias"] = params[2]
        if self.num_params > 2 and shape.has_offset:
            keywords["softmax_offset"] = params[-1]
        if shape.layout == "thd":
            keywords["max_seqlen_q"], keywords["max_seqlen_kv"] = call.sizes[:2]
        if shape.dropout:
            keywords["rng"] = call.rng
        return keywords

    def read(self, params: Params, call: Call, dtype: torch.dtype) -> Params:
        """Return the parameters of a call, keys and values of a cache up to the longest sequence:
        in thd that is among the keywords."""
        shape = self.shape
        params = self.unpaged(params, call, dtype)
        if not shape.cached or shape.layout == "thd":
            return params
        at, longest = shape.layout.index("s"), call.sizes[2]
        keys, values, *rest = params
        return (keys.narrow(at, 0, longest), values.narrow(at, 0, longest), *rest)

    def unpaged(self, params: Params, call: Call, dtype: torch.dtype) -> Params:
        """Return the parameters of a call, keys and values in pages as copies in the layout and in
        ``dtype``."""
        if not self.shape.paged:
            return params
        pages = AttentionTensors(*call.tensors).pages(params)
        copies = pages.gathered(call.sizes[-1], dtype)
        return (*in_layout(self.shape.layout, *copies), *params[2:])

    def has_single_queries(self, call: Call) -> bool:
        """Whether a call has no sequence of several queries."""
        return call.sizes[max(self.shape.layout.find("s"), 0)] == 1


class AttentionProgram(TensorProgram[AttentionLink]):
    """Attends; saves queries, keys, values, the result and its statistics."""

    __slots__ = ()

    def remade(self, saved: Saved, call: Call, out: QuantizeRequest) -> Handover:
        """Return the result, which is saved."""
        rows = saved[:-NUM_SAVED][-2]
        assert rows is not None
        return out(rows)

    def forward(self, x: Any, params: Params, call: Call, out: Out = None) -> Forward:
        """Compute the rows of the result, and fill ``max_logit_out``."""
        link, shape = self._link, self._link.shape
        keywords = dict(link.keywords(params, call))
        q = self._in_layout(x, shape.head_dim, call)
        run = link.run_paged if link.has_single_queries(call) else None
        if run is not None:
            pages = AttentionTensors(*call.tensors).pages(params)
            keys, values = pages.operands
            keywords["page_table"] = pages.page_table
        elif link.run_cached is not None:
            run = link.run_cached
            keys, values, *_ = link.unpaged(params, call, x.dtype)
            if shape.layout == "thd":
                keywords["max_seqlen_kv"] = len(keys) // (len(keywords["cu_seqlens_kv"]) - 1)
        else:
            run, (keys, values, *_) = link.run, link.read(params, call, x.dtype)
            check_memory(link.fallback, shape, q, keys, call)
        y, stats, max_logit = run(q, keys, values, **keywords)
        if max_logit is not None:
            hand_out(max_logit, call)
        rows = y.reshape(x.shape[0], shape.heads * shape.head_dim_v)
        saved: Saved = ()
        if True in self._needs_grad:
            saved = (x, *params, rows, stats, *saved_tensors(call))
        return rows if out is None else out(rows), saved, None

    def backward(
        self, grad: Any, saved: Saved, context: Any, call: Call, out: Out = None
    ) -> Backward:
        """Compute the gradients of the queries and of the parameters."""
        link, shape = self._link, self._link.shape
        x, *params, rows, stats = saved[:-NUM_SAVED]
        call = of_forward(call, saved)
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

    def _run_backward(self, *tensors: Any, **keywords: Any) -> Any:
        """Run backward, with the gradient of the bias if it is needed."""
        link = self._link
        needs_bias = link.shape.has_bias and self._needs_grad[3]
        return (link.run_bias_backward if needs_bias else link.run_backward)(*tensors, **keywords)

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
        if shape.cached:  # it keeps no history, and refuses backward itself
            grads[:2] = None, None
        grad_params = [
            grad if needed else None for grad, needed in zip(grads, needs[1:], strict=True)
        ]
        if not needs[0]:
            return (None, *grad_params)
        grad_x = grad_q.reshape(size)
        return (grad_x if out is None else out(grad_x), *grad_params)

    def _in_layout(self, rows: torch.Tensor, head_dim: int, call: Call) -> torch.Tensor:
        """Return ``rows [tokens, heads * head_dim]`` in the layout of the queries."""
        shape = self._link.shape
        tokens = (rows.shape[0],) if shape.layout == "thd" else call.sizes[:2]
        return rows.reshape(*tokens, shape.heads, head_dim)
