"""Quantizers made of others: by orientation, or with an amax recorded beside."""

from __future__ import annotations

import torch

from fp8core.backend_api import AmaxDesc, QuantizeDesc
from fp8core.tensors.low_precision import Resolve
from fp8core.tensors.quantizer import BaseQuantizer, Groups, Orientations, Quantizer

__all__ = ["Mixed", "Observer", "RowwiseTwice"]


class Mixed(BaseQuantizer):
    """One orientation in low precision, the other in high precision."""

    __slots__ = ("_columnwise", "_rowwise", "choices")

    def __init__(self, rowwise: Quantizer, columnwise: Quantizer) -> None:
        self._rowwise = rowwise
        self._columnwise = columnwise
        self.choices = (*rowwise.choices, *columnwise.choices)

    def __call__(
        self,
        x: torch.Tensor,
        groups: Groups = (),
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        rng: torch.Tensor | None = None,
    ) -> Orientations:
        """Make each orientation by its own quantizer."""
        row = self._rowwise(x, groups, columnwise=False, rng=rng).rowwise if rowwise else None
        if not columnwise:
            return Orientations(row, None)
        return Orientations(row, self._columnwise(x, groups, rowwise=False, rng=rng).columnwise)


class RowwiseTwice(BaseQuantizer):
    """Low precision for both orientations: the columnwise operand is the rowwise one, which its
    reader dequantizes and transposes."""

    __slots__ = ("_rowwise", "choices")

    def __init__(self, rowwise: Quantizer) -> None:
        self._rowwise = rowwise
        self.choices = rowwise.choices

    def __call__(
        self,
        x: torch.Tensor,
        groups: Groups = (),
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        rng: torch.Tensor | None = None,
    ) -> Orientations:
        """Quantize ``x`` rowwise."""
        operand = self._rowwise(x, groups, columnwise=False, rng=rng).rowwise
        return Orientations(operand if rowwise else None, operand if columnwise else None)


class Observer(BaseQuantizer):
    """Records the amax that ``desc`` would record, then hands the tensor to another quantizer."""

    __slots__ = ("_amax", "_inner", "_recorded", "choices")

    def __init__(
        self, inner: Quantizer, desc: QuantizeDesc, resolve: Resolve, recorded: torch.Tensor
    ) -> None:
        self._inner = inner
        self._amax = resolve(AmaxDesc(desc)).run
        self._recorded = recorded
        self.choices = inner.choices

    def __call__(
        self,
        x: torch.Tensor,
        groups: Groups = (),
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        rng: torch.Tensor | None = None,
    ) -> Orientations:
        """Record, then quantize."""
        self._recorded.copy_(torch.maximum(self._recorded, self._amax(x, *groups)))
        return self._inner(x, groups, rowwise=rowwise, columnwise=columnwise, rng=rng)
