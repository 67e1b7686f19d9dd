"""What a link of a chain is: stateless, forward and backward over plain tensors.

Neighbours talk through :class:`Want`: a link is told how its neighbour wants the result, and calls
``out(y)``, or lets a fused operation of the backend make the same :class:`Handed` in one go.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch

from fp8core.chain.call import DENSE, Call
from fp8core.chain.once import OnlyOnce
from fp8core.chain.padding import PaddedCall, RowsChanged
from fp8core.chain.stored import is_stored_as, take_operands
from fp8core.tensors.quantized_tensor import QuantizedTensor
from fp8core.tensors.quantizer import Cast, Orientations, Quantizer
from fp8core.torch_ops import operators

__all__ = [
    "DENSE",
    "Alone",
    "Backward",
    "Call",
    "Forward",
    "Handed",
    "Link",
    "OnlyOnce",
    "Program",
    "Saved",
    "Unadded",
    "Value",
    "Want",
]

Saved: TypeAlias = "Sequence[torch.Tensor | None]"
"""Plain tensors, so that checkpointing, offload hooks and compilers see them."""


class Handed:
    """A tensor as its consumer wanted it: quantized, padded, with its column sums if asked for.

    ``sums`` are float32 ``[cols]``, one a group, of the tensor before quantization, which has
    ``rows`` rows before padding.
    """

    __slots__ = ("operands", "padded", "rows", "sums")

    def __init__(
        self,
        operands: Orientations,
        rows: int,
        sums: Sequence[torch.Tensor] = (),
        padded: PaddedCall | None = None,
    ) -> None:
        self.operands = operands
        self.sums = sums
        self.padded = padded
        self.rows = rows

    def take(self) -> Orientations:
        """Return the operands and forget them, so that each is freed after the GEMM that reads it.

        Whoever calls a link holds on to what it hands over; of a large layer's gradient, two
        orientations at once are what its peak of memory is made of.
        """
        taken, self.operands = self.operands, _TAKEN
        return taken


_TAKEN = Orientations(None, None)


class Unadded(NamedTuple):
    """``x [rows, n]`` and what is to be added to it, for a link that adds them itself."""

    x: torch.Tensor
    residual: torch.Tensor

    @property
    def rows(self) -> int:
        """The rows of the sum."""
        return self.x.shape[0]


Value: TypeAlias = "torch.Tensor | Handed | Unadded"


@dataclass(frozen=True, slots=True)
class Want:
    """How a link wants a tensor ``y [rows, cols]``; call it with ``y`` in ``dtype``.

    ``cast`` makes the operands where there is nothing to pad or to group. ``rows``, where it is
    told, is how many ``y`` has to have.
    """

    quantizer: Quantizer
    dtype: torch.dtype
    rowwise: bool = True
    columnwise: bool = True
    has_sums: bool = False
    rng: torch.Tensor | None = None
    call: Call = DENSE
    padded: PaddedCall | None = None
    is_gradient: bool = False
    cast: Cast | None = None
    rows: int | None = None

    @property
    def is_plain(self) -> bool:
        """Whether a fused operation can make it: dense, not padded, something to quantize."""
        return self.padded is None and not self.call.groups and (self.rowwise or self.columnwise)

    def takes(self, y: torch.Tensor) -> bool:
        """Whether ``y`` is stored quantized as it is wanted, so that nothing has to be cast."""
        return self.is_plain and is_stored_as(y, self.quantizer.plan)

    def __call__(self, y: torch.Tensor) -> Handed:
        """Sum, pad and quantize ``y``; one that it :meth:`takes` hands over what it holds.

        Raises:
            RowsChanged: ``y`` has other rows than the call, whose groups or padding it is to get.
        """
        rows, groups = y.shape[0], self.call.groups
        if self.rows is not None and rows != self.rows:
            raise RowsChanged("linear", self.rows, y.shape)
        if isinstance(y, QuantizedTensor) and self.takes(y):
            sums = self._sums(y.dequantize()) if self.has_sums else ()
            return Handed(take_operands(y, self.rowwise, self.columnwise), rows, sums)
        sums = self._sums(y) if self.has_sums else ()
        if self.cast is not None:
            return Handed(self.cast(y), rows, sums)
        if not (self.rowwise or self.columnwise):
            return Handed(Orientations(None, None), rows, sums, self.padded)
        if self.padded is not None:
            groups = self.padded.groups
            pad = self.padded.pad_grad_output if self.is_gradient else self.padded.pad_input
            y = pad(y)
        operands = self.quantizer(
            y, groups, rowwise=self.rowwise, columnwise=self.columnwise, rng=self.rng
        )
        return Handed(operands, rows, sums, self.padded)

    def _sums(self, y: torch.Tensor) -> Sequence[torch.Tensor]:
        if self.call.has_device_groups:
            return _sums_of_groups(y, self.call.groups[0])
        parts = torch.split(y, list(self.call.splits)) if self.call.groups else (y,)
        return [operators.column_sums(part) for part in parts]


def _sums_of_groups(y: torch.Tensor, group_offsets: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return the column sums of each group of rows, float32 ``[n]``; nobody waits for offsets."""
    wide = y if y.dtype == torch.float64 else y.to(torch.float32)
    made = torch.segment_reduce(wide, "sum", offsets=group_offsets, axis=0, unsafe=True)
    return made.unbind(0)


class Forward(NamedTuple):
    """The output, what backward needs as tensors, and the rest of it as a value."""

    output: Any
    saved: Saved
    context: object = None


class Backward(NamedTuple):
    """The gradient of the input, None if nobody needs it, and those of the parameters."""

    grad_input: Any
    grad_params: Sequence[torch.Tensor | None]


class Program(Protocol):
    """What has run forward, and knows the way back.

    ``frees_early``: what was saved may go as soon as backward has read it, so that a backward that
    fails cannot be called again.
    """

    frees_early: bool

    def takes(self, grad_output: torch.Tensor, call: Call) -> bool:
        """Whether ``grad_output`` is stored quantized as the last link wants it."""

    def backward(
        self, grad_output: torch.Tensor, saved: list[torch.Tensor | None], call: Call
    ) -> Sequence[torch.Tensor | None]:
        """Return the gradients of x ``[rows, k]`` and of the parameters; empties ``saved``.

        ``grad_output`` is ``[rows, n]``, ``saved`` what forward saved.
        """


class Alone(Program, Protocol):
    """A link that is a chain of its own."""

    def forward(
        self, x: torch.Tensor, params: Sequence[torch.Tensor], call: Call
    ) -> tuple[torch.Tensor, Saved]:
        """Return ``y [rows, n]`` and what backward needs."""


class Link(Protocol):
    """One link of a chain. Holds bound callables only; tensors and sizes come with the call."""

    @property
    def num_params(self) -> int:
        """How many of the chain's parameters are this link's."""

    @property
    def needs_rng(self) -> bool:
        """Whether it takes ``call.rng``."""

    @property
    def only_once(self) -> OnlyOnce | None:
        """Why torch's own operators may not take its place; None in high precision: they may."""

    def alone(self, rows: int, needs: Sequence[bool], call: Call) -> Alone | None:
        """Return a shorter way to run the link as the only one of its chain, if it has one."""

    def wants(self, rows: int, needs: Sequence[bool], call: Call) -> Want | None:
        """Say how it wants its input; None: the tensor as it is."""

    def wants_grad(
        self, rows: int, needs: Sequence[bool], call: Call, context: object
    ) -> Want | None:
        """Say how it wants the gradient of its output."""

    def forward(
        self,
        x: Any,
        params: Sequence[torch.Tensor],
        call: Call,
        needs: Sequence[bool],
        out: Want | None,
    ) -> Forward:
        """Compute from ``x``: what :meth:`wants` made of ``[rows, k]``, or that tensor itself.

        ``needs`` says whose gradient backward will be asked for: the input's, then each
        parameter's. The output goes through ``out`` if there is one.
        """

    def backward(
        self,
        grad: Any,
        saved: list[torch.Tensor | None],
        context: object,
        call: Call,
        needs: Sequence[bool],
        out: Want | None,
    ) -> Backward:
        """Compute the gradients that ``needs`` asks for; grad_input goes through ``out``.

        ``saved`` is the link's own to empty: what leaves it early is freed early.
        """
