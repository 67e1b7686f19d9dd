"""How one program of a chain wants a tensor from its neighbour, and how it receives it.

A program is told the :class:`QuantizeRequest` of the next one. It calls the request with its
result, or lets a fused operation of the backend make the same :class:`Handover` in one go.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from fp8core.backend_api import Operand
from fp8core.chain.call import DENSE, Call
from fp8core.chain.padding import PaddedCall, RowsChanged
from fp8core.chain.stored import is_stored_as, take_operands
from fp8core.tensors.quantized_tensor import QuantizedTensor
from fp8core.tensors.quantizer import Cast, CastAndSum, Orientations, TensorQuantizer


class Handover:
    """A tensor as its consumer requested it: quantized, padded, with its column sums if needed.

    ``sums`` are float32 ``[cols]``, one per group, of the tensor before quantization. ``rows`` is
    its number of rows before padding.
    """

    __slots__ = ("operands", "rows", "sums")

    def __init__(
        self, operands: Orientations, rows: int, sums: Sequence[torch.Tensor] = ()
    ) -> None:
        self.operands = operands
        self.sums = sums
        self.rows = rows

    def take(self) -> Orientations:
        """Return the operands and drop them here, so that each is freed after its GEMM.

        The caller of a program keeps a reference to this object. Two orientations of a large
        gradient in memory at once would set the layer's peak.
        """
        operands, self.operands = self.operands, _TAKEN
        return operands


class Travel(Protocol):
    """Moves the operands of a tensor of which each rank has some rows."""

    def request(self, whole: QuantizeRequest) -> QuantizeRequest:
        """Return the request for a rank's rows, from that for the whole tensor."""

    def gather(self, mine: Handover, whole: QuantizeRequest) -> Handover:
        """Return the operands of all rows, of which ``mine`` are this rank's."""


class ProductInParts(Protocol):
    """Computes a product some rows at a time, each of which travels while the next are computed."""

    def __call__(
        self, gemm_part: Callable[..., torch.Tensor], a: Operand, b: Operand, dtype: torch.dtype
    ) -> Handover | None:
        """Return ``a[m, k] @ b[n, k].T`` in ``dtype`` as it is requested; None: it is to be given
        whole. ``gemm_part`` is what :class:`fp8core.backend_api.ComputesParts` offers."""


_TAKEN = Orientations(None, None)


@dataclass(frozen=True, slots=True)
class QuantizeRequest:
    """How a program wants a tensor ``y [rows, cols]``; call it with ``y`` in ``dtype``.

    ``cast`` returns the operands where there is nothing to pad or to group, ``cast_and_sum`` the
    sums as well. ``column_sums`` computes those of ``y`` or of a group of its rows; only with
    ``has_sums`` either is called. If ``rows`` is given, ``y`` must have that many. ``shards`` says
    how the operands travel if each rank has some of the rows; None: ``y`` has to be whole. If
    ``product`` is given, ``y`` may be left to it where that is a matrix product; with
    ``is_computed_later`` that only takes note of it. With ``takes_chunks`` the rowwise operand is
    read once, and may come as :class:`fp8core.backend_api.Chunks`.
    """

    quantizer: TensorQuantizer
    dtype: torch.dtype
    rowwise: bool = True
    columnwise: bool = True
    has_sums: bool = False
    column_sums: Callable[[torch.Tensor], torch.Tensor] | None = None
    rng: torch.Tensor | None = None
    call: Call = DENSE
    padded: PaddedCall | None = None
    is_gradient: bool = False
    cast: Cast | None = None
    cast_and_sum: CastAndSum | None = None
    rows: int | None = None
    shards: Travel | None = None
    product: ProductInParts | None = None
    is_computed_later: bool = False
    takes_chunks: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether a fused operation can serve it: dense, not padded, something to quantize."""
        return self.padded is None and not self.call.groups and (self.rowwise or self.columnwise)

    def takes(self, y: torch.Tensor) -> bool:
        """Whether ``y`` is stored quantized as requested, so that no cast is needed."""
        ways = {"rowwise": self.rowwise, "columnwise": self.columnwise}
        return self.is_plain and is_stored_as(y, self.quantizer.plan, **ways)

    def __call__(self, y: torch.Tensor) -> Handover:
        """Sum, pad and quantize ``y``; if it :meth:`takes` ``y``, hand over its operands.

        Raises:
            RowsChanged: ``y`` does not have the rows for which groups or padding were laid out.
        """
        rows, groups = y.shape[0], self.call.groups
        if self.rows is not None and rows != self.rows:
            raise RowsChanged("linear", self.rows, y.shape)
        if isinstance(y, QuantizedTensor) and self.takes(y):
            sums = self._sums(y.dequantize()) if self.has_sums else ()
            return Handover(take_operands(y, self.rowwise, self.columnwise), rows, sums)
        if isinstance(y, QuantizedTensor):
            y = y.dequantize()
        if self.cast is not None and self.cast_and_sum is not None and self.has_sums:
            operands, total = self.cast_and_sum(y)
            return Handover(operands, rows, (total,))
        sums = self._sums(y) if self.has_sums else ()
        if self.cast is not None:
            return Handover(self.cast(y), rows, sums)
        if not (self.rowwise or self.columnwise):
            return Handover(Orientations(None, None), rows, sums)
        if self.padded is not None:
            groups = self.padded.groups
            pad = self.padded.pad_grad_output if self.is_gradient else self.padded.pad_input
            y = pad(y)
        operands = self.quantizer(
            y, groups, rowwise=self.rowwise, columnwise=self.columnwise, rng=self.rng
        )
        return Handover(operands, rows, sums)

    def _sums(self, y: torch.Tensor) -> Sequence[torch.Tensor]:
        if self.call.has_device_groups:
            return _sums_of_groups(y, self.call.groups[0])
        assert self.column_sums is not None
        parts = torch.split(y, list(self.call.splits)) if self.call.groups else (y,)
        return [self.column_sums(part) for part in parts]


def _sums_of_groups(y: torch.Tensor, group_offsets: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return the column sums of each group of rows, float32 ``[n]``, without reading offsets."""
    wide = y if y.dtype == torch.float64 else y.to(torch.float32)
    sums = torch.segment_reduce(wide, "sum", offsets=group_offsets, axis=0, unsafe=True)
    return sums.unbind(0)
