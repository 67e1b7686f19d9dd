"""A layer of one operation: the base of those in :mod:`fp8core.ops`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fp8core.chain.shape import LinkShape
from fp8core.modules.base import LowPrecisionModule
from fp8core.modules.bind import bind
from fp8core.modules.inputs import check_input
from fp8core.modules.run import run_links

__all__ = ["Operation", "width_of"]


def width_of(shapes: Sequence[LinkShape]) -> int | None:
    """Return the columns of the input, as the first link with a size tells; None if none does."""
    width: int | None = None
    for shape in reversed(shapes):
        width = shape.input_columns(width)
    return width


class Operation(LowPrecisionModule):
    """One operation; called by itself it is a chain of one."""

    kind = "operation"

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Compute from ``input [..., k]``."""
        params = self.link_params()
        like = params[0] if params else None
        dtype = check_input(self, input, like, width_of(self.link_shapes()))
        bound = bind(self, input.device, dtype)
        input = input if input.dtype == dtype else input.to(dtype)
        return run_links(self, bound, bound.parts[0], input, params, bound.call(None))

    def _describe(self) -> list[str]:
        return []
