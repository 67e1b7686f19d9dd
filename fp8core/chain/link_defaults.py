"""What a link answers unless it says otherwise."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fp8core.chain.once import OnlyOnce
from fp8core.chain.protocol import Consumer, Link
from fp8core.dispatch.select import Choice

__all__ = ["LinkDefaults"]


class LinkDefaults:
    """A link that quantizes nothing, has no parameters and draws no random numbers, and computes
    with torch's operators."""

    __slots__ = ()

    num_params: int = 0
    needs_rng: bool = False

    @property
    def only_once(self) -> OnlyOnce | None:
        """Torch's operators can take its place."""
        return None

    def compare(self, shape: Sequence[int], needs_grad: Sequence[bool]) -> None:
        """It moves nothing between ranks."""

    @property
    def choices(self) -> Mapping[str, Choice]:
        """It has no GEMMs."""
        return {}

    @property
    def input_consumer(self) -> Consumer | None:
        """It does not quantize its input."""
        return None

    @property
    def grad_consumer(self) -> Consumer | None:
        """It does not quantize the gradient of its output."""
        return None

    @property
    def adds_residual(self) -> bool:
        """It takes one tensor."""
        return False

    @property
    def adds_gradient(self) -> bool:
        """It is asked for its gradient alone."""
        return False

    @property
    def is_left_to_next(self) -> bool:
        """It computes its output itself."""
        return False

    def in_torch(self: Link, bind: Callable[[Any], Any]) -> Link:
        """It computes with torch's operators already."""
        return self

    def converted(
        self, params: Sequence[torch.Tensor], dtype: torch.dtype
    ) -> Sequence[torch.Tensor]:
        """Return the parameters as they are: it converts them in its own node."""
        return params
