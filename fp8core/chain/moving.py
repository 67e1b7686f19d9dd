"""Links that move rows between the ranks of a group, and compute nothing but sums.

=========== =========================== ==========================================
link        forward                     backward
=========== =========================== ==========================================
gather      the rows of all ranks       the sum over ranks, each rank's rows of it
scatter     the sum over ranks, each    the rows of all ranks
            rank's rows of it
all_reduce  the sum over ranks          the gradient as it is
replicate   the tensor as it is         the sum over ranks
=========== =========================== ==========================================

A gather asks the linear that it feeds how that wants its operands, and moves codes and scales
(:mod:`fp8core.chain.shards`); sums are of the dtype of the activations. The sum of a gradient is
started when dgrad has computed it, and runs beside wgrad.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch

from fp8core.backend_api import Operand, Transfers
from fp8core.chain.call import Call
from fp8core.chain.compared import ComparedCalls
from fp8core.chain.once import OnlyOnce, over_ranks
from fp8core.chain.protocol import (
    Backward,
    Forward,
    Link,
    Out,
    Params,
    Program,
    Recordable,
    Relay,
    SavedList,
)
from fp8core.chain.request import Handover, ProductInParts, QuantizeRequest
from fp8core.chain.shape import BindContext, LinkShape
from fp8core.chain.shards import GemmPart
from fp8core.collectives import Communicator, Started, named
from fp8core.errors import OperandError
from fp8core.tensors.quantizer import HighPrecision, Orientations

__all__ = ["AllReduceShape", "GatherShape", "MovingLink", "ReplicateShape", "ScatterShape"]


@dataclass(frozen=True, slots=True)
class _MovingShape(LinkShape):
    """A link over the ranks of the group ``group``, by its name."""

    group: str
    program: ClassVar[Callable[..., Program]]

    @property
    def moved_over(self) -> str:
        """The name of the group."""
        return self.group

    def bind(self, context: BindContext) -> MovingLink:
        """Return the link."""
        communicator, device = named(self.group), context.binding.device
        calls = ComparedCalls(communicator, context.owner)
        kind, reason = type(self).program, over_ranks(context.owner)
        transfers = context.transfers(communicator)
        return MovingLink(communicator, kind, context.dtype, device, reason, calls, transfers)


@dataclass(frozen=True, slots=True, eq=False)
class MovingLink(Link):
    """A link that moves rows over ``communicator``, as its ``kind`` of program does; ``transfers``
    move them beside products, None: collectives of the group do."""

    communicator: Communicator
    kind: Callable[..., Program]
    dtype: torch.dtype
    device: torch.device
    reason: OnlyOnce
    calls: ComparedCalls
    transfers: Transfers | None = None

    @property
    def only_once(self) -> OnlyOnce:
        """Collectives have no second derivative."""
        return self.reason

    def compare(self, shape: Sequence[int], needs_grad: Sequence[bool]) -> None:
        """Compare the call with those of the other ranks.

        Raises:
            OperandError: ranks have inputs of other sizes, or other gradients are due; raised on
                every rank.
        """
        if self.device.type != "meta":
            self.calls.compare(shape, needs_grad)

    def program(self, rows: int, needs_grad: Sequence[bool], call: Call) -> Program:
        """Return the program."""
        return self.kind(self, needs_grad)


class _Program(Relay[MovingLink]):
    """Base: takes what its neighbours hand over, tensors or shards of operands."""

    __slots__ = ()

    recordable = Recordable(calls_functions=True)

    @property
    def _communicator(self) -> Communicator:
        return self._link.communicator

    @property
    def dtype(self) -> torch.dtype:
        """That of the activations."""
        return self._link.dtype

    def _gathered(self, x: Any, out: Out, purpose: str) -> Any:
        """Return the rows of all ranks, as ``out`` requests them."""
        if out is None:
            return self._communicator.gather(x, purpose, at_once=True).wait()
        if out.shards is None:
            return out(self._communicator.gather(x, purpose, at_once=True).wait())
        mine = x if isinstance(x, Handover) else out.shards.request(out)(x)
        return out.shards.gather(mine, out)

    def _scattered(self, x: torch.Tensor, purpose: str, *, at_once: bool = False) -> Started:
        size = self._communicator.size
        if x.shape[0] % size:
            raise OperandError(
                f"{self._link.reason.owner}: the {size} ranks of group "
                f"{self._communicator.group_name!r} do not divide {x.shape[0]} rows. With sequence "
                f"parallelism each rank gets as many rows: pad the input to a multiple of {size}."
            )
        return self._communicator.scatter(x, purpose, self._link.transfers, at_once=at_once)

    def _scattered_in_parts(
        self, gemm_part: GemmPart, a: Operand, b: Operand, dtype: torch.dtype, purpose: str
    ) -> _Sum | None:
        """Start the sum of the product of ``a[m, k]`` and ``b[n, k]`` over the ranks, each of which
        gets its rows; None if that has to be computed first."""
        transfers, size = self._link.transfers, self._communicator.size
        rows, columns = a.data.shape[0], b.data.shape[0]
        part = rows // size
        if transfers is None or rows % size or not _splits(a):
            return None
        if not transfers.takes(part * columns * dtype.itemsize):
            return None

        def compute(rank: int, out: torch.Tensor) -> None:
            gemm_part(rows, _rows_of(a, rank, size), b, out=out)

        started = self._communicator.scatter_in_parts(
            b.data, (part, columns), dtype, compute, purpose, transfers
        )
        return _Sum(started, rows)


def _splits(a: Operand) -> bool:
    """Say whether each scale of ``a`` is of one row, or of all of them."""
    scales = (a.scale_inv, a.global_scale_inv)
    return all(one is None or one.shape[0] in (1, a.data.shape[0]) for one in scales)


def _rows_of(a: Operand, rank: int, size: int) -> Operand:
    """Return one of ``size`` equal parts of the rows of ``a``."""
    data, *scales = (
        one if one is None or one.shape[0] == 1 else one.chunk(size)[rank] for one in a
    )
    assert data is not None
    return Operand(data, *scales)


class _Sum(Handover):
    """A sum over ranks that is under way."""

    __slots__ = ("started",)

    def __init__(self, started: Started, rows: int) -> None:
        super().__init__(Orientations(None, None), rows)
        self.started = started


@dataclass(frozen=True, slots=True)
class _StartSum(QuantizeRequest):
    """Starts the sum of a gradient as soon as it is computed: that is how its link wants it."""

    program: _Summing | _Scatter | None = None

    @property
    def is_plain(self) -> bool:
        """No cast can be fused with a sum."""
        return False

    def __call__(self, y: torch.Tensor) -> _Sum:
        """Start the sum of ``y``."""
        assert self.program is not None
        return _Sum(self.program.start_sum(y), y.shape[0])


def _start_sum(program: _Summing | _Scatter, product: ProductInParts | None) -> _StartSum:
    dtype = program.dtype
    return _StartSum(HighPrecision(dtype), dtype, program=program, product=product)


class _Summing(_Program):
    """Base of the programs whose backward sums the gradient over ranks."""

    __slots__ = ()

    def start_sum(self, x: torch.Tensor) -> Started:
        """Start the sum of the gradient of the output."""
        raise NotImplementedError

    def request_grad(self, call: Call) -> QuantizeRequest:
        """Return the request that starts the sum."""
        return _start_sum(self, self._product())

    def _product(self) -> ProductInParts | None:
        """Return what computes the gradient in parts, whose sums start one after the other."""
        return None

    def backward(
        self, grad: Any, saved: SavedList, context: Any, call: Call, out: Out = None
    ) -> Backward:
        """Finish the sum, started when the gradient was computed."""
        started = grad.started if isinstance(grad, _Sum) else self.start_sum(grad)
        total = started.wait()
        return (total if out is None else out(total),)


class _Gather(_Summing):
    __slots__ = ()

    def num_rows(self, rows: int) -> int:
        """Return the rows of all ranks."""
        return rows * self._communicator.size

    def relay(self, out: Out) -> Out:
        """Return the next program's request for a rank's rows."""
        return None if out is None or out.shards is None else out.shards.request(out)

    def forward(self, x: Any, params: Params, call: Call, out: Out = None) -> Forward:
        """Gather the rows."""
        return self._gathered(x, out, "input"), (), None

    def start_sum(self, x: torch.Tensor) -> Started:
        """Start the sum of the gradient, of which a rank gets its rows."""
        return self._scattered(x, "grad_input")

    def _product(self) -> ProductInParts | None:
        if self._link.transfers is None:
            return None
        return partial(self._scattered_in_parts, purpose="grad_input")


class _Scatter(_Program):
    __slots__ = ()

    def relay(self, out: Out) -> Out:
        """Return the request for a product some rows at a time, whose sums start one after the
        other; None where none of them would travel beside the next."""
        if self._link.transfers is None:
            return None
        return _start_sum(self, partial(self._scattered_in_parts, purpose="output"))

    def start_sum(self, x: torch.Tensor) -> Started:
        """Start the sum of the input, of which a rank gets its rows."""
        return self._scattered(x, "output", at_once=True)

    def num_rows(self, rows: int) -> int:
        """Return a rank's rows."""
        return rows // self._communicator.size

    def forward(self, x: Any, params: Params, call: Call, out: Out = None) -> Forward:
        """Sum, and keep a rank's rows."""
        y = (x.started if isinstance(x, _Sum) else self.start_sum(x)).wait()
        return y if out is None else out(y), (), None

    def backward(
        self, grad: Any, saved: SavedList, context: Any, call: Call, out: Out = None
    ) -> Backward:
        """Gather the gradient, as the link before wants it."""
        return (self._gathered(grad, out, "grad_output"),)


class _AllReduce(_Program):
    __slots__ = ()

    def forward(self, x: Any, params: Params, call: Call, out: Out = None) -> Forward:
        """Sum."""
        y = self._communicator.sum(x, "output", at_once=True).wait()
        return y if out is None else out(y), (), None

    def backward(
        self, grad: Any, saved: SavedList, context: Any, call: Call, out: Out = None
    ) -> Backward:
        """Hand the gradient on."""
        return (grad if out is None else out(grad),)


class _Replicate(_Summing):
    __slots__ = ()

    def relay(self, out: Out) -> Out:
        """Return the next program's request."""
        return out

    def forward(self, x: Any, params: Params, call: Call, out: Out = None) -> Forward:
        """Hand the tensor on."""
        return x if out is None or isinstance(x, Handover) else out(x), (), None

    def start_sum(self, x: torch.Tensor) -> Started:
        """Start the sum of the gradient."""
        return self._communicator.sum(x, "grad_input")


@dataclass(frozen=True, slots=True)
class GatherShape(_MovingShape):
    """Gathers rows; its gradient is summed over the ranks, each of which keeps its rows."""

    program: ClassVar[Callable[..., Program]] = _Gather

    @property
    def gathers_rows(self) -> bool:
        """Its output has the rows of all ranks."""
        return True


@dataclass(frozen=True, slots=True)
class ScatterShape(_MovingShape):
    """Sums over the ranks, each of which keeps its rows; the gradient is gathered."""

    program: ClassVar[Callable[..., Program]] = _Scatter

    @property
    def gathers_grad_rows(self) -> bool:
        """The gradient of its input has the rows of all ranks."""
        return True


@dataclass(frozen=True, slots=True)
class AllReduceShape(_MovingShape):
    """Sums over the ranks; the gradient stays as it is, equal on all ranks."""

    program: ClassVar[Callable[..., Program]] = _AllReduce


@dataclass(frozen=True, slots=True)
class ReplicateShape(_MovingShape):
    """Hands on a tensor that all ranks have; its gradient is summed over them."""

    program: ClassVar[Callable[..., Program]] = _Replicate
