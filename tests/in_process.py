"""Ranks that are threads of one process: what several processes compute, without starting any."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from fp8core.collectives import Communicator, register
from fp8core.collectives.collective import Finish
from fp8core.collectives.comparison import Claim
from fp8core.errors import CollectiveError

_Result = TypeVar("_Result")
_numbers = itertools.count()


def communicators(size: int, timeout_s: float = 60.0) -> list[Communicator]:
    """Return a communicator for each of ``size`` ranks; each is to be used by a thread of its own.

    A rank that waits for another one longer than ``timeout_s`` raises CollectiveError.
    """
    meeting = _Meeting(size, timeout_s)
    ranks: list[Communicator] = []
    for rank in range(size):
        communicator = _ThreadCommunicator(meeting, rank)
        register(communicator)
        ranks.append(communicator)
    return ranks


def run_in_threads(
    work: Callable[[Communicator], _Result], size: int, timeout_s: float = 60.0
) -> list[_Result]:
    """Run ``work(communicator)`` in ``size`` threads at once; what they return, by rank.

    Backward passes run in the thread that asks for them, as all ranks would otherwise share
    autograd's thread of the device. If ranks raise, the others are told, and the error of the
    first one that does not only say so is raised.
    """
    ranks = communicators(size, timeout_s)
    results: list[_Result | None] = [None] * size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            with torch.autograd.set_multithreading_enabled(False):
                results[rank] = work(ranks[rank])
        except BaseException as error:  # noqa: BLE001  handed to the caller's thread
            errors.append(error)
            _meeting_of(ranks[rank]).leave(rank)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((error for error in errors if not isinstance(error, CollectiveError)), errors[0])
    return results  # type: ignore[return-value]  # each rank has returned


class _Meeting:
    """Where the ranks leave what they send: by the number of the collective, then by rank."""

    def __init__(self, size: int, timeout_s: float) -> None:
        self.size = size
        self.number = next(_numbers)
        self._timeout_s = timeout_s
        self._left: dict[int, dict[int, tuple[str, torch.Tensor]]] = {}
        self._num_reads: dict[int, int] = {}
        self._gone: list[int] = []
        self._changed = threading.Condition()

    def leave(self, rank: int) -> None:
        """Let the ranks that wait for ``rank`` fail at once."""
        with self._changed:
            self._gone.append(rank)
            self._changed.notify_all()

    def post(self, number: int, rank: int, kind: str, x: torch.Tensor) -> None:
        """Leave what ``rank`` sends; a copy, as the rank may write to ``x`` when it has its own
        result."""
        with self._changed:
            self._left.setdefault(number, {})[rank] = (kind, x.clone())
            self._changed.notify_all()

    def collect(self, number: int) -> list[torch.Tensor]:
        """Wait for what all ranks send.

        Raises:
            CollectiveError: a rank is missing, or calls another collective.
        """
        with self._changed:
            sent = self._left[number]
            arrived = self._changed.wait_for(
                lambda: len(sent) == self.size or bool(self._gone), self._timeout_s
            )
            if not arrived or len(sent) < self.size:
                missing = sorted({*range(self.size)} - {*sent})
                raise CollectiveError(
                    f"collective {number}: ranks {missing} did not take part within "
                    f"{self._timeout_s} s. Ranks that raised an error or ended: {self._gone}."
                )
            kinds = {rank: sent[rank][0] for rank in range(self.size)}
            if len({*kinds.values()}) > 1:
                raise CollectiveError(
                    f"collective {number}: the ranks call different ones: {kinds}."
                )
            self._num_reads[number] = self._num_reads.get(number, 0) + 1
            if self._num_reads[number] == self.size:
                del self._left[number], self._num_reads[number]
        return [sent[rank][1] for rank in range(self.size)]


def _meeting_of(communicator: Communicator) -> _Meeting:
    assert isinstance(communicator, _ThreadCommunicator)
    return communicator.meeting


class _ThreadCommunicator(Communicator):
    """A rank of a meeting. Sums are taken in the order of ranks, in the dtype of the tensors."""

    def __init__(self, meeting: _Meeting, rank: int) -> None:
        name = f"threads {meeting.number}, rank {rank}"
        super().__init__(meeting.size, rank, name)
        self.meeting = meeting
        self._next = itertools.count()

    def _compare(self, claim: Claim) -> list[Claim] | None:
        text = json.dumps(claim).encode()
        number = self._posted(torch.tensor([*text], dtype=torch.uint8), "comparison")
        posts = [bytes(post.tolist()) for post in self.meeting.collect(number)]
        claims = [Claim(*json.loads(post)) for post in posts]
        return None if len({said.text for said in claims}) == 1 else claims

    def _gather(self, x: torch.Tensor) -> tuple[torch.Tensor, Finish]:
        result = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        return self._met(result, x, f"gather {x.dtype} {[*x.shape]}", _cat)

    def _scatter(self, x: torch.Tensor) -> tuple[torch.Tensor, Finish]:
        rows = x.shape[0] // self.size
        result = x.new_empty((rows, *x.shape[1:]))
        mine = slice(self.rank * rows, (self.rank + 1) * rows)

        def reduce(parts: Sequence[torch.Tensor]) -> torch.Tensor:
            return _sum([part[mine] for part in parts])

        return self._met(result, x, f"scatter {x.dtype} {[*x.shape]}", reduce)

    def _all_reduce(
        self, x: torch.Tensor, op: str, *, in_place: bool = False
    ) -> tuple[torch.Tensor, Finish]:
        reduce = {"sum": _sum, "max": _max}[op]
        return self._met(
            x if in_place else torch.empty_like(x), x, f"{op} {x.dtype} {[*x.shape]}", reduce
        )

    def _exchange(
        self, x: torch.Tensor, send: Sequence[int], receive: Sequence[int]
    ) -> tuple[torch.Tensor, Finish]:
        result = x.new_empty((sum(receive), *x.shape[1:]))
        # What a rank sends travels with its sizes in front, which tell where its parts begin.
        sizes = torch.tensor(send)
        number = self._posted(x, f"exchange {x.dtype} {[*x.shape[1:]]}")
        lengths = self._posted(sizes, "sizes of the exchange")

        def finish() -> None:
            parts, all_sizes = self.meeting.collect(number), self.meeting.collect(lengths)
            mine = [
                torch.split(part, part_sizes.tolist())[self.rank]
                for part, part_sizes in zip(parts, all_sizes, strict=True)
            ]
            arriving = [part.shape[0] for part in mine]
            if arriving != list(receive):
                raise CollectiveError(
                    f"exchange: rank {self.rank} expected {list(receive)} rows by rank, and the "
                    f"ranks send {arriving}."
                )
            result.copy_(torch.cat(mine))

        return result, finish

    def _met(
        self,
        result: torch.Tensor,
        x: torch.Tensor,
        kind: str,
        reduce: Callable[[Sequence[torch.Tensor]], torch.Tensor],
    ) -> tuple[torch.Tensor, Finish]:
        number = self._posted(x, kind)

        def finish() -> None:
            result.copy_(reduce(self.meeting.collect(number)))

        return result, finish

    def _posted(self, x: torch.Tensor, kind: str) -> int:
        number = next(self._next)
        self.meeting.post(number, self.rank, kind, x)
        return number


def _cat(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat(list(parts))


def _sum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def _max(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack(list(parts)).amax(0)
