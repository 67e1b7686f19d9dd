"""MXFP8 and NVFP4: casts whose scales are bytes, and GEMMs that read those scales in tiles."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from fp8core.backend_api import (
    GemmDesc,
    Operand,
    OperandError,
    OperandSpec,
    Quantized,
    QuantizeDesc,
)
from fp8core_backends.cuda.gemm import LowPrecisionGemm
from fp8core_backends.cuda.layout import (
    ALIGNMENT,
    DTYPES,
    Slots,
    adjacent_columns,
    round_up,
    scale_mode,
    wrong_dtype,
)
from fp8core_backends.cuda.stream import index_of, raw_stream

_PITCH = 16
"""Bytes that the pitch of scales, and their address, are multiples of."""
_FACTORS = 512
"""Bytes between the tiles of two operands: for alpha, beyond which tiles are aligned again."""


class _Output(NamedTuple):
    """An operand to be filled and its addresses; None and 0 where it is not wanted."""

    operand: Operand | None
    codes: int = 0
    scales: int = 0
    pitch: int = 0
    global_scale_inv: int = 0


class ByteScaled:
    """A cast in one call of the native library: of both orientations, or of one."""

    __slots__ = ("_desc", "_device", "_index", "_is_fp4", "_partials", "kernel", "native_cast")

    def __init__(self, desc: QuantizeDesc, device: torch.device, native: Any) -> None:
        spec = desc.rowwise or desc.columnwise
        assert spec is not None
        self._desc = desc
        self._index = index_of(device)
        self._device = torch.device("cuda", self._index)
        self._partials = 2 * native.MAX_PARTIALS
        self._is_fp4 = scale_mode(spec) == "nv16"
        input_type = native.InputType.__members__[DTYPES[desc.dtype]]
        is_square = spec.block[0] != 1
        if not self._is_fp4:
            self.native_cast = native.QuantizeMxfp8(
                native.Format.__members__[spec.format],
                input_type,
                is_square,
                spec.target,
                self._index,
            )
            self.kernel = "fp8core::mx_tile"
            return
        row, column = desc.rowwise, desc.columnwise
        self.native_cast = native.QuantizeNvfp4(
            input_type,
            is_square,
            spec.target,
            column is not None and column.transform is not None,
            row is not None and row.stochastic,
            column is not None and column.stochastic,
            self._index,
        )
        self.kernel = "fp8core::nvfp4_tile"

    def __call__(
        self,
        x: torch.Tensor,
        *,
        rng: torch.Tensor | None = None,
        nonfinite_out: torch.Tensor | None = None,
    ) -> Quantized:
        """Quantize; see the backend API."""
        rows, cols = x.shape
        if x.dtype is not self._desc.dtype:
            raise wrong_dtype("quantize", x.dtype, self._desc.dtype)
        self._check(rows, cols)
        row = self._allocate(self._desc.rowwise, rows, cols)
        column = self._allocate(self._desc.columnwise, cols, self._column_rows(rows))
        if not (rows and cols):
            return Quantized(row.operand, column.operand)
        x, stride = adjacent_columns(x)
        count = 0 if nonfinite_out is None else nonfinite_out.data_ptr()
        quantized, results, _workspace = self._results(rows, row, column, rng, count)
        self.native_cast((x.data_ptr(), rows, cols, stride, *results), raw_stream(self._index))
        return quantized

    def results(
        self, rows: int, cols: int, slots: Slots, rng: torch.Tensor | None = None
    ) -> tuple[Quantized, tuple[int, ...], torch.Tensor | None]:
        """Allocate the result of casting a tensor ``[rows, cols]`` that has elements.

        As ``Quantize.results``, with ``rng`` besides; of ``slots`` the count alone is read.
        """
        self._check(rows, cols)
        row = self._allocate(self._desc.rowwise, rows, cols)
        column = self._allocate(self._desc.columnwise, cols, self._column_rows(rows))
        return self._results(rows, row, column, rng, slots[2])

    def _column_rows(self, rows: int) -> int:
        """Return the rows of the columnwise operand: those of the tensor, and zeros."""
        return round_up(rows, self._desc.padded or 1)

    def _results(
        self, rows: int, row: _Output, column: _Output, rng: torch.Tensor | None, count: int
    ) -> tuple[Quantized, tuple[int, ...], torch.Tensor | None]:
        """Return the result, the arguments of the native cast that follow those of the tensor, and
        the workspace."""
        quantized = Quantized(row.operand, column.operand)
        addresses = (*row[1:4], *column[1:4])
        if not self._is_fp4:
            return quantized, (*addresses, count, self._column_rows(rows)), None
        seed, offset = (0, 0) if rng is None else rng.tolist()
        workspace = torch.empty(self._partials, dtype=torch.float32, device=self._device)
        globals_ = (row.global_scale_inv, column.global_scale_inv)
        noise = (seed, offset, self._column_rows(rows))
        arguments = (*addresses, *globals_, count, workspace.data_ptr(), *noise)
        return quantized, arguments, workspace

    def _check(self, rows: int, cols: int) -> None:
        """Refuse sizes that codes two a byte, or the transform of 16 rows, do not divide."""
        column = self._desc.columnwise
        step = 16 if column is not None and column.transform is not None else 2
        whole = self._column_rows(rows)
        for spec, k, least in ((self._desc.rowwise, cols, 2), (column, whole, step)):
            if self._is_fp4 and spec is not None and k % least:
                raise OperandError(
                    f"{self._desc}: x is [{rows}, {cols}]; the dimension that {spec} is contracted "
                    f"along must be a multiple of {least}."
                )

    def _allocate(self, spec: OperandSpec | None, rows: int, k: int) -> _Output:
        """Allocate an operand ``[rows, k]``; the global scale of an empty one is 1."""
        if spec is None:
            return _Output(None)
        (block_rows, block_k), device = spec.block, self._device
        width = k // 2 if self._is_fp4 else k
        # Room for whole steps of rows, so that no product copies them to have it.
        codes = torch.empty((round_up(rows, ALIGNMENT), width), dtype=torch.uint8, device=device)
        codes = codes[:rows]
        scale_rows, blocks = -(-rows // block_rows), -(-k // block_k)
        pitch = round_up(scale_rows, _PITCH)
        scales = torch.empty((blocks, pitch), dtype=torch.uint8, device=device).t()[:scale_rows]
        addresses = (codes.data_ptr(), scales.data_ptr(), pitch)
        if not self._is_fp4:
            return _Output(Operand(codes, scales), *addresses)
        new = torch.empty if rows and k else torch.ones
        global_scale_inv = new((1, 1), dtype=torch.float32, device=device)
        operand = Operand(codes, scales, global_scale_inv)
        return _Output(operand, *addresses, global_scale_inv.data_ptr())


class TiledGemm:
    """``d[m, n] = a[m, k] @ b[n, k].T`` of operands with byte scales; see GemmDesc.

    One kernel brings both operands' scales into cuBLASLt's tiles and, for NVFP4, multiplies the
    two global scales into alpha, on the device.
    """

    __slots__ = ("_blocks", "_desc", "_index", "_is_fp4", "_library", "_product", "kernel")

    def __init__(self, desc: GemmDesc, device: torch.device, native: Any) -> None:
        assert desc.a is not None
        assert desc.b is not None
        self._product = LowPrecisionGemm(desc, device, native)
        self._library = native
        self._index = index_of(device)
        self._desc = desc
        self._blocks = (desc.a.block, desc.b.block)
        self._is_fp4 = scale_mode(desc.a) == "nv16"
        self.kernel = f"fp8core::arrange, {self._product.kernel}"

    def __call__(
        self,
        a: Operand,
        b: Operand,
        *,
        bias: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Multiply; see the backend API."""
        if a.data.numel() and b.data.numel() and a.data.shape[1] == b.data.shape[1]:
            a, b = self._tiled(a, b)
        return self._product(a, b, bias=bias, out=out)

    def _tiled(self, a: Operand, b: Operand) -> tuple[Operand, Operand]:
        """Return the operands with their scales in tiles, alpha behind those of ``a``."""
        library = self._library
        a_source = self._source(a, *self._blocks[0])
        b_source = self._source(b, *self._blocks[1])
        a_bytes = library.tile_bytes(a_source[3], a_source[4])  # rows, blocks
        b_bytes = library.tile_bytes(b_source[3], b_source[4])
        begin = a_bytes + _FACTORS
        tiles = torch.empty(begin + b_bytes, dtype=torch.uint8, device=a.data.device)
        a_tiles, b_tiles = tiles[:a_bytes], tiles[begin:]
        arguments = (*a_source, a_tiles.data_ptr(), *b_source, b_tiles.data_ptr())
        library.arrange_scales(arguments, self._index, raw_stream(self._index))
        return Operand(a.data, a_tiles), Operand(b.data, b_tiles)

    def _source(
        self, operand: Operand, block_rows: int, block_k: int
    ) -> tuple[int, int, int, int, int, int, int]:
        """Return the fields of the native ScaleTiles of an operand, but for the tiles' address.

        Raises:
            OperandError: scales that do not go with the codes, which would be read beyond an end.
        """
        scales, global_scale_inv = operand.scale_inv, operand.global_scale_inv
        rows, width = operand.data.shape
        k = 2 * width if self._is_fp4 else width
        shape = (-(-rows // block_rows), -(-k // block_k))
        if scales is None or scales.shape != shape or (global_scale_inv is None) == self._is_fp4:
            shapes = [
                None if part is None else list(part.shape) for part in (scales, global_scale_inv)
            ]
            expected = "one float32 global_scale_inv" if self._is_fp4 else "no global_scale_inv"
            raise OperandError(
                f"{self._desc}: an operand of {rows} rows of {k} has scale_inv {shapes[0]} and "
                f"global_scale_inv {shapes[1]}; expected {list(shape)} and {expected}."
            )
        address = 0 if global_scale_inv is None else global_scale_inv.data_ptr()
        row_stride, block_stride = scales.stride()
        blocks = scales.shape[1]
        return scales.data_ptr(), row_stride, block_stride, rows, blocks, block_rows, address
