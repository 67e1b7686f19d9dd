"""Routes of tokens to rows and back, each of whose two directions is the other's gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fp8core.backend_api import CombineBackwardDesc, CombineDesc, DispatchDesc, RouteDesc
from fp8core.chain.alone import Run, bound, derivatives, in_torch, is_transformed, needs_node, plain
from fp8core.errors import OperandError, did_you_mean
from fp8core.torch_ops.companions import Companions
from fp8core.torch_ops.shapes import is_captured

_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_MAP_TYPES = ("mask", "index")


def is_readable(x: torch.Tensor) -> bool:
    """Say whether the host knows the values of ``x`` without waiting for a device."""
    return x.device.type == "cpu" and not (is_captured(x) or is_transformed())


def check_map_type(owner: str, map_type: str) -> None:
    """Refuse ``map_type`` unless it is one of the two."""
    if map_type not in _MAP_TYPES:
        raise OperandError(
            f"{owner}(map_type={map_type!r}): expected one of {', '.join(_MAP_TYPES)}."
            f"{did_you_mean(str(map_type), _MAP_TYPES)}"
        )


def check_rows(owner: str, name: str, x: torch.Tensor) -> torch.Tensor:
    """Return ``x``, dequantized if it is stored quantized, or refuse it."""
    if not isinstance(x, torch.Tensor) or x.dim() != 2 or x.dtype not in _FLOATS:
        shown = f"{x.dtype} {list(x.shape)}" if isinstance(x, torch.Tensor) else type(x).__name__
        raise OperandError(f"{owner}: {name} is {shown}; expected floating-point [rows, hidden].")
    return plain(x, f"{name} of {owner}")


def check_map(owner: str, inp: torch.Tensor, routing_map: torch.Tensor) -> None:
    """Refuse ``routing_map`` unless it holds integers in a row for each token."""
    check_integers(owner, "routing_map", routing_map, None, inp)
    if routing_map.dim() != 2 or routing_map.shape[0] != inp.shape[0]:
        raise OperandError(
            f"{owner}: routing_map is {list(routing_map.shape)}, inp {list(inp.shape)}; expected a "
            f"row of routing_map for each token."
        )


def check_integers(
    owner: str,
    name: str,
    x: torch.Tensor,
    shape: tuple[int, ...] | None,
    beside: torch.Tensor | None = None,
) -> None:
    """Refuse ``x`` unless it holds integers in ``shape``, on the device of ``beside``."""
    if not isinstance(x, torch.Tensor) or x.dtype not in _INTEGERS:
        shown = x.dtype if isinstance(x, torch.Tensor) else type(x).__name__
        raise OperandError(f"{owner}: {name} is {shown}; expected a tensor of integers.")
    if shape is not None and tuple(x.shape) != shape:
        raise OperandError(f"{owner}: {name} is {list(x.shape)}; expected {list(shape)}.")
    if beside is not None and x.device != beside.device:
        raise OperandError(
            f"{owner}: {name} is on {x.device}, inp on {beside.device}. Move one of them; nothing "
            f"is moved silently."
        )


def check_count(owner: str, count: int) -> int:
    """Return the number of rows that was asked for, also where a tensor holds it, or refuse it."""
    number = -1 if count is None or isinstance(count, float) else int(count)  # of a tensor too
    if number < 0:
        raise OperandError(
            f"{owner}(num_out_tokens={count}): expected an integer of 0 or above; the number of "
            f"rows that the tokens take is int(routing_map.sum())."
        )
    return number


def check_weights(
    owner: str,
    name: str,
    weights: torch.Tensor,
    beside: torch.Tensor,
    shape: tuple[int, ...] | None = None,
) -> torch.Tensor:
    """Return ``weights``, dequantized if stored quantized, or refuse them.

    The weights have the shape of ``beside``, or ``shape``, and its device.
    """
    expected = tuple(beside.shape) if shape is None else shape
    if not isinstance(weights, torch.Tensor) or weights.dtype not in _FLOATS:
        shown = weights.dtype if isinstance(weights, torch.Tensor) else type(weights).__name__
        raise OperandError(f"{owner}: {name} is {shown}; expected a floating-point tensor.")
    if tuple(weights.shape) != expected or weights.device != beside.device:
        raise OperandError(
            f"{owner}: {name} is {list(weights.shape)} on {weights.device}; expected "
            f"{list(expected)} on {beside.device}."
        )
    return plain(weights, f"{name} of {owner}")


def index_of(
    owner: str,
    inp: torch.Tensor,
    row_id_map: torch.Tensor,
    map_type: str,
    weights: torch.Tensor | None,
    restore_shape: Sequence[int] | None,
) -> torch.Tensor:
    """Return ``index [tokens, k]`` of a route."""
    check_integers(owner, "row_id_map", row_id_map, None, inp)
    if map_type == "mask":
        if row_id_map.dim() != 2:
            raise OperandError(
                f"{owner}: row_id_map is {list(row_id_map.shape)}; expected that of a function "
                f"that permutes by a mask, [tokens, experts]. For that of an index, set "
                f"map_type='index'."
            )
        return row_id_map
    tokens, width = row_id_map.numel(), 1
    if weights is not None and weights.dim() == 2:
        tokens, width = weights.shape
    elif restore_shape is not None:
        tokens = restore_shape[0]
    if row_id_map.dim() != 1 or (row_id_map.numel() % tokens if tokens else row_id_map.numel()):
        raise OperandError(
            f"{owner}: row_id_map is {list(row_id_map.shape)} of {tokens} tokens; expected that of "
            f"moe_permute(map_type='index'), which has k rows for each token."
        )
    if not tokens:
        return row_id_map.reshape(0, width)
    return row_id_map.reshape(row_id_map.numel() // tokens, tokens).t()


def check_chunks(
    owner: str, rows: int, split_sizes: torch.Tensor, sorted_index: torch.Tensor
) -> None:
    """Refuse chunks unless they are all ``rows`` rows, and their new order has each once."""
    sizes, order = split_sizes.tolist(), sorted_index.tolist()
    if sizes and (min(sizes) < 0 or sum(sizes) != rows):
        raise OperandError(
            f"{owner}: split_sizes {sizes} add up to {sum(sizes)}; expected sizes of 0 and above "
            f"that add up to the {rows} rows of inp."
        )
    if sorted(order) != list(range(len(sizes))):
        raise OperandError(
            f"{owner}: sorted_index {order} of {len(sizes)} chunks; expected the numbers 0 to "
            f"{len(sizes) - 1}, each once."
        )


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
        saved_x = None if weights is None else x
        ctx.save_for_backward(saved_x, weights, index, _inverse_of(index, x.shape[0]))
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
