"""Column sums, the gradients of biases: one pass over the tensor, without atomics."""

from __future__ import annotations

from typing import Any

import torch

from fp8core.backend_api import ColumnSumsDesc, OperandError
from fp8core_backends.cuda.layout import DTYPES, adjacent_columns
from fp8core_backends.cuda.memory import allocator
from fp8core_backends.cuda.operations import runs
from fp8core_backends.cuda.stream import index_of, raw_stream


def _problem(desc: ColumnSumsDesc) -> str | None:
    return None if desc.dtype in DTYPES else f"no column sums of {desc.dtype}"


@runs(ColumnSumsDesc, refuses=_problem, is_recorded=True)
class ColumnSums:
    """The callable of a ColumnSumsDesc: one native call."""

    __slots__ = ("_dtype", "_empty", "_index", "_native_sums", "kernel")

    def __init__(self, desc: ColumnSumsDesc, device: torch.device, native: Any) -> None:
        self._dtype = desc.dtype
        self._index = index_of(device)
        self._empty = allocator(self._index)
        input_type = native.InputType.__members__[DTYPES[desc.dtype]]
        self._native_sums = native.ColumnSums(input_type, self._index)
        self.kernel = "fp8core::sum_tiles"

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sums over the rows of ``x [rows, n]``, float32 ``[n]``.

        Raises:
            OperandError: ``x`` has another dtype than was bound.
        """
        rows, cols = x.shape
        if x.dtype != self._dtype:
            raise OperandError(f"column_sums of {x.dtype}; bound for {self._dtype}.")
        if not (rows and cols):
            return torch.zeros(cols, dtype=torch.float32, device=x.device)
        x, stride = adjacent_columns(x)
        sums, run = self._empty((cols,), (1,), torch.float32), self._native_sums
        size, workspace, workspace_address = run.workspace_floats(rows, cols), None, 0
        if size:
            workspace = self._empty((size,), (1,), torch.float32)  # held until it is enqueued
            workspace_address = workspace.data_ptr()
        arguments = (x.data_ptr(), rows, cols, stride, sums.data_ptr(), workspace_address)
        run(arguments, raw_stream(self._index))
        return sums
