"""Routes of tokens to the rows of experts, and rows sent along them."""

from __future__ import annotations

import torch

from fp8core.backend_api import CombineBackwardDesc, CombineDesc, DispatchDesc, RouteDesc

__all__ = ["combine_rows", "combine_rows_backward", "dispatch_rows", "route"]


def route(desc: RouteDesc, routing: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``index [t, k]`` and ``sources [rows]``; see the backend API."""
    if desc.kind == "rows":
        places = routing.long()
    else:
        places = _by_mask(routing) if desc.kind == "mask" else _by_experts(routing)
    is_row = (places >= 0) & (places < rows)
    index = torch.where(is_row, places, -1).to(torch.int32).contiguous()
    return index, _inverse(index, rows)


def _by_mask(routing: torch.Tensor) -> torch.Tensor:
    """Return the rows ``[t, e]``, expert by expert, -1 where a token does not go."""
    goes = (routing != 0).t()
    places = goes.flatten().cumsum(0).reshape(goes.shape) - 1
    return torch.where(goes, places, -1).t()


def _by_experts(routing: torch.Tensor) -> torch.Tensor:
    """Return the rows ``[t, k]``, expert by expert; negative for an expert that is negative."""
    experts = routing.flatten().long()
    order = experts.argsort(stable=True)
    places = torch.empty_like(order).scatter_(
        0, order, torch.arange(len(order), device=order.device)
    )
    return (places - (experts < 0).sum()).reshape(routing.shape)


def _inverse(index: torch.Tensor, rows: int) -> torch.Tensor:
    """Return the sources ``[rows]`` of a route; behind them lies a row for what goes nowhere."""
    flat = index.flatten().long()
    sources = torch.full((rows + 1,), -1, dtype=torch.int32, device=index.device)
    entries = torch.arange(len(flat), dtype=torch.int32, device=index.device)
    sources[torch.where(flat >= 0, flat, rows)] = entries
    return sources[:rows].clone()


def dispatch_rows(
    desc: DispatchDesc,
    x: torch.Tensor,
    index: torch.Tensor,
    sources: torch.Tensor,
    *,
    probs: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return ``y [m, n]``, and the probabilities of its rows; see the backend API."""
    is_row, entries = _valid(sources, index.numel())
    permuted = None
    if probs is not None:
        permuted = _picked(probs.flatten(), entries, is_row)
        if desc.skips_improbable:
            is_row = is_row & (permuted != 0)
    return _picked(x, entries // max(index.shape[1], 1), is_row), permuted


def combine_rows(
    desc: CombineDesc,
    x: torch.Tensor,
    index: torch.Tensor,
    *,
    weights: torch.Tensor | None = None,
    row_values: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return ``y [t, n]``, and the values of each token's rows; see the backend API."""
    wide = _wide(desc.dtype)
    total = torch.zeros(index.shape[0], x.shape[1], dtype=wide, device=x.device)
    is_row, rows = _valid(index, x.shape[0])
    for slot in range(index.shape[1]):
        row = _picked(x, rows[:, slot], is_row[:, slot]).to(wide)
        if weights is not None:
            weight = torch.where(is_row[:, slot], weights[:, slot].to(wide), 0)
            row = row * weight[:, None]
        total = total + row
    values = None if row_values is None else _picked(row_values, rows, is_row)
    return total.to(desc.dtype), values


def combine_rows_backward(
    desc: CombineBackwardDesc,
    grad: torch.Tensor,
    x: torch.Tensor,
    index: torch.Tensor,
    sources: torch.Tensor,
    weights: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of ``x [m, n]`` and of ``weights [t, k]``; see the backend API."""
    wide, slots = _wide(desc.dtype), index.shape[1]
    is_row, entries = _valid(sources, index.numel())
    weight = _picked(weights.flatten().to(wide), entries, is_row)
    grad_x = _picked(grad.to(wide), entries // max(slots, 1), is_row) * weight[:, None]
    is_row, rows = _valid(index, x.shape[0])
    products = [
        (grad.to(wide) * _picked(x, rows[:, slot], is_row[:, slot]).to(wide)).sum(-1)
        for slot in range(slots)
    ]
    grad_weights = torch.stack(products, dim=1) if products else weights.new_zeros(weights.shape)
    grad_weights = torch.where(is_row, grad_weights, 0)
    return grad_x.to(desc.dtype), grad_weights.to(weights.dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _valid(numbers: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which of ``numbers`` are below ``count`` and not negative, and those, 0 elsewhere."""
    is_valid = (numbers >= 0) & (numbers < count)
    return is_valid, torch.where(is_valid, numbers, 0).long()


def _picked(x: torch.Tensor, rows: torch.Tensor, is_row: torch.Tensor) -> torch.Tensor:
    """Return ``x[rows]``, zeros where there is no row."""
    if not x.shape[0]:
        return x.new_zeros(*rows.shape, *x.shape[1:])
    mask = is_row.reshape(*is_row.shape, *(1,) * (x.dim() - 1))
    return torch.where(mask, x[rows], torch.zeros((), dtype=x.dtype, device=x.device)).contiguous()
