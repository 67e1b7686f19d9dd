"""The gradient of an activation computed and cast some rows at a time: what it is computed from may
be a product whose rows are computed when they are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

from fp8core.backend_api import Chunks, ComputedRows, QuantizedChunks, QuantizeDesc
from fp8core_backends.cuda.chunks import LEAST_SAVED, ChunkedResult, Part
from fp8core_backends.cuda.layout import adjacent_columns, row_stride, scale_mode
from fp8core_backends.cuda.memory import allocator
from fp8core_backends.cuda.quantize_chunked import CHUNKED_MODES
from fp8core_backends.cuda.stream import raw_stream

CHUNK_ROWS = 2048
"""Rows of a chunk, a multiple of 128. Products of as many fill the chip, and what they return fits
its cache."""


def comes_in_chunks(cast: QuantizeDesc) -> bool:
    """Whether a chunk of what is cast has its scale before the rows behind it are computed."""
    row = cast.rowwise
    if row is None or cast.columnwise is None:
        return False
    mode = scale_mode(row)
    return mode in CHUNKED_MODES and (mode != "tensor" or row.delayed)


class FusedCall(NamedTuple):
    """The call that is made in chunks: ``whole(grad_output, x, ...)``, and its ``native_call``.

    ``x`` is of ``dtype``, with ``num_parts`` times as many columns as the gradient, which are a
    multiple of ``step``.
    """

    whole: Callable[..., tuple[Any, ...]]
    native_call: Any
    native: Any
    device_index: int
    dtype: torch.dtype
    mode: str
    num_parts: int
    step: int
    has_sums: bool


class RunChunked:
    """A fused call whose cast comes in chunks."""

    __slots__ = ("_call", "_empty")

    def __init__(self, call: FusedCall) -> None:
        self._call = call
        self._empty = allocator(call.device_index)

    def __call__(
        self,
        grad_output: torch.Tensor | ComputedRows,
        x: torch.Tensor,
        *,
        scale: torch.Tensor | None = None,
        amax_out: torch.Tensor | None = None,
        nonfinite_out: torch.Tensor | None = None,
    ) -> tuple[Any, ...]:
        """Return the gradient of ``x`` in chunks, if that is worth it, and the column sums.

        Raises:
            OperandError: as the call.
        """
        (rows, cols), call = x.shape, self._call
        if (rows - CHUNK_ROWS) * cols < LEAST_SAVED or not self._takes(grad_output, x):
            if not isinstance(grad_output, torch.Tensor):
                grad_output = grad_output.rows_of(0, rows)
            return call.whole(
                grad_output, x, scale=scale, amax_out=amax_out, nonfinite_out=nonfinite_out
            )
        sums = self._empty((cols,), (1,), torch.float32) if call.has_sums else None
        keywords = (scale, amax_out, nonfinite_out)
        result = ChunkedResult(call.mode, (rows, cols), CHUNK_ROWS, keywords, self._empty, sums)
        parts = partial(self._parts_of, grad_output, x, result)
        chunks = QuantizedChunks(Chunks(rows, parts), result.columnwise)
        return (chunks,) if sums is None else (chunks, sums)

    def _takes(self, grad_output: torch.Tensor | ComputedRows, x: torch.Tensor) -> bool:
        """Whether the kernel reads chunks of these tensors."""
        (rows, cols), call = x.shape, self._call
        n = cols // call.num_parts
        if n % call.step or n * call.num_parts != cols or tuple(grad_output.shape) != (rows, n):
            return False
        return self._reads(x) and (
            not isinstance(grad_output, torch.Tensor) or self._reads(grad_output)
        )

    def _reads(self, x: torch.Tensor) -> bool:
        """Whether the kernel reads the rows of ``x``, in vectors of 16 bytes."""
        stride = row_stride(x)
        return (
            x.dtype == self._call.dtype
            and stride is not None
            and not stride * x.itemsize % 16
            and not x.data_ptr() % 16
        )

    def _parts_of(
        self, grad_output: torch.Tensor | ComputedRows, x: torch.Tensor, result: ChunkedResult
    ) -> Iterator[Part]:
        """Compute and quantize one chunk after the other, into the memory of the one before."""
        (rows, cols), call = x.shape, self._call
        stream = raw_stream(call.device_index)
        _, stride = adjacent_columns(x)
        for start, end in result.spans():
            if isinstance(grad_output, torch.Tensor):
                grad = grad_output[start:end]
            else:
                grad = grad_output.rows_of(start, end)
            grad, grad_stride = adjacent_columns(grad)
            operand, results = result.part(start, end)
            call.native_call(
                (
                    *(x.data_ptr() + start * stride * x.itemsize, end - start, cols, stride),
                    *(grad.data_ptr(), grad_stride),
                    *(0, result.tile_sums(start, call.native_call)),
                    *(0, end - start, cols, cols),  # the result, which has no memory
                    *results,
                ),
                stream,
            )
            if end == rows:
                result.add_sums(call.native, call.device_index, stream)
            yield start, end, operand
