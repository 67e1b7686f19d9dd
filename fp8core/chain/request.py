"""How one program of a chain wants a tensor from its neighbour, and how it receives it.

A program is told the :class:`QuantizeRequest` of the next one. It calls the request with its
result, or lets a fused operation of the backend make the same :class:`Handover` in one go.

A gradient that is a matrix product may be computed while its reader casts it, some rows at a time
(:class:`ComputedProduct`): that of an activation's output is read once, by the operation that makes
the operands of the linear before it, and of a large one there are never more than a few rows in
memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from fp8core.backend_api import Operand
from fp8core.chain.call import DENSE, Call
from fp8core.chain.padding import PaddedCall, RowsChanged
from fp8core.tensors.quantized_tensor import QuantizedTensor
from fp8core.tensors.quantizer import Cast, CastAndSum, HighPrecision, Orientations, TensorQuantizer
from fp8core.tensors.storage import nearest, storage_plan


def is_stored_as(
    x: torch.Tensor,
    quantizer: TensorQuantizer,
    *,
    rowwise: bool = True,
    columnwise: bool = True,
) -> bool:
    """Say whether ``x`` is stored quantized, and holds the operands that ``quantizer`` makes.

    It has to hold the orientations asked for. Its scale is its own, also under delayed scaling, and
    its elements may be rounded to the nearest where the cast rounds stochastically.
    """
    plan = quantizer.plan
    if plan is None or not isinstance(x, QuantizedTensor):
        return False
    if columnwise and x.shape[:-1].numel() % quantizer.row_step:  # it has no zeros
        return False
    if columnwise and x._casting.columns_of != quantizer.columns_of:
        return False
    reads = (rowwise, columnwise)
    pairs = zip(reads, nearest(x.plan), nearest(storage_plan(plan)), strict=True)
    return all(stored == cast for is_read, stored, cast in pairs if is_read)


class Handover:
    """A tensor as its consumer requested it: quantized, padded, with its column sums if needed.

    ``sums`` are float32 ``[cols]``, one per group, of the tensor before quantization. ``rows`` is
    its number of rows before padding. That of a :class:`SplitRequest` has the handovers of the two
    halves in the place of operands.
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
        operands, self.operands = self.operands, _NO_OPERANDS
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
        whole. ``gemm_part`` is the call of a GemmDesc with ``part``."""


_NO_OPERANDS = Orientations(None, None)


@dataclass(frozen=True, slots=True)
class QuantizeRequest:
    """How a program wants a tensor ``y [rows, cols]``; call it with ``y`` in ``dtype``.

    ``cast`` returns the operands where there is nothing to pad or to group, ``cast_and_sum`` the
    sums as well. ``column_sums`` computes those of ``y`` or of a group of its rows; only with
    ``has_sums`` either is called. If ``rows`` is given, ``y`` must have that many. ``shards`` says
    how the operands travel if each rank has some of the rows; None: ``y`` has to be whole. If
    ``product`` is given, ``y`` may be left to it where that is a matrix product; with
    ``is_computed_later`` that only takes note of it. With ``takes_chunks`` the rowwise operand is
    read once, and may come as :class:`fp8core.backend_api.Chunks`. ``scale`` is the delayed scale
    of a cast that is made again, whose ``quantizer`` has none.
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
    scale: torch.Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Whether a fused operation can serve it: dense, not padded, something to quantize."""
        return self.padded is None and not self.call.groups and (self.rowwise or self.columnwise)

    def takes(self, y: torch.Tensor) -> bool:
        """Whether ``y`` is stored quantized as requested, so that no cast is needed."""
        ways = {"rowwise": self.rowwise, "columnwise": self.columnwise}
        return self.is_plain and is_stored_as(y, self.quantizer, **ways)

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
            return Handover(y.orientations(self.rowwise, self.columnwise), rows, sums)
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
        return [*map(self.column_sums, parts)]


def _sums_of_groups(y: torch.Tensor, group_offsets: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return the column sums of each group of rows, float32 ``[n]``, without reading offsets."""
    wide = y if y.dtype == torch.float64 else y.to(torch.float32)
    sums = torch.segment_reduce(wide, "sum", offsets=group_offsets, axis=0, unsafe=True)
    return sums.unbind(0)


class ComputedProduct(Handover):
    """``a[m, k] @ b[n, k].T`` in ``dtype``; see :class:`fp8core.backend_api.ComputedRows`."""

    __slots__ = ("_a", "_b", "_buffer", "_dtype", "_gemm_part", "shape")

    def __init__(
        self, gemm_part: Callable[..., torch.Tensor], a: Operand, b: Operand, dtype: torch.dtype
    ) -> None:
        super().__init__(Orientations(None, None), a.data.shape[0])
        self.shape = (self.rows, b.data.shape[0])
        self._gemm_part = gemm_part
        self._a, self._b, self._dtype = a, b, dtype
        self._buffer: torch.Tensor | None = None

    def rows_of(self, start: int, end: int) -> torch.Tensor:
        """Return the rows from ``start`` to ``end``, over those that were returned before."""
        a, rows = self._a, end - start
        if self._buffer is None:
            self._buffer = empty_rows(self._b.data, rows, self._dtype)
        part = Operand(a.data[start:end], a.scale_inv, a.global_scale_inv)
        return self._gemm_part(self.rows, part, self._b, out=self._buffer[:rows])

    def whole(self) -> torch.Tensor:
        """Return all rows."""
        return self.rows_of(0, self.rows)


def empty_rows(b: torch.Tensor, rows: int, dtype: torch.dtype) -> torch.Tensor:
    """Return memory for ``rows`` rows of a product with ``b [n, k]``, to be written a few rows at a
    time."""
    return b.new_empty((rows, b.shape[0]), dtype=dtype)


@dataclass(frozen=True, slots=True)
class _RowsRequest(QuantizeRequest):
    """Takes any gradient as it is, but that of a product as :class:`ComputedProduct`."""

    @property
    def is_plain(self) -> bool:
        """There is nothing to quantize."""
        return False

    def __call__(self, y: torch.Tensor) -> Any:
        """Return ``y``."""
        return y


@dataclass(frozen=True, slots=True)
class SplitRequest(QuantizeRequest):
    """Takes the gradient of two linears, whose columns are its halves, as it is. An operation that
    casts each half as its request in ``parts`` says hands over the handovers of both."""

    parts: Sequence[QuantizeRequest] = ()

    @classmethod
    def of(cls, parts: Sequence[QuantizeRequest | None]) -> SplitRequest | None:
        """Return the request of two linears with these requests; None where these differ in more
        than their scales, or ask for more than a cast."""
        plain = [
            each
            for each in parts
            if each is not None and each.is_plain and each.rng is None and each.shards is None
        ]
        if len(parts) != 2 or len(plain) != 2 or plain[0].quantizer.plan is None:
            return None
        ways = [
            (each.dtype, each.rowwise, each.columnwise, each.has_sums, each.quantizer.plan)
            for each in plain
        ]
        dtype, rowwise, columnwise, has_sums, _ = ways[0]
        if ways[0] != ways[1]:
            return None
        return cls(plain[0].quantizer, dtype, rowwise, columnwise, has_sums, parts=plain)

    def __call__(self, y: torch.Tensor) -> Any:
        """Return ``y``."""
        return y


def rows_request(dtype: torch.dtype) -> QuantizeRequest:
    """Return the request of a program that takes the gradient of its output, in ``dtype``, some
    rows at a time where it is a product with more rows than each of them adds up products.

    The operands of such a product stay in memory until it is read: the gradient, and what is cast
    from it, are larger then.
    """
    quantizer = HighPrecision(dtype)
    return _RowsRequest(quantizer, dtype, product=_later, is_computed_later=True)


def _later(
    gemm_part: Callable[..., torch.Tensor], a: Operand, b: Operand, dtype: torch.dtype
) -> ComputedProduct | None:
    rows, k = a.data.shape
    scales = (a.scale_inv, a.global_scale_inv)
    # Scales of rows would be copied for each part: products read them in a layout of their own.
    if rows <= k or any(scale is not None and scale.shape[0] != 1 for scale in scales):
        return None
    return ComputedProduct(gemm_part, a, b, dtype)
