"""Links that exchange rows between the ranks that hold the experts, and bring them back.

=========== ============================== ==============================
link        forward                        backward
=========== ============================== ==============================
dispatch    rows to the ranks of their     gradients back to the ranks of
            experts                        their rows
combine     results back to the ranks of   gradients to the ranks of the
            their rows                     experts
=========== ============================== ==============================

What goes to a grouped linear is cast where it comes from, and codes and scales travel, if the codes
are those that the whole group of rows would have: scales of rows do; scales of a group follow from
amaxes that are reduced over the ranks; blocks along the rows have to end with the rows of each rank
for each expert. Else rows travel in high precision, and are cast where they arrive.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from fp8core.backend_api import Operand, OperandSpec
from fp8core.chain.call import Call
from fp8core.chain.compared import ComparedCalls
from fp8core.chain.once import OnlyOnce, over_ranks
from fp8core.chain.protocol import Backward, Forward, Link, Out, Params, Program, Relay, SavedList
from fp8core.chain.request import Handover, QuantizeRequest
from fp8core.chain.routes import Routes
from fp8core.chain.shape import BindContext, LinkShape
from fp8core.collectives import Communicator, named
from fp8core.recipe.plan import TensorPlan
from fp8core.tensors.quantizer import Orientations, TensorQuantizer

__all__ = ["CombineShape", "DispatchShape", "Exchanged", "SentCast"]


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
            columnwise=whole.columnwise and not (whole.rowwise and self._is_same_both_ways),
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
            turned = (None if part is None else part.t() for part in rows)
            columns = Operand(*turned)  # type: ignore[arg-type]  # data is there
        return Handover(Orientations(rows, columns), sum(self.routes.received))

    @property
    def _is_same_both_ways(self) -> bool:
        """Whether the columnwise operand is the rowwise one, transposed: it need not travel."""
        row, column = self.cast.plan
        return row == column and row is not None and row.block == (0, 0)

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


@dataclass(frozen=True, slots=True)
class _ExchangeShape(LinkShape):
    """A link over the ranks of the group ``group``, by its name."""

    group: str
    program: ClassVar[Callable[..., Program]]

    @property
    def moved_over(self) -> str:
        """The name of the group."""
        return self.group

    def bind(self, context: BindContext) -> ExchangeLink:
        """Return the link."""
        communicator, reason = named(self.group), over_ranks(context.owner)
        calls = ComparedCalls(communicator, context.owner)
        return ExchangeLink(communicator, type(self).program, reason, calls)


@dataclass(frozen=True, slots=True, eq=False)
class ExchangeLink(Link):
    """A link that exchanges rows over ``communicator``, as its ``kind`` of program does."""

    communicator: Communicator
    kind: Callable[..., Program]
    reason: OnlyOnce
    calls: ComparedCalls

    @property
    def only_once(self) -> OnlyOnce:
        """Collectives have no second derivative."""
        return self.reason

    def compare(self, shape: Sequence[int], needs_grad: Sequence[bool]) -> None:
        """Compare whose gradients are due; ranks have other numbers of rows.

        Raises:
            OperandError: the gradients of ranks differ; raised on every rank.
        """
        self.calls.compare(None, needs_grad)

    def program(self, rows: int, needs_grad: Sequence[bool], call: Call) -> Program:
        """Return the program of a call, whose routes say how many rows it has."""
        assert call.routes is not None
        return self.kind(self, needs_grad, call.routes)


class _Program(Relay[ExchangeLink]):
    __slots__ = ("_routes",)

    def __init__(self, link: ExchangeLink, needs_grad: Sequence[bool], routes: Routes) -> None:
        super().__init__(link, needs_grad)
        self._routes = routes

    def _to_experts(self, x: Any, out: Out, purpose: str) -> Any:
        """Return the rows of this rank's experts, as ``out`` requests them."""
        if out is not None and out.shards is not None:
            mine = x if isinstance(x, Handover) else out.shards.request(out)(x)
            return out.shards.gather(mine, out)
        rows = exchanged(self._link.communicator, x, self._routes, 1, purpose)
        return rows if out is None else out(rows)

    def _from_experts(self, x: torch.Tensor, out: Out, purpose: str) -> Any:
        """Return this rank's rows, for all experts."""
        rows = returned(self._link.communicator, x, self._routes, purpose)
        return rows if out is None else out(rows)


class _Dispatch(_Program):
    __slots__ = ()

    def num_rows(self, rows: int) -> int:
        """Return the rows of this rank's experts."""
        return sum(self._routes.received)

    def relay(self, out: Out) -> Out:
        """Return the next program's request for the rows before they leave."""
        return None if out is None or out.shards is None else out.shards.request(out)

    def forward(self, x: Any, params: Params, call: Call, out: Out = None) -> Forward:
        """Send rows to their experts."""
        return self._to_experts(x, out, "input"), (), None

    def backward(
        self, grad: Any, saved: SavedList, context: Any, call: Call, out: Out = None
    ) -> Backward:
        """Send gradients back."""
        return (self._from_experts(grad, out, "grad_input"),)


class _Combine(_Program):
    __slots__ = ()

    def num_rows(self, rows: int) -> int:
        """Return this rank's rows."""
        return sum(self._routes.sent)

    def forward(self, x: Any, params: Params, call: Call, out: Out = None) -> Forward:
        """Send results back."""
        return self._from_experts(x, out, "output"), (), None

    def backward(
        self, grad: Any, saved: SavedList, context: Any, call: Call, out: Out = None
    ) -> Backward:
        """Send gradients to the experts."""
        return (self._to_experts(grad, out, "grad_output"),)


@dataclass(frozen=True, slots=True)
class DispatchShape(_ExchangeShape):
    """Sends rows to the ranks of their experts."""

    program: ClassVar[Callable[..., Program]] = _Dispatch

    @property
    def exchanges_rows(self) -> bool:
        """Its output has rows of other ranks."""
        return True


@dataclass(frozen=True, slots=True)
class CombineShape(_ExchangeShape):
    """Sends the results of experts back to the ranks of their rows."""

    program: ClassVar[Callable[..., Program]] = _Combine

    @property
    def exchanges_grad_rows(self) -> bool:
        """The gradient of its input has rows of other ranks."""
        return True
