"""The layouts of operands and scales that cuBLASLt reads; operands in other layouts are copied.

Source: cuBLAS 13 documentation, 3.1.4 (scaling factors' layout): a vector of scales along k has its
rows adjacent, padded to a multiple of 4; 128 x 128 blocks have k adjacent, padded likewise. Byte
scales (MXFP8, NVFP4) lie with their rows adjacent, and are brought into tiles before each GEMM.
"""

from __future__ import annotations

from typing import TypeAlias

import torch

from fp8core.backend_api import GROUP_STEP, OperandError, OperandSpec
from fp8core_backends.cuda.memory import Empty
from fp8core_backends.cuda.operations import first_problem

ALIGNMENT = 16
"""Bytes that addresses and distances between rows are multiples of."""

ALIGNMENT_OF_ALLOCATIONS = 256
"""Bytes that the addresses of whole tensors are multiples of; cuBLASLt may choose by it."""

BLOCKS = frozenset({"vec128", "block128"})
"""Scale modes with float32 blocks along k."""

TILED = frozenset({"mx32", "nv16"})
"""Scale modes of bytes, which cuBLASLt reads in tiles."""

DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
"""The native library's names of torch's dtypes."""

_MODES = {(0, 0): "tensor", (1, 0): "row", (1, 128): "vec128", (128, 128): "block128"}
_BYTE_MODES = {
    ("e8m0", (1, 32)): "mx32",
    ("e8m0", (32, 32)): "mx32",
    ("e4m3", (1, 16)): "nv16",
    ("e4m3", (16, 16)): "nv16",
}


def wrong_dtype(op: str, dtype: torch.dtype, bound: torch.dtype) -> OperandError:
    """Return the error of a tensor of which a kernel, bound for another dtype, would read another
    number of bytes than it has."""
    return OperandError(f"{op} of {dtype}; bound for {bound}.")


Slots: TypeAlias = "tuple[int, int, int]"
"""The addresses of a cast's delayed scale, of its amax and of its count; 0 where there is none."""


def slots_of(
    scale: torch.Tensor | None, amax_out: torch.Tensor | None, nonfinite_out: torch.Tensor | None
) -> Slots:
    """Return the addresses of keywords of a cast."""
    return (
        0 if scale is None else scale.data_ptr(),
        0 if amax_out is None else amax_out.data_ptr(),
        0 if nonfinite_out is None else nonfinite_out.data_ptr(),
    )


def round_up(size: int, step: int) -> int:
    """Return the least multiple of ``step`` from ``size`` on."""
    return -(-size // step) * step


def scale_mode(spec: OperandSpec) -> str | None:
    """Return the native library's name of a spec's granularity, None for one that it lacks."""
    if spec.scale_format == "float32":
        return _MODES.get(spec.block)
    return _BYTE_MODES.get((spec.scale_format, spec.block))


def spec_problem(spec: OperandSpec | None) -> str | None:
    """Say why no kernel writes or reads an operand of ``spec``, or None."""
    if spec is None:
        return None
    mode, is_float = scale_mode(spec), spec.scale_format == "float32"
    codes = ("e2m1",) if mode == "nv16" else ("e4m3", "e5m2")
    under = "" if is_float else f" under {spec.scale_format} scales"
    is_transformed = spec.transform not in ((None,) if is_float else (None, "hadamard16"))
    return first_problem(
        (is_float and spec.format not in codes, f"no kernels for format {spec.format}"),
        (mode is None, f"no kernels for blocks of {spec.block}{under}"),
        (spec.format not in codes, f"no {spec.format}{under}"),
        (spec.stochastic and mode != "nv16", "no stochastic rounding to 8 bits"),
        (is_transformed, f"no kernels for the transform {spec.transform}"),
    )


def row_step(mode: str) -> int:
    """Return what the rows of a product's first operand are multiples of, by its scales' mode:
    vectors of scales come in fours of rows, and products with tiles of scales take sixteens."""
    return ALIGNMENT if mode in TILED else 4 if mode == "vec128" else 1


def scale_shape(mode: str | None, rows: int, blocks: int) -> tuple[int, int] | None:
    """Return the shape of the float32 scales of an operand of ``rows``, with ``blocks`` of 128
    along k; None for other scales."""
    shapes = {
        "tensor": (1, 1),
        "row": (rows, 1),
        "vec128": (rows, blocks),
        "block128": (-(-rows // 128), blocks),
    }
    return shapes.get(mode or "")


def scale_strides(mode: str, rows: int, k: int) -> tuple[int, int]:
    """Return the strides that the scales of an operand ``[rows, k]`` have."""
    if mode == "vec128":
        return (1, round_up(rows, row_step(mode)))
    return (round_up(-(-k // 128), 4), 1) if mode == "block128" else (1, 1)


def column_pitch(rows: int) -> int:
    """Return the bytes from one row of columnwise codes to the next, of a tensor of ``rows``: the
    casts store 16 codes at once where each row begins at a multiple of as many."""
    return round_up(rows, ALIGNMENT)


def group_pitch(length: int) -> int:
    """Return the bytes from one row of columnwise codes of groups to the next, for ``length`` codes
    in a row: one of 32 sizes an octave, as products have a plan for each."""
    return round_up(length, max(1 << max(length.bit_length() - 6, 0), GROUP_STEP))


def empty_codes(mode: str, rows: int, k: int, empty: Empty, pitch: int) -> torch.Tensor:
    """Allocate the codes ``[rows, k]`` of an operand, ``pitch`` bytes from one row to the next.

    The memory behind them reaches to whole steps of rows, so that no product copies them to have
    it; see :func:`with_rows`.
    """
    whole = round_up(rows, row_step(mode))
    codes = empty((whole, k), (pitch, 1), torch.uint8)
    return codes if rows == whole else codes[:rows]


def with_rows(x: torch.Tensor, rows: int, strides: tuple[int, int], empty: Empty) -> torch.Tensor:
    """Return ``x [m, k]`` as ``[rows, k]`` with ``strides``: its rows, and after them whatever lies
    in its memory. A copy where that ends before, or the strides are others."""
    (m, k), (row, column) = x.shape, strides
    fits = all(
        size == 1 or stride == expected
        for size, stride, expected in zip(x.shape, x.stride(), strides, strict=True)
    )
    end = x.storage_offset() + (rows - 1) * row + (k - 1) * column + 1
    if fits and end * x.itemsize <= x.untyped_storage().nbytes():
        return x.as_strided((rows, k), strides)
    whole = empty((rows, k), strides, x.dtype)
    whole[:m] = x
    return whole


def empty_scales(mode: str, rows: int, k: int, empty: Empty) -> tuple[torch.Tensor, int]:
    """Allocate the scales of an operand ``[rows, k]``; return them and their pitch in floats.

    The tensor is the view that the backend API asks for, ``[ceil(rows / br), ceil(k / bk)]``.
    """
    # Views only where sizes need them: one costs as much as the allocation.
    if mode == "vec128":
        pitch, blocks = round_up(rows, row_step(mode)), -(-k // 128)
        scale_inv = empty((pitch, blocks), (1, pitch), torch.float32)
        return scale_inv if rows == pitch else scale_inv[:rows], pitch
    if mode == "block128":
        blocks = -(-k // 128)
        pitch = round_up(blocks, 4)
        scale_inv = empty((-(-rows // 128), pitch), (pitch, 1), torch.float32)
        return scale_inv if blocks == pitch else scale_inv[:, :blocks], pitch
    shape = (1, 1) if mode == "tensor" else (rows, 1)
    return empty(shape, (1, 1), torch.float32), 1


def scales(mode: str, scale_inv: torch.Tensor) -> torch.Tensor:
    """Return ``scale_inv`` in the layout that the library reads: itself, or a copy."""
    if mode in TILED:  # already in tiles
        return scale_inv
    rows, blocks = scale_inv.shape
    expected_strides = scale_strides(mode, rows, blocks * 128)
    fits = all(
        size == 1 or stride == expected
        for size, stride, expected in zip(
            scale_inv.shape, scale_inv.stride(), expected_strides, strict=True
        )
    )
    if fits and scale_inv.data_ptr() % ALIGNMENT == 0:
        return scale_inv
    # By operators that a recording of the call repeats.
    lines = scale_inv if mode == "block128" else scale_inv.t()
    length = lines.shape[1]
    if length % 4:
        copy = torch.nn.functional.pad(lines, (0, -length % 4))[:, :length]
    else:
        copy = lines.clone(memory_format=torch.contiguous_format)
    return copy if mode == "block128" else copy.t()


def row_stride(x: torch.Tensor) -> int | None:
    """Return how many elements there are from one row of ``x [rows, cols]`` to the next, None if
    its columns are not adjacent or its rows not apart."""
    cols = x.shape[1]
    if x.is_contiguous():
        return cols  # the stride of a single row is anything
    return x.stride(0) if x.stride(1) == 1 and x.stride(0) >= cols else None


def adjacent_columns(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return ``x [rows, cols]`` as the casts read it, columns adjacent and rows apart, and how many
    elements there are from one row to the next."""
    stride = row_stride(x)
    return (x.contiguous(), x.shape[1]) if stride is None else (x, stride)


def k_contiguous(data: torch.Tensor) -> torch.Tensor:
    """Return codes ``[rows, k]`` as the library reads them: whole, rows adjacent, aligned."""
    data = data.contiguous()
    return data if data.data_ptr() % ALIGNMENT == 0 else data.clone()
