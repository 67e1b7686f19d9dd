"""A layer of one operation: the base of those in :mod:`fp8core.ops`."""

from __future__ import annotations

import torch

from fp8core.chain.shape import input_columns_of
from fp8core.errors import OperandError
from fp8core.modules.base import LowPrecisionModule
from fp8core.modules.extra_tensors import ExtraTensors
from fp8core.modules.inputs import cast_to_weight, check_kind
from fp8core.modules.run import run_layer

__all__ = ["Operation"]


class Operation(LowPrecisionModule, ExtraTensors):
    """One operation; called by itself it is a chain of its own.

    It computes in the dtype of its parameters, to which the input is cast, and without parameters
    in that of the input.
    """

    kind = "operation"

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name)

    def forward(self, input: torch.Tensor, *extra_inputs: torch.Tensor) -> torch.Tensor:
        """Compute from ``input [..., k]``, and from as many extra inputs as the operation takes.

        Raises:
            OperandError: there are more or fewer extra inputs, or an input does not fit.
        """
        if len(extra_inputs) != self.num_extra_inputs:
            raise OperandError(
                f"{self.label}: got {len(extra_inputs)} extra inputs; expected "
                f"{self.num_extra_inputs}."
            )
        for tensor in extra_inputs:
            check_kind(self.label, "the extra input", tensor)
        params = list(extra_inputs) or self.link_params()
        like = None if extra_inputs or not params else params[0]
        shapes = self.link_shapes()
        if not shapes:
            check_kind(self.label, "input", input)
            return input
        columns = input_columns_of(shapes)
        return run_layer(self, cast_to_weight(input, like), params, like=like, columns=columns)[0]

    def _describe(self) -> list[str]:
        return []
