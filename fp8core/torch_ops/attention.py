"""Attention as operators of torch: all tensors of a call in one list, in the order of the contract.

None stands for a keyword that the call does not have. ``sizes`` are ``max_seqlen_q`` and
``max_seqlen_kv``, or empty.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fp8core.backend_api import AttentionBackwardDesc, AttentionDesc
from fp8core.torch_ops.encoding import Operation, decode
from fp8core.torch_ops.operators import bound, define, empty, settle_all
from fp8core.torch_ops.shapes import ResultShape

__all__ = ["attention_backward_call", "attention_call", "flat_call"]

_KEYWORDS = (
    *("bias", "alibi_slopes", "mask", "softmax_offset", "cu_seqlens_q", "cu_seqlens_kv"),
    *("cu_seqlens_q_padded", "cu_seqlens_kv_padded", "rng"),
)
_SIZES = ("max_seqlen_q", "max_seqlen_kv")

Tensors = Sequence[torch.Tensor | None]


def _keywords(tensors: Tensors, sizes: Sequence[int]) -> dict[str, Any]:
    """Return the keywords of a call from the tensors that follow its arguments."""
    named: dict[str, Any] = dict(zip(_KEYWORDS, tensors, strict=True))
    given = {name: tensor for name, tensor in named.items() if tensor is not None}
    return given | dict(zip(_SIZES, sizes, strict=False))


def flat_call(
    *inputs: torch.Tensor, **keywords: Any
) -> tuple[list[torch.Tensor | None], list[int]]:
    """Return the tensors and the sizes of a call, as the operators take them."""
    tensors = [*inputs, *(keywords.get(name) for name in _KEYWORDS)]
    return tensors, [keywords[name] for name in _SIZES if name in keywords]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _shapes(text: str, tensors: Tensors) -> list[ResultShape]:
    desc: Any = decode(text).desc
    assert isinstance(desc, AttentionDesc)
    q = tensors[0]
    assert q is not None
    if desc.layout == "thd":
        statistics: tuple[int, ...] = (q.shape[0], desc.heads)
    else:
        sequence, batch = (q.shape[0], q.shape[1])[:: 1 if desc.layout == "sbhd" else -1]
        statistics = (batch, desc.heads, sequence)
    wide = _wide(desc.dtype)
    results = [
        ResultShape((*q.shape[:-1], desc.head_dim_v), desc.dtype),
        ResultShape(statistics, wide),
    ]
    return [*results, ResultShape((desc.heads,), wide)] if desc.max_logit else results


def _device(tensors: Tensors) -> torch.device:
    assert tensors[0] is not None
    return tensors[0].device


@define(
    "(str operation, Tensor?[] tensors, SymInt[] sizes) -> Tensor[]",
    lambda text, tensors, sizes: empty(_shapes(text, tensors), _device(tensors)),
)
def _attention(text: str, tensors: Tensors, sizes: Sequence[int]) -> list[torch.Tensor]:
    run = bound(text, _device(tensors))
    results = run(*tensors[:3], **_keywords(tensors[3:], sizes))
    return settle_all(results, _shapes(text, tensors))


def _backward_shapes(text: str, tensors: Tensors) -> list[ResultShape]:
    desc: Any = decode(text).desc
    assert isinstance(desc, AttentionBackwardDesc)
    inputs, bias = [one for one in tensors[1:4] if one is not None], tensors[6]
    results = [ResultShape(tuple(one.shape), desc.attention.dtype) for one in inputs]
    if desc.bias_grad:
        assert bias is not None
        results.append(ResultShape(tuple(bias.shape), bias.dtype))
    if desc.attention.softmax == "learnable":
        results.append(ResultShape((desc.attention.heads,), _wide(desc.attention.dtype)))
    return results


@define(
    "(str operation, Tensor?[] tensors, SymInt[] sizes) -> Tensor[]",
    lambda text, tensors, sizes: empty(_backward_shapes(text, tensors), _device(tensors)),
)
def _attention_backward(text: str, tensors: Tensors, sizes: Sequence[int]) -> list[torch.Tensor]:
    run = bound(text, _device(tensors))
    results = run(*tensors[:6], **_keywords(tensors[6:], sizes))
    return settle_all(results, _backward_shapes(text, tensors))


def attention_call(text: str, operation: Operation) -> Callable[..., Any]:
    """Return the operator of forward as a callable of the backend API's signature."""
    desc = operation.desc
    assert isinstance(desc, AttentionDesc)

    def run(*inputs: torch.Tensor, **keywords: Any) -> tuple[torch.Tensor | None, ...]:
        results = _attention(text, *flat_call(*inputs, **keywords))
        return tuple(results) if desc.max_logit else (*results, None)

    return run


def attention_backward_call(text: str, operation: Operation) -> Callable[..., Any]:
    """Return the operator of backward as a callable of the backend API's signature."""
    desc = operation.desc
    assert isinstance(desc, AttentionBackwardDesc)

    def run(*inputs: torch.Tensor, **keywords: Any) -> tuple[torch.Tensor | None, ...]:
        grads = list(_attention_backward(text, *flat_call(*inputs, **keywords)))
        offset = grads.pop() if desc.attention.softmax == "learnable" else None
        bias = grads.pop() if desc.bias_grad else None
        return (*grads, bias, offset)

    return run
