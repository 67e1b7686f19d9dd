"""Turns of several ranks, which begin a slice together, and stop together."""

from __future__ import annotations

import dataclasses
import datetime
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from tests.benchmarks.measuring.device import CUDA, HOST, Device

__all__ = ["Ranks", "Step", "join", "leave_multicast_off", "of_world"]

Step = Callable[[], None]
TIMEOUT = datetime.timedelta(seconds=300)


@dataclasses.dataclass(frozen=True, slots=True)
class Ranks:
    """This process's rank, the group whose collectives are measured, and the device.

    What the ranks tell each other about the measurement goes through ``control``, a group of the
    CPU, whose collectives are between slices, never in one.
    """

    rank: int
    size: int
    group: dist.ProcessGroup
    control: dist.ProcessGroup
    device: Device

    def agree(self, value: float) -> float:
        """Return the largest ``value`` of all ranks."""
        largest = torch.tensor([value], dtype=torch.float64, device="cpu")
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.control)
        return largest.item()

    def slowest(self, times: Mapping[str, list[float]]) -> dict[str, list[float]]:
        """Return the time of each turn on the rank that took longest."""
        names = list(times)
        mine = torch.tensor([times[name] for name in names], dtype=torch.float64, device="cpu")
        dist.all_reduce(mine, op=dist.ReduceOp.MAX, group=self.control)
        return dict(zip(names, mine.tolist(), strict=True))


def leave_multicast_off() -> None:
    """Have this process and those that it starts use no NVLink multicast, in which test hosts that
    have none hang, unless the environment says otherwise."""
    for name, value in (("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1"), ("NCCL_NVLS_ENABLE", "0")):
        os.environ.setdefault(name, value)


def join(
    rank: int, size: int, kind: str, folder: str, timeout: datetime.timedelta = TIMEOUT
) -> Ranks:
    """Join the group of ``size`` ranks on devices of ``kind``, which meet in ``folder``."""
    device = _device(rank, kind)
    dist.init_process_group(
        dist.get_default_backend_for_device(device.torch_device),
        init_method=Path(folder, "rendezvous").as_uri(),
        rank=rank,
        world_size=size,
        timeout=timeout,
        device_id=device.torch_device if kind == "cuda" else None,
    )
    return of_world(device)


def of_world(device: Device) -> Ranks:
    """Return the ranks of the default group, whose clock waits for the others."""
    control = dist.new_group(backend="gloo", timeout=TIMEOUT)
    group = dist.group.WORLD
    assert group is not None
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), group, control, device)
    wait = device.clock.synchronize

    def synchronize() -> None:
        wait()
        dist.barrier(group=control)

    clock = device.clock._replace(synchronize=synchronize, agree=ranks.agree)
    return dataclasses.replace(ranks, device=dataclasses.replace(device, clock=clock))


def _device(rank: int, kind: str) -> Device:
    if kind == "cpu":
        return HOST
    torch.cuda.set_device(rank)
    return dataclasses.replace(CUDA, torch_device=torch.device("cuda", rank))
