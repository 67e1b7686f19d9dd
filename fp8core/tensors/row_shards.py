"""Quantizing a rank's rows of a matrix to what the whole matrix's operands hold for them.

A scale that covers rows of several ranks needs amaxes of all of them: the tensor's, one a column,
or one for each block that a boundary between ranks cuts. Each rank computes those of its rows, the
maximum over the ranks is taken, and the cast then takes them. A backend has no cast of a part of a
block, so the rows are extended to whole blocks by zeros, and by one element a block that holds the
block's amax: the cast finds the scale of the whole block.
"""

from __future__ import annotations

from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import torch

from fp8core.backend_api import AmaxDesc, OperandSpec, QuantizeByAmaxDesc, QuantizeDesc, has_amax
from fp8core.dispatch import table
from fp8core.torch_ops.counted import counter_of

__all__ = ["RowCast", "RowPart", "RowShard"]


class RowShard(NamedTuple):
    """The rows of rank ``rank`` of ``num_ranks``: ``each`` of ``total`` rows, fewer at the end."""

    total: int
    each: int
    rank: int
    num_ranks: int

    @staticmethod
    def of(total: int, rank: int, num_ranks: int) -> RowShard:
        """Return the rows that ``torch.chunk`` gives to ``rank``."""
        return RowShard(total, -(-total // num_ranks), rank, num_ranks)

    @property
    def bounds(self) -> list[int]:
        """The first row of each rank, then ``total``."""
        return [min(rank * self.each, self.total) for rank in range(self.num_ranks + 1)]

    @property
    def is_even(self) -> bool:
        """Whether all ranks have equally many rows."""
        return self.each * self.num_ranks == self.total


class RowPart(NamedTuple):
    """What a rank holds of an operand: ``codes [rows, k]`` by rows of the matrix, also of a
    columnwise operand; and ``scales``, by rows too, those of the blocks that begin in its rows.
    Scales that cover all rows are the same on all ranks."""

    codes: torch.Tensor
    scales: torch.Tensor


class RowCast:
    """Casts a rank's rows of a matrix ``[total, columns]`` of ``dtype`` to one orientation.

    ``spec`` is that of an operand with scales of one level and codes of a byte.
    """

    def __init__(
        self, spec: OperandSpec, dtype: torch.dtype, columns: int, shard: RowShard, *, turns: bool
    ) -> None:
        """``turns``: the operand is columnwise, with the matrix's rows along its k."""
        self._desc = QuantizeDesc(dtype, None, spec) if turns else QuantizeDesc(dtype, spec, None)
        self._turns = turns
        self._columns = columns
        self._shard = shard
        self._block, self._width = spec.block[::-1] if turns else spec.block
        # A scale a row of the matrix depends on that row alone.
        self._reduces = has_amax(self._desc) and self._block != 1

    @property
    def covers_all_rows(self) -> bool:
        """Whether each scale covers all rows of the matrix."""
        return self._block == 0

    @cached_property
    def cut_blocks(self) -> list[int]:
        """The numbers of the blocks of rows that a boundary between ranks cuts, ascending."""
        if self._block < 2:
            return []
        inner = [bound for bound in self._shard.bounds[1:-1] if bound < self._shard.total]
        return sorted({bound // self._block for bound in inner if bound % self._block})

    @cached_property
    def scales_begin(self) -> list[int]:
        """By rank, the number of the first block that begins in its rows; then of all blocks."""
        return [-(-bound // self._block) for bound in self._shard.bounds]

    @property
    def max_scale_rows(self) -> int:
        """The most rows of scales that any rank holds, of scales that do not cover all rows."""
        return max(end - start for start, end in pairwise(self.scales_begin))

    @property
    def num_amaxes(self) -> int:
        """How many amaxes are reduced over the ranks."""
        if self._reduces:
            spec = self._desc.columnwise if self._turns else self._desc.rowwise
            assert spec is not None
            return self._columns if spec.block != (0, 0) else 1
        return len(self.cut_blocks) * self._num_widths

    @property
    def _num_widths(self) -> int:
        return -(-self._columns // self._width) if self._width else 1

    def amaxes(self, value: torch.Tensor) -> torch.Tensor:
        """Return float32 ``[num_amaxes]`` of the rank's rows, ``value [rows, columns]``."""
        zeros = torch.zeros(self.num_amaxes, dtype=torch.float32, device=value.device)
        if not value.numel() or not self.num_amaxes:
            return zeros
        if self._reduces:
            amaxes: torch.Tensor = table.resolve(AmaxDesc(self._desc), value.device).run(value)
            return amaxes
        first = self._shard.bounds[self._shard.rank]
        of_blocks = zeros.view(len(self.cut_blocks), -1)
        for at, number in enumerate(self.cut_blocks):
            start, end = number * self._block - first, (number + 1) * self._block - first
            rows = value[max(start, 0) : max(end, 0)]
            if rows.numel():
                of_blocks[at] = self._largest(rows)
        return zeros

    def _largest(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the largest magnitude in each group of columns, NaN ignored."""
        magnitudes = torch.where(rows.isnan(), 0.0, rows.abs()).amax(0).float()
        missing = self._num_widths * self._width - self._columns
        return torch.nn.functional.pad(magnitudes, (0, missing)).view(self._num_widths, -1).amax(1)

    def __call__(self, value: torch.Tensor, reduced: torch.Tensor) -> RowPart:
        """Cast the rank's rows; ``reduced`` is the maximum of :meth:`amaxes` over the ranks."""
        first, last = self._shard.bounds[self._shard.rank :][:2]
        start, end = first, last
        if self._block > 1 and value.numel():
            start = first // self._block * self._block
            end = min(-(-last // self._block) * self._block, self._shard.total)
        x = value
        if (start, end) != (first, last):
            x = self._extended(value, first - start, end - last, reduced)
        codes, scales = self._cast(x, reduced)
        if self._turns:
            codes, scales = codes.t(), scales.t()
        codes = codes[first - start :][: last - first]
        return RowPart(codes.contiguous(), scales[int(start < first) :].contiguous())

    def _cast(self, x: torch.Tensor, reduced: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keywords = {"nonfinite_out": counter_of(x.device)}
        desc = self._desc
        if self._reduces:
            desc = QuantizeByAmaxDesc.of(desc)
            keywords["amax"] = reduced
        operand = table.resolve(desc, x.device).run(x, **keywords)[int(self._turns)]
        return operand.data, operand.scale_inv

    def _extended(
        self, value: torch.Tensor, above: int, below: int, reduced: torch.Tensor
    ) -> torch.Tensor:
        """Return ``value`` with rows added that stand for those of other ranks in its blocks."""
        x = value.new_zeros(above + value.shape[0] + below, self._columns)
        x[above : above + value.shape[0]] = value
        of_blocks = reduced.view(len(self.cut_blocks), -1)
        bounds = self._shard.bounds[self._shard.rank :]
        for is_cut, row, bound in ((above, 0, bounds[0]), (below, -1, bounds[1])):
            if is_cut:
                # An amax is an element, so that it is exact in the dtype of the elements.
                amaxes = of_blocks[self.cut_blocks.index(bound // self._block)]
                x[row, :: self._width] = amaxes.to(x.dtype)
        return x
