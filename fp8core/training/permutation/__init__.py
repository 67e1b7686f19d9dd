"""Tokens sent to the rows of experts and back, for mixtures of experts.

The names and arguments are those of ``transformer_engine.pytorch.permutation``. The second result
of the functions that permute, ``row_id_map``, holds the rows of each token, for
:func:`moe_unpermute`.

A number that is no row, such as an offset beyond the tokens, is an error on the CPU. On an
accelerator the host does not read such numbers: they stand for no row there.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch

from fp8core.backend_api import CombineBackwardDesc, CombineDesc, DispatchDesc, RouteDesc
from fp8core.chain.alone import bound, derivatives, in_torch, is_transformed, needs_node, plain
from fp8core.errors import OperandError, checked_choice, elsewhere
from fp8core.tensors.quantized_tensor import QuantizedTensor
from fp8core.tensors.storage import is_square
from fp8core.torch_ops.capture import constant_in_graph, is_captured
from fp8core.torch_ops.companions import Companions

__all__ = [
    "moe_permute",
    "moe_permute_and_pad_with_probs",
    "moe_permute_with_probs",
    "moe_sort_chunks_by_index",
    "moe_sort_chunks_by_index_with_probs",
    "moe_unpermute",
]


def moe_permute(
    inp: torch.Tensor,
    routing_map: torch.Tensor,
    num_out_tokens: int,
    max_token_num: int = -1,
    map_type: str = "mask",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens of expert 0, then those of expert 1, and so on, and ``row_id_map``.

    Args:
        inp: ``[tokens, hidden]``. Of a quantized tensor whose rows can be selected, as no block is
            of several, the codes are permuted; the result holds rows alone where its columns would
            be other codes.
        routing_map: with ``"mask"`` ``[tokens, experts]``, not 0 where a token goes to an expert;
            with ``"index"`` ``[tokens, k]``, the numbers of each token's experts, a negative one
            for none. bool or integers.
        num_out_tokens: the number of rows of the result. Tokens for which there is no row are
            dropped; rows to which no token goes are zeros. With ``"index"``, 0 stands for
            ``tokens * k``.
        max_token_num: has no effect, as no workspace is kept between calls.
        map_type: ``"mask"`` or ``"index"``.

    Raises:
        OperandError: shapes, dtypes or devices that do not fit.
    """
    owner = "moe_permute"
    checked_choice(owner, "map_type", map_type, _MAP_TYPES)
    inp = _rows_or_codes(owner, inp)
    check_map(owner, inp, routing_map)
    rows = check_count(owner, num_out_tokens)
    if map_type == "mask":
        index, sources = route_by_mask(routing_map, rows)
    else:
        index, sources = route("experts", routing_map, rows or routing_map.numel())
    # As Transformer Engine lays it out: the first row of each token, then the second of each.
    row_id_map = index if map_type == "mask" else index.t().flatten()
    return dispatch(inp, None, index, sources)[0], row_id_map


def moe_permute_with_probs(
    inp: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor, num_out_tokens: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the permuted tokens, the probabilities of their rows, and ``row_id_map``.

    Args:
        inp: ``[tokens, hidden]``, as of :func:`moe_permute`.
        probs: ``[tokens, experts]``, floating-point. A row whose probability is 0 is zeros; its
            gradient is that of a copy.
        routing_map, num_out_tokens: as of :func:`moe_permute` with ``"mask"``.

    Raises:
        OperandError: shapes, dtypes or devices that do not fit.
    """
    owner = "moe_permute_with_probs"
    inp = _rows_or_codes(owner, inp)
    check_map(owner, inp, routing_map)
    probs = check_weights(owner, "probs", probs, routing_map)
    index, sources = route_by_mask(routing_map, check_count(owner, num_out_tokens))
    output, permuted = dispatch(inp, probs, index, sources, skips_improbable=True)
    assert permuted is not None
    return output, permuted, index


def moe_permute_and_pad_with_probs(
    inp: torch.Tensor,
    probs: torch.Tensor,
    routing_map: torch.Tensor,
    tokens_per_expert: torch.Tensor,
    align_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Return the results of :func:`moe_permute_with_probs`, with zeros behind the rows of each
    expert up to a multiple of ``align_size``.

    Waits for the device, as the number of rows follows from ``tokens_per_expert``.

    Args:
        inp, probs, routing_map: as of :func:`moe_permute_with_probs`.
        tokens_per_expert: integers ``[experts]``: how many tokens go to each expert.
        align_size: at least 1.

    Returns the padded tokens, the probabilities of the rows, ``row_id_map``, the padding before the
    rows of each expert, int64 ``[experts]``, for :func:`moe_unpermute`, or None if there is none,
    and the numbers of rows of the experts.

    Raises:
        OperandError: shapes, dtypes or devices that do not fit, or, on the CPU,
            ``tokens_per_expert`` that are not those of ``routing_map``.
    """
    owner = "moe_permute_and_pad_with_probs"
    inp = _rows_or_codes(owner, inp)
    check_map(owner, inp, routing_map)
    probs = check_weights(owner, "probs", probs, routing_map)
    if not isinstance(align_size, int) or align_size < 1:
        raise OperandError(f"{owner}(align_size={align_size!r}): expected an integer >= 1.")
    check_integers(owner, "tokens_per_expert", tokens_per_expert, (routing_map.shape[1],))
    counts = tokens_per_expert.to(inp.device).long()
    if is_readable(routing_map) and not torch.equal(counts, (routing_map != 0).sum(0)):
        raise OperandError(
            f"{owner}: tokens_per_expert is {counts.tolist()}, and routing_map sends "
            f"{(routing_map != 0).sum(0).tolist()} tokens to the experts; expected the same."
        )
    padded = (counts + (align_size - 1)) // align_size * align_size
    before, rows = (padded - counts).cumsum(0) - (padded - counts), int(padded.sum())
    index, sources = route("mask", routing_map, rows)
    offsets = before if bool((padded != counts).any()) else None
    padded_index = index
    if offsets is not None:
        padded_index, sources = route("rows", moved(index, offsets), rows)
    output, permuted = dispatch(inp, probs, padded_index, sources, skips_improbable=True)
    assert permuted is not None
    return output, permuted, index, offsets, padded


def moe_unpermute(
    inp: torch.Tensor,
    row_id_map: torch.Tensor,
    merging_probs: torch.Tensor | None = None,
    restore_shape: Sequence[int] | None = None,
    map_type: str = "mask",
    probs: torch.Tensor | None = None,
    pad_offsets: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return each token's rows, added up, ``[tokens, hidden]`` in the dtype of ``inp``.

    Added in float32 (float64 from float64), in the order of the experts, and rounded once; a token
    without rows is zeros.

    Args:
        inp: ``[rows, hidden]``.
        row_id_map: the second result of the function that permuted.
        merging_probs: by which rows are multiplied, floating-point: ``[tokens, experts]``, with
            ``"index"`` ``[tokens, k]``. None adds the rows unscaled, with ``"index"`` where k is 1.
        restore_shape: the shape of the result, of two dimensions; by default ``[tokens, hidden]``.
        map_type: that of :func:`moe_permute`.
        probs: the former name of ``merging_probs``.
        pad_offsets: the fourth result of :func:`moe_permute_and_pad_with_probs`.

    Raises:
        OperandError: shapes, dtypes or devices that do not fit, or, on the CPU, a row that ``inp``
            does not have.
    """
    owner = "moe_unpermute"
    checked_choice(owner, "map_type", map_type, _MAP_TYPES)
    inp = check_rows(owner, "inp", inp)
    if probs is not None:
        if merging_probs is not None:
            raise OperandError(f"{owner}: merging_probs and its former name, probs, are given.")
        warnings.warn("probs is now called merging_probs.", DeprecationWarning, stacklevel=2)
        merging_probs = probs
    index = index_of(owner, inp, row_id_map, map_type, merging_probs, restore_shape)
    if pad_offsets is not None:
        check_integers(owner, "pad_offsets", pad_offsets, (index.shape[1],), inp)
        index = moved(index, pad_offsets)
    if merging_probs is not None:
        merging_probs = check_weights(owner, "merging_probs", merging_probs, index)
    if restore_shape is not None and tuple(restore_shape) != (index.shape[0], inp.shape[1]):
        raise OperandError(
            f"{owner}(restore_shape={list(restore_shape)}): row_id_map has "
            f"{index.shape[0]} tokens, and inp {inp.shape[1]} columns; expected "
            f"{[index.shape[0], inp.shape[1]]}."
        )
    if is_readable(index) and index.numel() and int(index.max()) >= inp.shape[0]:
        raise OperandError(
            f"{owner}: row_id_map has row {int(index.max())}, and inp {inp.shape[0]} rows. Give "
            f"the rows of the function that permuted, all of them."
        )
    return combine(inp, merging_probs, None, index)[0]


def moe_sort_chunks_by_index(
    inp: torch.Tensor, split_sizes: torch.Tensor, sorted_index: torch.Tensor
) -> torch.Tensor:
    """Return the chunks of ``inp`` in the order of ``sorted_index``.

    Args:
        inp: ``[tokens, hidden]``, as of :func:`moe_permute`.
        split_sizes: integers ``[chunks]``: how many rows each chunk has.
        sorted_index: integers ``[chunks]``: the numbers of the chunks, each once, in the new order.

    Raises:
        OperandError: shapes, dtypes or devices that do not fit, or, on the CPU, chunks that are not
            all rows of ``inp``. On an accelerator, rows that no chunk has become zeros.
    """
    return _sort_chunks("moe_sort_chunks_by_index", inp, None, split_sizes, sorted_index)[0]


def moe_sort_chunks_by_index_with_probs(
    inp: torch.Tensor, probs: torch.Tensor, split_sizes: torch.Tensor, sorted_index: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the chunks of ``inp`` and those of ``probs`` in the order of ``sorted_index``.

    Args:
        inp, split_sizes, sorted_index: as of :func:`moe_sort_chunks_by_index`.
        probs: ``[tokens]``, floating-point.

    Raises:
        OperandError: as :func:`moe_sort_chunks_by_index`.
    """
    owner = "moe_sort_chunks_by_index_with_probs"
    output, permuted = _sort_chunks(owner, inp, probs, split_sizes, sorted_index)
    assert permuted is not None
    return output, permuted


def _sort_chunks(
    owner: str,
    inp: torch.Tensor,
    probs: torch.Tensor | None,
    split_sizes: torch.Tensor,
    sorted_index: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    inp = _rows_or_codes(owner, inp)
    check_integers(owner, "split_sizes", split_sizes, None, inp)
    if split_sizes.dim() != 1:
        raise OperandError(f"{owner}: split_sizes is {list(split_sizes.shape)}; expected [chunks].")
    check_integers(owner, "sorted_index", sorted_index, tuple(split_sizes.shape), inp)
    rows = inp.shape[0]
    if is_readable(inp) and is_readable(split_sizes):
        check_chunks(owner, rows, split_sizes, sorted_index)
    if probs is not None:
        probs = check_weights(owner, "probs", probs, inp, (rows,))
    if not rows or not split_sizes.numel():
        return inp.clone(), None if probs is None else probs.clone()
    sizes = split_sizes.long()
    order = sorted_index.long().clamp(0, sizes.numel() - 1)
    ends, new_ends = sizes.cumsum(0), sizes[order].cumsum(0)
    # Row d of the result is in the new chunk that ends first behind it.
    places = torch.arange(rows, device=inp.device)
    chunk = torch.searchsorted(new_ends, places, right=True)
    is_row = chunk < sizes.numel()
    chunk = chunk.clamp(max=sizes.numel() - 1)
    origin = places - new_ends[chunk] + ends[order[chunk]]
    origin = torch.where(is_row & (origin >= 0) & (origin < rows), origin, -1)
    # The route from the result back to inp, turned around.
    sources, index = route("rows", origin[:, None], rows)
    column = None if probs is None else probs[:, None]
    return dispatch(inp, column, index[:, None], sources[:, 0])


_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_MAP_TYPES = ("mask", "index")


def is_readable(x: torch.Tensor) -> bool:
    """Say whether the host knows the values of ``x`` without waiting for a device."""
    return x.device.type == "cpu" and not (is_captured(x) or is_transformed())


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
        raise elsewhere(f"{owner}: {name}", x.device, "inp", beside.device)


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
    index, sources = bound(RouteDesc, (routing.dtype, kind), routing)(routing, rows)
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
    if is_transformed():
        run = in_torch(DispatchDesc, (x.dtype, skips_improbable), x.device)
        y, permuted = run(x, index, sources, **_there(probs=probs))
        return y, permuted
    if needs_node(x, probs):
        return _Dispatch.apply(x, probs, index, sources, skips_improbable)  # type: ignore[no-any-return,no-untyped-call]  # torch's
    return _dispatched(x, probs, index, sources, skips_improbable)


def _dispatched(
    x: torch.Tensor, probs: Optional, index: torch.Tensor, sources: torch.Tensor, skips: bool
) -> tuple[torch.Tensor, Optional]:
    if isinstance(x, QuantizedTensor):
        if index.shape[1]:
            return _dispatched_codes(x, probs, index, sources, skips)
        x = x.decoded()  # of which no row goes to any of no experts
    run = bound(DispatchDesc, (x.dtype, skips), x)
    y, permuted = run(x, index, sources, **_there(probs=probs))
    return y, permuted


def _rows_or_codes(owner: str, inp: torch.Tensor) -> torch.Tensor:
    """Return ``inp``, dequantized where a block of its codes is of several rows."""
    if not isinstance(inp, QuantizedTensor) or inp.dim() != 2 or not len(inp):
        return check_rows(owner, "inp", inp)
    if torch.compiler.is_compiling():
        _allow_in_graph()
    return _codes_or_values(inp)


def _codes_or_values(x: QuantizedTensor) -> torch.Tensor:
    spec = x.plan.rowwise
    return x if spec is not None and spec.block[0] <= 1 else x.dequantize()


def _dispatched_codes(
    x: QuantizedTensor, probs: Optional, index: torch.Tensor, sources: torch.Tensor, skips: bool
) -> tuple[QuantizedTensor, Optional]:
    """Return the rows of a route in the codes of ``x``, zeros where there is none."""
    column = x.plan.columnwise
    rows = x if column is not None and is_square(column) else x.rowwise_sub_storage
    assert rows is not None
    absent, sources = sources < 0, sources.clamp(min=0).long()
    permuted = None
    if probs is not None:
        permuted = probs.reshape(-1)[sources].masked_fill(absent, 0)
        absent = absent | (permuted == 0) if skips else absent
    with torch.no_grad():
        y = rows.index_select(0, sources // index.shape[1])
    assert isinstance(y, QuantizedTensor)
    for operand, positions in zip(y.stored, (absent[:, None], absent), strict=True):
        if operand is not None:
            operand.data.masked_fill_(positions, 0)
    return y, permuted


def _allow_in_graph() -> bool:
    """Have torch.compile record what reads codes by its operators, as it knows no plan."""
    for function in (_codes_or_values, _dispatched_codes):
        torch.compiler.allow_in_graph(function)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return True


constant_in_graph(_allow_in_graph)


def _there(**tensors: Optional) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


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
        return _dispatched(x, probs, index, sources, skips_improbable)

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
        run = in_torch(CombineDesc, (x.dtype,), x.device)
    elif needs_node(x, weights, values):
        return _Combine.apply(x, weights, values, index)  # type: ignore[no-any-return,no-untyped-call]  # torch's
    else:
        run = bound(CombineDesc, (x.dtype,), x)
    y, picked = run(x, index, **_there(weights=weights, row_values=values))
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
        run = bound(CombineDesc, (x.dtype,), x)
        y, picked = run(x, index, **_there(weights=weights, row_values=values))
        return y, picked

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
            run = bound(CombineBackwardDesc, (x.dtype,), x)
            grad_x, grad_weights = run(grad, x, index, sources, weights)
        return grad_x, grad_weights, None, None
