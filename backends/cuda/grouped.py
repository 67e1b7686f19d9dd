"""Grouped GEMMs as one GEMM a group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fp8core.backend_api import GroupedGemmDesc, Operand, split_groups
from fp8core_backends.cuda.gemm import LowPrecisionGemm
from fp8core_backends.cuda.layout import ALIGNMENT


def bind_grouped_gemm(
    desc: GroupedGemmDesc, dense: Callable[..., torch.Tensor]
) -> Callable[..., Any]:
    """Return the callable of ``desc``; ``dense`` runs one group of it."""
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
