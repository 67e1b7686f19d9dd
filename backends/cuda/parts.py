"""A large gradient quantized some rows at a time: its rowwise codes are never there as a whole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from fp8core.backend_api import Operand, Quantized, QuantizeDesc
from fp8core_backends.cuda.casts import Cast
from fp8core_backends.cuda.layout import DTYPES, adjacent_columns, empty_scales, scale_mode
from fp8core_backends.cuda.memory import allocator
from fp8core_backends.cuda.stream import index_of, raw_stream

__all__ = ["QuantizeInParts"]

PART_ROWS = 5120
"""Rows of a part, a multiple of 128: a product of as many fills the chip."""
LEAST_SAVED = 2**24
"""Bytes that are worth three launches more: a cast, and a product that clears its counters."""


class _Tensor(NamedTuple):
    """What a tensor is quantized from, and into."""

    x: torch.Tensor
    stride: int
    columnwise: Operand
    column_pitch: int
    scale: torch.Tensor | None
    amax_out: torch.Tensor | None
    nonfinite_out: torch.Tensor | None


class QuantizeInParts:
    """The method ``in_parts`` of a cast of both orientations by one spec; see QuantizeDesc."""

    __slots__ = ("_empty", "_index", "_input", "_is_delayed", "_mode", "_native", "_run", "_whole")

    def __init__(
        self, desc: QuantizeDesc, device: torch.device, native: Any, run: Any, whole: Cast
    ) -> None:
        assert desc.rowwise is not None
        mode = scale_mode(desc.rowwise)
        assert mode is not None
        self._mode: str = mode
        self._is_delayed = desc.rowwise.delayed
        self._input = native.InputType.__members__[DTYPES[desc.dtype]]
        self._index = index_of(device)
        self._empty = allocator(self._index)
        self._native = native
        self._run = run
        self._whole = whole

    def __call__(
        self,
        x: torch.Tensor,
        *,
        scale: torch.Tensor | None = None,
        amax_out: torch.Tensor | None = None,
        nonfinite_out: torch.Tensor | None = None,
    ) -> Quantized:
        """Return the columnwise operand to be filled, and the parts that fill it."""
        rows, cols = x.shape
        if (rows - PART_ROWS) * cols < LEAST_SAVED:
            return self._whole(x, scale=scale, amax_out=amax_out, nonfinite_out=nonfinite_out)
        made, stride = adjacent_columns(x)
        if made is not x:  # a copy, which should not outlive the cast
            return self._whole(made, scale=scale, amax_out=amax_out, nonfinite_out=nonfinite_out)
        codes = self._empty((cols, rows), (rows, 1), torch.uint8)
        scale_inv, pitch = empty_scales(self._mode, cols, rows, self._empty)
        columnwise = Operand(codes, scale_inv)
        whole = _Tensor(x, stride, columnwise, pitch, scale, amax_out, nonfinite_out)
        return Quantized(_Parts(self, whole), columnwise)  # type: ignore[arg-type]  # parts of one

    def parts_of(self, whole: _Tensor) -> Iterator[tuple[int, int, Operand]]:
        """Quantize the parts one after the other, each in the room of the one before."""
        x, (rows, cols) = whole.x, whole.x.shape
        stream = raw_stream(self._index)
        codes, scale_inv, _ = whole.columnwise
        assert scale_inv is not None
        room = self._empty((PART_ROWS, cols), (cols, 1), torch.uint8)
        partials, num_partials = None, 0
        if self._mode == "tensor" and not self._is_delayed:
            partials = self._empty((self._native.MAX_PARTIALS,), (1,), torch.float32)
            source = (x.data_ptr(), rows, cols, whole.stride, self._input)
            num_partials = self._native.partial_amaxes(
                *source, partials.data_ptr(), self._index, stream
            )
        for start in range(0, rows, PART_ROWS):
            end = min(start + PART_ROWS, rows)
            row_scale, row_pitch = scale_inv, 1
            column_scale_at = scale_inv.data_ptr()
            if self._mode != "tensor":
                row_scale, row_pitch = empty_scales(self._mode, end - start, cols, self._empty)
                column_scale_at += start // 128 * whole.column_pitch * scale_inv.itemsize
            self._run.part(
                x.data_ptr() + start * whole.stride * x.itemsize,
                end - start,
                cols,
                whole.stride,
                room.data_ptr(),
                row_scale.data_ptr(),
                row_pitch,
                codes.data_ptr() + start,
                column_scale_at,
                whole.column_pitch,
                0 if whole.scale is None else whole.scale.data_ptr(),
                0 if whole.amax_out is None else whole.amax_out.data_ptr(),
                0 if whole.nonfinite_out is None else whole.nonfinite_out.data_ptr(),
                0 if partials is None else partials.data_ptr(),
                rows,
                num_partials,
                stream,
            )
            yield start, end, Operand(room[: end - start], row_scale)


class _Parts:
    """A rowwise operand in parts; see :class:`fp8core.backend_api.Parts`."""

    __slots__ = ("_cast", "_whole", "rows")

    def __init__(self, cast: QuantizeInParts, whole: _Tensor) -> None:
        self._cast = cast
        self._whole = whole
        self.rows = whole.x.shape[0]

    def __iter__(self) -> Iterator[tuple[int, int, Operand]]:
        return self._cast.parts_of(self._whole)
