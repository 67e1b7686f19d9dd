"""Grouped GEMMs as one GEMM a group, in high precision also of sizes that only the device knows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from fp8core.backend_api import GroupedGemmDesc, Operand, OperandError, split_groups
from fp8core_backends.cuda.device_groups import checked_offsets
from fp8core_backends.cuda.gemm import LowPrecisionGemm
from fp8core_backends.cuda.layout import ALIGNMENT


def bind_grouped_gemm(
    desc: GroupedGemmDesc, dense: Callable[..., torch.Tensor], *, reads_offsets: bool = False
) -> Callable[..., Any]:
    """Return the callable of ``desc``; ``dense`` runs one group of it.

    ``reads_offsets``: torch's grouped product reads offsets on the device, as it does on compute
    capability 9.0 in bfloat16. On 10.0 it leaves the gradients of empty groups as they were.
    """
    if desc.offsets_on_device:
        selecting = _selecting(desc, dense)
        is_torchs = reads_offsets and desc.out_dtype == torch.bfloat16 and not desc.accumulate
        return partial(_by_torch, desc, selecting) if is_torchs else selecting
    return _contracting(desc, dense) if desc.contract_groups else _stacking(desc, dense)


def _stacking(desc: GroupedGemmDesc, dense: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    def run(
        a: Operand,
        b: Sequence[Operand],
        group_offsets: torch.Tensor,
        *,
        bias: Sequence[torch.Tensor] | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        bounds = group_offsets.tolist()
        count, whole = a.data.shape[0], None
        if out is None:
            if isinstance(dense, LowPrecisionGemm) and not desc.accumulate:
                whole = dense
            size = (count if whole is None else count + ALIGNMENT, b[0].data.shape[0])
            new = torch.zeros if desc.accumulate else torch.empty
            out = new(size, dtype=desc.out_dtype, device=a.data.device)
        biases = [None] * len(b) if bias is None else bias
        for group, part in enumerate(split_groups(desc.a, a, bounds, 0)):
            # [m_g, k] x [n, k] -> [m_g, n]
            start, end = bounds[group], bounds[group + 1]
            if whole is not None and end > start:
                # What it computes too much lies in the rows of the next groups, which follow.
                rows = out[start : start + whole.planned_rows(end - start)]
                whole.with_rows_behind(part, b[group], rows, biases[group])
            else:
                dense(part, b[group], bias=biases[group], out=out[start:end])
        return out if len(out) == count else out[:count]

    return run


def _contracting(desc: GroupedGemmDesc, dense: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    def run(
        a: Operand,
        b: Operand,
        group_offsets: torch.Tensor,
        *,
        bias: None = None,
        out: Sequence[torch.Tensor] | None = None,
    ) -> list[torch.Tensor]:
        bounds = group_offsets.tolist()
        parts = zip(
            split_groups(desc.a, a, bounds, 1), split_groups(desc.b, b, bounds, 1), strict=True
        )
        outs = [None] * (len(bounds) - 1) if out is None else out
        # [m, k_g] x [n, k_g] -> [m, n]
        return [dense(*pair, out=d) for pair, d in zip(parts, outs, strict=True)]

    return run


def _selecting(desc: GroupedGemmDesc, dense: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """Return products of all rows by each group's operand, of which each row takes its group's.

    So much is computed for every group as for all of them: without the sizes on the host there is
    no smaller product of torch that takes any dtype and a bias, waits for nothing and can be
    captured.
    """

    def run(
        a: Operand,
        b: Operand | Sequence[Operand],
        group_offsets: torch.Tensor,
        *,
        bias: Sequence[torch.Tensor] | None = None,
        out: torch.Tensor | Sequence[torch.Tensor] | None = None,
    ) -> torch.Tensor | list[torch.Tensor]:
        offsets, groups = checked_offsets(group_offsets, a.data.device)
        rows = torch.arange(a.data.shape[1 if desc.contract_groups else 0], device=offsets.device)
        masks = [(rows >= offsets[i]) & (rows < offsets[i + 1]) for i in range(groups)]
        if isinstance(b, Operand):
            outs = [None] * groups if out is None else list(out)
            _check_count(desc, groups, outs)
            # [m, k] x [n, k] -> [m, n], of the columns of one group; zeros in the others
            pairs = [[Operand(x.data.where(mask, 0)) for x in (a, b)] for mask in masks]
            return [dense(*pair, out=d) for pair, d in zip(pairs, outs, strict=True)]
        assert out is None or isinstance(out, torch.Tensor)
        biases = [None] * groups if bias is None else list(bias)
        _check_count(desc, groups, b, biases)
        added = out if desc.accumulate else None
        shape = (a.data.shape[0], b[0].data.shape[0])
        result = a.data.new_zeros(shape, dtype=desc.out_dtype) if added is None else added
        for mask, second, vector in zip(masks, b, biases, strict=True):
            target = None if added is None else added.clone()
            d = dense(a, second, bias=vector, out=target)  # [m, k] x [n, k] -> [m, n]
            result = torch.where(mask[:, None], d, result)  # selected: inf * 0 would be NaN
        return result if out is None else out.copy_(result)

    return run


def _by_torch(
    desc: GroupedGemmDesc,
    selecting: Callable[..., Any],
    a: Operand,
    b: Operand | Sequence[Operand],
    group_offsets: torch.Tensor,
    *,
    bias: Sequence[torch.Tensor] | None = None,
    out: torch.Tensor | Sequence[torch.Tensor] | None = None,
) -> torch.Tensor | list[torch.Tensor]:
    """Return each group's product by torch's grouped one, by ``selecting`` what that does not take:
    biases, other dtypes, and sizes of which rows are no multiples of 16 bytes."""
    seconds = [b] if isinstance(b, Operand) else b
    # The dimensions that are adjacent in memory, as they are or in a copy.
    sizes = (len(a.data), len(seconds[0].data)) if desc.contract_groups else seconds[0].data.shape
    fits = {each.data.dtype for each in (a, *seconds)} == {torch.bfloat16} and bias is None
    if not fits or 0 in a.data.shape or any(size % 8 or not size for size in sizes):
        selected: torch.Tensor | list[torch.Tensor]
        selected = selecting(a, b, group_offsets, bias=bias, out=out)
        return selected
    _, groups = checked_offsets(group_offsets, a.data.device)
    if not isinstance(b, Operand):
        assert out is None or isinstance(out, torch.Tensor)
        _check_count(desc, groups, b)
        product = stacked_product(a.data, _stacked([each.data for each in b]), group_offsets)
        return product if out is None else out.copy_(product)
    ends = _ends(a.data.shape[1], group_offsets, a.data.device)
    # Groups begin where they like along k, so the other dimension has to be the adjacent one.
    first, second = (_aligned(each.data.mT) for each in (a, b))
    products = torch.nn.functional.grouped_mm(first.mT, second, offs=ends)
    if out is None:
        return [*products]
    outs = [*out]
    _check_count(desc, groups, outs)
    return [target.copy_(product) for target, product in zip(outs, products, strict=True)]


def stacked_product(a: torch.Tensor, b: torch.Tensor, group_offsets: torch.Tensor) -> torch.Tensor:
    """Return ``a [m, k]`` by each group's of ``b [groups, n, k]``, ``[m, n]`` in bfloat16, zeros
    behind the last group, by torch's grouped product: it reads offsets on the device where both are
    bfloat16 on compute capability 9.0 or 10.0, and waits for them elsewhere."""
    ends = _ends(a.shape[0], group_offsets, a.device)
    product = torch.nn.functional.grouped_mm(_aligned(a), b.mT, offs=ends)
    rows = torch.arange(a.shape[0], device=a.device)
    return product.masked_fill_((rows >= ends[-1])[:, None], 0.0)


def _ends(count: int, group_offsets: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return where each group ends, int32: ends that do not ascend, or lie beyond ``count``, would
    lead torch's product out of the tensors."""
    offsets, _ = checked_offsets(group_offsets, device)
    return offsets[1:].clamp(0, count).cummax(0).values.to(torch.int32)


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` with adjacent columns, at an address that torch's product takes."""
    readable = x.contiguous()
    return readable.clone() if readable.data_ptr() % ALIGNMENT else readable


def _stacked(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return ``weights [n, k]``, one a group, as one tensor ``[groups, n, k]``: of slices that
    follow one another in a tensor as they lie there, of others a copy in their order."""
    first = weights[0]
    if not first.is_contiguous() and first.mT.is_contiguous():
        return _stacked([weight.mT for weight in weights]).mT
    parts = [(each.untyped_storage().data_ptr(), each.storage_offset()) for each in weights]
    base, start = parts[0]
    size, shape = first.numel(), (len(weights), *first.shape)
    are_in_order = parts == [(base, start + at * size) for at in range(len(weights))]
    are_adjacent = all([each.is_contiguous() for each in weights])
    if are_in_order and are_adjacent and first.data_ptr() % ALIGNMENT == 0:
        return first.as_strided(shape, (size, *first.stride()))
    return torch.stack([*weights])


def _check_count(desc: GroupedGemmDesc, groups: int, *lists: Sequence[Any]) -> None:
    """Refuse lists that have not one entry a group."""
    for entries in lists:
        if len(entries) != groups:
            raise OperandError(f"{desc}: {len(entries)} entries; expected {groups}, one a group.")
