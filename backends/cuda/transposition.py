"""Codes that are laid out as cuBLASLt reads them: rows whole, along what a product contracts."""

from __future__ import annotations

from typing import Any

import torch

from fp8core_backends.cuda.layout import k_contiguous
from fp8core_backends.cuda.memory import allocator
from fp8core_backends.cuda.stream import index_of, raw_stream

_STEP = 16
"""Sizes and addresses that the kernel takes are multiples of it."""


class RowsAdjacent:
    """Returns codes ``[rows, k]`` of 8 bits with adjacent rows: themselves, or a copy.

    Ranks that have one scale for a tensor exchange its codes once, and transpose them: columns of
    codes, which torch would copy byte by byte, go through one kernel.
    """

    __slots__ = ("_empty", "_index", "_transpose")

    def __init__(self, device: torch.device, native: Any) -> None:
        self._index = index_of(device)
        self._empty = allocator(self._index)
        self._transpose = native.Transpose(self._index)

    def __call__(self, codes: torch.Tensor) -> torch.Tensor:
        """Return ``codes`` with adjacent rows, at an address that cuBLASLt takes."""
        rows, k = codes.shape
        is_transposed = not codes.is_contiguous() and codes.t().is_contiguous()
        at = codes.data_ptr()
        if not is_transposed or rows % _STEP or k % _STEP or at % _STEP or codes.itemsize != 1:
            return k_contiguous(codes)
        result = self._empty((rows, k), (k, 1), codes.dtype)
        self._transpose((at, k, rows, result.data_ptr()), raw_stream(self._index))
        return result
