"""Attention as operators of torch: all tensors of a call in one list, in the order of the contract.

None stands for a keyword that the call does not have. ``sizes`` are ``max_seqlen_q`` and
``max_seqlen_kv``, or None: a package of AOTInductor cannot pass an empty list of numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from fp8core.backend_api import AttentionBackwardDesc, AttentionDesc, Operand, OperandSpec
from fp8core.backend_api.record import ResultShape, computing_dtype
from fp8core.torch_ops.definition import bound, define, empty, settle_all
from fp8core.torch_ops.encoding import Operation, decode
from fp8core.torch_ops.shapes import with_records

__all__ = ["attention_backward_call", "attention_call", "flat_call"]

_KEYWORDS = (
    *("bias", "alibi_slopes", "mask", "softmax_offset", "cu_seqlens_q", "cu_seqlens_kv"),
    *("cu_seqlens_q_padded", "cu_seqlens_kv_padded", "rng", "s_scale", "dp_scale"),
)
_RECORDS = ("s_amax_out", "dp_amax_out")
_SIZES = ("max_seqlen_q", "max_seqlen_kv")

Tensors = Sequence[torch.Tensor | None]


def flat_call(
    *inputs: torch.Tensor | Operand | None, **keywords: Any
) -> tuple[list[torch.Tensor | None], list[int] | None]:
    """Return the tensors and the sizes of a call, as the operators take them.

    The tensors are the inputs, the codes of those that are quantized; the keywords; the record of
    an amax, or None; and the scales of the quantized inputs, in order.
    """
    tensors = [one.data if isinstance(one, Operand) else one for one in inputs]
    tensors += [keywords.get(name) for name in _KEYWORDS]
    tensors.append(_record_of(keywords))
    tensors += [one.scale_inv for one in inputs if isinstance(one, Operand)]
    return tensors, [keywords[name] for name in _SIZES if name in keywords] or None


def _record_of(keywords: dict[str, Any]) -> torch.Tensor | None:
    return next((keywords[name] for name in _RECORDS if keywords.get(name) is not None), None)


class _Given(NamedTuple):
    """The arguments of a call as the backend takes them; ``record``, the amax that it writes, is a
    copy, which becomes a result: an operator cannot both return and write."""

    inputs: list[Any]
    keywords: dict[str, Any]
    record: torch.Tensor | None


def _given(
    tensors: Tensors, sizes: Sequence[int] | None, specs: Sequence[OperandSpec | None], record: str
) -> _Given:
    """Return the arguments of a call; ``specs`` are those of its inputs, ``record`` the name of
    the keyword of an amax."""
    count = len(specs)
    inputs: list[Any] = list(tensors[:count])
    end = count + len(_KEYWORDS)
    scales = iter(tensors[end + 1 :])
    for at, spec in enumerate(specs):
        if spec is not None:
            inputs[at] = Operand(inputs[at], next(scales))
    named = zip(_KEYWORDS, tensors[count:end], strict=True)
    keywords: dict[str, Any] = {name: one for name, one in named if one is not None}
    keywords |= dict(zip(_SIZES, sizes or (), strict=False))
    amax = tensors[end]
    new = None if amax is None else amax.clone()
    if new is not None:
        keywords[record] = new
    return _Given(inputs, keywords, new)


def _recorded(results: list[torch.Tensor], keywords: dict[str, Any]) -> list[torch.Tensor]:
    """Return ``results`` without the amax that is the last of them, which is written."""
    amax = _record_of(keywords)
    if amax is None:
        return results
    amax.copy_(results[-1])
    return results[:-1]


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
    wide = computing_dtype(desc.dtype)
    results = [
        ResultShape((*q.shape[:-1], desc.head_dim_v), torch.uint8 if desc.out else desc.dtype),
        ResultShape(statistics, wide),
    ]
    if desc.max_logit:
        results.append(ResultShape((desc.heads,), wide))
    return with_records(results, tensors[3 + len(_KEYWORDS)], None)


def _device(tensors: Tensors) -> torch.device:
    assert tensors[0] is not None
    return tensors[0].device


@define(
    "(str operation, Tensor?[] tensors, SymInt[]? sizes) -> Tensor[]",
    lambda text, tensors, sizes: empty(_shapes(text, tensors), _device(tensors)),
)
def _attention(text: str, tensors: Tensors, sizes: Sequence[int] | None) -> list[torch.Tensor]:
    desc: Any = decode(text).desc
    given = _given(tensors, sizes, (desc.qkv,) * 3, "s_amax_out")
    results = bound(text, _device(tensors))(*given.inputs, **given.keywords)
    return settle_all([*results, given.record], _shapes(text, tensors))


def _backward_shapes(text: str, tensors: Tensors) -> list[ResultShape]:
    desc: Any = decode(text).desc
    assert isinstance(desc, AttentionBackwardDesc)
    inputs, bias = [one for one in tensors[1:4] if one is not None], tensors[6]
    results = [ResultShape(tuple(one.shape), desc.attention.dtype) for one in inputs]
    if desc.bias_grad:
        assert bias is not None
        results.append(ResultShape(tuple(bias.shape), bias.dtype))
    if desc.attention.softmax == "learnable":
        results.append(ResultShape((desc.attention.heads,), computing_dtype(desc.attention.dtype)))
    return with_records(results, tensors[6 + len(_KEYWORDS)], None)


@define(
    "(str operation, Tensor?[] tensors, SymInt[]? sizes) -> Tensor[]",
    lambda text, tensors, sizes: empty(_backward_shapes(text, tensors), _device(tensors)),
)
def _attention_backward(
    text: str, tensors: Tensors, sizes: Sequence[int] | None
) -> list[torch.Tensor]:
    desc: Any = decode(text).desc
    specs = (desc.grad_output, *(desc.attention.qkv,) * 3, None, None)
    given = _given(tensors, sizes, specs, "dp_amax_out")
    results = bound(text, _device(tensors))(*given.inputs, **given.keywords)
    return settle_all([*results, given.record], _backward_shapes(text, tensors))


def attention_call(text: str, operation: Operation) -> Callable[..., Any]:
    """Return the operator of forward as a callable of the backend API's signature."""
    desc = operation.desc
    assert isinstance(desc, AttentionDesc)

    def run(*inputs: torch.Tensor | Operand, **keywords: Any) -> tuple[torch.Tensor | None, ...]:
        results = _recorded(list(_attention(text, *flat_call(*inputs, **keywords))), keywords)
        return tuple(results) if desc.max_logit else (*results, None)

    return run


def attention_backward_call(text: str, operation: Operation) -> Callable[..., Any]:
    """Return the operator of backward as a callable of the backend API's signature."""
    desc = operation.desc
    assert isinstance(desc, AttentionBackwardDesc)

    def run(*inputs: torch.Tensor | Operand, **keywords: Any) -> tuple[torch.Tensor | None, ...]:
        results = list(_attention_backward(text, *flat_call(*inputs, **keywords)))
        grads = _recorded(results, keywords)
        offset = grads.pop() if desc.attention.softmax == "learnable" else None
        bias = grads.pop() if desc.bias_grad else None
        return (*grads, bias, offset)

    return run
