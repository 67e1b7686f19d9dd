"""The columns of activations, of which the gated ones take two halves."""

from __future__ import annotations

import torch

from fp8core.backend_api import GATED
from fp8core.chain.shape import LinkShape
from fp8core.errors import OperandError


class GatedShape(LinkShape):
    """Base of the shapes of an activation called ``name``, gated or not; it computes in float32."""

    __slots__ = ()

    name: str

    @property
    def is_gated(self) -> bool:
        """Whether it takes twice as many columns as it gives."""
        return self.name in GATED

    def columns(self, columns: int) -> int:
        """Return half of ``columns`` for a gated one."""
        return columns // 2 if self.is_gated else columns

    def input_columns(self, columns: int | None) -> int | None:
        """Return twice the ``columns`` for a gated one."""
        return 2 * columns if self.is_gated and columns is not None else columns

    def expected_columns(self, columns: int) -> str | None:
        """Refuse two halves of an odd number of columns."""
        return "an even number of" if self.is_gated and columns % 2 else None

    def output_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return float32, in which it computes."""
        return torch.float32

    def no_halves(self, x: torch.Tensor) -> OperandError:
        """Return the error about ``x``, whose odd number of columns has no two halves."""
        return OperandError(
            f"{self.name}: input {list(x.shape)} has no two halves; expected an even number of "
            f"columns."
        )
