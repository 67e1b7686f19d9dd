"""Links that move rows between the ranks of a group, and compute nothing but sums.

=========== =========================== ==========================================
link        forward                     backward
=========== =========================== ==========================================
gather      the rows of all ranks       the sum over ranks, each rank's rows of it
scatter     the sum over ranks, each    the rows of all ranks
            rank's rows of it
all_reduce  the sum over ranks          the gradient as it is
replicate   the tensor as it is         the sum over ranks
dispatch    rows to the ranks of their  gradients back to the ranks of their rows
            experts
combine     results back to the ranks   gradients to the ranks of the experts
            of their rows
=========== =========================== ==========================================

Each is a row of :data:`_WAYS`: the way of its output, and that of its gradient. A gather asks the
linear that it feeds how that wants its operands, and moves codes and scales
(:mod:`fp8core.chain.shards`), and so do dispatch and combine; sums are of the dtype of the
activations. The sum of a gradient is started when dgrad has computed it, and runs beside wgrad.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fp8core.backend_api import Operand, Transfers
from fp8core.chain.call import Call, Routes
from fp8core.chain.protocol import (
    Backward,
    Forward,
    Link,
    OnlyOnce,
    Out,
    Params,
    Recordable,
    SavedList,
    TensorProgram,
    over_ranks,
)
from fp8core.chain.request import Handover, QuantizeRequest
from fp8core.chain.shape import BindContext, LinkShape, Movement
from fp8core.chain.shards import GemmPart, exchanged, operand_of, returned
from fp8core.collectives import Communicator, Started, named
from fp8core.errors import OperandError
from fp8core.tensors.quantizer import HighPrecision, Orientations
from fp8core.torch_ops.private import is_traced

_MOST_CALLS = 256
"""Kinds of calls that a link remembers to be equal on all ranks."""

_WAYS: Mapping[str, tuple[str, str]] = {
    "gather": ("gathered", "scattered"),
    "scatter": ("scattered", "gathered"),
    "all_reduce": ("summed", "unmoved"),
    "replicate": ("unmoved", "summed"),
    "dispatch": ("exchanged", "returned"),
    "combine": ("returned", "exchanged"),
}
"""How each link moves its input, and the gradient of its output: as in the table above."""


@dataclass(frozen=True, slots=True)
class MovingShape(LinkShape):
    """A collective over the ranks of the group ``group``, by its name; ``kind`` is the link's name
    in the table above."""

    kind: str
    group: str

    @property
    def movement(self) -> Movement:
        """The ways in which rows arrive."""
        return Movement(self.group, *(way if way in _ARRIVING else "" for way in _WAYS[self.kind]))

    def bind(self, context: BindContext) -> MovingLink:
        """Return the link."""
        communicator = named(self.group)
        return MovingLink(
            self,
            communicator,
            context.dtype,
            context.binding.device,
            None if self.splits_experts else context.transfers(communicator),
            over_ranks(context.owner),
        )


@dataclass(frozen=True, slots=True, eq=False)
class MovingLink(Link):
    """A link that moves rows over ``communicator``; ``transfers`` move them beside products, None:
    collectives of the group do. ``only_once``: collectives have no second derivative.

    ``compared`` are the kinds of calls that the ranks have compared. Ranks whose calls differ would
    begin other collectives: of other sizes, where their inputs have others, and in backward alone,
    where one of them computes no gradients.
    """

    shape: MovingShape
    communicator: Communicator
    dtype: torch.dtype
    device: torch.device
    transfers: Transfers | None
    only_once: OnlyOnce = field()  # which has no default, unlike in Link
    compared: set[Hashable] = field(default_factory=set)

    def compare(self, shape: Sequence[int], needs_grad: Sequence[bool]) -> None:
        """Compare a call with those of the other ranks if it is the first of its kind; not while
        torch captures a graph. Ranks of experts have other rows, and compare no sizes.

        Raises:
            OperandError: ranks have inputs of other sizes, or other gradients are due; raised on
                every rank.
        """
        sizes = None if self.shape.splits_experts else tuple(shape)
        if sizes is not None and (
            self.device.type == "meta" or any(type(size) is not int for size in sizes)
        ):
            return  # no values, or symbols, while torch traces
        kind = sizes, tuple(needs_grad)
        if kind in self.compared or torch.compiler.is_compiling() or is_traced():
            return
        text = gradients_text(needs_grad)
        text = text if sizes is None else f"an input of {list(sizes)}, {text}"
        self.communicator.agree(text, f"a call of {self.only_once.owner}")
        if len(self.compared) >= _MOST_CALLS:  # ragged sizes without end
            self.compared.clear()
        self.compared.add(kind)

    def program(self, rows: int, needs_grad: Sequence[bool], call: Call) -> MovingProgram:
        """Return the program of a call, whose routes say how many rows go to which experts."""
        return MovingProgram(self, needs_grad, call.routes)


class MovingProgram(TensorProgram[MovingLink]):
    """A collective of a call: takes what its neighbours hand over, tensors or shards of operands.

    ``_summed`` is the name of the tensor that is summed over the ranks, if one is; with
    ``_is_scattered`` each rank gets its rows of it.
    """

    __slots__ = (
        *("_backward", "_forward", "_is_scattered", "_summed"),
        *("_communicator", "_routes", "_transfers"),
    )

    def __init__(self, link: MovingLink, needs_grad: Sequence[bool], routes: Routes | None) -> None:
        super().__init__(link, needs_grad)
        self._communicator, self._transfers = link.communicator, link.transfers
        self._routes = routes
        self._forward, self._backward = ways = _WAYS[link.shape.kind]
        self._is_scattered = "scattered" in ways
        self._summed = "output" if self._forward in _SUMS else "grad_input"

    @property
    def recordable(self) -> Recordable | None:
        """Collectives alone, but for rows whose numbers differ from call to call."""
        return Recordable() if self._routes is None else None

    def num_rows(self, rows: int) -> int:
        """Return how many rows the output has on this rank."""
        if self._forward in ("exchanged", "returned"):
            assert self._routes is not None
            return sum(self._routes.received if self._forward == "exchanged" else self._routes.sent)
        if self._forward == "gathered":
            return rows * self._communicator.size
        return rows // self._communicator.size if self._forward == "scattered" else rows

    def request_input(self, out: Out) -> Out:
        """Return the next program's request, where rows travel as it wants them for those of this
        rank. A sum, each rank's rows of it, asks for a product some rows at a time, whose sums
        start one after the other; None where none of them would travel beside the next."""
        if self._forward in _ARRIVING:
            return None if out is None or out.shards is None else out.shards.request(out)
        if self._forward == "scattered" and self._transfers is not None:
            return self._sum_request()
        return out if self._forward == "unmoved" else None

    def request_grad(self, call: Call) -> QuantizeRequest | None:
        """Return the request that starts the sum of the gradient."""
        return self._sum_request() if self._backward in _SUMS else None

    def forward(self, x: Any, params: Params, call: Call, out: Out = None) -> Forward:
        """Move the rows."""
        return _MOVES[self._forward](self, x, out, "input", "output"), (), None

    def backward(
        self, grad: Any, saved: SavedList, context: Any, call: Call, out: Out = None
    ) -> Backward:
        """Move the gradients."""
        return (_MOVES[self._backward](self, grad, out, "grad_output", "grad_input"),)

    def _arrived(self, x: Any, out: Out, purpose: str, _: str) -> Any:
        """Return the rows of all ranks, or of this rank's experts, as ``out`` requests them."""
        if out is not None and out.shards is not None:
            mine = x if isinstance(x, Handover) else out.shards.request(out)(x)
            return out.shards.gather(mine, out)
        if self._routes is None:
            rows = self._communicator.gather(x, purpose, at_once=True).wait()
        else:
            rows = exchanged(self._communicator, x, self._routes, 1, purpose)
        return rows if out is None else out(rows)

    def _returned(self, x: torch.Tensor, out: Out, _: str, purpose: str) -> Any:
        """Return this rank's rows, for all experts."""
        assert self._routes is not None
        rows = returned(self._communicator, x, self._routes, purpose)
        return rows if out is None else out(rows)

    def _unmoved(self, x: Any, out: Out, _: str, __: str) -> Any:
        """Return the tensor, which all ranks have."""
        return x if out is None or isinstance(x, Handover) else out(x)

    def _sum_of(self, x: Any, out: Out, _: str, __: str) -> Any:
        """Return the sum of ``x`` over the ranks, which may have been started."""
        started = x.started if isinstance(x, _Sum) else self._start_sum(x)
        total = started.wait()
        return total if out is None else out(total)

    def _sum_request(self) -> QuantizeRequest:
        """Return how the tensor that is summed is wanted: its sum started as soon as it is
        computed, also some rows at a time where those of other ranks travel meanwhile."""
        is_in_parts = self._transfers is not None and self._is_scattered
        product = self._sum_in_parts if is_in_parts else None
        dtype = self._link.dtype
        return _StartSum(HighPrecision(dtype), dtype, product=product, start=self._start_sum)

    def _start_sum(self, x: torch.Tensor) -> Started:
        communicator, purpose = self._communicator, self._summed
        at_once = purpose == "output"  # nothing runs beside it
        if not self._is_scattered:
            return communicator.sum(x, purpose, at_once=at_once)
        if x.shape[0] % communicator.size:
            raise OperandError(
                f"{self._link.only_once.owner}: the {communicator.size} ranks of group "
                f"{communicator.group_name!r} do not divide {x.shape[0]} rows. With sequence "
                f"parallelism each rank gets as many rows: pad the input to a multiple of "
                f"{communicator.size}."
            )
        return communicator.scatter(x, purpose, self._transfers, at_once=at_once)

    def _sum_in_parts(
        self, gemm_part: GemmPart, a: Operand, b: Operand, dtype: torch.dtype
    ) -> _Sum | None:
        """Start the sum of the product of ``a[m, k]`` and ``b[n, k]`` over the ranks, each of which
        gets its rows; None if that has to be computed first."""
        transfers, size = self._transfers, self._communicator.size
        rows, columns = a.data.shape[0], b.data.shape[0]
        part = rows // size
        if transfers is None or rows % size or not _splits(a):
            return None
        if not transfers.takes(part * columns * dtype.itemsize):
            return None

        def compute(rank: int, out: torch.Tensor) -> None:
            gemm_part(rows, _rows_of(a, rank, size), b, out=out)

        started = self._communicator.scatter_in_parts(
            b.data, (part, columns), dtype, compute, self._summed, transfers
        )
        return _Sum(started, rows)


_MOVES: Mapping[str, Callable[[MovingProgram, Any, Out, str, str], Any]] = {
    "gathered": MovingProgram._arrived,
    "exchanged": MovingProgram._arrived,
    "returned": MovingProgram._returned,
    "scattered": MovingProgram._sum_of,
    "summed": MovingProgram._sum_of,
    "unmoved": MovingProgram._unmoved,
}
"""What computes each way. It takes the names of the tensor before and after."""

_ARRIVING = ("gathered", "exchanged")
_SUMS = ("scattered", "summed")


def _splits(a: Operand) -> bool:
    """Say whether each scale of ``a`` is of one row, or of all of them."""
    scales = (a.scale_inv, a.global_scale_inv)
    return all(scale is None or scale.shape[0] in (1, a.data.shape[0]) for scale in scales)


def _rows_of(a: Operand, rank: int, size: int) -> Operand:
    """Return one of ``size`` equal parts of the rows of ``a``."""
    return operand_of(
        [part if part is None or part.shape[0] == 1 else part.chunk(size)[rank] for part in a]
    )


class _Sum(Handover):
    """A sum over ranks that is under way."""

    __slots__ = ("started",)

    def __init__(self, started: Started, rows: int) -> None:
        super().__init__(Orientations(None, None), rows)
        self.started = started


@dataclass(frozen=True, slots=True)
class _StartSum(QuantizeRequest):
    """Starts the sum of a tensor, by ``start``, as soon as it is computed."""

    start: Callable[[torch.Tensor], Started] | None = None

    @property
    def is_plain(self) -> bool:
        """No cast can be fused with a sum."""
        return False

    def __call__(self, y: torch.Tensor) -> _Sum:
        """Start the sum of ``y``."""
        assert self.start is not None
        return _Sum(self.start(y), y.shape[0])


def gradients_text(needs_grad: Sequence[bool]) -> str:
    """Return whose gradient is due, in words: the input's, then the parameters'.

    >>> gradients_text((True, False, True))
    'gradients of the input and parameter 2'
    >>> gradients_text((False, False))
    'no gradients'
    """
    due = [str(at) for at, needs in enumerate(needs_grad) if needs and at]
    words = ["the input"] if needs_grad[0] else []
    if due:
        words.append(f"parameter{'s' if len(due) > 1 else ''} {', '.join(due)}")
    return f"gradients of {' and '.join(words)}" if words else "no gradients"
