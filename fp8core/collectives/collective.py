"""A collective in steps that a recorded run can repeat: functions of tensors.

A recorded run has nothing but tensors between its steps, so that a collective under way is an
attribute of its result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch

from fp8core.backend_api import Sending, Transfers
from fp8core.errors import CollectiveError, Fp8CoreError
from fp8core.torch_ops.repeats import called_in_repeats

End: TypeAlias = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Blocks until a result is complete, and returns it; called with the result and what was sent."""

Arrive: TypeAlias = Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor]
"""Blocks until the rows of a rank are complete, and returns the result; called with the rank, the
result and what was sent."""


class Started:
    """The result of a collective that may still be under way; :meth:`wait` returns it.

    The object keeps the tensors of the collective alive. Until :meth:`wait` nobody may write to the
    tensor that is sent. On a GPU, waiting makes the current stream wait, and not the host.
    """

    __slots__ = ("_arrive", "_end", "_result", "_sent")

    def __init__(
        self,
        result: torch.Tensor,
        sent: torch.Tensor | None = None,
        end: End | None = None,
        arrive: Arrive | None = None,
    ) -> None:
        """``sent`` is the tensor that is sent, None where ``result`` is complete already;
        ``arrive`` is None where the rows of all ranks come together."""
        self._result = result
        self._sent = sent
        self._end = end
        self._arrive = arrive

    def rows_of(self, rank: int, size: int) -> torch.Tensor:
        """Return the rows of one of ``size`` ranks, as soon as they are here.

        Raises:
            CollectiveError: as :meth:`wait`.
        """
        if self._sent is None or self._arrive is None:
            return self.wait().chunk(size)[rank]
        result = called_in_repeats(partial(self._arrive, rank), self._result, self._sent)
        return result.chunk(size)[rank]

    def wait(self) -> torch.Tensor:
        """Return the result; a second call returns it again.

        Raises:
            CollectiveError: the collective failed, for instance because a rank did not take part
                before the group's timeout.
            OperandError: another rank compares something meanwhile, and shows what differs.
        """
        if self._sent is not None and self._end is not None:
            self._result = called_in_repeats(self._end, self._result, self._sent)
            self._sent = self._end = self._arrive = None
        return self._result

    def wait_as(self, of: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Return ``of(self.wait())``, in repeats of a recorded run as well: a function of torch's
        operators, which a recorder may not know."""
        return called_in_repeats(of, self.wait())


PLAIN = "plain"
"""A collective of the process group."""
BESIDE = "beside products"
"""Copies between ranks that a backend runs beside its products."""
IN_PARTS = "in parts"
"""Copies beside products, of a product's operand or result: each rank's rows are multiplied by
themselves, while others travel."""
READ = "read by each rank"
"""Numbers that a backend reads from the memory of the other ranks."""


class Count(NamedTuple):
    """How many collectives a rank took part in, and how many bytes it sent in them."""

    calls: int = 0
    bytes: int = 0


class Traffic:
    """Counts by ``(collective, purpose)``, such as ``("gather", "input")``.

    Bytes are those that leave one rank of ``p``: of a gather ``p - 1`` times its shard, of a
    scatter the parts of the others, of a sum or maximum what a ring sends, ``2 (p - 1) / p`` of the
    tensor, of an exchange the rows for others. Collectives of a
    captured graph are not counted.
    """

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        # Calls, bytes and the way of the latest call: lists, as one is written in each collective.
        self._counts: dict[tuple[str, str], list[Any]] = {}

    def add(self, collective: str, purpose: str, num_bytes: int, way: str = PLAIN) -> None:
        """Count one call, which ran in the given ``way``."""
        count = self._counts.get((collective, purpose))
        if count is None:
            count = self._counts[collective, purpose] = [0, 0, way]
        count[0] += 1
        count[1] += num_bytes
        count[2] = way

    def note_way(self, collective: str, purpose: str, way: str) -> None:
        """Note that the latest call of that purpose ran in another way than was counted."""
        self._counts[collective, purpose][2] = way

    def way(self, collective: str, purpose: str) -> str:
        """Return how the last collective of that purpose ran: :data:`PLAIN`, :data:`BESIDE`,
        :data:`IN_PARTS` or :data:`READ`."""
        way: str = self._counts.get((collective, purpose), (0, 0, PLAIN))[2]
        return way

    def clear(self) -> None:
        """Start again from zero."""
        self._counts.clear()

    @property
    def total(self) -> Count:
        """All collectives together."""
        return Count(*map(sum, zip(Count(), *(count for _, count in self), strict=True)))

    def __getitem__(self, key: tuple[str, str]) -> Count:
        """Return the count of one collective and purpose; zeros if there was none."""
        return Count(*self._counts.get(key, (0, 0))[:2])

    def __iter__(self) -> Iterator[tuple[tuple[str, str], Count]]:
        """Yield ``((collective, purpose), count)`` in the order of the first calls."""
        return iter([(key, Count(*count[:2])) for key, count in self._counts.items()])


Finish = Callable[[], object]
"""Blocks until a collective has written its result."""


def done() -> None:
    """Wait for nothing: the current stream has the result."""


Moved: TypeAlias = (
    "tuple[torch.Tensor, Finish] | tuple[torch.Tensor, Finish, Callable[[int], object]]"
)
"""What moving returns: a result, what blocks until it is complete, and, if they come one after the
other, until the rows of a rank are."""


class _Counting(Protocol):
    """The communicator, as a collective needs it."""

    traffic: Traffic
    begun: int
    starting: tuple[Collective, torch.Tensor] | None
    rank: int

    def describe(self, collective: str, purpose: str, x: torch.Tensor) -> str: ...


_UNDER_WAY = "fp8core_collective"
"""The attribute of a result that holds it: a recorded run begins a collective in one step and ends
it in another, and has nothing but tensors in between."""


@dataclass(slots=True, eq=False)  # a frozen one takes three times as long to make
class Collective:
    """A collective of ``communicator``, apart from its tensors; ``move`` starts it.

    ``is_coded``: the tensor is sent as uint8. ``at_once``: it is called to be complete.
    """

    communicator: _Counting
    collective: str
    purpose: str
    num_bytes: int
    way: str
    is_coded: bool
    at_once: bool
    move: Callable[[torch.Tensor], Moved]

    def begin(self, x: torch.Tensor) -> torch.Tensor:
        """Start it; the result is complete after :meth:`end`."""
        result, *moved = self._moved(x)
        vars(result)[_UNDER_WAY] = moved
        return result  # type: ignore[no-any-return]  # a tensor

    def arrive(self, rank: int, result: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Block until the rows of a rank are complete."""
        *_, arrive = vars(result)[_UNDER_WAY]
        _reported(partial(arrive, rank), partial(self.describe, x))
        return result

    def end(self, result: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Block until all of ``result`` is complete."""
        attributes = vars(result)
        _reported(attributes[_UNDER_WAY][1], partial(self.describe, x))
        del attributes[_UNDER_WAY]
        return result

    def complete(self, x: torch.Tensor) -> torch.Tensor:
        """Start it, and block until its result is complete: one step of a recorded run."""
        moved = self._moved(x)
        if moved[2] is not done:
            _reported(moved[2], partial(self.describe, x))
        return moved[0]  # type: ignore[no-any-return]  # a tensor

    def _moved(self, x: torch.Tensor) -> tuple[Any, ...]:
        """Start it; its result, what is sent, and the rest of what moving returns."""
        communicator, is_coded = self.communicator, self.is_coded
        communicator.traffic.add(self.collective, self.purpose, self.num_bytes, self.way)
        communicator.begun += 1
        communicator.starting = self, x
        sent = x.detach() if x.requires_grad else x
        if not sent.is_contiguous():
            sent = sent.contiguous()
        if is_coded:
            sent = sent.view(torch.uint8)
        try:
            result, *finish = self.move(sent)
        except RuntimeError as error:
            raise _named(error, self.describe(x)) from None
        finally:
            communicator.starting = None
        return result.view(x.dtype) if is_coded else result, sent, *finish

    def describe(self, x: torch.Tensor) -> str:
        """Return the collective of ``x`` in words, for an error."""
        return self.communicator.describe(self.collective, self.purpose, x)


@dataclass(frozen=True, slots=True)
class SumInParts:
    """A scatter of a tensor that is computed for it, a rank's part of ``size`` at a time, while the
    part before it travels ``by`` a backend."""

    communicator: _Counting
    purpose: str
    size: tuple[int, ...]
    dtype: torch.dtype
    num_bytes: int
    by: Transfers

    def start(self, like: torch.Tensor, compute: Callable[[int, torch.Tensor], object]) -> Started:
        """Compute and send all parts; ``compute(rank, out)`` writes the addend to that of a rank,
        ``like`` is a tensor on the device."""
        part = called_in_repeats(self._first, like)
        sending: Sending = vars(part)[_UNDER_WAY]
        for step, rank in enumerate(sending.order):
            compute(rank, part)
            part = called_in_repeats(partial(self._send, step), part)
        compute(self.communicator.rank, part)
        return Started(called_in_repeats(self._finish, part), part, self._end)

    def _first(self, like: torch.Tensor) -> torch.Tensor:
        """Return memory for the first part."""
        self.communicator.traffic.add("scatter", self.purpose, self.num_bytes, IN_PARTS)
        begin = partial(self.by.scatter, self.size, self.dtype)
        sending = _reported(begin, partial(self._describe, like))
        return _marked(sending.part(sending.order[0]), sending)

    def _send(self, step: int, part: torch.Tensor) -> torch.Tensor:
        """Send a part; return memory for the next one, which at last is this rank's."""
        sending: Sending = vars(part).pop(_UNDER_WAY)
        order = sending.order
        _reported(partial(sending.send, order[step]), partial(self._describe, part))
        is_last = step + 1 == len(order)
        following = part.new_empty(self.size) if is_last else sending.part(order[step + 1])
        return _marked(following, sending)

    def _finish(self, mine: torch.Tensor) -> torch.Tensor:
        sending: Sending = vars(mine).pop(_UNDER_WAY)
        finish = partial(sending.finish, mine)
        return _marked(*_reported(finish, partial(self._describe, mine)))

    def _end(self, total: torch.Tensor, mine: torch.Tensor) -> torch.Tensor:
        _reported(vars(total)[_UNDER_WAY], partial(self._describe, mine))
        del vars(total)[_UNDER_WAY]
        return total

    def _describe(self, x: torch.Tensor) -> str:
        return self.communicator.describe("scatter", self.purpose, x)


def _marked(x: torch.Tensor, under_way: object) -> torch.Tensor:
    """Return ``x`` with what is under way: another object, as a backend may keep its tensors."""
    x = x.view_as(x)
    vars(x)[_UNDER_WAY] = under_way
    return x


def _reported(call: Callable[[], Any], describe: Callable[[], str]) -> Any:
    """Return ``call()``; an error of torch's is raised with the collective in words."""
    try:
        return call()
    except RuntimeError as error:
        raise _named(error, describe()) from None


def _named(error: RuntimeError, collective: str) -> RuntimeError:
    """Return the error to raise for one of ``collective``: one of this library is that itself."""
    return error if isinstance(error, Fp8CoreError) else CollectiveError.of(collective, error)


def gathered_by(transfers: Transfers, size: int, rank: int, x: torch.Tensor) -> Moved:
    """Start to gather ``x`` by a backend's transfers between ``size`` ranks, of which this is
    ``rank``."""
    result, arrive = transfers.gather(x)
    # This rank's own rows are the last to be copied: a product in parts does without.
    coming = [(rank + step) % size for step in range(1, size + 1)]

    def arrive_once(peer: int) -> None:
        if peer in coming:
            coming.remove(peer)
            arrive(peer)

    def finish() -> None:
        while coming:
            arrive_once(coming[0])

    return result, finish, arrive_once


def scattered_by(transfers: Transfers, size: int, rank: int, x: torch.Tensor) -> Moved:
    """Start to add up ``x`` over ranks, of which each gets its rows, as :func:`gathered_by`."""
    parts = x.chunk(size)
    sending = transfers.scatter(parts[rank].shape, x.dtype)
    for peer in sending.order:
        sending.part(peer).copy_(parts[peer])
        sending.send(peer)
    return sending.finish(parts[rank])


def travels_as_bytes(collective: str, dtype: torch.dtype) -> bool:
    """Say whether elements are sent as uint8: those of a byte that nobody adds up."""
    if dtype.itemsize != 1 or dtype in (torch.uint8, torch.int8, torch.bool):
        return False
    return collective in ("gather", "exchange")
