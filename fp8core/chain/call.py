"""What a call of a layer brings besides its tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from fp8core.tensors.quantizer import Groups
from fp8core.tensors.weights import Keeping

__all__ = ["DENSE", "Call"]


class Call(NamedTuple):
    """What one call of a layer adds to its tensors.

    ``groups`` is ``(group_offsets,)``, int64 ``[groups + 1]`` on the CPU, or ``()`` if dense;
    ``splits`` are the same sizes as integers, ``()`` if only the device knows them, in which case
    the offsets are there as well. ``rng`` int64 ``[2]`` is the seed and offset of dropout and
    stochastic rounding. ``first_microbatch`` is the caller's argument, ``keeping`` what follows
    from it for weights; None quantizes them. ``backward_pass`` is set in a recompute: the pass that
    it is part of, at whose end backward scales are updated. ``tensors`` and ``sizes`` are what the
    link of the chain that takes them says, as :class:`fp8core.chain.attention.AttentionTensors`
    does; nothing in them is differentiated.
    """

    groups: Groups = ()
    splits: Sequence[int] = ()
    rng: torch.Tensor | None = None
    first_microbatch: bool | None = None
    keeping: Keeping | None = None
    backward_pass: int | None = None
    tensors: Sequence[torch.Tensor | None] = ()
    sizes: Sequence[int] = ()

    @property
    def has_device_groups(self) -> bool:
        """Whether only the device knows the sizes of the groups."""
        return bool(self.groups) and not self.splits


DENSE = Call()
