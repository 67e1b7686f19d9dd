"""From codes to values: one kernel for every operand that the casts of this backend make."""

from __future__ import annotations

from typing import Any

import torch

from fp8core.backend_api import DequantizeDesc, Operand, OperandError
from fp8core_backends.cuda.layout import DTYPES, adjacent_columns, spec_problem
from fp8core_backends.cuda.memory import allocator
from fp8core_backends.cuda.operations import runs
from fp8core_backends.cuda.stream import index_of, raw_stream


def _problem(desc: DequantizeDesc) -> str | None:
    is_float = desc.dtype in DTYPES
    return spec_problem(desc.operand) if is_float else f"no low precision to {desc.dtype}"


@runs(DequantizeDesc, refuses=_problem, is_recorded=True)
class Dequantize:
    """The callable of a DequantizeDesc: one native call. A transform is not undone.

    Scales are read where they are, of any strides; codes whose rows are not whole are copied first.
    """

    __slots__ = ("_desc", "_empty", "_index", "_native_dequantize", "_per_byte", "kernel")

    def __init__(self, desc: DequantizeDesc, device: torch.device, native: Any) -> None:
        spec = desc.operand
        self._desc = desc
        self._index = index_of(device)
        self._empty = allocator(self._index)
        self._per_byte = 2 if spec.format == "e2m1" else 1
        types = native.ElementType.__members__
        self._native_dequantize = native.Dequantize(
            types[spec.format],
            types[DTYPES[desc.dtype]],
            native.ScaleFormat.__members__[spec.scale_format],
            *spec.block,
            self._index,
        )
        self.kernel = "fp8core::dequantize_units"

    def __call__(self, operand: Operand, x: torch.Tensor | None = None) -> torch.Tensor:
        """Return the values of ``operand``, ``[rows, k]`` in the dtype of the descriptor, in ``x``
        where that is given: contiguous memory of the caller's own.

        Raises:
            OperandError: scales that do not go with the codes, which would be read beyond an end.
        """
        data, scale_inv, global_scale_inv = operand
        rows, width = data.shape
        k = width * self._per_byte
        if x is None:
            x = self._empty((rows, k), (k or 1, 1), self._desc.dtype)
        if not (rows and k):
            return x
        scale_inv = self._checked_scales(operand, rows, k)
        data, stride = adjacent_columns(data)
        row_stride, block_stride = scale_inv.stride()
        arguments = (
            data.data_ptr(),
            rows,
            k,
            stride,
            scale_inv.data_ptr(),
            row_stride,
            block_stride,
            0 if global_scale_inv is None else global_scale_inv.data_ptr(),
            x.data_ptr(),
        )
        self._native_dequantize(arguments, raw_stream(self._index))
        return x

    def _checked_scales(self, operand: Operand, rows: int, k: int) -> torch.Tensor:
        """Return the scales, of the shapes and dtypes that the kernel reads."""
        spec = self._desc.operand
        data, scale_inv, whole = operand
        blocks = tuple(
            -(-size // block) if block else 1
            for size, block in zip((rows, k), spec.block, strict=True)
        )
        dtype = torch.float32 if spec.scale_format == "float32" else torch.uint8
        has_whole = spec.scale_format == "e4m3"
        is_right = (
            data.dtype == torch.uint8
            and scale_inv is not None
            and (scale_inv.dtype, scale_inv.shape) == (dtype, blocks)
            and (whole is not None) == has_whole
            and (whole is None or (whole.dtype, whole.numel()) == (torch.float32, 1))
        )
        if not is_right or scale_inv is None:
            parts = [None if part is None else (part.dtype, *part.shape) for part in operand]
            expected = "one float32 global_scale_inv" if has_whole else "no global_scale_inv"
            raise OperandError(
                f"{self._desc}: an operand {parts}; expected uint8 codes, {dtype} scale_inv "
                f"{list(blocks)} and {expected}."
            )
        return scale_inv
