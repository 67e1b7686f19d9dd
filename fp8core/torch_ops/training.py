"""What training needs around the layers, as operators of torch: routes, routers, cross entropy and
steps of optimizers.

Results that are None are left out, as keywords without a value are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fp8core.torch_ops.definition import Tensors, bound, define, empty, given, settle_all
from fp8core.torch_ops.encoding import Operation, decode
from fp8core.torch_ops.shapes import ResultShape

__all__ = ["TRAINING_CALLS", "training_call"]

Call = Callable[..., Any]
Optional = torch.Tensor | None


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _route_shapes(routing: torch.Tensor, rows: int) -> list[ResultShape]:
    tokens, slots = routing.shape
    return [ResultShape((tokens, slots), torch.int32), ResultShape((rows,), torch.int32)]


@define(
    "(str operation, Tensor routing, SymInt rows) -> Tensor[]",
    lambda text, routing, rows: empty(_route_shapes(routing, rows), routing.device),
)
def _route(text: str, routing: torch.Tensor, rows: int) -> list[torch.Tensor]:
    result = bound(text, routing.device)(routing, rows)
    return settle_all(result, _route_shapes(routing, rows))


def _dispatch_shapes(x: torch.Tensor, sources: torch.Tensor, probs: Optional) -> list[ResultShape]:
    rows = sources.shape[0]
    shapes = [ResultShape((rows, x.shape[1]), x.dtype)]
    return shapes if probs is None else [*shapes, ResultShape((rows,), probs.dtype)]


@define(
    "(str operation, Tensor x, Tensor index, Tensor sources, Tensor? probs) -> Tensor[]",
    lambda text, x, index, sources, probs: empty(_dispatch_shapes(x, sources, probs), x.device),
)
def _dispatch_rows(
    text: str, x: torch.Tensor, index: torch.Tensor, sources: torch.Tensor, probs: Optional
) -> list[torch.Tensor]:
    result = bound(text, x.device)(x, index, sources, **given(probs=probs))
    return settle_all(result, _dispatch_shapes(x, sources, probs))


def _combine_shapes(
    x: torch.Tensor, index: torch.Tensor, row_values: Optional
) -> list[ResultShape]:
    tokens, slots = index.shape
    shapes = [ResultShape((tokens, x.shape[1]), x.dtype)]
    if row_values is not None:
        shapes.append(ResultShape((tokens, slots), row_values.dtype))
    return shapes


@define(
    "(str operation, Tensor x, Tensor index, Tensor? weights, Tensor? row_values) -> Tensor[]",
    lambda text, x, index, weights, row_values: empty(
        _combine_shapes(x, index, row_values), x.device
    ),
)
def _combine_rows(
    text: str, x: torch.Tensor, index: torch.Tensor, weights: Optional, row_values: Optional
) -> list[torch.Tensor]:
    keywords = given(weights=weights, row_values=row_values)
    result = bound(text, x.device)(x, index, **keywords)
    return settle_all(result, _combine_shapes(x, index, row_values))


def _combine_backward_shapes(x: torch.Tensor, weights: torch.Tensor) -> list[ResultShape]:
    return [ResultShape(tuple(one.shape), one.dtype) for one in (x, weights)]


@define(
    "(str operation, Tensor grad, Tensor x, Tensor index, Tensor sources, Tensor weights) "
    "-> Tensor[]",
    lambda text, grad, x, index, sources, weights: empty(
        _combine_backward_shapes(x, weights), x.device
    ),
)
def _combine_rows_backward(
    text: str,
    grad: torch.Tensor,
    x: torch.Tensor,
    index: torch.Tensor,
    sources: torch.Tensor,
    weights: torch.Tensor,
) -> list[torch.Tensor]:
    result = bound(text, x.device)(grad, x, index, sources, weights)
    return settle_all(result, _combine_backward_shapes(x, weights))


def _router_shapes(text: str, logits: torch.Tensor) -> list[ResultShape]:
    desc: Any = decode(text).desc
    size = tuple(logits.shape)
    dtype = torch.float32 if desc.of_all else desc.dtype
    return [ResultShape(size, one) for one in (dtype, torch.bool, torch.float32)]


@define(
    "(str operation, Tensor logits, Tensor? expert_bias) -> Tensor[]",
    lambda text, logits, expert_bias: empty(_router_shapes(text, logits), logits.device),
)
def _router(text: str, logits: torch.Tensor, expert_bias: Optional) -> list[torch.Tensor]:
    result = bound(text, logits.device)(logits, **given(expert_bias=expert_bias))
    return settle_all(result, _router_shapes(text, logits))


def _router_backward_shape(text: str, scores: torch.Tensor) -> ResultShape:
    desc: Any = decode(text).desc
    return ResultShape(tuple(scores.shape), desc.dtype)


@define(
    "(str operation, Tensor grad_probs, Tensor routing_map, Tensor scores) -> Tensor",
    lambda text, grad_probs, routing_map, scores: _router_backward_shape(text, scores).empty(
        scores.device
    ),
)
def _router_backward(
    text: str, grad_probs: torch.Tensor, routing_map: torch.Tensor, scores: torch.Tensor
) -> torch.Tensor:
    result = bound(text, scores.device)(grad_probs, routing_map, scores)
    return settle_all([result], [_router_backward_shape(text, scores)])[0]


def _cross_entropy_shapes(x: torch.Tensor) -> list[ResultShape]:
    return [ResultShape((x.shape[0],), _wide(x.dtype))] * 3


@define(
    "(str operation, Tensor x, Tensor target) -> Tensor[]",
    lambda text, x, target: empty(_cross_entropy_shapes(x), x.device),
)
def _cross_entropy(text: str, x: torch.Tensor, target: torch.Tensor) -> list[torch.Tensor]:
    return settle_all(bound(text, x.device)(x, target), _cross_entropy_shapes(x))


@define(
    "(str operation, Tensor grad, Tensor x, Tensor target, Tensor largest, Tensor log_sum) "
    "-> Tensor",
    lambda text, grad, x, *_: ResultShape(tuple(x.shape), x.dtype).empty(x.device),
)
def _cross_entropy_backward(
    text: str,
    grad: torch.Tensor,
    x: torch.Tensor,
    target: torch.Tensor,
    largest: torch.Tensor,
    log_sum: torch.Tensor,
) -> torch.Tensor:
    result = bound(text, x.device)(grad, x, target, largest, log_sum)
    return settle_all([result], [ResultShape(tuple(x.shape), x.dtype)])[0]


# The numbers of a step: a tensor of one element for those that the device knows, None for the
# others, and all of them as numbers.


@define(
    "(str operation, Tensor[] grads, Tensor(a!)[] params, Tensor(b!)[] exp_avgs, "
    "Tensor(c!)[] exp_avg_sqs, Tensor(d!)[] masters, Tensor?[] on_device, float[] numbers) -> ()",
    lambda text, grads, params, exp_avgs, exp_avg_sqs, masters, on_device, numbers: None,
)
def _adam(
    text: str,
    grads: Tensors,
    params: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    masters: Tensors,
    on_device: Sequence[Optional],
    numbers: Sequence[float],
) -> None:
    keywords = dict(zip(_ADAM_NUMBERS, numbers, strict=True))
    keywords |= given(**dict(zip(_ADAM_TENSORS, on_device, strict=True)))
    keywords["bias_correction"] = bool(keywords["bias_correction"])
    lists = (grads, params, exp_avgs, exp_avg_sqs, masters)
    bound(text, params[0].device)(*lists, **keywords)


_ADAM_NUMBERS = (
    *("lr", "beta1", "beta2", "eps", "weight_decay", "step", "bias_correction", "inv_scale"),
)
_ADAM_TENSORS = ("lr", "step", "inv_scale", "found_inf")


_ADAM_DEFAULTS = {"bias_correction": True, "inv_scale": 1.0}


def _adam_call(text: str) -> Call:
    """Return a step's call: lists of tensors, then numbers by keyword."""

    def run(*lists: Tensors, **keywords: Any) -> None:
        if not lists[0]:
            return
        on_device = [keywords.get(name) for name in _ADAM_TENSORS]
        on_device = [one if isinstance(one, torch.Tensor) else None for one in on_device]
        numbers = [keywords.get(name, _ADAM_DEFAULTS.get(name)) for name in _ADAM_NUMBERS]
        plain = [0.0 if isinstance(n, torch.Tensor) else float(n) for n in numbers]  # type: ignore[arg-type]  # only names with a default may be missing
        _adam(text, *map(list, lists), on_device, plain)

    return run


def _padded(results: Sequence[torch.Tensor]) -> tuple[Optional, Optional]:
    """Return a result, and a second one or None."""
    return results[0], results[1] if len(results) > 1 else None


_CALLS: dict[str, Callable[[str], Call]] = {
    "route": lambda text: lambda routing, rows: tuple(_route(text, routing, rows)),
    "dispatch_rows": lambda text: (
        lambda x, index, sources, *, probs=None: _padded(
            _dispatch_rows(text, x, index, sources, probs)
        )
    ),
    "combine_rows": lambda text: (
        lambda x, index, *, weights=None, row_values=None: _padded(
            _combine_rows(text, x, index, weights, row_values)
        )
    ),
    "combine_rows_backward": lambda text: (
        lambda *arguments: tuple(_combine_rows_backward(text, *arguments))
    ),
    "router": lambda text: (
        lambda logits, *, expert_bias=None: tuple(_router(text, logits, expert_bias))
    ),
    "router_backward": lambda text: lambda *arguments: _router_backward(text, *arguments),
    "cross_entropy": lambda text: lambda x, target: tuple(_cross_entropy(text, x, target)),
    "cross_entropy_backward": lambda text: (
        lambda *arguments: _cross_entropy_backward(text, *arguments)
    ),
    "adam": _adam_call,
}


def training_call(op: str, text: str) -> Call:
    """Return the operator of ``op`` as a callable of the backend API's signature."""
    return _CALLS[op](text)


def _made(op: str) -> Callable[[str, Operation], Call]:
    return lambda text, operation: training_call(op, text)


TRAINING_CALLS: dict[str, Callable[[str, Operation], Call]] = {op: _made(op) for op in _CALLS}
"""For each operation, what makes a callable of the backend API's signature."""
