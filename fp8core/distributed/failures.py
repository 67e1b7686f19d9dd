"""Errors that name the rank: each rank tells the others how it ends, by the store of their group.

A rank that is killed, or raises outside of a collective, leaves the others in one. Over gloo that
raises what the network saw; over NCCL the host waits for the device, and NCCL ends the process
after the timeout. Neither says which rank it was::

    rank 0, waits in a collective           rank 1
    -------------------------------------   ---------------------------------------------
    a thread posts a beat, looks at those   posts beats; raises "no more data", posts that
    of the rank before it, reads posts      and ends; or is killed, and is silent
    logs what rank 1 has posted, or that
    rank 1 is silent, and posts that
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import json
import math
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from types import TracebackType
from typing import Any, NamedTuple
from weakref import ref

import torch.distributed as dist

from fp8core.collectives import of_group
from fp8core.errors import OperandError
from fp8core.reporting import logger
from fp8core.torch_ops.private import end_process, store_of, timeout_of

_PERIOD_S, _LONGEST_SILENCE_S = 0.5, 60.0
_ANSWER = timedelta(seconds=10)
_PATIENCE = 4
"""Periods in which ranks that differ find that out themselves, where the host waits."""
_COLLECTIVES = ("torch.distributed", "fp8core.collectives")
"""Modules whose errors come from other ranks, as a rule."""

_watches: set[_Watch] = set()
"""Those of groups that exist, also where the thread has ended, as the store is gone."""


def watch_ranks(group: dist.ProcessGroup | None = None) -> None:
    """Have the ranks of ``group`` tell each other how they end; None: the default group.

    Call it on all ranks, once the group exists. When a rank raises an error that nobody catches,
    or says nothing for a third of the group's timeout and at most 60 s, the others log its number
    and its error. A process that does not end by an error of torch's within the group's timeout
    from then on is ended, with status 1 and a traceback of its threads: over NCCL it waits for the
    device, and torch would let it wait a minute longer. A thread of each process asks the store of
    the group twice a second; no step and no collective waits for it.

    Raises:
        OperandError: there is no process group, or this process is not in it.
    """
    communicator = of_group(group)
    reference = communicator.reference
    process_group = None if reference is None else reference()
    if process_group is None:
        raise OperandError(
            f"watch_ranks: group {communicator.group_name!r} is none of torch.distributed, so that "
            f"it has no store. Give a group of processes."
        )
    if communicator.size == 1 or any(watch.is_of(process_group) for watch in [*_watches]):
        return
    if not isinstance(sys.excepthook, _Hook):
        sys.excepthook = _Hook(sys.excepthook)
    atexit.unregister(_end_watches)
    atexit.register(_end_watches)
    _Watch(communicator, process_group).start()


def _watches_of_process() -> list[_Watch]:
    """Return the watches of this process: none in a child that it has forked, whose end is not the
    rank's, and which has no thread of them."""
    return [watch for watch in [*_watches] if watch.is_alive()]


def _end_watches() -> None:
    for watch in _watches_of_process():
        watch.end()


class _Failure(NamedTuple):
    """How a rank ended.

    ``follows``: within a collective, as where another rank failed before. ``beat`` is the last one
    of a rank that said nothing since.
    """

    rank: int
    text: str
    follows: bool
    beat: str = ""


class _Watch(threading.Thread):
    """Posts that this rank lives, and reads what others post."""

    def __init__(self, communicator: Any, group: dist.ProcessGroup) -> None:
        super().__init__(name=f"fp8core-ranks-{communicator.group_name}", daemon=True)
        self._communicator, self._group = communicator, ref(group)
        self._name = communicator.group_name
        self._rank, self._size = communicator.rank, communicator.size
        self._timeout_s = timeout_of(group).total_seconds()
        self._silence_s = min(self._timeout_s / 3, _LONGEST_SILENCE_S)
        # When this process has to have ended, as another rank has failed.
        self._deadline = math.inf
        self._store = store_of(group).clone()  # a connection of its own
        self._store.set_timeout(_ANSWER)
        # A new group may have the store of a destroyed one, see fp8core.collectives.comparison.
        number = (self._store.add("fp8core/watched", 1) - 1) // self._size
        self._prefix = f"fp8core/watch/{number}"
        self._stopped = threading.Event()
        self._explained = threading.Event()
        # Whether this rank has posted how it ends.
        self._is_over = False
        self._failures: list[_Failure] = []
        # The rank that is watched, its latest beat, and when that came.
        self._before = (self._rank - 1) % self._size, "", time.monotonic()
        # For how many periods ranks have compared something, while this one was in a collective.
        self._compared: Counter[tuple[int, str]] = Counter()

    def is_of(self, group: dist.ProcessGroup) -> bool:
        """Say whether it is the ranks of ``group`` that are watched."""
        return self._group() is group

    def start(self) -> None:
        """Start the thread, which is one of the watches from now on."""
        _watches.add(self)
        super().start()

    def run(self) -> None:
        """Post and read until :meth:`end`, or until the group is destroyed."""
        try:
            self._watch()
        finally:
            if self._group() is None:
                _watches.discard(self)

    def _watch(self) -> None:
        beat = 0
        try:
            while not self._stopped.wait(_PERIOD_S):
                if self._group() is None:
                    self._post_end()
                    return
                beat += 1
                self._store.set(f"{self._prefix}/beat/{self._rank}", str(beat))
                self._look()
                self._look_at_comparisons()
                for failure in self._news():
                    self._take(failure)
                is_lost = self._deadline < math.inf and not self._are_back()
                if is_lost and time.monotonic() > self._deadline:
                    _end(f"group {self._name!r} has lost a rank, and this one did not end")
        except RuntimeError:
            # Where all is well, the process that has the store ends a moment before this one.
            if not self._stopped.wait(self._silence_s) and self._group() is not None:
                logger.error(
                    "group %r: its store does not answer. The process that has the store, as a "
                    "rule rank 0 or the launcher, has ended.",
                    self._name,
                )
                self._explained.set()

    def end(self) -> None:
        """Stop the thread, as this process ends; without an error, unless one was posted."""
        self._stopped.set()
        self.join(2 * _PERIOD_S)
        with contextlib.suppress(RuntimeError):
            self._post_end()

    def _post_end(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._store.set(f"{self._prefix}/ended/{self._rank}", "")

    def fail(self, error: BaseException, *, follows: bool) -> None:
        """Post the error by which this rank ends; of several the first."""
        if self._is_over:  # hooks of earlier calls are behind that of the last one
            return
        self._is_over = True
        # The error's own str() may raise.
        message = str(traceback.TracebackException(type(error), error, None))
        lines = message.strip().splitlines() or [""]
        where = " in a collective" if follows else ""
        text = f"failed{where}: {type(error).__name__}: {lines[0][:500]}"
        with contextlib.suppress(RuntimeError):
            self._post(_Failure(self._rank, text, follows))

    def explain(self) -> None:
        """Wait until it is logged from which rank the error of this one follows."""
        if self._explained.wait(1.5 * self._silence_s + 4 * _PERIOD_S) or not self.is_alive():
            return
        self._explained.set()
        with contextlib.suppress(RuntimeError):  # the store may be gone meanwhile
            ended = [rank for rank in range(self._size) if self._has(f"ended/{rank}")]
            if ended:
                self._log(_Failure(ended[0], "ended, without an error", follows=False))
        for failure in self._failures[1:]:  # the first is logged
            if failure.rank != self._rank:
                self._log(failure)

    def _take(self, failure: _Failure) -> None:
        """Log the failure of another rank."""
        if failure.rank == self._rank:
            return
        self._deadline = min(self._deadline, time.monotonic() + self._timeout_s)
        # Those that follow are as many as there are ranks.
        if failure is self._failures[0] or not failure.follows:
            self._log(failure)

    def _are_back(self) -> bool:
        """Say whether the ranks that failed had only said nothing, and live."""
        of_peers = [failure for failure in self._failures if failure.rank != self._rank]
        are_back = all(each.beat and self._beat_of(each.rank) != each.beat for each in of_peers)
        if are_back:
            logger.error("the silent ranks of group %r are back", self._name)
            self._deadline = math.inf
            self._before = (self._rank - 1) % self._size, "", time.monotonic()
        return are_back

    def _beat_of(self, rank: int) -> str:
        """Return the latest beat of a rank, "0" before the first one."""
        if not self._has(f"beat/{rank}"):
            return "0"
        beat: bytes = self._store.get(f"{self._prefix}/beat/{rank}")
        return beat.decode()

    def _look(self) -> None:
        """Post that the rank before this one is silent, if it is; then look at the one before."""
        rank, beat, since = self._before
        latest = self._beat_of(rank)
        if latest != beat:
            self._before = rank, latest, time.monotonic()
            return
        # One that was silent for a time may be so again.
        is_ended = self._has(f"ended/{rank}") or any(
            failure.rank == rank and failure.beat in ("", beat) for failure in self._failures
        )
        silent_s = time.monotonic() - since
        if not is_ended and silent_s > self._silence_s:
            text = f"has said nothing for {silent_s:.0f} s: it was killed, or hangs"
            self._post(_Failure(rank, text, follows=False, beat=beat))
        elif not is_ended:
            return
        before = (rank - 1) % self._size
        if before != self._rank:
            self._before = before, "", time.monotonic()

    def _look_at_comparisons(self) -> None:
        """Log the ranks that compare something, while this one waits in a collective for them.

        Over NCCL the host does not wait there and cannot look itself.
        """
        try:
            waiting = self._communicator.waiting(self._store)
        except dist.DistStoreError:  # they have just agreed
            waiting = []
        self._compared = Counter({entry: self._compared[entry] + 1 for entry in waiting})
        for (rank, subject), periods in self._compared.items():
            if periods == _PATIENCE:
                text = f"compares {subject}, and this rank is in a collective meanwhile"
                self._log(_Failure(rank, text, follows=False))

    def _has(self, key: str) -> bool:
        return bool(self._store.check([f"{self._prefix}/{key}"]))

    def _post(self, failure: _Failure) -> None:
        number = self._store.add(f"{self._prefix}/failures", 1) - 1
        self._store.set(f"{self._prefix}/failure/{number}", json.dumps(failure))

    def _news(self) -> Iterator[_Failure]:
        """Yield what was posted since the last call."""
        while self._has(f"failure/{len(self._failures)}"):
            post = self._store.get(f"{self._prefix}/failure/{len(self._failures)}")
            self._failures.append(_Failure(*json.loads(post)))
            yield self._failures[-1]

    def _log(self, failure: _Failure) -> None:
        logger.error(
            "rank %d of the %d ranks of group %r %s",
            *(failure.rank, self._size, self._name, failure.text),
        )
        if not failure.follows:
            self._explained.set()


def _end(reason: str) -> None:
    """End the process, whose main thread may wait for a device, and say where its threads are."""
    logger.error("%s; it ends now", reason)
    with contextlib.suppress(AttributeError, OSError, ValueError):  # no file behind it
        faulthandler.dump_traceback(sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
    end_process(1)


class _Hook:
    """Prints an error that ends the process as ``plain`` does, and tells the other ranks."""

    def __init__(self, plain: Any) -> None:
        self._plain = plain

    def __call__(
        self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        # An OperandError says itself what differs between ranks.
        is_of_collectives = _innermost_module(traceback).startswith(_COLLECTIVES)
        follows = is_of_collectives and not isinstance(error, OperandError)
        watches = _watches_of_process()
        for watch in watches:
            watch.fail(error, follows=follows)
        self._plain(kind, error, traceback)
        for watch in watches if follows else ():
            watch.explain()


def _innermost_module(traceback: TracebackType | None) -> str:
    name = ""
    while traceback is not None:
        name = traceback.tb_frame.f_globals.get("__name__", "")
        traceback = traceback.tb_next
    return name
