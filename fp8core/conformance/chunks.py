"""Operands that come in chunks of rows, and tensors that are computed while they are read."""

from __future__ import annotations

import torch

from fp8core.backend_api import Chunks, Operand, OperandSpec
from fp8core.conformance.compare import require


def joined(spec: OperandSpec, chunks: Chunks, rows: int) -> Operand:
    """Return the operand of all chunks, each copied before the next one overwrites it."""
    require(chunks.rows == rows, f"the chunks have {chunks.rows} rows, x has {rows}")
    data, scales, at = [], [], 0
    for start, end, part in chunks:
        require(start == at, f"a chunk begins at row {start}, the one before ended at {at}")
        assert part.scale_inv is not None
        data.append(part.data.clone())
        scales.append(part.scale_inv.clone())
        at = end
    require(at == rows, f"the chunks end at row {at} of {rows}")
    return Operand(torch.cat(data), torch.cat(scales) if spec.block[0] else scales[-1])


class ReadOnce:
    """The rows of ``x``, in memory that each call overwrites; a
    :class:`~fp8core.backend_api.ComputedRows`."""

    def __init__(self, x: torch.Tensor) -> None:
        self.shape = tuple(x.shape)
        self._x = x
        self._end = 0
        self._buffer: torch.Tensor | None = None

    def rows_of(self, start: int, end: int) -> torch.Tensor:
        """Return rows ``start`` to ``end``.

        Raises:
            Broken: the rows do not follow those of the last call, or are more than in the first.
        """
        require(start == self._end, f"rows from {start} on are read, those before {self._end} were")
        if self._buffer is None:
            self._buffer = torch.empty_like(self._x[start:end])
        most = len(self._buffer)
        require(end - start <= most, f"{end - start} rows are read at once, {most} at first")
        self._end = end
        return self._buffer[: end - start].copy_(self._x[start:end])
