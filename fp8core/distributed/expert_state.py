"""The delayed scales of experts in a ``state_dict``: those of all ranks, by number of the expert.

A layer of experts holds the slots of its first linear's experts, then those of the next one's.
They are saved as ``[..., linears, experts, slots]``, a DTensor that ranks split along the experts,
so that a checkpoint loads on another number of ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from fp8core.collectives import Communicator
from fp8core.tensors.sharded_weight import local_part

__all__ = ["SavedScales"]


class SavedScales:
    """How the scales of ``num_local`` experts of this rank, in ``num_linears`` linears, are saved.

    Attributes:
        group: the ranks; None: this one alone.
    """

    def __init__(self, num_linears: int, num_local: int, group: Communicator | None) -> None:
        self.sizes = num_linears, num_local
        self.group = group

    def saved(self, held: torch.Tensor) -> torch.Tensor:
        """Return ``held [..., linears * experts * slots]`` as it is saved, in the same memory."""
        local = held.detach().view(*held.shape[:-1], *self.sizes, -1)
        if self.group is None:
            return local
        process_group: Any = self.group
        mesh = DeviceMesh.from_group(process_group.group, local.device.type)
        whole: torch.Tensor = DTensor.from_local(
            local, mesh, [Shard(local.dim() - 2)], run_check=False
        )
        return whole

    def held(self, saved: Any) -> Any:
        """Return this rank's part of ``saved``, a value of a checkpoint, as the layer holds it;
        another value than :meth:`saved` returns, as it is."""
        if not isinstance(saved, torch.Tensor) or saved.dim() < 3:
            return saved
        part, (num_linears, num_local) = local_part(saved), self.sizes
        if self.group is not None and part.shape[-2] == num_local * self.group.size:
            part = part.narrow(-2, num_local * self.group.rank, num_local)
        return part.flatten(-3) if part.shape[-3:-1] == (num_linears, num_local) else saved
