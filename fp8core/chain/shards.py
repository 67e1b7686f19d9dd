"""Tensors whose rows are on several ranks: each casts its own rows, and codes and scales travel.

Of :class:`Shards` each rank has some rows, of which all ranks get the whole. What a rank casts is
its share of the operands of the whole tensor, bit for bit: a scale that covers rows of several
ranks follows from the amaxes of all of them, and a scale of a block belongs to one rank, where
blocks end with a rank's rows. Where they do not, the tensor travels in high precision, and each
rank casts the whole of it.

Of :class:`Exchanged` rows go to the ranks of their experts, if the codes are those that the whole
group of rows would have: scales of rows do; scales of a group follow from amaxes that are reduced
over the ranks; blocks along the rows have to end with the rows of each rank for each expert. Else
rows travel in high precision, and are cast where they arrive.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch

from fp8core.backend_api import Operand, OperandSpec, Transfers, amax_extent
from fp8core.chain.call import Call, Routes
from fp8core.chain.request import Handover, QuantizeRequest
from fp8core.collectives import Communicator, Started
from fp8core.recipe.plan import TensorPlan
from fp8core.tensors.quantizer import Orientations, TensorQuantizer
from fp8core.tensors.storage import turn
from fp8core.torch_ops.capture import is_captured
from fp8core.torch_ops.repeats import called_in_repeats

_WORD = 8
"""Bytes that are copied as one element."""

_TRANSFORMED = 16
"""Elements along k that a transform combines."""


GemmPart: TypeAlias = Callable[..., torch.Tensor]
"""The call of a :class:`~fp8core.backend_api.GemmDesc` with ``part``."""


class _Shared(NamedTuple):
    """A tensor that is the same on all ranks, for all rows; None where the operand has none."""

    part: torch.Tensor | None

    def wait(self) -> torch.Tensor | None:
        return self.part

    def rows_of(self, rank: int) -> torch.Tensor | None:
        return self.part


class _Arriving(NamedTuple):
    """A tensor of which each rank has a shard: ``of(rows)`` gives rows their place and strides."""

    started: Started
    of: Callable[[torch.Tensor], torch.Tensor]
    size: int

    def wait(self) -> torch.Tensor:
        return self.started.wait() if self.of is _as_it_is else self.started.wait_as(self.of)

    def rows_of(self, rank: int) -> torch.Tensor:
        return self.of(self.started.rows_of(rank, self.size))


class _ArrivingColumns(NamedTuple):
    """A tensor whose columns are on several ranks; ``mine`` are those of this ``rank``."""

    started: Started
    mine: torch.Tensor
    size: int
    rank: int

    def wait(self) -> torch.Tensor:
        order = [(self.rank + step) % self.size for step in range(self.size)]  # of their arrival
        parts = {rank: self.rows_of(rank) for rank in order}
        return called_in_repeats(_side_by_side, *(parts[rank] for rank in range(self.size)))

    def rows_of(self, rank: int) -> torch.Tensor:
        return self.mine if rank == self.rank else self.started.rows_of(rank, self.size)


_Tensor: TypeAlias = _Shared | _Arriving | _ArrivingColumns
"""A tensor of an operand of all rows, codes or scales: ``wait()`` returns the whole when it is
here, ``rows_of(rank)`` what belongs to the rows of a rank; None where the operand has none."""


class ArrivingOperand:
    """An operand of all rows that is under way; ``complete()`` waits for its parts."""

    __slots__ = ("_complete", "_whole")

    def __init__(self, complete: Callable[[], Operand]) -> None:
        self._complete = complete
        self._whole: Operand | None = None

    def wait(self) -> Operand:
        """Return the operand when its parts have arrived; a second call returns it again."""
        if self._whole is None:
            self._whole = self._complete()
        return self._whole

    def turned(self) -> ArrivingOperand:
        """Return the operand of one scale, transposed."""
        return ArrivingOperand(lambda: _transposed(self.wait()))


def operand_of(parts: Sequence[torch.Tensor | None]) -> Operand:
    """Return the operand of codes and scales, None for a scale that it has not."""
    data, *scales = parts
    assert data is not None
    return Operand(data, *scales)


class ArrivingRows(ArrivingOperand):
    """A rowwise operand, of which a product can take the rows of each rank as they arrive, those of
    this rank, ``mine``, first."""

    __slots__ = ("_communicator", "_mine", "_tensors")

    def __init__(
        self, tensors: Sequence[_Tensor], mine: Operand, communicator: Communicator
    ) -> None:
        super().__init__(lambda: operand_of([tensor.wait() for tensor in tensors]))
        self._tensors = tensors
        self._mine = mine
        self._communicator = communicator

    def product(
        self,
        gemm_part: GemmPart,
        b: Operand,
        dtype: torch.dtype,
        *,
        bias: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the product ``[m, n]`` of the rows of all ranks with ``b [n, k]``."""
        size, first = self._communicator.size, self._communicator.rank
        rows, mine = size * self._mine.data.shape[0], self._mine.data.shape[0]
        y = out
        if y is None:
            like = partial(torch.Tensor.new_empty, size=(rows, b.data.shape[0]), dtype=dtype)
            y = called_in_repeats(like, b.data)
        for step in range(size):
            rank = (first + step) % size
            a = self._rows_of(rank) if step else self._mine
            gemm_part(rows, a, b, bias=bias, out=y[rank * mine : (rank + 1) * mine])
        return y

    def _rows_of(self, rank: int) -> Operand:
        return operand_of([tensor.rows_of(rank) for tensor in self._tensors])


def here(operand: Any) -> Any:
    """Return an operand that may still be arriving, when it is here."""
    return operand.wait() if isinstance(operand, ArrivingOperand) else operand


@dataclass(frozen=True, slots=True)
class Shards:
    """How the operands of one tensor travel between the ranks of ``communicator``.

    ``plan`` says how the tensor is quantized, an orientation in high precision is None there.
    ``is_gathered_again``: the columnwise operand stays with its rank, which holds it until backward
    reads it; :meth:`start_columnwise` gathers it then. ``is_decoded``: the columnwise operand is
    the rowwise one, which its reader decodes. ``purpose`` is the tensor's name in the counts.
    ``transfers`` move it beside products, None: the process group does. ``in_parts``: the product
    that reads the rowwise operand takes the rows of each rank as they arrive.
    """

    communicator: Communicator
    plan: TensorPlan
    purpose: str
    is_gathered_again: bool = False
    is_decoded: bool = False
    transfers: Transfers | None = None
    in_parts: bool = False

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
        is_turned = not self.is_gathered_again and whole.rowwise and _is_same_both_ways(self.plan)
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
        in_parts = self.in_parts and row is not None and self._moves_beside(row.data)
        rows: Any = None
        if row is not None:
            rows = self._start(row, self.plan.rowwise, 0, self.purpose, in_parts, not in_parts)
        columns: Any = column
        if column is not None and not self.is_gathered_again:
            columns = self._start(
                column, self.plan.columnwise, 1, self.purpose, at_once=not in_parts
            )
        elif whole.columnwise and not self.is_gathered_again and rows is not None:
            columns = rows.turned()
        if not in_parts:
            rows, columns = here(rows), here(columns)
        return Handover(Orientations(rows, columns), mine.rows * self.communicator.size)

    def start_columnwise(self, mine: Operand) -> ArrivingOperand:
        """Start to gather the columnwise operand that this rank has held since forward."""
        if self.is_decoded:
            return self._start(mine, self.plan.rowwise, 0, f"{self.purpose} again")
        return self._start(mine, self.plan.columnwise, 1, f"{self.purpose} again")

    def _moves_beside(self, x: torch.Tensor) -> bool:
        return self.transfers is not None and self.transfers.takes(x.nbytes)

    def _start(
        self,
        mine: Operand,
        spec: OperandSpec | None,
        along: int,
        purpose: str,
        in_parts: bool = False,
        at_once: bool = False,
    ) -> ArrivingOperand:
        """Start to gather ``mine``, in which the rows of the tensor are dimension ``along``;
        ``at_once``: the caller waits for it at once."""
        is_of_rows = amax_extent(spec) == "row" and along == 0
        moves_scale = spec is not None and spec.block[along] != 0
        moves = (True, moves_scale, is_of_rows and spec is not None and spec.row_scaled)
        names = (purpose, f"{purpose} scales", f"{purpose} scales")
        tensors = [
            self._tensor(part, along, partial(self._gathered, name, in_parts, at_once))
            if moved and part is not None
            else _Shared(part)
            for part, moved, name in zip(mine, moves, names, strict=True)
        ]
        if in_parts:
            return ArrivingRows(tensors, mine, self.communicator)
        return ArrivingOperand(lambda: operand_of([tensor.wait() for tensor in tensors]))

    def _gathered(
        self, purpose: str, in_parts: bool, at_once: bool, shard: torch.Tensor
    ) -> Started:
        gather = self.communicator.gather
        return gather(shard, purpose, self.transfers, in_parts=in_parts, at_once=at_once)

    def _tensor(
        self, part: torch.Tensor, along: int, gather: Callable[[torch.Tensor], Started]
    ) -> _Tensor:
        size = self.communicator.size
        is_transposed = not part.is_contiguous() and part.t().is_contiguous()
        if along == 0:
            # Strides belong to the backend that cast the part.
            of = _column_major if is_transposed else _as_it_is
            return _Arriving(gather(part), of, size)
        if part.t().is_contiguous():
            return _Arriving(gather(part.t()), torch.Tensor.t, size)
        return _ArrivingColumns(gather(part), part, size, self.communicator.rank)


def _side_by_side(*columns: torch.Tensor) -> torch.Tensor:
    first = columns[0]
    if first.dtype.itemsize != 1 or first.shape[1] % _WORD or is_captured(first):
        return torch.cat(columns, dim=1)
    # Torch copies element by element, which for bytes takes several times as long.
    words = [part.contiguous().view(torch.int64) for part in columns]
    return torch.cat(words, dim=1).view(first.dtype)


def _as_it_is(rows: torch.Tensor) -> torch.Tensor:
    return rows


def _column_major(rows: torch.Tensor) -> torch.Tensor:
    return rows.t().contiguous().t()


def _transposed(operand: Operand) -> Operand:
    """Return the operand of the transposed tensor, of one with one scale."""
    return operand._replace(data=operand.data.t())


def _is_same_both_ways(plan: TensorPlan) -> bool:
    """Say whether the columnwise operand is the rowwise one, transposed: it need not travel."""
    row, column = plan
    if row is None or row != column:
        return row is column
    return row.block == (0, 0) and row.transform is None and not row.stochastic


def _ends_with(rows: int, spec: OperandSpec | None, along: int) -> bool:
    """Say whether blocks of ``spec`` along the rows, and what a transform combines, end with
    ``rows``."""
    if spec is None:
        return True
    if along == 1 and spec.transform is not None and rows % _TRANSFORMED:
        return False
    block = spec.block[along]
    return not block or rows % block == 0


@dataclass(frozen=True, slots=True)
class SentCast:
    """How a tensor is cast before its rows leave: as ``plan`` says, by ``quantizer``, which reduces
    amaxes over the ranks of ``communicator``. ``purpose`` is the tensor's name in the counts."""

    communicator: Communicator
    plan: TensorPlan
    quantizer: TensorQuantizer
    purpose: str

    def of_call(self, routes: Routes) -> Exchanged | None:
        """Return how rows travel quantized in a call, None if they do not."""
        row, column = self.plan
        if row is None or column is None:
            return None
        if not (_keeps_rows(row, 0, routes.unit) and _keeps_rows(column, 1, routes.unit)):
            return None
        return Exchanged(self, routes)


def _keeps_rows(spec: OperandSpec, along: int, unit: int) -> bool:
    """Say whether rows that are cast in parts of ``unit`` rows, or multiples, have the codes that
    the whole group gives them."""
    if spec.transform is not None or spec.stochastic or spec.scale_format == "e4m3":
        return False
    block = spec.block[along]
    return block in (0, 1) or unit % block == 0


@dataclass(frozen=True, slots=True)
class Exchanged:
    """Casts the rows of one call, and moves codes and scales to the ranks of their experts."""

    cast: SentCast
    routes: Routes

    def request(self, whole: QuantizeRequest) -> QuantizeRequest:
        """Return the request for the rows before they leave, from that for those that arrive."""
        chunks = self.routes.chunks
        offsets = torch.tensor((0, *chunks), device="cpu").cumsum(0)
        return dataclasses.replace(
            whole,
            quantizer=self.cast.quantizer,
            columnwise=whole.columnwise
            and not (whole.rowwise and _is_same_both_ways(self.cast.plan)),
            call=Call(groups=(offsets,), splits=chunks),
            cast=None,
            cast_and_sum=None,
            rows=sum(chunks),
            shards=None,
        )

    def gather(self, mine: Handover, whole: QuantizeRequest) -> Handover:
        """Return the operands of the rows that arrive, of which ``mine`` are those that leave."""
        row, column = mine.take()
        rows = None if row is None else self._moved(row, self.cast.plan.rowwise, 0)
        columns = None if column is None else self._moved(column, self.cast.plan.columnwise, 1)
        if whole.columnwise and columns is None and rows is not None:
            columns = turn(rows)
        return Handover(Orientations(rows, columns), sum(self.routes.received))

    def _moved(self, operand: Operand, spec: OperandSpec | None, along: int) -> Operand:
        assert spec is not None
        assert operand.scale_inv is not None
        purpose, block = self.cast.purpose, spec.block[along]
        data = self._rows(operand.data, along, 1, purpose)
        if block:
            return Operand(data, self._rows(operand.scale_inv, along, block, f"{purpose} scales"))
        # One scale, or one a column, for each expert: all ranks have those of all experts.
        experts = self.routes.experts
        count = experts.stop - experts.start
        return Operand(data, operand.scale_inv.narrow(along, experts.start, count))

    def _rows(self, x: torch.Tensor, along: int, step: int, purpose: str) -> torch.Tensor:
        """Return what arrives of ``x``, whose dimension ``along`` is the rows, ``step`` of them in
        each entry."""
        rows = x if along == 0 else x.t()
        arrived = exchanged(self.cast.communicator, rows, self.routes, step, purpose)
        return arrived if along == 0 else arrived.t().contiguous()


def exchanged(
    communicator: Communicator, x: torch.Tensor, routes: Routes, step: int, purpose: str
) -> torch.Tensor:
    """Return the rows of this rank's experts, by expert; ``x`` are this rank's, for all experts."""
    sent = [count // step for count in routes.sent]
    received = [count // step for count in routes.received]
    x = x.narrow(0, 0, sum(sent))  # scales on meta are as many as any sizes of groups need
    rows = communicator.exchange(x, sent, received, purpose).wait()
    if len(routes.splits) == 1 or routes.size == 1:
        return rows  # they came in this order
    order = routes.order(x.device, step)
    # Not every operator of torch takes a dtype of one byte.
    plain = rows.view(torch.uint8) if rows.dtype.itemsize == 1 else rows
    return plain.index_select(0, order).view(rows.dtype)


def returned(
    communicator: Communicator, x: torch.Tensor, routes: Routes, purpose: str
) -> torch.Tensor:
    """Return the rows of this rank, for all experts: the inverse of :func:`exchanged`."""
    if len(routes.splits) > 1 and routes.size > 1:
        x = x.index_select(0, routes.order(x.device).argsort())
    return communicator.exchange(x, routes.received, routes.sent, purpose).wait()
