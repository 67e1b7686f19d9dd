"""What a call of a layer brings besides its tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

from fp8core.chain.routes import Routes
from fp8core.tensors.quantizer import Groups
from fp8core.tensors.weights import Keeping

__all__ = ["DENSE", "Call", "DelayedWgrads"]


class DelayedWgrads(Protocol):
    """Takes the weight gradients of a call that are computed later, see
    :mod:`fp8core.chain.delayed_wgrad`."""

    def source(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the layer's weight that the call's parameter ``weight`` stands for."""

    def put(self, index: int, pending: Any) -> None:
        """Leave the gradient of the linear ``index`` to a later call."""


class Call(NamedTuple):
    """What one call of a layer adds to its tensors.

    ``groups`` is ``(group_offsets,)``, int64 ``[groups + 1]`` on the CPU, or ``()`` if dense;
    ``splits`` are the same sizes as integers, ``()`` if only the device knows them, in which case
    the offsets are there as well. ``rng`` int64 ``[2]`` is the seed and offset of dropout and
    stochastic rounding; on the CPU, but for attention in a graph of its device.
    ``first_microbatch`` is the caller's argument, ``keeping`` what follows from it for weights;
    None quantizes them. ``backward_pass`` is set in a recompute: the pass that it is part of, at
    whose end backward scales are updated. ``tensors`` and ``sizes`` are what the link of the chain
    that takes them says, as :class:`~fp8core.chain.attention.tensors.AttentionTensors` does;
    nothing in them is differentiated. ``delayed_wgrads`` takes the weight gradients that are not
    computed in backward. ``output [rows, n]`` and ``grad_input [rows, k]`` are memory for the
    results of a lone linear. ``routes`` says where rows go whose experts are on several ranks.
    """

    groups: Groups = ()
    splits: Sequence[int] = ()
    rng: torch.Tensor | None = None
    first_microbatch: bool | None = None
    keeping: Keeping | None = None
    backward_pass: int | None = None
    tensors: Sequence[torch.Tensor | None] = ()
    sizes: Sequence[int] = ()
    delayed_wgrads: DelayedWgrads | None = None
    output: torch.Tensor | None = None
    grad_input: torch.Tensor | None = None
    routes: Routes | None = None

    @property
    def has_device_groups(self) -> bool:
        """Whether only the device knows the sizes of the groups."""
        return bool(self.groups) and not self.splits


DENSE = Call()
