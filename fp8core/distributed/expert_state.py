"""The delayed scales of experts in a ``state_dict``: those of all ranks, by number of the expert.

A layer of experts holds the slots of its first linear's experts, then those of the next one's.
The scales are saved as ``[..., linears, experts, slots]``, a DTensor that ranks split along the
experts, so that a checkpoint loads on another number of ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from fp8core.collectives import Communicator
from fp8core.tensors.sharded_weight import local_part


class _RemoteExpert(DTensor):
    """A parameter of an expert that another rank holds; without memory here."""

    _source: _OfAllRanks
    _number: int

    def redistribute(self, *args: Any, **kwargs: Any) -> DTensor:
        """Return the whole parameter; all ranks gather their experts together."""
        return self._source.take(self._number)

    def __deepcopy__(self, memo: Any) -> _RemoteExpert:
        return _stand_in(self, copy.deepcopy(self._source, memo), self._number)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.to_local().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]  # torch's

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # untyped
        return f"_RemoteExpert({self._number}, {list(self.shape)})"


class _OfAllRanks:
    """A parameter of the experts of all ranks; ``local`` are the tensors of this rank."""

    def __init__(self, local: Sequence[torch.Tensor], group: Communicator) -> None:
        self._local, self._group = local, group
        self._gathered: dict[int, torch.Tensor] = {}

    def __deepcopy__(self, memo: Any) -> _OfAllRanks:
        return _OfAllRanks(copy.deepcopy(self._local, memo), self._group)

    def take(self, number: int) -> DTensor:
        """Return the parameter of expert ``number``.

        All ranks gather those of all when the first of them is taken, or one for the second time.
        """
        if number not in self._gathered:
            first = self._group.rank * len(self._local)
            numbers = range(first, first + len(self._local))
            self._gathered = {
                at: parameter for at, parameter in enumerate(self._gather()) if at not in numbers
            }
        process_group: Any = self._group
        value = self._gathered.pop(number)
        mesh = DeviceMesh.from_group(process_group.group, value.device.type)
        return DTensor.from_local(value, mesh, [Replicate()], run_check=False)

    def _gather(self) -> Iterator[torch.Tensor]:
        local: list[Any] = [
            tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            for tensor in self._local
        ]
        if not hasattr(local[0], "__tensor_flatten__"):
            yield from self._of_all(local)
            return
        names, context = local[0].__tensor_flatten__()
        parts = [self._of_all([getattr(tensor, name) for tensor in local]) for name in names]
        for part in zip(*parts, strict=True):
            tensors = dict(zip(names, part, strict=True))
            yield local[0].__tensor_unflatten__(tensors, context, local[0].shape, local[0].stride())

    def _of_all(self, local: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
        yield from self._group.gather(torch.stack(list(local)), "experts").wait()


def remote_experts(
    local: Sequence[torch.Tensor], group: Communicator
) -> Iterator[tuple[int, DTensor]]:
    """Yield the number of each expert of another rank, and a tensor in its stead; ``local`` are the
    tensors of this rank's experts."""
    if not local:
        return
    process_group: Any = group
    ranks = dist.get_process_group_ranks(process_group.group)
    source, like = _OfAllRanks(local, group), local[0]
    empty = torch.empty(0, dtype=like.dtype, device=like.device)
    for rank, of_rank in enumerate(ranks):
        if rank == group.rank:
            continue
        mesh = DeviceMesh(like.device.type, [of_rank], _init_backend=False)
        part: Any = DTensor.from_local(
            empty, mesh, [Replicate()], run_check=False, shape=like.shape, stride=like.stride()
        )
        for number in range(rank * len(local), (rank + 1) * len(local)):
            yield number, _stand_in(part, source, number)


def _stand_in(like: Any, source: _OfAllRanks, number: int) -> _RemoteExpert:
    kind: Any = _RemoteExpert  # whose constructor torch has not typed
    tensor: _RemoteExpert = kind(like.to_local(), like._spec, requires_grad=False)
    tensor._source, tensor._number = source, number
    return tensor


class SavedScales:
    """How the scales of ``num_local`` experts of this rank, in ``num_linears`` linears, are saved.

    Attributes:
        group: the ranks; None: this one alone.
    """

    def __init__(self, num_linears: int, num_local: int, group: Communicator | None) -> None:
        self.sizes = num_linears, num_local
        self.group = group

    def saved(self, scales: torch.Tensor) -> torch.Tensor:
        """Return ``scales [..., linears * experts * slots]`` as it is saved, in the same memory."""
        local = scales.detach().view(*scales.shape[:-1], *self.sizes, -1)
        if self.group is None:
            return local
        process_group: Any = self.group
        mesh = DeviceMesh.from_group(process_group.group, local.device.type)
        whole: torch.Tensor = DTensor.from_local(
            local, mesh, [Shard(local.dim() - 2)], run_check=False
        )
        return whole

    def restored(self, saved: Any) -> Any:
        """Return this rank's part of ``saved``, a value of a checkpoint, as the layer holds it;
        another value than :meth:`saved` returns, as it is."""
        if not isinstance(saved, torch.Tensor) or saved.dim() < 3:
            return saved
        part, (num_linears, num_local) = local_part(saved), self.sizes
        if self.group is not None and part.shape[-2] == num_local * self.group.size:
            part = part.narrow(-2, num_local * self.group.rank, num_local)
        return part.flatten(-3) if part.shape[-3:-1] == (num_linears, num_local) else saved
