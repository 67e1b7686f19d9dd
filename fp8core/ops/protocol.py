"""What an operation in a chain is: stateless, forward and backward over plain tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeAlias

import torch

from fp8core.quantizer import Groups, Quantizer

__all__ = ["DENSE", "Backward", "Call", "Forward", "Op", "Saved"]

Saved: TypeAlias = "Sequence[torch.Tensor | None]"
"""Plain tensors, so that checkpointing, offload hooks and compilers see them."""


class Call(NamedTuple):
    """What one call of a layer adds to its tensors.

    ``groups`` is ``(group_offsets,)``, int64 ``[groups + 1]``, or ``()`` for a dense layer;
    ``splits`` are the same sizes as integers. ``rng`` int64 ``[2]`` is the seed and offset of
    stochastic rounding.
    """

    groups: Groups = ()
    splits: Sequence[int] = ()
    rng: torch.Tensor | None = None


DENSE = Call()


class Forward(NamedTuple):
    """``output [rows, n]``, what backward needs as tensors, and the rest of it as a value."""

    output: torch.Tensor
    saved: Saved
    context: object


class Backward(NamedTuple):
    """The gradient of the input, None if nobody needs it, and those of the parameters."""

    grad_input: torch.Tensor | None
    grad_params: Sequence[torch.Tensor | None]


class Op(Protocol):
    """One link of a chain. Holds bound callables only; tensors and sizes come with the call."""

    @property
    def num_params(self) -> int:
        """How many of the chain's parameters are this op's."""

    def forward(
        self,
        x: torch.Tensor,
        params: Sequence[torch.Tensor],
        call: Call,
        needs: Sequence[bool],
        out: Quantizer | None,
    ) -> Forward:
        """Compute from ``x [rows, k]``.

        ``needs`` says whose gradient backward will be asked for: the input's, then each
        parameter's. ``out`` is how the next op wants the result quantized, None to get it as it is.
        """

    def backward(
        self,
        grad_output: torch.Tensor,
        saved: Saved,
        context: object,
        call: Call,
        needs: Sequence[bool],
    ) -> Backward:
        """Compute the gradients that ``needs`` asks for from ``grad_output [rows, n]``."""
