"""Routes of tokens to rows and back, each of whose two directions is the other's gradient."""

from __future__ import annotations

from typing import Any

import torch

from fp8core.backend_api import CombineBackwardDesc, CombineDesc, DispatchDesc, RouteDesc
from fp8core.chain.alone import (
    Run,
    bound,
    derivatives,
    in_torch,
    is_transformed,
    needs_node,
)
from fp8core.torch_ops.companions import Companions
from fp8core.torch_ops.shapes import is_captured

__all__ = ["combine", "dispatch", "moved", "route", "route_by_mask"]

Optional = torch.Tensor | None

_inverses: Companions[torch.Tensor] = Companions()
"""The ``sources`` of each ``row_id_map`` of a mask, so that backward needs not invert it again."""


def route(kind: str, routing: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``index`` and ``sources`` of the route that a map of ``kind`` describes."""
    run = bound(RouteDesc, (routing.dtype, kind), routing.device)
    index, sources = run(routing, rows)
    return index, sources


def moved(index: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Return ``index`` with ``offsets [experts]`` added to the rows of each expert."""
    return torch.where(index >= 0, index + offsets, -1).to(torch.int32)


def route_by_mask(routing_map: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the route of a mask, whose inverse is remembered."""
    index, sources = route("mask", routing_map, rows)
    if not (is_captured(index) or is_transformed()):
        _inverses.put(index, sources)
    return index, sources


def _inverse_of(index: torch.Tensor, rows: int) -> Optional:
    """Return the ``sources`` of a route that is known to go to ``rows`` rows, None of another."""
    if is_captured(index):
        return None
    sources = _inverses.get(index)
    return sources if sources is not None and sources.shape[0] == rows else None


def dispatch(
    x: torch.Tensor,
    probs: Optional,
    index: torch.Tensor,
    sources: torch.Tensor,
    *,
    skips_improbable: bool = False,
) -> tuple[torch.Tensor, Optional]:
    """Return the rows of a route, and their probabilities."""
    values = (x.dtype, skips_improbable)
    if is_transformed():
        return _run_dispatch(in_torch(DispatchDesc, values, x.device), x, probs, index, sources)
    if needs_node(x, probs):
        return _Dispatch.apply(x, probs, index, sources, skips_improbable)  # type: ignore[no-any-return,no-untyped-call]  # torch's
    return _run_dispatch(bound(DispatchDesc, values, x.device), x, probs, index, sources)


def _run_dispatch(
    run: Run, x: torch.Tensor, probs: Optional, index: torch.Tensor, sources: torch.Tensor
) -> tuple[torch.Tensor, Optional]:
    keywords = {} if probs is None else {"probs": probs}
    y, permuted = run(x, index, sources, **keywords)
    return y, permuted


class _Dispatch(torch.autograd.Function):
    """The rows of a route; the gradient of a row that is skipped is that of a copy."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        probs: Optional,
        index: torch.Tensor,
        sources: torch.Tensor,
        skips_improbable: bool,
    ) -> tuple[torch.Tensor, Optional]:
        ctx.save_for_backward(index)
        run = bound(DispatchDesc, (x.dtype, skips_improbable), x.device)
        return _run_dispatch(run, x, probs, index, sources)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, grad_probs: Optional) -> tuple[Optional, ...]:
        (index,) = ctx.saved_tensors
        if not ctx.needs_input_grad[1]:
            grad_probs = None
        grad_x, values = combine(grad, None, grad_probs, index)
        return grad_x, values, None, None, None


def combine(
    x: torch.Tensor, weights: Optional, values: Optional, index: torch.Tensor
) -> tuple[torch.Tensor, Optional]:
    """Return each token's rows, added up, and the values of its rows."""
    if is_transformed():
        return _run_combine(in_torch(CombineDesc, (x.dtype,), x.device), x, weights, values, index)
    if needs_node(x, weights, values):
        return _Combine.apply(x, weights, values, index)  # type: ignore[no-any-return,no-untyped-call]  # torch's
    return _run_combine(bound(CombineDesc, (x.dtype,), x.device), x, weights, values, index)


def _run_combine(
    run: Run, x: torch.Tensor, weights: Optional, values: Optional, index: torch.Tensor
) -> tuple[torch.Tensor, Optional]:
    keywords = {} if weights is None else {"weights": weights}
    if values is not None:
        keywords["row_values"] = values
    y, picked = run(x, index, **keywords)
    return y, picked


class _Combine(torch.autograd.Function):
    """Each token's rows, added up."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weights: Optional, values: Optional, index: torch.Tensor
    ) -> tuple[torch.Tensor, Optional]:
        kept = None if weights is None else x
        ctx.save_for_backward(kept, weights, index, _inverse_of(index, x.shape[0]))
        ctx.rows = x.shape[0]
        run = bound(CombineDesc, (x.dtype,), x.device)
        return _run_combine(run, x, weights, values, index)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, grad_values: Optional) -> tuple[Optional, ...]:
        x, weights, index, sources = ctx.saved_tensors
        if sources is None:
            index, sources = route("rows", index, ctx.rows)
        if not ctx.needs_input_grad[2]:
            grad_values = None
        if weights is None:
            grad_x, permuted = dispatch(grad, grad_values, index, sources)
            return grad_x, None, permuted, None
        if torch.is_grad_enabled():
            run = in_torch(CombineDesc, (x.dtype,), x.device)
            grad_x, grad_weights = derivatives(
                lambda x, weights: run(x, index, weights=weights)[:1], (x, weights), (grad,)
            )
        else:
            run = bound(CombineBackwardDesc, (x.dtype,), x.device)
            grad_x, grad_weights = run(grad, x, index, sources, weights)
        return grad_x, grad_weights, None, None
