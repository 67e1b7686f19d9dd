"""Quantization by the native kernels: codes and their transpose in one pass over the tensor."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from fp8core.backend_api import (
    AmaxDesc,
    Operand,
    OperandSpec,
    Quantized,
    QuantizeDesc,
)
from fp8core_backends.cuda.casts import apart, in_groups
from fp8core_backends.cuda.device_groups import bind_device_quantize
from fp8core_backends.cuda.layout import DTYPES, adjacent_columns, empty_scales, scale_mode
from fp8core_backends.cuda.memory import allocator
from fp8core_backends.cuda.pairs import Place, QuantizePair
from fp8core_backends.cuda.parts import QuantizeInParts
from fp8core_backends.cuda.stream import index_of, raw_stream

__all__ = ["bind_amax", "bind_quantize"]

_FLOAT32_MAX = torch.finfo(torch.float32).max
# Looked up in every call, so here by one name each.
_UINT8, _FLOAT32, _ONE = torch.uint8, torch.float32, (1, 1)


class _Quantize:
    """One call of the native library: one spec, in the orientations that have it."""

    __slots__ = (
        "_columnwise",
        "_empty",
        "_index",
        "_mode",
        "_native",
        "_pairs",
        "_rowwise",
        "_workspace",
        "in_parts",
        "kernel",
        "native_cast",
    )

    def __init__(
        self,
        desc: QuantizeDesc,
        spec: OperandSpec,
        device: torch.device,
        native: Any,
    ) -> None:
        mode = scale_mode(spec)
        assert mode is not None
        self._mode: str = mode
        self.kernel = (
            "fp8core::directed_tile" if mode in ("row", "vec128") else "fp8core::uniform_tile"
        )
        self._rowwise = desc.rowwise is not None
        self._columnwise = desc.columnwise is not None
        self._index = index_of(device)
        self._empty = allocator(self._index)
        self._workspace = 0
        if mode == "tensor" and not spec.delayed:
            self._workspace = native.MAX_PARTIALS
        self.native_cast = _native_quantize(desc, spec, self._index, native)
        self._native = native
        # What two casts must have in common to be one launch.
        is_both = self._rowwise and self._columnwise
        is_paired = is_both and mode == "tensor" and spec.format == "e4m3"
        self._pairs = (spec.delayed, desc.dtype, self._index) if is_paired else None
        if is_both and mode in ("tensor", "vec128"):
            self.in_parts = QuantizeInParts(desc, device, native, self.native_cast, self)

    def __call__(
        self,
        x: torch.Tensor,
        *,
        scale: torch.Tensor | None = None,
        amax_out: torch.Tensor | None = None,
        nonfinite_out: torch.Tensor | None = None,
    ) -> Quantized:
        rows, cols = x.shape
        if self._mode != "tensor" or not (rows and cols and x.is_contiguous()):
            return self._quantize_any(x, scale, amax_out, nonfinite_out)
        made, place, _room = self.place(x, scale, amax_out, nonfinite_out)
        self.native_cast.whole(place, raw_stream(self._index))
        return made

    def place(
        self,
        x: torch.Tensor,
        scale: torch.Tensor | None,
        amax_out: torch.Tensor | None,
        nonfinite_out: torch.Tensor | None,
    ) -> tuple[Quantized, Place, torch.Tensor | None]:
        """Return room for what has one scale, where all of it is, and what holds the workspace."""
        (rows, cols), empty = x.shape, self._empty
        scale_inv = empty(_ONE, _ONE, _FLOAT32)  # both orientations share it
        row = column = room = None
        row_codes = column_codes = workspace = 0
        if self._rowwise:
            codes = empty((rows, cols), (cols, 1), _UINT8)
            row_codes = codes.data_ptr()
            row = Operand(codes, scale_inv)
        if self._columnwise:
            codes = empty((cols, rows), (rows, 1), _UINT8)
            column_codes = codes.data_ptr()
            column = Operand(codes, scale_inv)
        if self._workspace:
            room = empty((self._workspace,), (1,), _FLOAT32)
            workspace = room.data_ptr()
        place = (
            x.data_ptr(),
            rows,
            cols,
            row_codes,
            column_codes,
            scale_inv.data_ptr(),
            0 if scale is None else scale.data_ptr(),
            0 if amax_out is None else amax_out.data_ptr(),
            0 if nonfinite_out is None else nonfinite_out.data_ptr(),
            workspace,
        )
        return Quantized(row, column), place, room

    def beside(self, other: object) -> QuantizePair | None:
        """Return the cast of this and of ``other`` in one launch, if there is one; see
        QuantizeDesc."""
        if not isinstance(other, _Quantize) or self._pairs is None or self._pairs != other._pairs:
            return None
        return QuantizePair(self, other, self._native.quantize_pair, self._index)

    def _quantize_any(
        self,
        x: torch.Tensor,
        scale: torch.Tensor | None,
        amax_out: torch.Tensor | None,
        nonfinite_out: torch.Tensor | None,
    ) -> Quantized:
        """Quantize in any mode, from any strides."""
        rows, cols = x.shape
        mode, empty = self._mode, self._empty
        if not (rows and cols):
            return self._quantize_nothing(rows, cols, scale)
        x, stride = adjacent_columns(x)
        size = rows + cols if mode == "row" else self._workspace
        room = empty((size,), (1,), _FLOAT32) if size else None
        shared = empty_scales(mode, rows, cols, empty) if mode == "tensor" else None
        made: list[Operand | None] = []
        places: list[tuple[int, int, int]] = []
        for is_wanted, shape in ((self._rowwise, (rows, cols)), (self._columnwise, (cols, rows))):
            if not is_wanted:
                made.append(None)
                places.append((0, 0 if shared is None else shared[0].data_ptr(), 1))
                continue
            codes = empty(shape, (shape[1], 1), _UINT8)
            scale_inv, pitch = shared or empty_scales(mode, *shape, empty)
            made.append(Operand(codes, scale_inv))
            places.append((codes.data_ptr(), scale_inv.data_ptr(), pitch))
        self.native_cast(
            x.data_ptr(),
            rows,
            cols,
            stride,
            *places[0],
            *places[1],
            0 if scale is None else scale.data_ptr(),
            0 if amax_out is None else amax_out.data_ptr(),
            0 if nonfinite_out is None else nonfinite_out.data_ptr(),
            0 if room is None else room.data_ptr(),
            raw_stream(self._index),
        )
        return Quantized(*made)

    def _quantize_nothing(self, rows: int, cols: int, scale: torch.Tensor | None) -> Quantized:
        """Return operands without elements; their scales are 1, or the delayed one."""

        def operand(m: int, k: int) -> Operand:
            own, _ = empty_scales(self._mode, m, k, self._empty)
            own.fill_(1.0) if scale is None else own.copy_(1.0 / scale.reshape(1, 1))
            return Operand(self._empty((m, k), (max(k, 1), 1), _UINT8), own)

        return Quantized(
            operand(rows, cols) if self._rowwise else None,
            operand(cols, rows) if self._columnwise else None,
        )


def _native_quantize(desc: QuantizeDesc, spec: OperandSpec, index: int, native: Any) -> Any:
    largest = _FLOAT32_MAX if spec.block[1] == 0 else torch.finfo(desc.dtype).max
    return native.Quantize(
        native.Granularity.__members__["delayed" if spec.delayed else scale_mode(spec)],
        native.Format.__members__[spec.format],
        native.InputType.__members__[DTYPES[desc.dtype]],
        spec.target,
        spec.amax_epsilon,
        largest,
        spec.power_of_two,
        index,
    )


def bind_quantize(
    desc: QuantizeDesc, device: torch.device, native: Any
) -> Callable[..., Quantized]:
    """Return the callable of ``desc``: one native call, or one an orientation if specs differ."""
    if desc.offsets_on_device:
        index = index_of(device)
        bind = partial(_native_quantize, index=index, native=native)
        return bind_device_quantize(desc, device, bind)
    row, column = desc.rowwise, desc.columnwise
    if row is None or column is None or row == column:
        spec = row or column
        assert spec is not None
        dense: Callable[..., Quantized] = _Quantize(desc, spec, device, native)
    else:
        halves = [
            _Quantize(half, spec, device, native)
            for half, spec in zip(desc.halves(), (row, column), strict=True)
        ]
        dense = apart(*halves)
    return in_groups(dense) if desc.grouped else dense


def bind_amax(desc: AmaxDesc, device: torch.device, native: Any) -> Callable[..., torch.Tensor]:
    """Return ``amax(x) -> float32 [1]``."""
    index = index_of(device)
    kind = native.InputType.__members__[DTYPES[desc.dtype]]

    def run(x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(1, -1)
        if flat.stride(1) != 1:
            flat = flat.contiguous()
        room = torch.empty(native.MAX_PARTIALS, dtype=torch.float32, device=x.device)
        out = torch.empty(1, dtype=torch.float32, device=x.device)
        size = flat.shape[1]
        native.amax(
            flat.data_ptr(),
            1,
            size,
            size,
            kind,
            out.data_ptr(),
            room.data_ptr(),
            index,
            raw_stream(index),
        )
        return out

    run.kernel = "fp8core::amax_partials"  # type: ignore[attr-defined]  # what explain shows
    return run
