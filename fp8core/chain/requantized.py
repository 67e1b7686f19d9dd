"""A linear whose backward quantizes the weight again, and holds no codes of it since forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fp8core.chain.call import Call
from fp8core.chain.protocol import Backward, Out, Program, SavedList, Wrapper
from fp8core.chain.unwrap import made_readable
from fp8core.errors import OperandError
from fp8core.tensors.saving import is_unquantized
from fp8core.tensors.weights import WeightQuantizer


class Requantizing(Wrapper):
    """Around a linear program: quantizes the weights that it saved, right before dgrad.

    ``weight`` is the program's quantizer of weights, each of which has ``shape`` and ``dtype`` and
    is on ``device``; their tensors are the last ones that it saves, after ``num_before`` others.
    ``owner`` names the layer in messages.
    """

    __slots__ = ("_device", "_dtype", "_num_before", "_owner", "_shape", "_weight")

    def __init__(
        self,
        inner: Program,
        weight: WeightQuantizer,
        num_before: int,
        *,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        owner: str,
    ) -> None:
        super().__init__(inner, inner.input_request)
        self._weight = weight
        self._num_before = num_before
        self._shape = torch.Size(shape)
        self._dtype = dtype
        self._device = device
        self._owner = owner

    def backward(
        self, grad: Any, saved: SavedList, context: Any, call: Call, out: Out = None
    ) -> Backward:
        """Run the inner program's backward on operands; it frees them after dgrad.

        Raises:
            OperandError: a weight is not what it was in forward, or its memory is freed.
        """
        grad, at = self._grad(grad, call), self._num_before
        for index in range(at, len(saved), 3):
            first = saved[index]
            if first is not None and is_unquantized(first):
                saved[index] = self._readable(first)
        saved[at:] = self._weight.requantize(saved[at:])
        return self._inner.backward(grad, saved, context, call, out)

    def _readable(self, weight: torch.Tensor) -> torch.Tensor:
        """Return ``weight``, whose data may have been replaced without a write, as a kernel reads
        it; raise if it does not fit or cannot be read."""
        if (weight.shape, weight.dtype) != (self._shape, self._dtype):
            raise OperandError(
                f"{self._owner}: in backward the weight is {list(weight.shape)} {weight.dtype}, "
                f"forward had {list(self._shape)} {self._dtype}. Convert or shard it after "
                f"backward."
            )
        return made_readable(weight, self._device, f"{self._owner}: in backward the weight")
