"""Laws of the rows that a backend moves between ranks, held to the collectives of their group; all
ranks run them at the same time.

Numbers are such that each rank can compute those of the others.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from fp8core.backend_api import GemmDesc, Operand, QuantizeDesc, Transfers
from fp8core.collectives import Communicator
from fp8core.conformance.catalogue import catalogue
from fp8core.conformance.compare import Unjudged, require, same_bits
from fp8core.conformance.laws.gemm import repeatable, rows_of
from fp8core.conformance.operands import gemm_operands
from fp8core.conformance.subject import Subject
from fp8core.dispatch import plugins
from fp8core.errors import OperandError
from fp8core.tensors.checks import bytes_of

_ROWS, _COLUMNS = 6, 256
_MOST_BYTES = 1 << 26
_ROUNDS = 3
_NUMBERS = 31  # sums of so few integers up to this are exact in every dtype
_CODES = 120  # byte patterns from 0 on, none of which is a NaN of float8_e4m3fn

Pair: TypeAlias = tuple[str, torch.Tensor, torch.Tensor]
"""A name, what arrived, and what is due."""


@dataclass(frozen=True, slots=True)
class RankSubject:
    """A rank of a group, and a backend on it: ``transfers`` moves rows beside its products, None:
    nothing does. Laws of the group alone need no ``backend``."""

    communicator: Communicator
    device: torch.device
    backend: Subject | None = None
    transfers: Transfers | None = None

    @property
    def subject(self) -> Subject:
        """The backend, which laws of what it moves have."""
        assert self.backend is not None
        return self.backend

    @property
    def moves(self) -> Transfers:
        """The transfers that move rows beside products.

        Raises:
            Unjudged: nothing does between these ranks.
        """
        if self.transfers is None:
            raise Unjudged("the backend moves no rows between these ranks: their group does")
        return self.transfers

    def rows(self, row_bytes: int, step: int = 1) -> int:
        """Return how many rows, a multiple of ``step``, a rank's part needs to be moved.

        Raises:
            Unjudged: parts of the largest size are not.
        """
        rows = step
        while not self.moves.takes(rows * row_bytes):
            rows *= 2
            if rows * row_bytes > _MOST_BYTES:
                raise Unjudged(f"parts of {_MOST_BYTES} bytes are not moved beside products")
        return rows

    def values(
        self, rank: int, rows: int, dtype: torch.dtype, round_: int = 0, columns: int = _COLUMNS
    ) -> torch.Tensor:
        """Return the numbers ``[rows, columns]`` of a rank, on the device of this one."""
        numbers = torch.arange(rows * columns).reshape(rows, columns) * 7 + 11 * rank + 3 * round_
        if dtype == torch.float8_e4m3fn:
            return (numbers % _CODES).to(torch.uint8).view(dtype).to(self.device)
        return (numbers % _NUMBERS).to(dtype).to(self.device)

    def of_each(
        self, rows: int, dtype: torch.dtype, round_: int = 0, columns: int = _COLUMNS
    ) -> list[torch.Tensor]:
        """Return the numbers of all ranks, in their order."""
        ranks = range(self.communicator.size)
        return [self.values(rank, rows, dtype, round_, columns) for rank in ranks]


def subject_of(subject: Subject, communicator: Communicator) -> RankSubject:
    """Return the backend of ``subject`` between the ranks of ``communicator``."""
    registry = plugins.load()
    spec = registry.spec(subject.name, "the conformance kit")
    transfers = registry.transfers(spec, communicator, subject.device)
    return RankSubject(communicator, subject.device, subject, transfers)


RankLaw: TypeAlias = Callable[[RankSubject], None]


def _compared(law: Callable[[RankSubject], Iterable[Pair]]) -> RankLaw:
    """Return ``law``, whose pairs are compared when everything is exchanged, so that the ranks stay
    in step where one of them finds a fault."""

    @functools.wraps(law)
    def compare(ranks: RankSubject) -> None:
        for name, arrived, due in list(law(ranks)):
            same_bits(name, bytes_of(arrived, name), bytes_of(due, name))

    return compare


def _gathered(
    ranks: RankSubject, dtype: torch.dtype, *sizes: int, by: Transfers | None = None
) -> Iterator[Pair]:
    for rows in sizes:
        x = ranks.values(ranks.communicator.rank, rows, dtype)
        arrived = ranks.communicator.gather(x, "kit", by).wait()
        yield f"{dtype} [{rows}, {_COLUMNS}]", arrived, torch.cat(ranks.of_each(rows, dtype))


def _scattered(
    ranks: RankSubject, dtype: torch.dtype, rows: int, by: Transfers | None = None
) -> Iterator[Pair]:
    size, rank = ranks.communicator.size, ranks.communicator.rank
    x = torch.cat(ranks.of_each(rows, dtype, round_=rank))
    part = ranks.communicator.scatter(x, "kit", by).wait()
    addends = torch.stack([ranks.values(rank, rows, dtype, round_=peer) for peer in range(size)])
    yield f"{dtype}", part, addends.float().sum(0).to(dtype)


def _reduced(ranks: RankSubject, kind: str) -> Iterator[Pair]:
    addends = ranks.of_each(_ROWS, torch.float32)
    reduce = getattr(ranks.communicator, kind)
    due = torch.stack(addends)
    result = reduce(addends[ranks.communicator.rank], "kit").wait()
    yield kind, result, due.sum(0) if kind == "sum" else due.amax(0)


def _exchanged(ranks: RankSubject, dtype: torch.dtype) -> Iterator[Pair]:
    size, rank = ranks.communicator.size, ranks.communicator.rank
    sent = [[(of + to) % size for to in range(size)] for of in range(size)]  # none to one of them
    inputs = [ranks.values(of, sum(sizes), dtype) for of, sizes in enumerate(sent)]
    receive = [sizes[rank] for sizes in sent]
    arrived = ranks.communicator.exchange(inputs[rank], sent[rank], receive).wait()
    parts = [torch.split(x.view(torch.uint8), sizes) for x, sizes in zip(inputs, sent, strict=True)]
    yield f"{dtype}", arrived, torch.cat([of[rank] for of in parts])


def _of(
    law: Callable[..., Iterator[Pair]], *options: Any
) -> Callable[[RankSubject], Iterator[Pair]]:
    return lambda ranks: law(ranks, *options)


COLLECTIVES: dict[str, RankLaw] = {
    name: _compared(_of(law, *options))
    for name, law, options in (
        ("gather of float8_e4m3fn", _gathered, (torch.float8_e4m3fn, _ROWS)),
        ("gather of bfloat16", _gathered, (torch.bfloat16, _ROWS)),
        ("scatter of sums in bfloat16", _scattered, (torch.bfloat16, _ROWS)),
        ("sum of float32", _reduced, ("sum",)),
        ("maximum of float32", _reduced, ("max",)),
        ("exchange of float8_e4m3fn", _exchanged, (torch.float8_e4m3fn,)),
    )
}
"""The laws of the collectives of a group, in the order in which every rank runs them."""


@_compared
def rows_gathered_beside_products(ranks: RankSubject) -> Iterator[Pair]:
    """Rows of every dtype, of one size and the next ones, are those that the group gathers."""
    for dtype in (torch.uint8, torch.bfloat16, torch.float32):
        least = ranks.rows(_COLUMNS * dtype.itemsize)
        yield from _gathered(ranks, dtype, least, least + 1, 2 * least + 3, by=ranks.moves)


@_compared
def rows_that_arrive_one_rank_after_the_other(ranks: RankSubject) -> Iterator[Pair]:
    """The rows of a rank are complete when they are said to be, before those of all are."""
    communicator = ranks.communicator
    size, rank = communicator.size, communicator.rank
    rows = ranks.rows(2 * _COLUMNS)
    due = ranks.of_each(rows, torch.bfloat16)
    started = communicator.gather(due[rank], "kit", ranks.moves, in_parts=True)
    for sender in ((rank + step) % size for step in range(1, size)):
        yield f"rows of rank {sender}", started.rows_of(sender, size).clone(), due[sender]
    yield "all rows", started.wait(), torch.cat(due)


@_compared
def maxima_of_a_few_numbers(ranks: RankSubject) -> Iterator[Pair]:
    """Maxima over ranks are exact, for one number and for thousands, again and again without a
    wait, and leave what they are taken of as it was."""
    rank, maximum = ranks.communicator.rank, ranks.moves.maximum
    for round_ in range(_ROUNDS):
        for count in (1, 2, 4099):
            numbers = [x[0] / 8 for x in ranks.of_each(1, torch.float32, round_, count)]
            x = numbers[rank].clone()
            largest = ranks.communicator.max(x, "kit", maximum).wait()
            yield f"{count} numbers", x, numbers[rank]
            yield f"the maxima of {count}", largest, torch.stack(numbers).amax(0)


@_compared
def several_transfers_under_way(ranks: RankSubject) -> Iterator[Pair]:
    """Gathers and sums that are started before others are waited for, again and again, mix up
    nothing: memory is written anew only when nobody reads it any more."""
    communicator, moves = ranks.communicator, ranks.moves
    size, rank = communicator.size, communicator.rank
    rows, dtype, results = ranks.rows(2 * _COLUMNS), torch.bfloat16, []
    for round_ in range(_ROUNDS):
        x = ranks.values(rank, rows, dtype, round_)
        whole = torch.cat(ranks.of_each(rows, dtype, round_ + rank))
        first = communicator.gather(x, "kit", moves)
        total = communicator.scatter(whole, "kit", moves)
        second = communicator.gather(x + 1, "kit", moves)
        results.append([started.wait().clone() for started in (second, total, first)])
    for round_, (second_rows, part, first_rows) in enumerate(results):
        due = torch.cat(ranks.of_each(rows, dtype, round_))
        addends = [ranks.values(rank, rows, dtype, round_ + peer) for peer in range(size)]
        yield f"round {round_}, the first gather", first_rows, due
        yield f"round {round_}, the second gather", second_rows, due + 1
        yield f"round {round_}, the sum", part, torch.stack(addends).sum(0).to(dtype)


@_compared
def sums_scattered_beside_products(ranks: RankSubject) -> Iterator[Pair]:
    """Each rank gets its rows of the sum over ranks, of every dtype of activations."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        rows = ranks.rows(_COLUMNS * dtype.itemsize) + 1
        yield from _scattered(ranks, dtype, rows, ranks.moves)


@_compared
def products_of_rows_that_arrive(ranks: RankSubject) -> Iterator[Pair]:
    """A product of each rank's rows as they arrive has the bits of gather and product, for one
    product of each kind of scales."""
    communicator = ranks.communicator
    size, rank = communicator.size, communicator.rank
    with repeatable():
        for name, desc, k in _products(ranks):
            gemm_part = ranks.subject.variant(desc, part=True)
            assert gemm_part is not None
            rows = ranks.rows(k, 128)
            a, b = gemm_operands(ranks.subject, desc, size * rows, _COLUMNS, k)
            whole = ranks.subject.run(desc, a, b)
            mine = rows_of(a, rank * rows, rows, size * rows)
            started = communicator.gather(mine.data, "kit", ranks.moves, in_parts=True)
            out = torch.empty_like(whole)
            for step in range(size):
                sender = (rank + step) % size
                part = rows_of(a, sender * rows, rows, size * rows)
                data = started.rows_of(sender, size) if step else mine.data
                part = part._replace(data=data)
                gemm_part(size * rows, part, b, out=out[sender * rows : (sender + 1) * rows])
            yield name, out, whole


def products_that_are_summed_in_parts(ranks: RankSubject) -> None:
    """Parts of a product that travel while the next is computed add up to the sum of products."""
    communicator, moves = ranks.communicator, ranks.moves
    size, rank = communicator.size, communicator.rank
    pairs = []
    with repeatable():
        for name, desc, k in _products(ranks):
            gemm_part = ranks.subject.variant(desc, part=True)
            assert gemm_part is not None
            rows = ranks.rows(_COLUMNS * desc.out_dtype.itemsize, 128)
            a, b = gemm_operands(ranks.subject, desc, size * rows, _COLUMNS, k, seed=rank)
            products = ranks.subject.run(desc, a, b)
            plain = communicator.gather(products, "kit").wait()
            compute = _part_of(gemm_part, a, b, rows, size)
            started = communicator.scatter_in_parts(
                b.data, (rows, _COLUMNS), desc.out_dtype, compute, "kit", moves
            )
            addends = [product.chunk(size)[rank] for product in plain.chunk(size)]
            pairs.append((name, started.wait(), addends))
    for name, total, addends in pairs:
        expected = torch.stack(addends).double().sum(0)
        magnitude = torch.stack(addends).double().abs().sum(0)
        rounding = torch.finfo(total.dtype).eps / 2
        error = (total.double() - expected).abs()
        limit = (size - 1) * rounding * magnitude
        require(bool((error <= limit).all()), f"{name}: a sum is beyond {size - 1} roundings")


def _part_of(
    gemm_part: Callable[..., torch.Tensor], a: Operand, b: Operand, rows: int, size: int
) -> Callable[[int, torch.Tensor], object]:
    def compute(rank: int, out: torch.Tensor) -> None:
        gemm_part(size * rows, rows_of(a, rank * rows, rows, size * rows), b, out=out)

    return compute


def faults_are_told_to_every_rank(ranks: RankSubject) -> None:
    """Ranks that differ in what they compare, and rows that the ranks do not divide, are named
    errors on all of them, after which collectives work."""
    communicator, device = ranks.communicator, ranks.device
    told = []
    for call in (
        lambda: communicator.agree(f"rank {communicator.rank}", "the kit's texts"),
        lambda: communicator.scatter(torch.zeros(communicator.size + 1, 1, device=device)),
    ):
        try:
            call()
            told.append("")
        except OperandError as error:
            told.append(str(error))
    total = communicator.sum(torch.ones(1, device=device), "kit").wait()
    require("rank 0: rank 0; rank 1: rank 1" in told[0], f"differing texts: {told[0]!r}")
    require("do not divide" in told[1], f"rows that the ranks do not divide: {told[1]!r}")
    require(float(total) == communicator.size, "a sum after these errors is wrong")


def _products(ranks: RankSubject) -> Sequence[tuple[str, GemmDesc, int]]:
    """Return a product of each kind of scales that can be computed in parts, and its k."""
    subject, k = ranks.subject, 512
    products: dict[object, tuple[str, GemmDesc, int]] = {}
    assert ranks.moves is not None
    for label, desc in catalogue():
        if type(desc) is not GemmDesc or desc.accumulate or desc.out_dtype != torch.bfloat16:
            continue
        if subject.refuses(desc) is not None or subject.variant(desc, part=True) is None:
            continue
        casts = [QuantizeDesc(torch.float32, spec, None) for spec in (desc.a, desc.b) if spec]
        if any(subject.refuses(cast) is not None for cast in casts):
            continue
        block = None if desc.a is None else dataclasses.astuple(desc.a)[:2]
        products.setdefault(block, (label, desc, k))
    if not products:
        raise Unjudged("the backend computes no product in parts")
    return list(products.values())


LAWS: dict[str, RankLaw] = {
    law.__name__: law
    for law in (
        faults_are_told_to_every_rank,
        rows_gathered_beside_products,
        rows_that_arrive_one_rank_after_the_other,
        sums_scattered_beside_products,
        maxima_of_a_few_numbers,
        several_transfers_under_way,
        products_of_rows_that_arrive,
        products_that_are_summed_in_parts,
    )
}
"""The laws of what a backend moves, in the order in which every rank runs them."""
