"""Operands: the plain tensors of a quantized tensor, and the values of their scales."""

from __future__ import annotations

from typing import NamedTuple

import torch

from fp8core import formats
from fp8core.backend_api.operand_spec import OperandSpec

__all__ = ["Operand", "Quantized", "scale_inverses"]


class Operand(NamedTuple):
    """One operand ``[rows, k]`` of a GEMM: flat plain tensors, so that autograd can save them.

    Quantized, ``data`` is uint8: ``[rows, k]`` codes, or ``[rows, k / 2]`` for a 4-bit format,
    where element ``2 i`` is in the low half of byte ``i``. ``scale_inv`` is ``[ceil(rows / br),
    ceil(k / bk)]`` in float32, or uint8 codes of the scale format. ``global_scale_inv`` is
    float32 for two-level scales, ``[1, 1]``, or ``[rows, 1]`` if they are ``row_scaled``, else
    None. ``fp8core.backend_api.grouped`` says how
    the operands of several groups are stored as one.

    In high precision (a descriptor's spec is None), ``data`` is the tensor itself, without scales.
    """

    data: torch.Tensor
    scale_inv: torch.Tensor | None = None
    global_scale_inv: torch.Tensor | None = None


class Quantized(NamedTuple):
    """The orientations of one tensor ``x [rows, cols]`` that were asked for, None for the other.

    ``rowwise`` has the shape of ``x``, ``columnwise`` that of ``x.T``.
    """

    rowwise: Operand | None
    columnwise: Operand | None


def scale_inverses(spec: OperandSpec, operand: Operand) -> torch.Tensor:
    """Return the factor of each block of ``operand``, float32, both levels multiplied.

    ``value = decode(data) * factor``; the shape is that of ``operand.scale_inv``.
    """
    assert operand.scale_inv is not None
    scale_inv = operand.scale_inv
    if spec.scale_format != "float32":
        scale_inv = formats.by_name(spec.scale_format).decode(scale_inv)
    if operand.global_scale_inv is not None:
        scale_inv = scale_inv * operand.global_scale_inv
    return scale_inv
