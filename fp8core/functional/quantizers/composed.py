"""Quantizers of two formats, one for each orientation, and of none."""

from __future__ import annotations

import torch

from fp8core.errors import OperandError, RecipeError, UnsupportedError
from fp8core.functional.quantizers.base import Quantizer
from fp8core.recipe.plan import TensorPlan


class IdentityQuantizer(Quantizer):
    """Leaves a tensor in high precision: for a factory's answer, or one half of a HybridQuantizer.

    Called, it returns the tensor, in ``dtype`` if that is given.
    """

    def __init__(
        self, *, dtype: torch.dtype | None = None, rowwise: bool = True, columnwise: bool = True
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise RecipeError(f"IdentityQuantizer(dtype={dtype!r}): expected a floating dtype.")
        self.dtype = dtype

    @property
    def plan(self) -> TensorPlan:
        """No orientation is quantized."""
        return TensorPlan(None, None)

    @property
    def cell(self) -> TensorPlan:
        """The plan, which says all that a layer does with it."""
        return self.plan

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:  # type: ignore[override]  # no QuantizedTensor
        """Return ``tensor``."""
        return tensor if self.dtype is None else tensor.to(self.dtype)

    def __repr__(self) -> str:
        return "IdentityQuantizer()" if self.dtype is None else f"IdentityQuantizer({self.dtype})"


class HybridQuantizer(Quantizer):
    """Quantizes rowwise as one quantizer does, and columnwise as another.

    Args:
        rowwise_quantizer, columnwise_quantizer: quantizers whose plans say all that they do; their
            usages do not matter.
        columnwise_source: ``"original"``; the columnwise operand of a dequantized rowwise one is
            not offered, as no product here reads one.
    """

    def __init__(
        self,
        *,
        rowwise_quantizer: Quantizer,
        columnwise_quantizer: Quantizer,
        columnwise_source: str = "original",
    ) -> None:
        super().__init__()
        cells = []
        for way, given in (("rowwise", rowwise_quantizer), ("columnwise", columnwise_quantizer)):
            cell = given.cell if isinstance(given, Quantizer) else None
            if cell is None:
                raise OperandError(
                    f"HybridQuantizer({way}_quantizer={given!r}): expected a quantizer of fp8core "
                    f"without a state or code of its own."
                )
            cells.append(cell)
        if columnwise_source == "rowwise_dequantized":
            raise UnsupportedError(
                "HybridQuantizer(columnwise_source='rowwise_dequantized') is not offered; a recipe "
                "with backward_override='dequantized' multiplies by the dequantized operand."
            )
        if columnwise_source != "original":
            raise RecipeError(
                f"HybridQuantizer(columnwise_source={columnwise_source!r}): expected 'original'."
            )
        self.rowwise_quantizer = rowwise_quantizer
        self.columnwise_quantizer = columnwise_quantizer
        self.columnwise_source = columnwise_source
        self._plan = TensorPlan(cells[0].rowwise, cells[1].columnwise)

    @property
    def plan(self) -> TensorPlan:
        """The rowwise half of one plan, and the columnwise half of the other."""
        return self._plan
