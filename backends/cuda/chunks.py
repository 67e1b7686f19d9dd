"""The operands of a large gradient that is cast some rows at a time.

The columnwise codes are whole; of rowwise codes there are never more than one chunk's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import torch

from fp8core.backend_api import Operand
from fp8core_backends.cuda.layout import column_pitch, empty_scales, slots_of
from fp8core_backends.cuda.memory import Empty

LEAST_SAVED = 2**24
"""Bytes that are worth three launches more: a cast, and a product that clears its counters."""

Part: TypeAlias = "tuple[int, int, Operand]"
"""The first row of a chunk, the row behind its last, and the operand of those between."""


Keywords: TypeAlias = "tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]"
"""``scale``, ``amax_out`` and ``nonfinite_out`` of a cast, held until its last chunk is read."""


class ChunkedResult:
    """The result of casting a tensor ``[rows, cols]`` in chunks of ``chunk_rows``, a multiple of
    128 rows: what one native call for each of them fills.

    ``columnwise`` is whole once all were cast; ``sums``, if they are asked for, once
    :meth:`add_sums` was called then.
    """

    __keywords__ = (
        *("_code_pitch", "_cols", "_column_pitch", "_empty", "_mode", "_row_codes", "_rows"),
        "_keywords",
        *("_tile_sums", "chunk_rows", "columnwise", "sums"),
    )

    def __init__(
        self,
        mode: str,
        size: tuple[int, int],
        chunk_rows: int,
        keywords: Keywords,
        empty: Empty,
        sums: torch.Tensor | None = None,
    ) -> None:
        self._rows, self._cols = rows, cols = size
        self._mode, self._keywords, self._empty = mode, keywords, empty
        self.chunk_rows = chunk_rows
        self._code_pitch = column_pitch(rows)
        codes = empty((cols, rows), (self._code_pitch, 1), torch.uint8)
        scale_inv, self._column_pitch = empty_scales(mode, cols, rows, empty)
        self.columnwise = Operand(codes, scale_inv)
        self.sums = sums
        self._row_codes: torch.Tensor | None = None
        self._tile_sums: torch.Tensor | None = None

    def spans(self) -> Iterator[tuple[int, int]]:
        """Yield where each chunk begins and ends."""
        for start in range(0, self._rows, self.chunk_rows):
            yield start, min(start + self.chunk_rows, self._rows)

    def part(
        self, start: int, end: int, partials: torch.Tensor | None = None, num_partials: int = 0
    ) -> tuple[Operand, tuple[int, ...]]:
        """Return the rowwise operand of a chunk, over the one before, and the arguments of the
        native cast that follow those of the tensor.

        ``partials`` hold the amaxes of the whole tensor, where its scale follows from them.
        """
        cols, (codes, scale_inv, _) = self._cols, self.columnwise
        assert scale_inv is not None
        if self._row_codes is None:
            self._row_codes = self._empty((self.chunk_rows, cols), (cols, 1), torch.uint8)
        row_scale, row_pitch = scale_inv, 1
        column_scale_address = scale_inv.data_ptr()
        if self._mode != "tensor":
            row_scale, row_pitch = empty_scales(self._mode, end - start, cols, self._empty)
            column_scale_address += start // 128 * self._column_pitch * scale_inv.itemsize
        addresses = (
            self._row_codes.data_ptr(),
            row_scale.data_ptr(),
            row_pitch,
            codes.data_ptr() + start,
            column_scale_address,
            self._column_pitch,
            *slots_of(*self._keywords),
            0 if partials is None else partials.data_ptr(),
            self._code_pitch,
            num_partials,
        )
        return Operand(self._row_codes[: end - start], row_scale), addresses

    def tile_sums(self, start: int, native_cast: Any) -> int:
        """Return the address for the sums of a chunk's tiles, 0 where none are asked for."""
        if self.sums is None:
            return 0
        if self._tile_sums is None:
            size = native_cast.tile_sums_floats(self._rows, self._cols)
            self._tile_sums = self._empty((size,), (1,), torch.float32)
        return self._tile_sums.data_ptr() + start // 128 * self._cols * self._tile_sums.itemsize

    def add_sums(self, native: Any, index: int, stream: int) -> None:
        """Fill ``sums``, if they are asked for, from those of all tiles."""
        if self.sums is None:
            return
        assert self._tile_sums is not None
        arguments = (self._tile_sums.data_ptr(), self._rows, self._cols, self.sums.data_ptr())
        native.add_tile_sums(arguments, index, stream)
