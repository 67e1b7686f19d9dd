"""A gradient that is a matrix product, computed while its reader casts it, some rows at a time.

The gradient of an activation's output is read once, by the operation that makes the operands of the
linear before it. Of a large one there are never more than a few rows in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from fp8core.backend_api import Operand
from fp8core.chain.request import Handover, QuantizeRequest
from fp8core.tensors.quantizer import HighPrecision, Orientations
from fp8core.torch_ops.recorded import called_in_repeats


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
    time: each repeat of a recorded run allocates it too."""
    return called_in_repeats(partial(_empty_rows, rows, dtype), b)


def _empty_rows(rows: int, dtype: torch.dtype, b: torch.Tensor) -> torch.Tensor:
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
    if rows <= k or any(one is not None and one.shape[0] != 1 for one in scales):
        return None
    return ComputedProduct(gemm_part, a, b, dtype)
