"""A layer of one operation: the base of those in :mod:`fp8core.ops`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fp8core.chain.activation import ActivationShape
from fp8core.chain.bind import LinkShape
from fp8core.chain.linear import LinearShape
from fp8core.chain.norm import NormShape
from fp8core.chain.pointwise import BiasShape
from fp8core.modules.base import LowPrecisionModule
from fp8core.modules.bind import bind
from fp8core.modules.inputs import check_input
from fp8core.modules.run import run_links

__all__ = ["Operation", "width_of"]


def width_of(shapes: Sequence[LinkShape]) -> int | None:
    """Return the columns of the input, as the first link with a size tells; None if none does."""
    halves = 1
    for shape in shapes:
        if isinstance(shape, LinearShape):
            return halves * shape.in_features
        if isinstance(shape, NormShape | BiasShape):
            return halves * shape.size
        halves *= 2 if isinstance(shape, ActivationShape) and shape.is_gated else 1
    return None


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
