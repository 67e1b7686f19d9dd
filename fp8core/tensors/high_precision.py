"""Quantizers that leave a tensor in high precision."""

from __future__ import annotations

import torch

from fp8core.backend_api import Operand
from fp8core.dispatch.select import Choice
from fp8core.tensors.quantizer import BaseQuantizer, Groups, Orientations

__all__ = ["HighPrecision", "Unturned"]


class HighPrecision(BaseQuantizer):
    """No quantization: the operands are the tensor in the activation dtype, and its view."""

    __slots__ = ("_dtype", "choices")

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self.choices: tuple[Choice, ...] = ()

    def __call__(
        self,
        x: torch.Tensor,
        groups: Groups = (),
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        rng: torch.Tensor | None = None,
    ) -> Orientations:
        """Return ``x`` and ``x.T``."""
        if x.dtype != self._dtype:
            x = x.to(self._dtype)
        return Orientations(Operand(x) if rowwise else None, Operand(x.t()) if columnwise else None)


class Unturned(HighPrecision):
    """No quantization, and no view: both operands are the tensor itself, which its GEMM turns.

    What autograd saves is then the tensor that it knows, with its history.
    """

    __slots__ = ()

    def __call__(
        self,
        x: torch.Tensor,
        groups: Groups = (),
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        rng: torch.Tensor | None = None,
    ) -> Orientations:
        """Return ``x`` for either orientation."""
        operand = Operand(x if x.dtype == self._dtype else x.to(self._dtype))
        return Orientations(operand if rowwise else None, operand if columnwise else None)
