"""A cast that returns the column sums as well: a gradient read once, also for the bias.

The sums have the bits of :class:`fp8core_backends.cuda.column_sums.ColumnSums`.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias

import torch

from fp8core.backend_api import Quantized
from fp8core_backends.cuda.layout import adjacent_columns, wrong_dtype
from fp8core_backends.cuda.memory import allocator
from fp8core_backends.cuda.stream import raw_stream

DTYPES = (torch.bfloat16, torch.float16)
MODES = ("tensor", "row", "vec128")
"""What there are kernels for: dtypes of the tensor, and what a scale covers."""

Addresses: TypeAlias = "tuple[int, ...]"
"""The arguments of a native cast: the fields of ``QuantizeArguments`` in their order (see
csrc/include/fp8core/quantize.h), 0 where there is no tensor."""

Results: TypeAlias = "tuple[Quantized, Addresses, torch.Tensor | None]"


class SummableCast(Protocol):
    """A cast of tensors of ``dtype`` that allocates its results apart from its native call."""

    dtype: torch.dtype
    native_cast: Any

    def __call__(
        self,
        x: torch.Tensor,
        *,
        scale: torch.Tensor | None = None,
        amax_out: torch.Tensor | None = None,
        nonfinite_out: torch.Tensor | None = None,
    ) -> Quantized:
        """Quantize ``x``."""

    def results(
        self,
        rows: int,
        cols: int,
        scale: torch.Tensor | None,
        amax_out: torch.Tensor | None,
        nonfinite_out: torch.Tensor | None,
    ) -> Results:
        """Allocate the result of casting a tensor ``[rows, cols]`` that has elements.

        Returns the result, the arguments of the native cast that follow those of the tensor, and
        the workspace, which the caller holds until the cast is enqueued.
        """


class QuantizeAndSum:
    """A cast of a descriptor with ``sums``."""

    __slots__ = ("_cast", "_empty", "_index")

    def __init__(self, cast: SummableCast, index: int) -> None:
        self._cast = cast
        self._index = index
        self._empty = allocator(index)

    def __call__(
        self,
        x: torch.Tensor,
        *,
        scale: torch.Tensor | None = None,
        amax_out: torch.Tensor | None = None,
        nonfinite_out: torch.Tensor | None = None,
    ) -> tuple[Quantized, torch.Tensor]:
        """Quantize ``x [rows, n]``, and return its column sums, float32 ``[n]``.

        Raises:
            OperandError: ``x`` has another dtype than was bound.
        """
        (rows, cols), cast = x.shape, self._cast
        if x.dtype is not cast.dtype:
            raise wrong_dtype("quantize_and_sum", x.dtype, cast.dtype)
        if not (rows and cols):
            quantized = cast(x, scale=scale, amax_out=amax_out, nonfinite_out=nonfinite_out)
            return quantized, torch.zeros(cols, dtype=torch.float32, device=x.device)
        x, stride = adjacent_columns(x)
        # Freed memory may be handed out again at once: both workspaces are held over the launch.
        quantized, results, _workspace = cast.results(rows, cols, scale, amax_out, nonfinite_out)
        sums = self._empty((cols,), (1,), torch.float32)
        size = cast.native_cast.tile_sums_floats(rows, cols)
        tile_sums = self._empty((size,), (1,), torch.float32)
        addresses = (sums.data_ptr(), tile_sums.data_ptr())
        arguments = (*addresses, x.data_ptr(), rows, cols, stride, *results)
        cast.native_cast.and_sum(arguments, raw_stream(self._index))
        return quantized, sums
