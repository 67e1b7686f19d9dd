"""A large gradient quantized some rows at a time: its rowwise codes never exist as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from fp8core.backend_api import Chunks, QuantizedChunks, QuantizeDesc
from fp8core_backends.cuda.chunks import LEAST_SAVED, ChunkedResult, Part
from fp8core_backends.cuda.layout import DTYPES, row_stride, scale_mode, wrong_dtype
from fp8core_backends.cuda.memory import allocator
from fp8core_backends.cuda.stream import index_of, raw_stream

CHUNKED_MODES = ("tensor", "vec128")
"""What a scale covers in casts that come in chunks."""
CHUNK_ROWS = 4096
"""Rows of a chunk, a multiple of 128: a product of as many fills the chip."""


class QuantizeChunked:
    """A cast of both orientations by one spec, in chunks, with column sums where ``desc`` asks for
    them; ``whole`` is the cast at once."""

    __slots__ = (
        *("_amax", "_dtype", "_empty", "_has_sums", "_index", "_mode", "_native", "_native_cast"),
        "_whole",
    )

    def __init__(
        self,
        desc: QuantizeDesc,
        device: torch.device,
        native: Any,
        native_cast: Any,
        whole: Callable[..., Any],
    ) -> None:
        assert desc.rowwise is not None
        mode = scale_mode(desc.rowwise)
        assert mode is not None
        self._mode: str = mode
        self._dtype = desc.dtype
        self._has_sums = desc.sums
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
    ) -> Any:
        """Return the chunks, and the columnwise operand that is whole once all were taken; so are
        the sums, if there are any. What ``whole`` returns if ``x`` is not worth chunks, or has to
        be copied: a copy should not outlive the cast.

        Raises:
            OperandError: ``x`` has another dtype than was bound.
        """
        if x.dtype is not self._dtype:
            raise wrong_dtype("quantize_chunked", x.dtype, self._dtype)
        (rows, cols), stride = x.shape, row_stride(x)
        if (rows - CHUNK_ROWS) * cols < LEAST_SAVED or stride is None:
            return self._whole(x, scale=scale, amax_out=amax_out, nonfinite_out=nonfinite_out)
        sums = self._empty((cols,), (1,), torch.float32) if self._has_sums else None
        keywords = (scale, amax_out, nonfinite_out)
        result = ChunkedResult(self._mode, (rows, cols), CHUNK_ROWS, keywords, self._empty, sums)
        parts = partial(self._parts_of, x, stride, result)
        chunks = QuantizedChunks(Chunks(rows, parts), result.columnwise)
        return chunks if sums is None else (chunks, sums)

    def _parts_of(self, x: torch.Tensor, stride: int, result: ChunkedResult) -> Iterator[Part]:
        """Quantize one chunk after the other, into the memory of the one before."""
        rows, cols = x.shape
        stream = raw_stream(self._index)
        partials, num_partials = None, 0
        if self._amax is not None:
            partials = self._empty((self._native.MAX_PARTIALS,), (1,), torch.float32)
            arguments = (x.data_ptr(), rows, cols, stride, partials.data_ptr())
            num_partials = self._amax.partials(arguments, stream)
        for start, end in result.spans():
            operand, results = result.part(start, end, partials, num_partials)
            first = x.data_ptr() + start * stride * x.itemsize
            addresses = (first, end - start, cols, stride, *results)
            tile_sums = result.tile_sums(start, self._native_cast)
            if not tile_sums:
                self._native_cast(addresses, stream)
            else:
                self._native_cast.and_sum((0, tile_sums, *addresses), stream)
            if end == rows:
                result.add_sums(self._native, self._index, stream)
            yield start, end, operand
