"""Rows moved between the ranks of a host beside products, by copies over symmetric memory.

A copy from another device's memory runs on a copy engine, and leaves the multiprocessors to
products. All barriers are on the stream of the products, before and after them: a barrier is a
kernel, which beside a product would wait for a free multiprocessor until that has ended.

A buffer is read by other ranks until they have copied their part. A later write follows a barrier
on the same stream, which each rank reaches behind its copies. Each stream has buffers of
its own, as a barrier on one says nothing about copies that another has waited for.

Memory that copies write to is allocated before they start: torch fills it on the current stream,
with torch.use_deterministic_algorithms.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from fp8core.backend_api import Ranks, UnsupportedError
from fp8core_backends.cuda import settings
from fp8core_backends.cuda.private import group_of, store_of, timeout_of
from fp8core_backends.cuda.stream import index_of
from fp8core_backends.cuda.symmetric_memory import Lane, Slot, meet

FEWEST_BYTES = 2 << 20
"""Below, a collective of NCCL is as fast: it has two barriers and a copy less."""


MOST_BYTES_READ = 1 << 18
"""Above, copy engines or NCCL read a tensor of other ranks faster than a kernel does."""

_LEAST_SLOT = 2 << 20
"""Bytes of the smallest buffer: the driver gives no less."""


class _Lease:
    """A buffer in use, and how many barriers its stream had been given when the last copy from it
    was waited for; -1 while it is in use."""

    __slots__ = ("barriers", "slot")

    def __init__(self, slot: Any) -> None:
        self.slot = slot
        self.barriers = -1

    def fits(self, num_bytes: int) -> bool:
        return self.barriers >= 0 and self.slot.num_bytes >= num_bytes


def _size(lease: _Lease) -> int:
    num_bytes: int = lease.slot.num_bytes
    return num_bytes


class _Pool:
    """The buffers of one stream, and how many barriers it has been given."""

    __slots__ = ("barriers", "leases")

    def __init__(self) -> None:
        self.leases: list[_Lease] = []
        self.barriers = 0

    def free(self, num_bytes: int) -> _Lease | None:
        """Return the smallest buffer of so many bytes that no rank reads any more: all of them have
        been at a barrier since."""
        free = [
            lease
            for lease in self.leases
            if lease.fits(num_bytes) and lease.barriers < self.barriers
        ]
        return min(free, key=_size, default=None)


class Transfers:
    """Moves rows between ``ranks``; see :class:`fp8core.backend_api.Transfers`.

    ``new_slot(num_bytes)`` allocates a buffer on every rank, ``new_lane()`` a stream of copies.
    """

    def __init__(
        self, ranks: Ranks, new_slot: Callable[[int], Any], new_lane: Callable[[], Any]
    ) -> None:
        self.size, self.rank = ranks.size, ranks.rank
        self._new_slot = new_slot
        self._new_lane = new_lane
        self._pools: dict[int, _Pool] = {}
        # Buffers of captured graphs, which use no others: each use begins with a barrier, as nobody
        # knows what runs between the replays.
        self._captured = _Pool()

    @functools.cached_property
    def lane(self) -> Any:
        """The stream of copies."""
        return self._new_lane()

    def takes(self, num_bytes: int) -> bool:
        """Whether a part of so many bytes is worth it, and, in a captured graph, which cannot
        allocate, whether there is a buffer."""
        if num_bytes < FEWEST_BYTES:
            return False
        if not self.lane.is_captured:
            return True
        return self._for_graph(num_bytes * max(1, self.size - 1)) is not None

    def gather(self, x: torch.Tensor) -> tuple[torch.Tensor, Callable[[int], object]]:
        """Start to concatenate the ``x`` of all ranks along dimension 0."""
        lane, lease = self.lane, self.lease(x.nbytes)
        result = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        lease.slot.of(self.rank, x.shape, x.dtype).copy_(x)
        self.barrier(lease)
        lane.follow()
        # Views of another tensor of that memory: whoever keeps ``arrive`` on the result keeps no
        # more than it needs.
        parts = result.detach().chunk(self.size)
        peers = [self.after(step) for step in self.steps]
        here = {
            peer: lane.copy(parts[peer], lease.slot.of(peer, x.shape, x.dtype)) for peer in peers
        }

        def arrive(rank: int) -> None:
            if rank == self.rank:
                parts[rank].copy_(x)
                return
            lane.wait(here[rank])
            if rank == peers[-1]:
                self.release(lease)

        return result, arrive

    def scatter(self, size: Sequence[int], dtype: torch.dtype) -> Sending:
        """Start a sum of tensors of which each rank gets a part of this ``size``."""
        num_bytes = math.prod(size) * dtype.itemsize * (self.size - 1)
        return Sending(self, self.lease(num_bytes), size, dtype)

    def maximum(self, x: torch.Tensor) -> torch.Tensor | None:
        """Take the maximum of the ``x`` of all ranks: each reads those of the others. None if that
        is more than some numbers, and in a graph for which there is no buffer."""
        if x.nbytes > MOST_BYTES_READ:
            return None
        if x.is_meta:
            return torch.empty_like(x)
        if self.lane.is_captured and self._for_graph(x.nbytes) is None:
            return None
        lease = self.lease(x.nbytes)
        lease.slot.of(self.rank, x.shape, x.dtype).copy_(x)
        self.barrier(lease)
        result = x
        for step in self.steps:
            result = torch.maximum(result, lease.slot.of(self.after(step), x.shape, x.dtype))
        self.release(lease)
        return result

    @property
    def steps(self) -> range:
        """Numbers of the other ranks, counted from this one on."""
        return range(1, self.size)

    def after(self, step: int) -> int:
        """Return the rank ``step`` places behind this one in the circle of ranks."""
        return (self.rank + step) % self.size

    def lease(self, num_bytes: int) -> _Lease:
        """Return a buffer that no rank reads any more.

        Raises:
            UnsupportedError: a graph is being captured, and there is none.
        """
        if self.lane.is_captured:
            lease = self._for_graph(num_bytes)
            if lease is None:
                raise UnsupportedError(
                    f"a graph that is being captured cannot share {num_bytes} bytes more between "
                    f"ranks: run the layer on inputs of these sizes before the capture."
                )
            lease.barriers = -1
            self.barrier(lease)
            return lease
        pool = self._pool
        lease = pool.free(num_bytes)
        if lease is None:
            lease = _Lease(self._new_slot(_rounded(num_bytes)))
            pool.leases.append(lease)
        lease.barriers = -1
        return lease

    def barrier(self, lease: _Lease) -> None:
        """Have the current stream wait for those of all ranks."""
        lease.slot.barrier()
        self._pool.barriers += 1

    def release(self, lease: _Lease) -> None:
        """Give the buffer back: this rank's copies have been waited for."""
        lease.barriers = self._pool.barriers

    @property
    def _pool(self) -> _Pool:
        """The buffers of the current stream."""
        lane = self.lane
        if lane.is_captured:
            return self._captured
        stream = lane.current
        pool = self._pools.get(stream)
        if pool is None:
            pool = self._pools[stream] = _Pool()
        return pool

    def _for_graph(self, num_bytes: int) -> _Lease | None:
        """Return a buffer for a captured graph: one that graphs have, or a stream's, which then
        becomes theirs; None if there is none, as nothing can be allocated there."""
        for pool in (self._captured, *self._pools.values()):
            for lease in pool.leases:
                if lease.fits(num_bytes):
                    if pool is not self._captured:
                        pool.leases.remove(lease)
                        self._captured.leases.append(lease)
                    return lease
        return None


def _rounded(num_bytes: int) -> int:
    """Return the bytes of a buffer: powers of two, so that tensors whose sizes vary share some."""
    return 1 << (max(num_bytes, _LEAST_SLOT) - 1).bit_length()


class Sending:
    """A sum over ranks under way; see :class:`fp8core.backend_api.Sending`."""

    def __init__(
        self, transfers: Transfers, lease: _Lease, size: Sequence[int], dtype: torch.dtype
    ) -> None:
        self._transfers = transfers
        self._lease = lease
        self._size, self._dtype = tuple(size), dtype
        self.order = [transfers.after(step) for step in transfers.steps]
        self._received: list[torch.Tensor] = []
        self._event: Any = None

    def part(self, rank: int) -> torch.Tensor:
        """Return memory for this rank's addend to the part of ``rank``."""
        mine = self._transfers.rank
        return self._of(mine, self.order.index(rank))

    def send(self, rank: int) -> None:
        """Start to fetch what another rank has written for this one meanwhile."""
        transfers, step = self._transfers, self.order.index(rank)
        source = self._of(transfers.after(-(step + 1)), step)
        received = torch.empty(self._size, dtype=self._dtype, device=source.device)
        self._received.append(received)
        transfers.barrier(self._lease)
        transfers.lane.follow()
        self._event = transfers.lane.copy(received, source)

    def finish(self, mine: torch.Tensor) -> tuple[torch.Tensor, Callable[[], object]]:
        """Start to add what was fetched to ``mine``."""
        lane = self._transfers.lane
        total, *rest = self._received
        lane.follow()
        for addend in (mine, *rest):
            self._event = lane.add(total, addend)

        def finish() -> None:
            lane.wait(self._event)
            self._transfers.release(self._lease)

        return total, finish

    def _of(self, rank: int, index: int) -> torch.Tensor:
        view: torch.Tensor = self._lease.slot.of(rank, self._size, self._dtype, index)
        return view


def transfers_between(ranks: Ranks, device: torch.device) -> Transfers | None:
    """Return what moves rows between ``ranks``, None unless they are known to be on one host whose
    devices reach each other's memory. Each group has one object, for as long as the group lives."""
    group, index = None if ranks.size == 1 else _group_of(ranks), index_of(device)
    if group is None or not _is_single_host(group) or not _reach_all_peers(index, ranks.size):
        return None
    of_devices = _of_groups.setdefault(group, {})
    if index not in of_devices:
        of_devices[index] = _new_transfers(ranks, device)
    return of_devices[index]


_of_groups: WeakKeyDictionary[Any, dict[int, Transfers]] = WeakKeyDictionary()
"""By group, not by its name, which a later group may have again."""


def _new_transfers(ranks: Ranks, device: torch.device) -> Transfers:
    name, rank, size, numbers = ranks.group_name, ranks.rank, ranks.size, itertools.count()

    def new_slot(num_bytes: int) -> Slot:
        meet(store_of(name), next(numbers), rank, size, timeout_of(name, device))
        return Slot(num_bytes, name, device)

    return Transfers(ranks, new_slot, lambda: Lane(device))


def _group_of(ranks: Ranks) -> Any:
    """Return the group over NCCL of these ranks; None for others, as threads of one process."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    try:
        group = group_of(ranks.group_name)
    except (KeyError, RuntimeError, ValueError):
        return None  # ranks that are threads, of which torch.distributed knows nothing
    is_nccl = dist.get_backend(group) == "nccl" or "nccl" in str(dist.get_backend_config(group))
    return group if is_nccl else None


def _is_single_host(group: Any) -> bool:
    """Say whether all ranks are on this host: by the setting, or, if torchrun has started them, as
    it numbers the ranks of one host one after the other."""
    setting = settings.read().transfers
    if setting is not None:
        return setting
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    if not local.isdigit() or not int(local):
        return False
    hosts = {rank // int(local) for rank in dist.get_process_group_ranks(group)}
    return len(hosts) == 1


def _reach_all_peers(index: int, size: int) -> bool:
    """Say whether this device reaches all others that the process sees, as many as there are ranks:
    one that sees its own alone cannot map the memory of others."""
    count = torch.cuda.device_count()
    peers = [peer for peer in range(count) if peer != index]
    return count >= size and all(torch.cuda.can_device_access_peer(index, peer) for peer in peers)
