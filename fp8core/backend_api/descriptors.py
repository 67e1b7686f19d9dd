"""The three operations that every backend begins with: quantize, dequantize, and the product."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from fp8core.backend_api.descriptor_text import dtype_text, text
from fp8core.backend_api.operand_spec import OperandSpec


@dataclass(frozen=True, slots=True)
class QuantizeDesc:
    """``quantize(x, group_offsets=None, *, scale=None, amax=None, amax_out=None, rng=None,
    nonfinite_out=None) -> Quantized``.

    ``x [rows, cols]`` has ``dtype``, any strides, and is on the device the op was bound for.
    ``nonfinite_out`` (int64 ``[1]`` on ``x``'s device, or None) grows by the number of NaN and inf
    in ``x``, each counted once, also where both orientations are asked for.

    Every other argument is given for descriptors of one kind alone, so that a backend which denies
    that kind does not take it:

    - ``grouped``: ``group_offsets``. Each group is a tensor with its own amax and its own blocks,
      and rows of no group are not counted; see ``fp8core.backend_api.grouped``.
    - delayed specs: ``scale`` (float32, one entry, or one a group; a multiplier) and ``amax_out``
      (likewise; becomes ``max(amax_out, amax(x))``, NaN elements ignored; None records nothing).
    - :class:`~fp8core.backend_api.QuantizeByAmaxDesc`: ``amax``.
    - stochastic specs: ``rng`` (int64 ``[2]`` on the CPU: seed and offset; the same values give the
      same rounding).

    What a bound callable may offer for speed: :mod:`fp8core.backend_api.optional`.

    Raises nothing for values: NaN keeps its place, inf saturates, zero blocks get scale 1."""

    op: ClassVar[str] = "quantize"
    low_precision: ClassVar[bool] = True
    dtype: torch.dtype
    rowwise: OperandSpec | None
    columnwise: OperandSpec | None
    grouped: bool = False
    offsets_on_device: bool = False

    def halves(self) -> tuple[QuantizeDesc, QuantizeDesc]:
        """Return the descriptors of the rowwise and of the columnwise half alone."""
        return replace(self, columnwise=None), replace(self, rowwise=None)

    def __str__(self) -> str:
        start = f"{dtype_text(self.dtype)} -> rowwise={self.rowwise}"
        return text(self, start, f"columnwise={self.columnwise}")


@dataclass(frozen=True, slots=True)
class DequantizeDesc:
    """``dequantize(operand) -> x [rows, k]`` in ``dtype``; rounds once, from float32."""

    op: ClassVar[str] = "dequantize"
    operand: OperandSpec
    dtype: torch.dtype = torch.float32
    low_precision: ClassVar[bool] = True

    def __str__(self) -> str:
        return text(self, f"{self.operand} -> {dtype_text(self.dtype)}")


@dataclass(frozen=True, slots=True)
class GemmDesc:
    """``gemm(a, b, *, bias=None, out=None) -> d [m, n]`` in ``out_dtype``.

    ``a`` is an :class:`Operand` ``[m, k]`` quantized by spec ``a``, in high precision if that is
    None; ``b`` ``[n, k]`` likewise. ``bias`` is ``[n]``, added in float32 before the one rounding
    to ``out_dtype``. With ``out`` the result is written there, with ``accumulate`` added to it.
    ``fast_accumulation`` allows the device's faster, less exact accumulator.
    """

    op: ClassVar[str] = "gemm"
    a: OperandSpec | None
    b: OperandSpec | None
    out_dtype: torch.dtype
    accumulate: bool = False
    fast_accumulation: bool = False

    @property
    def low_precision(self) -> bool:
        """Whether an operand is quantized."""
        return self.a is not None or self.b is not None

    def __str__(self) -> str:
        return text(self, f"a={self.a}", f"b={self.b}", f"out={dtype_text(self.out_dtype)}")
