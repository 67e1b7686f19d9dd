"""A layer of one operation: the base of those in :mod:`fp8core.ops`."""

from __future__ import annotations

import torch

from fp8core.modules.base import LowPrecisionModule
from fp8core.modules.run import run_layer

__all__ = ["Operation"]


class Operation(LowPrecisionModule):
    """One operation, of one shape; called by itself it is a chain of one link."""

    kind = "operation"

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Compute from ``input [..., k]``."""
        params = self.link_params()
        like = params[0] if params else None
        (shape,) = self.link_shapes()
        return run_layer(self, input, params, like=like, columns=shape.input_columns(None))[0]

    def _describe(self) -> list[str]:
        return []
