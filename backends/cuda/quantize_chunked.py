"""A large gradient quantized some rows at a time: its rowwise codes never exist as a whole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from fp8core.backend_api import Operand, Quantized, QuantizedChunks, QuantizeDesc
from fp8core_backends.cuda.layout import (
    DTYPES,
    empty_scales,
    row_stride,
    scale_mode,
    wrong_dtype,
)
from fp8core_backends.cuda.memory import Empty, allocator
from fp8core_backends.cuda.quantize_and_sum import QuantizeAndSum
from fp8core_backends.cuda.quantize_compose import Cast
from fp8core_backends.cuda.stream import index_of, raw_stream

__all__ = ["QuantizeChunked", "QuantizeChunkedAndSum"]

CHUNK_ROWS = 5120
"""Rows of a chunk, a multiple of 128: a product of as many fills the chip."""
LEAST_SAVED = 2**24
"""Bytes that are worth three launches more: a cast, and a product that clears its counters."""


class _Source(NamedTuple):
    """A tensor, the slots of its cast, the columnwise operand that the cast fills, and the column
    sums if they are asked for."""

    x: torch.Tensor
    stride: int
    columnwise: Operand
    column_pitch: int
    scale: torch.Tensor | None
    amax_out: torch.Tensor | None
    nonfinite_out: torch.Tensor | None
    sums: torch.Tensor | None = None


class QuantizeChunked:
    """A cast of both orientations by one spec, in chunks; see QuantizesChunked."""

    __slots__ = (
        *("_amax", "_dtype", "_empty", "_index", "_mode", "_native", "_native_cast"),
        "_whole",
    )

    def __init__(
        self, desc: QuantizeDesc, device: torch.device, native: Any, native_cast: Any, whole: Cast
    ) -> None:
        assert desc.rowwise is not None
        mode = scale_mode(desc.rowwise)
        assert mode is not None
        self._mode: str = mode
        self._dtype = desc.dtype
        self._index = index_of(device)
        self._empty = allocator(self._index)
        self._native = native
        self._native_cast = native_cast
        self._whole = whole
        self._amax: Any = None
        if mode == "tensor" and not desc.rowwise.delayed:
            kind = native.InputType.__members__[DTYPES[desc.dtype]]
            self._amax = native.Amax(native.Granularity.__members__["tensor"], kind, self._index)

    def __call__(
        self,
        x: torch.Tensor,
        *,
        scale: torch.Tensor | None = None,
        amax_out: torch.Tensor | None = None,
        nonfinite_out: torch.Tensor | None = None,
    ) -> Quantized | QuantizedChunks:
        """Return the chunks, and the columnwise operand that is whole once all were taken."""
        chunks = self.chunks(x, scale, amax_out, nonfinite_out)
        if chunks is None:
            return self._whole(x, scale=scale, amax_out=amax_out, nonfinite_out=nonfinite_out)
        return chunks

    def chunks(
        self,
        x: torch.Tensor,
        scale: torch.Tensor | None,
        amax_out: torch.Tensor | None,
        nonfinite_out: torch.Tensor | None,
        sums: torch.Tensor | None = None,
    ) -> QuantizedChunks | None:
        """Return the chunks, which fill ``sums``; None if ``x`` is not worth them, or has to be
        copied: a copy should not outlive the cast.

        Raises:
            OperandError: ``x`` has another dtype than was bound.
        """
        if x.dtype is not self._dtype:
            raise wrong_dtype("quantize_chunked", x.dtype, self._dtype)
        (rows, cols), stride = x.shape, row_stride(x)
        if (rows - CHUNK_ROWS) * cols < LEAST_SAVED or stride is None:
            return None
        codes = self._empty((cols, rows), (rows, 1), torch.uint8)
        scale_inv, pitch = empty_scales(self._mode, cols, rows, self._empty)
        columnwise = Operand(codes, scale_inv)
        source = _Source(x, stride, columnwise, pitch, scale, amax_out, nonfinite_out, sums)
        return QuantizedChunks(_Chunks(self, source), columnwise)

    def chunks_of(self, source: _Source) -> Iterator[tuple[int, int, Operand]]:
        """Quantize one chunk after the other, into the memory of the one before."""
        x, (rows, cols) = source.x, source.x.shape
        stream = raw_stream(self._index)
        codes, scale_inv, _ = source.columnwise
        assert scale_inv is not None
        row_codes = self._empty((CHUNK_ROWS, cols), (cols, 1), torch.uint8)
        partials, num_partials = None, 0
        if self._amax is not None:
            partials = self._empty((self._native.MAX_PARTIALS,), (1,), torch.float32)
            arguments = (x.data_ptr(), rows, cols, source.stride, partials.data_ptr())
            num_partials = self._amax.partials(arguments, stream)
        tile_sums = None
        if source.sums is not None:
            size = self._native_cast.tile_sums_floats(rows, cols)
            tile_sums = self._empty((size,), (1,), torch.float32)
        for start in range(0, rows, CHUNK_ROWS):
            end = min(start + CHUNK_ROWS, rows)
            row_scale, row_pitch = scale_inv, 1
            column_scale_address = scale_inv.data_ptr()
            if self._mode != "tensor":
                row_scale, row_pitch = empty_scales(self._mode, end - start, cols, self._empty)
                column_scale_address += start // 128 * source.column_pitch * scale_inv.itemsize
            addresses = (
                x.data_ptr() + start * source.stride * x.itemsize,
                end - start,
                cols,
                source.stride,
                row_codes.data_ptr(),
                row_scale.data_ptr(),
                row_pitch,
                codes.data_ptr() + start,
                column_scale_address,
                source.column_pitch,
                0 if source.scale is None else source.scale.data_ptr(),
                0 if source.amax_out is None else source.amax_out.data_ptr(),
                0 if source.nonfinite_out is None else source.nonfinite_out.data_ptr(),
                0 if partials is None else partials.data_ptr(),
                rows,  # bytes between the rows of the columnwise codes
                num_partials,
            )
            if tile_sums is None or source.sums is None:
                self._native_cast(addresses, stream)
            else:
                part = tile_sums.data_ptr() + start // 128 * cols * tile_sums.itemsize
                self._native_cast.and_sum((0, part, *addresses), stream)  # sums of tiles alone
                if end == rows:
                    added = (tile_sums.data_ptr(), rows, cols, source.sums.data_ptr())
                    self._native.add_tile_sums(added, self._index, stream)
            yield start, end, Operand(row_codes[: end - start], row_scale)


class QuantizeChunkedAndSum:
    """The same with column sums; see QuantizesChunkedAndSums."""

    __slots__ = ("_chunked", "_empty", "_whole")

    def __init__(self, chunked: QuantizeChunked, whole: QuantizeAndSum, empty: Empty) -> None:
        self._chunked = chunked
        self._whole = whole
        self._empty = empty

    def __call__(
        self,
        x: torch.Tensor,
        *,
        scale: torch.Tensor | None = None,
        amax_out: torch.Tensor | None = None,
        nonfinite_out: torch.Tensor | None = None,
    ) -> tuple[Quantized | QuantizedChunks, torch.Tensor]:
        """Return the chunks, and the sums that are complete once all were taken."""
        sums = self._empty((x.shape[1],), (1,), torch.float32)
        chunks = self._chunked.chunks(x, scale, amax_out, nonfinite_out, sums)
        if chunks is None:
            return self._whole(x, scale=scale, amax_out=amax_out, nonfinite_out=nonfinite_out)
        return chunks, sums


class _Chunks:
    """A rowwise operand in chunks; see :class:`fp8core.backend_api.Chunks`."""

    __slots__ = ("_cast", "_source", "rows")

    def __init__(self, cast: QuantizeChunked, source: _Source) -> None:
        self._cast = cast
        self._source = source
        self.rows = source.x.shape[0]

    def __iter__(self) -> Iterator[tuple[int, int, Operand]]:
        return self._cast.chunks_of(self._source)
