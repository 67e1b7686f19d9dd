"""The collectives of layers, apart from who moves the bytes."""

from __future__ import annotations

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeAlias, TypeGuard
from weakref import ReferenceType

import torch
import torch.distributed as dist

from fp8core.backend_api import Ranks, Transfers
from fp8core.collectives.collective import (
    BESIDE,
    IN_PARTS,
    PLAIN,
    READ,
    Collective,
    Finish,
    Moved,
    Started,
    SumInParts,
    Traffic,
    done,
    gathered_by,
    scattered_by,
    travels_as_bytes,
)
from fp8core.collectives.comparison import Claim, differing_parts
from fp8core.errors import CollectiveError, Fp8CoreError, OperandError, UnsupportedError
from fp8core.torch_ops.capture import is_captured
from fp8core.torch_ops.repeats import called_in_repeats

GroupReference: TypeAlias = ReferenceType["dist.ProcessGroup"]
"""``weakref.ref(group)``: the same object each time, as long as the group exists."""


def is_process_group(value: object) -> TypeGuard[dist.ProcessGroup]:
    """Say whether ``value`` is a group of torch.distributed, of which a build of torch may lack
    all."""
    return dist.is_available() and isinstance(value, dist.ProcessGroup)


def existing(reference: GroupReference, use: str) -> dist.ProcessGroup:
    """Return the group, ``use`` of which is asked for.

    Raises:
        OperandError: it was destroyed.
    """
    group = reference()
    if group is None:
        raise OperandError(
            f"{use}: the process group was destroyed, as by "
            f"torch.distributed.destroy_process_group. Give a group that exists."
        )
    return group


Maximum: TypeAlias = Callable[[torch.Tensor], "torch.Tensor | None"]
"""The ``maximum`` of :class:`fp8core.backend_api.Transfers`."""


class Communicator(Ranks, ABC):
    """A rank of a group of ``size`` ranks.

    ``rank`` is this process's position in the group, ``group_name`` the name by which
    :func:`fp8core.collectives.named` returns this communicator. Every rank of the group has to
    call the same collectives in the same order with tensors of equal shapes. In a group of one rank
    they return the tensor that they are given, and of a tensor on meta they return one of the
    result's size, without the other ranks. A ``purpose`` is a word for the counts and for
    errors, such as ``"input"``. ``at_once`` says that the caller waits for the result at once, so
    that nothing can run beside the collective: it may take the stream of the caller, and the result
    is complete when the call returns. ``reference`` is that of the process group, None where there
    is none.
    """

    reference: GroupReference | None = None

    def __init__(self, size: int, rank: int, group_name: str) -> None:
        super().__init__(size, rank, group_name)
        self.traffic = Traffic()
        # How many collectives were begun, those of captured graphs apart.
        self.begun = 0
        # The one that is being started, and its tensor.
        self.starting: tuple[Collective, torch.Tensor] | None = None
        # What the ranks have compared last, by subject.
        self._claimed: dict[str, str] = {}
        # What the ranks have compared and need not compare again.
        self.agreed: set[str] = set()

    def gather(
        self,
        x: torch.Tensor,
        purpose: str = "",
        by: Transfers | None = None,
        *,
        in_parts: bool = False,
        at_once: bool = False,
    ) -> Started:
        """Start to concatenate the ``x`` of all ranks along dimension 0, in the order of ranks.

        ``by`` moves it beside products, if it takes so many bytes; ``in_parts`` says that a product
        will read each rank's rows as they arrive.
        """
        if self.size == 1:
            return Started(x)
        if not x.numel():
            return Started(x.new_empty((self.size * x.shape[0], *x.shape[1:])))
        num_bytes = (self.size - 1) * _bytes_of(x)
        if by is None or is_captured(x) or not by.takes(_bytes_of(x)):
            return self._start("gather", purpose, x, num_bytes, self._gather, at_once=at_once)
        way = IN_PARTS if in_parts else BESIDE
        move = partial(gathered_by, by, self.size, self.rank)
        return self._start("gather", purpose, x, num_bytes, move, way=way, arrives_in_parts=True)

    def scatter(
        self,
        x: torch.Tensor,
        purpose: str = "",
        by: Transfers | None = None,
        *,
        at_once: bool = False,
    ) -> Started:
        """Start to add up the ``x`` of all ranks, of which each rank gets its part of dimension 0.

        ``by`` moves it beside products, if it takes so many bytes.

        Raises:
            OperandError: the ranks do not divide dimension 0.
        """
        if x.shape[0] % self.size:
            raise OperandError(
                f"scatter of {list(x.shape)} over the {self.size} ranks of group "
                f"{self.group_name!r}: they do not divide its {x.shape[0]} rows. Give a "
                f"multiple of {self.size} rows."
            )
        if self.size == 1 or not x.numel():
            return Started(x[: x.shape[0] // self.size])
        part = _bytes_of(x) // self.size
        num_bytes = part * (self.size - 1)
        if by is None or is_captured(x) or not by.takes(part):
            return self._start("scatter", purpose, x, num_bytes, self._scatter, at_once=at_once)
        move = partial(scattered_by, by, self.size, self.rank)
        return self._start("scatter", purpose, x, num_bytes, move, way=BESIDE)

    def scatter_in_parts(
        self,
        like: torch.Tensor,
        size: Sequence[int],
        dtype: torch.dtype,
        compute: Callable[[int, torch.Tensor], object],
        purpose: str,
        by: Transfers,
    ) -> Started:
        """Start a scatter of a tensor that is computed for it, a rank's part of ``size`` at a time.

        ``compute(rank, out)`` writes the addend to the part of a rank; each part travels ``by`` a
        backend while the next one is computed. ``like`` is a tensor on the device.
        """
        num_bytes = math.prod(size) * dtype.itemsize * (self.size - 1)
        if like.is_meta:
            self.traffic.add("scatter", purpose, num_bytes, IN_PARTS)
            mine = like.new_empty(size, dtype=dtype)
            for rank in range(self.size):
                compute(rank, mine)
            return Started(mine)
        return SumInParts(self, purpose, tuple(size), dtype, num_bytes, by).start(like, compute)

    def sum(self, x: torch.Tensor, purpose: str = "", *, at_once: bool = False) -> Started:
        """Start to add up the ``x`` of all ranks; the result is a new tensor."""
        move = partial(self._all_reduce, op="sum")
        return self._reduced("sum", purpose, x, move, at_once=at_once)

    def max(
        self,
        x: torch.Tensor,
        purpose: str = "",
        by: Maximum | None = None,
        *,
        in_place: bool = False,
        at_once: bool = False,
    ) -> Started:
        """Start to take the elementwise maximum over all ranks; the result is a new tensor, or with
        ``in_place`` it may be ``x``, written.

        ``by`` takes it in less time than a collective does, or returns None.
        """
        reduce = partial(self._all_reduce, op="max", in_place=in_place)
        if by is None or is_captured(x) or (x.is_meta and by(x) is None):
            return self._reduced("max", purpose, x, reduce, at_once=at_once)

        def move(sent: torch.Tensor) -> Moved:
            largest = by(sent)
            if largest is not None:
                return largest, done
            self.traffic.note_way("max", purpose, PLAIN)
            return reduce(sent)

        return self._reduced("max", purpose, x, move, READ, at_once=at_once)

    def exchange(
        self, x: torch.Tensor, send: Sequence[int], receive: Sequence[int], purpose: str = ""
    ) -> Started:
        """Start to send rows of ``x`` to each rank and to receive rows from each.

        ``send[r]`` is how many rows go to rank ``r``, the first ones to rank 0; ``receive[r]`` is
        how many come from it. A zero sends or receives nothing.

        Raises:
            OperandError: the sizes are not one a rank, or ``send`` does not add up to the rows.
        """
        if len(send) != self.size or len(receive) != self.size or sum(send) != x.shape[0]:
            raise OperandError(
                f"exchange of {list(x.shape)} over the {self.size} ranks of group "
                f"{self.group_name!r} with send={list(send)} and receive={list(receive)}: expected "
                f"{self.size} sizes each, those of send adding up to {x.shape[0]} rows."
            )
        if self.size == 1:
            return Started(x)
        row_bytes = _bytes_of(x) // x.shape[0] if x.shape[0] else 0
        num_bytes = (x.shape[0] - send[self.rank]) * row_bytes

        def move(sent: torch.Tensor) -> tuple[torch.Tensor, Finish]:
            return self._exchange(sent, send, receive)

        return self._start("exchange", purpose, x, num_bytes, move, send=send, receive=receive)

    @contextlib.contextmanager
    def counting(self) -> Iterator[Traffic]:
        """Count what is sent within the context apart from all else, in the traffic it returns."""
        before, self.traffic = self.traffic, Traffic()
        try:
            yield self.traffic
        finally:
            self.traffic = before

    def agree(self, text: str, subject: str) -> None:
        """Compare ``text`` with that of the other ranks; ``subject`` says what it describes.

        The host waits for the other ranks; no collective of the group is called.

        Raises:
            OperandError: the texts differ; raised on every rank, and names the ranks and texts.
            CollectiveError: another rank does not compare anything now.
        """
        if self.size == 1:
            return
        claims = self._compare(Claim(subject, text))
        if claims is not None:
            raise self._differing(claims)
        self._claimed[subject] = text

    def agree_once(self, text: str, subject: str) -> None:
        """As :meth:`agree`, unless the ranks have agreed on ``text`` before."""
        if text not in self.agreed:
            self.agree(text, subject)
            self.agreed.add(text)

    def describe(self, collective: str, purpose: str, x: torch.Tensor) -> str:
        """Return one collective in words, for an error."""
        suffix = f" ({purpose})" if purpose else ""
        return (
            f"{collective} of {x.dtype} {list(x.shape)}{suffix} by rank {self.rank} of the "
            f"{self.size} ranks of group {self.group_name!r}"
        )

    def _differing(self, claims: Sequence[Claim]) -> Fp8CoreError:
        """Return the error for claims that differ."""
        if not any(claim.waits_in for claim in claims):
            return OperandError(_difference(claims[self.rank].subject, self.group_name, claims))
        subjects = dict.fromkeys(claim.subject for claim in claims if not claim.waits_in)
        said = _difference(" and ".join(subjects), self.group_name, claims)
        ended = (
            " The group cannot go on after that, as some ranks have begun a collective that the "
            "others do not call."
        )
        texts = {claim.text for claim in claims}
        return (OperandError if len(texts) > 1 else CollectiveError)(said + ended)

    def _claim_of_waiting(self, stage: str, subject: str) -> Claim:
        """Return what a rank claims that waits in a collective while others compare ``subject``."""
        return Claim(subject, self._claimed.get(subject, "not compared so far"), stage)

    def _in_graph(
        self, collective: str, x: torch.Tensor, send: Sequence[int], receive: Sequence[int]
    ) -> torch.Tensor:
        """Return the result of the collective of a contiguous ``x`` while torch captures a graph;
        ``send`` and ``receive`` are those of an exchange."""
        raise UnsupportedError(
            f"a graph cannot hold the collectives of group {self.group_name!r}: torch.distributed "
            f"does not know it. Keep the layer out of the graph with torch.compiler.disable."
        )

    @abstractmethod
    def _compare(self, claim: Claim) -> list[Claim] | None:
        """Return the claims of all ranks, by rank; None if all are equal."""

    @abstractmethod
    def _gather(self, x: torch.Tensor) -> tuple[torch.Tensor, Finish]:
        """Start the collective of a contiguous ``x``; its result, and what waits for that."""

    @abstractmethod
    def _scatter(self, x: torch.Tensor) -> tuple[torch.Tensor, Finish]:
        """As :meth:`_gather`."""

    @abstractmethod
    def _all_reduce(
        self, x: torch.Tensor, op: str, *, in_place: bool = False
    ) -> tuple[torch.Tensor, Finish]:
        """As :meth:`_gather`; ``op`` is sum or max. ``in_place``: the result may be ``x``."""

    @abstractmethod
    def _exchange(
        self, x: torch.Tensor, send: Sequence[int], receive: Sequence[int]
    ) -> tuple[torch.Tensor, Finish]:
        """As :meth:`_gather`."""

    def _reduced(
        self,
        op: str,
        purpose: str,
        x: torch.Tensor,
        move: Callable[[torch.Tensor], Moved],
        way: str = PLAIN,
        *,
        at_once: bool,
    ) -> Started:
        if self.size == 1 or not x.numel():
            return Started(x)
        num_bytes = 2 * (self.size - 1) * _bytes_of(x) // self.size
        return self._start(op, purpose, x, num_bytes, move, way=way, at_once=at_once)

    def _start(
        self,
        collective: str,
        purpose: str,
        x: torch.Tensor,
        num_bytes: int,
        move: Callable[[torch.Tensor], Moved],
        *,
        send: Sequence[int] = (),
        receive: Sequence[int] = (),
        way: str = PLAIN,
        arrives_in_parts: bool = False,
        at_once: bool = False,
    ) -> Started:
        if x.is_meta:  # shapes alone, which are counted
            self.traffic.add(collective, purpose, num_bytes, way)
            return Started(x.new_empty(_size_after(collective, x, self.size, receive)))
        if is_captured(x):
            return self._captured(collective, purpose, x, send, receive)
        is_coded = travels_as_bytes(collective, x.dtype)
        steps = Collective(self, collective, purpose, num_bytes, way, is_coded, at_once, move)
        if at_once:
            return Started(called_in_repeats(steps.complete, x))
        result = called_in_repeats(steps.begin, x)
        return Started(result, x, steps.end, steps.arrive if arrives_in_parts else None)

    def _captured(
        self,
        collective: str,
        purpose: str,
        x: torch.Tensor,
        send: Sequence[int],
        receive: Sequence[int],
    ) -> Started:
        """Record the collective in the graph that torch captures, which orders it by itself."""
        sent = x.detach().contiguous()
        try:
            if travels_as_bytes(collective, x.dtype):
                sent = self._in_graph(collective, sent.view(torch.uint8), send, receive)
                return Started(sent.view(x.dtype))
            return Started(self._in_graph(collective, sent, send, receive))
        except Fp8CoreError:
            raise
        except RuntimeError as error:
            raise CollectiveError.of(self.describe(collective, purpose, x), error) from None


def _size_after(
    collective: str, x: torch.Tensor, size: int, receive: Sequence[int]
) -> tuple[int, ...]:
    """Return the size of the result of a collective of ``x`` over ``size`` ranks."""
    rows = {
        "gather": x.shape[0] * size,
        "scatter": x.shape[0] // size,
        "exchange": sum(receive),
    }
    return (rows.get(collective, x.shape[0]), *x.shape[1:])


def _bytes_of(x: torch.Tensor) -> int:
    # x.nbytes has no symbols for sizes that torch traces.
    return x.numel() * x.element_size()


def _difference(subject: str, group_name: str, claims: Sequence[Claim]) -> str:
    """Return the message for claims that differ: what only some have, once, with its ranks."""
    ranks: dict[str, list[int]] = {}
    texts = [claim.text for claim in claims]
    if len(set(texts)) > 1 and len({claim.subject for claim in claims}) == 1:
        texts = differing_parts(texts)
    for rank, (claim, text) in enumerate(zip(claims, texts, strict=True)):
        waits = f", and waits in {claim.waits_in}" if claim.waits_in else ""
        if claim.subject != claims[0].subject:
            text = f"{claim.subject}: {text}"
        ranks.setdefault(f"{text}{waits}", []).append(rank)
    parts = (
        f"rank{'s' if len(of) > 1 else ''} {', '.join(map(str, of))}: {text}"
        for text, of in ranks.items()
    )
    return (
        f"the ranks of group {group_name!r} differ in {subject}. " + "; ".join(parts) + ". Every "
        "rank of the group has to run the same layers by the same recipe, in the same order, on "
        "inputs of the same sizes, with gradients of the same tensors."
    )
