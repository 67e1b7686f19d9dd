"""Laws of the rows that a backend moves between ranks, held to the collectives of their group; all
ranks run them at the same time.

A law exchanges everything first and compares at its end, so that the ranks stay in step where one
of them finds a fault. Numbers are such that each rank can compute those of the others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

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

_COLUMNS = 256
_MOST_BYTES = 1 << 26
_ROUNDS = 3
_NUMBERS = 31  # sums of so few integers up to this are exact in every dtype


@dataclass(frozen=True, slots=True)
class RankSubject:
    """A backend on one rank: ``transfers`` moves rows beside its products, None: nothing does."""

    subject: Subject
    communicator: Communicator
    transfers: Transfers | None

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


def subject_of(subject: Subject, communicator: Communicator) -> RankSubject:
    """Return the backend of ``subject`` between the ranks of ``communicator``."""
    registry = plugins.load()
    spec = registry.spec(subject.name, "the conformance kit")
    return RankSubject(
        subject, communicator, registry.transfers(spec, communicator, subject.device)
    )


def _values(
    ranks: RankSubject, rank: int, rows: int, dtype: torch.dtype, round_: int = 0
) -> torch.Tensor:
    """Return the whole numbers of a rank, on its device."""
    numbers = torch.arange(rows * _COLUMNS).reshape(rows, _COLUMNS) * 7 + 11 * rank + 3 * round_
    return ranks.subject.here((numbers % _NUMBERS).to(dtype))  # type: ignore[no-any-return]  # a tensor


def _of_all(ranks: RankSubject, rows: int, dtype: torch.dtype, round_: int = 0) -> torch.Tensor:
    size = ranks.communicator.size
    return torch.cat([_values(ranks, rank, rows, dtype, round_) for rank in range(size)])


def rows_gathered_beside_products(ranks: RankSubject) -> None:
    """Rows of every dtype, of one size and the next ones, are those that the group gathers."""
    communicator = ranks.communicator
    pairs = []
    for dtype in (torch.uint8, torch.bfloat16, torch.float32):
        least = ranks.rows(_COLUMNS * dtype.itemsize)
        for rows in (least, least + 1, 2 * least + 3):
            x = _values(ranks, communicator.rank, rows, dtype)
            started = communicator.gather(x, "kit", ranks.moves)
            pairs.append((f"{dtype} [{rows}, {_COLUMNS}]", started.wait(), (rows, dtype)))
    for name, gathered, arguments in pairs:
        same_bits(name, gathered, _of_all(ranks, *arguments))


def rows_that_arrive_one_rank_after_the_other(ranks: RankSubject) -> None:
    """The rows of a rank are complete when they are said to be, before those of all are."""
    communicator = ranks.communicator
    size, rank = communicator.size, communicator.rank
    rows = ranks.rows(2 * _COLUMNS)
    x = _values(ranks, rank, rows, torch.bfloat16)
    started = communicator.gather(x, "kit", ranks.moves, in_parts=True)
    order = [(rank + step) % size for step in range(1, size)]
    arrived = {sender: started.rows_of(sender, size).clone() for sender in order}
    whole = started.wait()
    for sender, part in arrived.items():
        same_bits(f"rows of rank {sender}", part, _values(ranks, sender, rows, torch.bfloat16))
    same_bits("all rows", whole, _of_all(ranks, rows, torch.bfloat16))


def maxima_of_a_few_numbers(ranks: RankSubject) -> None:
    """Maxima over ranks are exact, for one number and for thousands, again and again without a
    wait, and leave what they are taken of as it was."""
    communicator, results = ranks.communicator, []
    rank, size = communicator.rank, communicator.size
    maximum = ranks.moves.maximum

    def numbers(rank: int, count: int, round_: int) -> torch.Tensor:
        x = torch.arange(count) * 7 + 11 * rank + 3 * round_
        return ranks.subject.here((x % _NUMBERS).float() / 8)  # type: ignore[no-any-return]  # a tensor

    for round_ in range(_ROUNDS):
        for count in (1, 2, 4099):
            x = numbers(rank, count, round_)
            results.append((count, round_, x, communicator.max(x, "kit", maximum).wait()))
    for count, round_, x, largest in results:
        same_bits(f"{count} numbers given", x, numbers(rank, count, round_))
        addends = torch.stack([numbers(peer, count, round_) for peer in range(size)])
        same_bits(f"the maxima of {count}", largest, addends.amax(0))


def several_transfers_under_way(ranks: RankSubject) -> None:
    """Gathers and sums that are started before others are waited for, again and again, mix up
    nothing: memory is written anew only when nobody reads it any more."""
    communicator, moves = ranks.communicator, ranks.moves
    size, rank = communicator.size, communicator.rank
    rows, dtype = ranks.rows(2 * _COLUMNS), torch.bfloat16
    results = []
    for round_ in range(_ROUNDS):
        x = _values(ranks, rank, rows, dtype, round_)
        whole = _of_all(ranks, rows, dtype, round_ + rank)
        first = communicator.gather(x, "kit", moves)
        total = communicator.scatter(whole, "kit", moves)
        second = communicator.gather(x + 1, "kit", moves)
        results.append((second.wait().clone(), total.wait().clone(), first.wait().clone()))
    for round_, (second_rows, part, first_rows) in enumerate(results):
        expected = _of_all(ranks, rows, dtype, round_)
        same_bits(f"round {round_}, the first gather", first_rows, expected)
        same_bits(f"round {round_}, the second gather", second_rows, expected + 1)
        addends = [_values(ranks, rank, rows, dtype, round_ + peer) for peer in range(size)]
        same_bits(f"round {round_}, the sum", part, torch.stack(addends).sum(0).to(dtype))


def sums_scattered_beside_products(ranks: RankSubject) -> None:
    """Each rank gets its rows of the sum over ranks, of every dtype of activations."""
    communicator, results = ranks.communicator, []
    rank, size = communicator.rank, communicator.size
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        rows = ranks.rows(_COLUMNS * dtype.itemsize) + 1
        x = _of_all(ranks, rows, dtype, round_=rank)
        results.append((dtype, rows, communicator.scatter(x, "kit", ranks.moves).wait()))
    for dtype, rows, part in results:
        addends = [_values(ranks, rank, rows, dtype, round_=peer) for peer in range(size)]
        same_bits(f"{dtype}", part, torch.stack(addends).float().sum(0).to(dtype))


def products_of_rows_that_arrive(ranks: RankSubject) -> None:
    """A product of each rank's rows as they arrive has the bits of gather and product, for one
    product of each kind of scales."""
    communicator = ranks.communicator
    size, rank = communicator.size, communicator.rank
    pairs = []
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
            pairs.append((name, out, whole))
    for name, out, whole in pairs:
        same_bits(name, out, whole)


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
    communicator, device = ranks.communicator, ranks.subject.device
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
    """Return a product of each kind of scales that can be computed in parts, and its k.

    Raises:
        Unjudged: there is none, or nothing moves rows.
    """
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


LAWS: dict[str, Callable[[RankSubject], None]] = {
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
