"""Grouped GEMMs as one GEMM a group, in high precision also of sizes that only the device knows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fp8core.backend_api import GroupedGemmDesc, Operand, OperandError, split_groups
from fp8core_backends.cuda.device_groups import checked_offsets
from fp8core_backends.cuda.gemm import LowPrecisionGemm
from fp8core_backends.cuda.layout import ALIGNMENT


def bind_grouped_gemm(
    desc: GroupedGemmDesc, dense: Callable[..., torch.Tensor]
) -> Callable[..., Any]:
    """Return the callable of ``desc``; ``dense`` runs one group of it."""
    if desc.offsets_on_device:
        return _selecting(desc, dense)
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
    no smaller product of torch that takes any dtype, waits for nothing and can be captured.
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


def stacked_product(a: torch.Tensor, b: torch.Tensor, group_offsets: torch.Tensor) -> torch.Tensor:
    """Return ``a [m, k]`` by each group's of ``b [groups, n, k]``, ``[m, n]`` in bfloat16, zeros
    behind the last group, by torch's grouped product: it reads offsets on the device where both are
    bfloat16 on compute capability 9.0 or 10.0, and waits for them elsewhere."""
    offsets, _ = checked_offsets(group_offsets, a.device)
    # Ends that do not ascend would lead it out of the tensors.
    ends = offsets[1:].clamp(0, a.shape[0]).cummax(0).values
    readable = a.contiguous()
    if readable.data_ptr() % ALIGNMENT:
        readable = readable.clone()
    product = torch.nn.functional.grouped_mm(readable, b.mT, offs=ends.to(torch.int32))
    rows = torch.arange(a.shape[0], device=a.device)
    return product.masked_fill_((rows >= ends[-1])[:, None], 0.0)


def _check_count(desc: GroupedGemmDesc, groups: int, *lists: Sequence[Any]) -> None:
    """Refuse lists that have not one entry a group."""
    for entries in lists:
        if len(entries) != groups:
            raise OperandError(f"{desc}: {len(entries)} entries; expected {groups}, one a group.")
