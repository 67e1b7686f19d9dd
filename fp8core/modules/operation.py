"""A layer of one operation: the base of those in :mod:`fp8core.ops`."""

from __future__ import annotations

import torch

from fp8core.modules.base import LowPrecisionModule
from fp8core.modules.bind import bind
from fp8core.modules.inputs import check_input
from fp8core.modules.run import run_links

__all__ = ["Operation"]


class Operation(LowPrecisionModule):
    """One operation, of one shape; called by itself it is a chain of one link."""

    kind = "operation"

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Compute from ``input [..., k]``."""
        params = self.link_params()
        like = params[0] if params else None
        (shape,) = self.link_shapes()
        dtype = check_input(self, input, like, shape.input_columns(None))
        bound = bind(self, input.device, dtype)
        input = input if input.dtype == dtype else input.to(dtype)
        return run_links(self, bound, bound.parts[0], input, params, bound.call(None))

    def _describe(self) -> list[str]:
        return []
