"""A tensor whose rows are on several ranks: each casts its own rows, and codes and scales travel.

What a rank casts is its share of the operands of the whole tensor, bit for bit: a scale that covers
rows of several ranks follows from the amaxes of all of them, and a scale of a block belongs to one
rank, where blocks end with a rank's rows. Where they do not, the tensor travels in high precision,
and each rank casts the whole of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch

from fp8core.backend_api import Operand, OperandSpec, amax_extent
from fp8core.chain.request import Handover, QuantizeRequest
from fp8core.communicator import Communicator
from fp8core.recipe.plan import TensorPlan
from fp8core.tensors.quantizer import Orientations

__all__ = ["ArrivingOperand", "Shards"]

_TRANSFORMED = 16
"""Elements along k that a transform combines."""


class ArrivingOperand:
    """An operand of all rows whose parts are under way."""

    __slots__ = ("_finish",)

    def __init__(self, finish: list[Callable[[], torch.Tensor | None]]) -> None:
        self._finish = finish

    def wait(self) -> Operand:
        """Return the operand when its parts have arrived."""
        data, *scales = (finish() for finish in self._finish)
        assert data is not None
        return Operand(data, *scales)


@dataclass(frozen=True, slots=True)
class Shards:
    """How the operands of one tensor travel between the ranks of ``communicator``.

    ``plan`` says how the tensor is quantized, an orientation in high precision is None there.
    ``is_gathered_again``: the columnwise operand stays with its rank, which holds it until backward
    reads it; :meth:`start_columnwise` gathers it then. ``is_decoded``: the columnwise operand is
    the rowwise one, which its reader decodes. ``purpose`` is the tensor's name in the counts.
    """

    communicator: Communicator
    plan: TensorPlan
    purpose: str
    is_gathered_again: bool = False
    is_decoded: bool = False

    def fits(self, rows: int) -> bool:
        """Say whether a tensor of ``rows`` rows, on all ranks, can travel quantized."""
        size = self.communicator.size
        if rows % size:
            return False
        part = rows // size
        column = None if self.is_decoded else self.plan.columnwise
        return _ends_with(part, self.plan.rowwise, 0) and _ends_with(part, column, 1)

    def request(self, whole: QuantizeRequest) -> QuantizeRequest:
        """Return the request for a rank's rows, from that for the whole tensor."""
        is_turned = not self.is_gathered_again and whole.rowwise and self._is_same_both_ways
        columnwise = whole.columnwise and not is_turned
        cast = whole.cast
        if columnwise is not whole.columnwise:
            cast = whole.quantizer.cast_to(rowwise=whole.rowwise, columnwise=columnwise)
            cast = None if whole.cast is None else cast
        rng = whole.rng
        if rng is not None:  # noise that differs between the rows of the ranks
            rng = rng + torch.tensor((self.communicator.rank, 0), device="cpu")
        return dataclasses.replace(
            whole, columnwise=columnwise, cast=cast, cast_and_sum=None, rng=rng, shards=None
        )

    def gather(self, mine: Handover, whole: QuantizeRequest) -> Handover:
        """Return the operands of all rows, of which ``mine`` are this rank's."""
        row, column = mine.take()
        arriving = [
            None if row is None else self._start(row, self.plan.rowwise, 0, self.purpose),
            None
            if column is None or self.is_gathered_again
            else self._start(column, self.plan.columnwise, 1, self.purpose),
        ]
        rows, columns = (None if one is None else one.wait() for one in arriving)
        if self.is_gathered_again:
            columns = column
        elif whole.columnwise and columns is None and rows is not None:
            columns = Operand(*_transposed(rows))
        operands = Orientations(rows, columns)
        return Handover(operands, mine.rows * self.communicator.size)

    def start_columnwise(self, mine: Operand) -> ArrivingOperand:
        """Start to gather the columnwise operand that this rank has held since forward."""
        if self.is_decoded:
            return self._start(mine, self.plan.rowwise, 0, f"{self.purpose} again")
        return self._start(mine, self.plan.columnwise, 1, f"{self.purpose} again")

    @property
    def _is_same_both_ways(self) -> bool:
        """Whether the columnwise operand is the rowwise one, transposed: it need not travel."""
        row, column = self.plan
        if row is None or row != column:
            return row is column
        return row.block == (0, 0) and row.transform is None and not row.stochastic

    def _start(
        self, mine: Operand, spec: OperandSpec | None, along: int, purpose: str
    ) -> ArrivingOperand:
        """Start to gather ``mine``, in which the rows of the tensor are dimension ``along``."""
        is_of_rows = amax_extent(spec) == "row" and along == 0
        moves_scale = spec is not None and spec.block[along] != 0
        moves = (True, moves_scale, is_of_rows and spec is not None and spec.row_scaled)
        names = (purpose, f"{purpose} scales", f"{purpose} scales")
        return ArrivingOperand(
            [
                self._part(part, along, name) if moved and part is not None else _given(part)
                for part, moved, name in zip(mine, moves, names, strict=True)
            ]
        )

    def _part(
        self, part: torch.Tensor, along: int, purpose: str
    ) -> Callable[[], torch.Tensor | None]:
        gather, size = self.communicator.gather, self.communicator.size
        if along == 0:
            rows = gather(part, purpose)
            # Strides belong to the backend that cast the part.
            is_transposed = not part.is_contiguous() and part.t().is_contiguous()
            return (lambda: rows.wait().t().contiguous().t()) if is_transposed else rows.wait
        if part.t().is_contiguous():
            turned = gather(part.t(), purpose)
            return lambda: turned.wait().t()
        count, length = part.shape
        blocks = gather(part, purpose)
        return lambda: (
            blocks.wait().reshape(size, count, length).transpose(0, 1).reshape(count, size * length)
        )


def _given(part: torch.Tensor | None) -> Callable[[], torch.Tensor | None]:
    return lambda: part


def _transposed(operand: Operand) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return the tensors of an operand with one scale, for the transposed tensor."""
    return operand.data.t(), operand.scale_inv, operand.global_scale_inv


def _ends_with(rows: int, spec: OperandSpec | None, along: int) -> bool:
    """Say whether blocks of ``spec`` along the rows, and what a transform combines, end with
    ``rows``."""
    if spec is None:
        return True
    if along == 1 and spec.transform is not None and rows % _TRANSFORMED:
        return False
    block = spec.block[along]
    return not block or rows % block == 0
