"""Stand-ins for memory and streams that ranks share, with a thread for each rank."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fp8core_backends.cuda.transfers import Transfers

WAIT_S = 20


class Host:
    """What the ranks share: buffers by their number, and a barrier."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size)
        self.buffers: dict[tuple[int, int], torch.Tensor] = {}


class Slot:
    """A buffer of bytes on every rank."""

    def __init__(self, host: Host, rank: int, number: int, num_bytes: int) -> None:
        self.host, self.rank, self.number, self.num_bytes = host, rank, number, num_bytes
        host.buffers[rank, number] = torch.full((num_bytes,), 255, dtype=torch.uint8)
        host.barrier.wait(WAIT_S)

    def of(
        self, rank: int, size: Sequence[int], dtype: torch.dtype, index: int = 0
    ) -> torch.Tensor:
        count = torch.Size(size).numel() * dtype.itemsize
        part = self.host.buffers[rank, self.number][index * count : (index + 1) * count]
        return part.view(dtype).view(*size)

    def barrier(self) -> None:
        self.host.barrier.wait(WAIT_S)


class Lane:
    """Copies at once; ``is_captured`` and ``current``, the stream's number, as a test sets them."""

    is_captured = False
    current = 0

    def follow(self) -> None: ...

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> Any:
        return self._enqueue(lambda: to.copy_(source))

    def add(self, to: torch.Tensor, addend: torch.Tensor) -> Any:
        return self._enqueue(lambda: to.add_(addend))

    def wait(self, event: Any) -> None:
        assert event == "done"

    def _enqueue(self, work: Callable[[], object]) -> Any:
        work()
        return "done"


class LateLane(Lane):
    """Copies as late as it may: when they are waited for."""

    def __init__(self) -> None:
        self._queue: list[Callable[[], object]] = []

    def wait(self, event: int) -> None:
        while len(self._queue) and event > self._done:
            self._queue.pop(0)()
            self._done += 1

    _done = 0

    def _enqueue(self, work: Callable[[], object]) -> int:
        self._queue.append(work)
        return self._done + len(self._queue)


class NotedLane(Lane):
    """Notes in ``log`` when it follows the current stream, and when copies start."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def follow(self) -> None:
        self.log.append("follow")

    def _enqueue(self, work: Callable[[], object]) -> Any:
        self.log.append("start")
        work()
        self.log.append("started")
        return "done"


class Operators(TorchDispatchMode):
    """Notes in ``log`` each operator that allocates or writes."""

    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self.log = log

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> torch.Tensor:
        if not func.is_view:
            self.log.append(str(func))
        return func(*args, **(kwargs or {}))


def over(
    size: int,
    work: Callable[[Transfers, Any], Any],
    new_lane: Callable[[], Any] = Lane,
) -> list[Any]:
    """Run ``work(transfers, slots)`` for each rank in a thread; ``slots`` are those it has."""
    host, results, errors = Host(size), [None] * size, []

    def run(rank: int) -> None:
        slots: list[Slot] = []

        def new_slot(num_bytes: int) -> Slot:
            slots.append(Slot(host, rank, len(slots), num_bytes))
            return slots[-1]

        ranks = SimpleNamespace(size=size, rank=rank, group_name="g")
        try:
            results[rank] = work(Transfers(ranks, new_slot, new_lane), slots)
        except BaseException as error:  # noqa: BLE001  raised in the test's thread
            errors.append(error)
            host.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    if errors:
        raise errors[0]
    return results
