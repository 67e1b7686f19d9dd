"""Collectives of layers over one group of ranks: the only place that calls torch.distributed for
them.

A :class:`Communicator` offers five collectives. Each is started by its call and finished by
``wait()`` on what the call returns, so that a caller can compute in between::

    communicator = of_group(group)            # or named(name), for the same object
    started = communicator.gather(codes)      # the shards of all ranks, along dimension 0
    compute_something_else()
    codes_of_all = started.wait()

In eager mode they call the process group itself; while torch captures a graph, they are the
functional collectives, which a graph can hold. A tensor whose elements have one byte, as FP8,
travels as uint8. Each communicator counts its calls and the bytes that its rank sends, see
:class:`Traffic`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any
from weakref import WeakValueDictionary, ref

import torch
import torch.distributed as dist

from fp8core.collectives.base import Communicator, GroupReference, existing
from fp8core.collectives.collective import (
    BESIDE,
    IN_PARTS,
    PLAIN,
    READ,
    Count,
    Finish,
    Started,
    Traffic,
    done,
)
from fp8core.collectives.comparison import Claim, Comparisons
from fp8core.errors import OperandError
from fp8core.torch_ops.private import (
    functional_collective,
    gather_options,
    group_by_name,
    start_all_gather,
    start_reduce_scatter,
    store_of,
    timeout_of,
    wait_for_result,
)

__all__ = [
    "BESIDE",
    "IN_PARTS",
    "PLAIN",
    "READ",
    "Communicator",
    "Count",
    "Started",
    "Traffic",
    "named",
    "of_group",
    "register",
]

_PATIENCE = timedelta(seconds=0.5)
"""How long a rank waits for a collective before it looks whether another rank compares."""

_communicators: dict[str, _GroupCommunicator] = {}
_registered: WeakValueDictionary[str, Communicator] = WeakValueDictionary()


def of_group(group: dist.ProcessGroup | Communicator | None = None) -> Communicator:
    """Return the communicator of ``group``, the default group if None; the same one each time.

    A communicator is returned as it is, so that ranks need not be processes of torch.

    Raises:
        OperandError: torch.distributed is not initialized, or this process is not in the group.
    """
    if isinstance(group, Communicator):
        return group
    if not dist.is_available() or not dist.is_initialized():
        raise OperandError(
            "a layer over several ranks needs torch.distributed.init_process_group first."
        )
    if group is None:
        group = dist.group.WORLD
    if isinstance(group, bool) or not isinstance(group, dist.ProcessGroup | int):
        raise OperandError(
            f"{group!r} is no process group of torch.distributed. Give the group itself, as "
            f'dist.new_group or DeviceMesh.get_group("tp") returns it.'
        )
    rank = dist.get_rank(group)
    if rank < 0 or not isinstance(group, dist.ProcessGroup):
        raise OperandError(
            f"rank {dist.get_rank()} is not in the given process group ({group!r}). Give each "
            f"layer the group that its own rank belongs to."
        )
    name = group.group_name
    communicator = _communicators.get(name)
    if communicator is None or communicator.reference() is not group:
        communicator = _communicators[name] = _GroupCommunicator(group, rank)
    return communicator


def named(group_name: str) -> Communicator:
    """Return the communicator of the group of that name.

    Raises:
        OperandError: there is no such group, or this process is not in it.
    """
    if not group_name:
        raise OperandError(
            "the layer has tp_size > 1 and no group. Give it tp_group, or call "
            "set_tensor_parallel_group before its first forward."
        )
    registered = _registered.get(group_name)
    if registered is not None:
        return registered
    if not dist.is_available() or not dist.is_initialized():
        return of_group()  # raises
    try:
        group = group_by_name(group_name)
    except (KeyError, RuntimeError, ValueError):
        raise OperandError(
            f"there is no process group {group_name!r} in this process: it was destroyed, or the "
            f"layer was made in another process. Give the layer its group again, by "
            f"set_tensor_parallel_group."
        ) from None
    return of_group(group)


def register(communicator: Communicator) -> None:
    """Have :func:`named` return ``communicator``, for as long as it lives."""
    _registered[communicator.group_name] = communicator


def wait_patiently(work: Any, look: Callable[[], object]) -> None:
    """Wait for ``work`` of a process group, and call ``look()`` from time to time meanwhile.

    Raises:
        RuntimeError: the work failed, as where the group's timeout is over.
    """
    while True:
        try:
            work.wait(_PATIENCE)
        except RuntimeError:
            if work.is_completed():  # meanwhile, or it failed
                work.wait()
                return
        else:
            return
        look()


class _GroupCommunicator(Communicator):
    """Calls the process group without the checks and logs of torch.distributed's functions, whose
    host time is three times that of the call."""

    def __init__(self, group: dist.ProcessGroup, rank: int) -> None:
        super().__init__(group.size(), rank, group.group_name)
        self.reference: GroupReference = ref(group)
        self._comparisons = _comparisons_of(group, rank)
        self._options = {at_once: _options(at_once) for at_once in (False, True)}

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group.

        Raises:
            OperandError: it was destroyed.
        """
        return self.reference() or existing(self.reference, "a collective of a layer")

    def _gather(self, x: torch.Tensor) -> tuple[torch.Tensor, Finish]:
        rows, *sizes = x.shape
        result = x.new_empty((self.size * rows, *sizes))
        work = start_all_gather(self.group, result, x, self._options_of("gather"))
        return result, self._end(work, x)

    def _scatter(self, x: torch.Tensor) -> tuple[torch.Tensor, Finish]:
        result = x.new_empty((x.shape[0] // self.size, *x.shape[1:]))
        if x.is_cpu and self._comparisons is not None:
            # A reduce-scatter of gloo, an all-reduce inside, waits as long as the group allows,
            # however long it is told to (torch 2.13): nobody could look meanwhile.
            whole, finish = self._all_reduce(x, "sum")
            return result, partial(_take_part, finish, whole, result, self.rank)
        work = start_reduce_scatter(self.group, result, x, self._options_of("scatter"))
        return result, self._end(work, x)

    def _all_reduce(
        self, x: torch.Tensor, op: str, *, in_place: bool = False
    ) -> tuple[torch.Tensor, Finish]:
        result = x if in_place else x.clone()  # c10d reduces in place
        group: Any = self.group  # the stubs lack the options of allreduce
        return result, self._end(group.allreduce([result], self._options_of(op)), x)

    def _exchange(
        self, x: torch.Tensor, send: Sequence[int], receive: Sequence[int]
    ) -> tuple[torch.Tensor, Finish]:
        result = x.new_empty((sum(receive), *x.shape[1:]))
        work = self.group.alltoall_base(result, x, list(receive), list(send))
        return result, self._end(work, x)

    def _options_of(self, collective: str) -> Any:
        starting = self.starting
        return self._options[starting is not None and starting[0].at_once][collective]

    def _end(self, work: Any, x: torch.Tensor) -> Finish:
        """Return what waits for ``work``, the latest collective, of ``x``."""
        if work is None:  # on the current stream, which has the result in its turn
            return done
        if self._comparisons is None or not x.is_cpu:
            wait: Finish = work.wait  # of a device: its stream waits, and not the host
            return wait
        stage: Callable[[], str] = str
        if self.starting is not None:
            collective, tensor = self.starting
            stage = partial(collective.describe, tensor)
        return partial(self._wait_and_look, work, self.begun, stage)

    def _wait_and_look(self, work: Any, number: int, stage: Callable[[], str]) -> None:
        """Wait for the collective ``number``, and look from time to time whether another rank
        compares instead of taking part.

        Raises:
            OperandError: one does, and shows what differs.
            CollectiveError: one does, of something that this rank does not know.
        """
        wait_patiently(work, partial(self._look, number, stage))

    def _look(self, number: int, stage: Callable[[], str]) -> None:
        assert self._comparisons is not None

        def claim(subject: str) -> Claim:
            return self._claim_of_waiting(stage(), subject)

        claims = self._comparisons.parted(number, claim)
        if claims is not None:
            raise self._differing(claims)

    def _compare(self, claim: Claim) -> list[Claim] | None:
        if self._comparisons is None:
            return None
        return self._comparisons.compare(claim, self.begun)

    def waiting(self, store: Any) -> list[tuple[int, str]]:
        """Return the ranks that wait in a comparison with this one, which has begun collectives
        that they have not, and what they compare; see :meth:`Comparisons.waiting`."""
        return [] if self._comparisons is None else self._comparisons.waiting(self.begun, store)

    def _in_graph(
        self, collective: str, x: torch.Tensor, send: Sequence[int], receive: Sequence[int]
    ) -> torch.Tensor:
        name, arguments = {
            "gather": ("all_gather_into_tensor", (self.size,)),
            "scatter": ("reduce_scatter_tensor", ("sum", self.size)),
            "sum": ("all_reduce", ("sum",)),
            "max": ("all_reduce", ("max",)),
            "exchange": ("all_to_all_single", (list(receive), list(send))),
        }[collective]
        started = functional_collective(name)(x, *arguments, self.group_name)
        # A graph orders its operators itself, so the wait is recorded here.
        result: torch.Tensor = wait_for_result(started)
        return result


def _take_part(finish: Finish, whole: torch.Tensor, result: torch.Tensor, rank: int) -> None:
    """Write a rank's part of ``whole``, which is complete after ``finish``, to ``result``."""
    finish()
    result.copy_(whole[rank * result.shape[0] :][: result.shape[0]])


def _comparisons_of(group: dist.ProcessGroup, rank: int) -> Comparisons | None:
    """Return the comparisons of a group; None for torch's stand-in of a group without others."""
    if group.size() == 1 or dist.get_backend(group) == "fake":
        return None
    return Comparisons(store_of(group), rank, group.size(), timeout_of(group).total_seconds())


def _options(at_once: bool) -> dict[str, Any]:
    """Return options of the process group's calls, by collective. With ``at_once`` NCCL runs on the
    current stream, which need not wait for another one, nor another for it."""
    options = {"gather": gather_options(), "scatter": dist.ReduceScatterOptions()}
    for op, operation in (("sum", dist.ReduceOp.SUM), ("max", dist.ReduceOp.MAX)):
        options[op] = dist.AllreduceOptions()
        options[op].reduceOp = operation
    for each in options.values():
        each.asyncOp = not at_once
    return options
