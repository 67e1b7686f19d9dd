"""Copies between ranks: which rows go where, and when a buffer is written again; over stand-ins for
memory and streams that every rank shares, with a thread for each rank."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fp8core
from fp8core.backend_api import UnsupportedError
from fp8core.dispatch import plugins
from fp8core_backends.cuda import settings, transfers
from fp8core_backends.cuda.symmetric_memory import meet
from fp8core_backends.cuda.transfers import Transfers
from tests import overlapping_backend
from tests.backends.cuda.transfers_stand_in import (
    Host,
    Lane,
    LateLane,
    NotedLane,
    Operators,
    Slot,
    over,
)
from tests.in_process import run_in_threads
from tests.modules import test_parallel as parallel


def shard(rank: int, round_: int = 0) -> torch.Tensor:
    return (torch.arange(12).reshape(4, 3) + 100 * rank + 7 * round_).to(torch.bfloat16)


def gathered(moves: Transfers, x: torch.Tensor) -> torch.Tensor:
    result, arrive = moves.gather(x)
    for step in range(1, moves.size + 1):
        arrive(moves.after(step))
    return result.clone()


def summed(moves: Transfers, round_: int = 0) -> torch.Tensor:
    sending = moves.scatter((4, 3), torch.bfloat16)
    for rank in sending.order:
        sending.part(rank).copy_(addend(moves.rank, rank, round_))
        sending.send(rank)
    result, finish = sending.finish(addend(moves.rank, moves.rank, round_))
    finish()
    return result


def addend(rank: int, to: int, round_: int) -> torch.Tensor:
    return shard(rank, round_) % 32 + to


@pytest.mark.parametrize("lane", [Lane, LateLane])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_gather_has_the_rows_of_all_ranks(size: int, lane: Callable[[], Any]) -> None:
    whole = torch.cat([shard(rank) for rank in range(size)])
    for result in over(size, lambda moves, slots: gathered(moves, shard(moves.rank)), lane):
        assert torch.equal(result, whole)


@pytest.mark.parametrize("lane", [Lane, LateLane])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_each_rank_gets_its_rows_of_the_sum(size: int, lane: Callable[[], Any]) -> None:
    for rank, result in enumerate(over(size, lambda moves, slots: summed(moves), lane)):
        expected = sum(addend(other, rank, 0).float() for other in range(size))
        assert torch.equal(result.float(), expected)


def test_a_result_that_is_dropped_is_freed_with_what_waits_for_it() -> None:
    def work(moves: Transfers, slots: list[Slot]) -> list[str]:
        result, arrive = moves.gather(shard(moves.rank))
        freed: list[str] = []
        weakref.finalize(result, freed.append, "freed")
        vars(result)["arrive"] = arrive  # as a collective under way has it
        arrive(moves.after(1))
        del result, arrive
        return freed

    assert over(2, work) == [["freed"]] * 2


@pytest.mark.parametrize("size", [2, 3])
def test_maxima_are_those_of_all_ranks(size: int) -> None:
    def numbers(rank: int, round_: int) -> torch.Tensor:
        return torch.tensor([rank * 1.5, -rank - round_, float(round_)])

    def work(moves: Transfers, slots: list[Slot]) -> list[Any]:
        rounds = [moves.maximum(numbers(moves.rank, at)) for at in range(5)]
        return [len(slots), moves.maximum(torch.zeros(1 << 20)), *rounds]

    for count, of_many, *rounds in over(size, work):
        assert (count, of_many) == (2, None)
        for at, found in enumerate(rounds):
            expected = torch.stack([numbers(rank, at) for rank in range(size)]).amax(0)
            assert torch.equal(found, expected)


def test_maxima_on_meta_read_nothing() -> None:
    def work(moves: Transfers, slots: list[Slot]) -> list[Any]:
        few, many = (moves.maximum(torch.zeros(size, device="meta")) for size in (4, 1 << 20))
        return [few is not None and few.shape == (4,), many is None, len(slots)]

    assert over(2, work) == [[True, True, 0]] * 2


def test_the_smallest_buffer_that_fits_is_taken() -> None:
    def work(moves: Transfers, slots: list[Slot]) -> list[int]:
        large = torch.zeros(1, 4 << 20, dtype=torch.uint8)
        for _ in range(3):
            gathered(moves, large)
            moves.maximum(torch.zeros(1))
        return sorted(slot.num_bytes >> 20 for slot in slots)

    # One of each: a buffer is free behind the other's barrier.
    assert over(2, work) == [[2, 4]] * 2


def test_nothing_is_written_once_copies_may_start() -> None:
    """torch.empty fills memory on the current stream, with deterministic algorithms."""
    logs: list[list[str]] = [[], []]

    def work(moves: Transfers, slots: list[Slot]) -> None:
        moves.lane = NotedLane(logs[moves.rank])
        with Operators(logs[moves.rank]):
            gathered(moves, shard(moves.rank))
            summed(moves)

    over(2, work)
    for log in logs:
        followed = [log[at + 1] for at, event in enumerate(log) if event == "follow"]
        assert followed == ["start"] * 3  # of a gather, of a sum's part, and of the addition


@pytest.mark.parametrize("lane", [Lane, LateLane])
def test_a_buffer_serves_again_after_a_barrier_behind_its_copies(lane: Callable[[], Any]) -> None:
    def work(moves: Transfers, slots: list[Slot]) -> list[Any]:
        rounds = [(gathered(moves, shard(moves.rank, at)), summed(moves, at)) for at in range(6)]
        return [len(slots), *rounds]

    for rank, (count, *rounds) in enumerate(over(2, work, lane)):
        assert count == 2  # one alone would be written while another rank reads it
        for at, (whole, total) in enumerate(rounds):
            assert torch.equal(whole, torch.cat([shard(0, at), shard(1, at)]))
            assert torch.equal(total, addend(0, rank, at) + addend(1, rank, at))


@pytest.mark.parametrize("lane", [Lane, LateLane])
def test_transfers_under_way_have_buffers_of_their_own(lane: Callable[[], Any]) -> None:
    def work(moves: Transfers, slots: list[Slot]) -> list[torch.Tensor]:
        started = [moves.gather(shard(moves.rank, at)) for at in range(3)]
        assert len({id(slot) for slot in slots}) == 3
        for _, arrive in started:
            for step in (1, 2):
                arrive(moves.after(step))
        return [result for result, _ in started]

    for results in over(2, work, lane):
        for at, result in enumerate(results):
            assert torch.equal(result, torch.cat([shard(0, at), shard(1, at)]))


def test_a_graph_takes_buffers_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "FEWEST_BYTES", 1)

    def work(moves: Transfers, slots: list[Slot]) -> list[bool]:
        moves.lane.is_captured = True
        before = moves.takes(24)
        moves.lane.is_captured = False
        gathered(moves, shard(moves.rank))
        moves.lane.is_captured = True
        with pytest.raises(UnsupportedError, match="before the capture"):
            moves.gather(torch.zeros(1 << 23))
        return [before, moves.takes(24), moves.takes(1 << 30)]

    assert over(2, work) == [[False, True, False]] * 2


def test_each_stream_has_buffers_of_its_own() -> None:
    def work(moves: Transfers, slots: list[Slot]) -> list[int]:
        counts = []
        for stream in (1, 2, 1, 2, 1, 2):
            moves.lane.current = stream
            gathered(moves, shard(moves.rank))
            counts.append(len(slots))
        return counts

    # A stream's first buffer waits for another barrier on that stream, not on the other one.
    assert over(2, work) == [[1, 2, 3, 4, 4, 4]] * 2


def test_barriers_of_a_graph_free_no_buffer_of_a_stream() -> None:
    def work(moves: Transfers, slots: list[Slot]) -> int:
        for _ in range(2):
            gathered(moves, shard(moves.rank))
        moves.lane.is_captured = True
        gathered(moves, shard(moves.rank))  # into the first buffer, which is the graph's from now
        moves.lane.is_captured = False
        gathered(moves, shard(moves.rank))
        return len(slots)

    assert over(2, work) == [3, 3]


def test_buffers_of_sizes_that_vary_are_shared() -> None:
    def work(moves: Transfers, slots: list[Slot]) -> list[int]:
        for rows in range(1, 5):
            x = torch.zeros(rows, 1 << 20, dtype=torch.uint8)
            for _ in range(2):
                gathered(moves, x)
        return [slot.num_bytes >> 20 for slot in slots]

    assert over(2, work) == [[2, 2, 4, 4]] * 2


def test_another_group_of_the_same_name_has_transfers_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Group:
        pass

    groups = [Group(), Group()]
    ranks, device = SimpleNamespace(size=2, rank=0, group_name="0"), torch.device("cuda", 0)
    monkeypatch.setattr(transfers, "_is_single_host", lambda group: True)
    monkeypatch.setattr(transfers, "_reach_all_peers", lambda index, size: True)
    found = []
    for group in (groups[0], groups[0], groups[1]):
        monkeypatch.setattr(transfers, "_group_of", lambda ranks, group=group: group)
        found.append(transfers.transfers_between(ranks, device))
    assert found[0] is found[1] is not found[2]
    gone = weakref.ref(found[2])
    monkeypatch.undo()  # which refers to the group
    del found, groups, group
    assert gone() is None


def test_a_rank_that_does_not_come_is_named() -> None:
    store = dist.HashStore()
    for number in range(2):  # each meeting has keys of its own
        store.set(f"fp8core shares memory {number}, rank 0", "here")
    meet(store, 0, 1, 2, timedelta(seconds=1))
    with pytest.raises(RuntimeError, match=r"rank 2 did not come .* rank 1 within 0.05 s"):
        meet(store, 1, 1, 3, timedelta(seconds=0.05))


@pytest.mark.parametrize(("count", "reaches"), [(1, False), (2, True), (8, True)])
def test_devices_that_a_process_does_not_see_are_out_of_reach(
    monkeypatch: pytest.MonkeyPatch, count: int, reaches: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda index, other: True)
    assert transfers._reach_all_peers(0, 2) is reaches


def test_small_tensors_are_left_to_collectives() -> None:
    moves = Transfers(SimpleNamespace(size=2, rank=0, group_name="g"), Slot, Lane)
    assert [moves.takes(1 << 16), moves.takes(1 << 25)] == [False, True]


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A backend on the CPU that computes products in parts, and moves rows by these transfers."""
    hosts: dict[str, Host] = {}

    def moved(self: Any, ranks: Any, device: torch.device) -> Transfers:
        group = ranks.group_name.split(",")[0]  # of threads, each has a name of its own
        host = hosts.setdefault(group, Host(ranks.size))
        numbers = itertools.count()
        return Transfers(ranks, lambda size: Slot(host, ranks.rank, next(numbers), size), Lane)

    monkeypatch.setenv("FP8CORE_PLUGINS", "tests.overlapping_backend")
    monkeypatch.setattr(overlapping_backend.Backend, "transfers", cached_by_rank(moved))
    monkeypatch.setattr(transfers, "FEWEST_BYTES", 2048)
    plugins.reload()
    yield
    monkeypatch.undo()
    plugins.reload()


def cached_by_rank(make: Callable[..., Transfers]) -> Callable[..., Transfers]:
    """As the backend, which has one object for each group."""
    known: dict[Any, Transfers] = {}

    def transfers_of(self: Any, ranks: Any, device: torch.device) -> Transfers:
        key = ranks.group_name
        if key not in known:
            known[key] = make(self, ranks, device)
        return known[key]

    return transfers_of


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", ["current", "rowwise", "mxfp8"])
def test_parallel_layers_compute_the_same(plugin: None, name: str, size: int) -> None:
    results = {}
    for backend in (overlapping_backend.NAME, overlapping_backend.PLAIN_NAME):

        def work(communicator: Any, backend: str = backend) -> Any:
            with fp8core.use_backend(backend):
                return parallel.parallel_mlp(communicator, name, sequence=True)

        results[backend] = run_in_threads(work, size)
    for found, plain in zip(*results.values(), strict=True):
        assert found["traffic"] == plain["traffic"]
        for key in ("y", "dx", "fc1_weight", "fc2_weight"):
            if size == 2:
                assert torch.equal(found[key], plain[key]), key
            else:  # sums in another order, of three roundings to bfloat16 each
                error = (found[key].float() - plain[key].float()).norm() / plain[key].norm()
                assert error < 2 * (size - 1) * 2**-9, key


def test_ranks_that_are_threads_have_no_transfers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP8CORE_TRANSFERS", "1")
    assert settings.read().transfers is True
    ranks = SimpleNamespace(size=2, rank=0, group_name="threads 1, rank 0")
    assert transfers.transfers_between(ranks, torch.device("cuda", 0)) is None
