"""Collectives over two processes and over threads, against what they are defined to return."""

from __future__ import annotations

import datetime
import time
from datetime import timedelta
from typing import Any
from unittest.mock import patch
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.distributed.fake_pg import FakeStore

from fp8core.collectives import Communicator, named, of_group, wait_patiently
from fp8core.collectives.comparison import DIGEST, differing_parts
from fp8core.errors import CollectiveError, OperandError
from tests.in_process import run_in_threads
from tests.ranks import device, run_ranks

FP8 = torch.float8_e4m3fn


def shard(rank: int) -> torch.Tensor:
    """Whole numbers, whose sums are exact in bfloat16."""
    return (torch.arange(24).reshape(4, 6) + 10 * rank).to(device(), torch.bfloat16)


def collectives(communicator: Communicator) -> dict[str, Any]:
    """One of each collective, and what was counted."""
    x = shard(communicator.rank)
    kept = x.clone()
    send = [[1, 3], [2, 2]][communicator.rank]
    receive = [[1, 2], [3, 2]][communicator.rank]
    first, second = communicator.gather(x, "x"), communicator.sum(x)  # two under way
    returned = {
        "sum": second.wait(),
        "gather": first.wait(),
        "gather again": first.wait(),
        "fp8": communicator.gather(x.to(FP8), "codes").wait().to(torch.float32),
        "scatter": communicator.scatter(x).wait(),
        "max": communicator.max(x.float()).wait(),
        "exchange": communicator.exchange(x, send, receive).wait(),
        "turned": communicator.gather(x.t()).wait(),
        "empty": communicator.gather(x[:0]).wait(),
        "counts": {"/".join(key): list(count) for key, count in communicator.traffic},
    }
    returned["written"] = not torch.equal(x, kept)
    returned["at once"] = [
        communicator.gather(x, "at once", at_once=True).wait(),
        communicator.scatter(x, "at once", at_once=True).wait(),
        communicator.sum(x, "at once", at_once=True).wait(),
        communicator.max(x.float(), "at once", at_once=True).wait(),
    ]
    into = x.float()
    returned["in place"] = [into, communicator.max(into, in_place=True).wait() is into]
    communicator.agree("the same", "their layers")
    with pytest.raises(OperandError) as caught:
        communicator.agree(f"recipe {communicator.rank}", "their recipes")
    returned["differing"] = str(caught.value)
    with pytest.raises(OperandError, match="they do not divide its 3 rows"):
        communicator.scatter(x[:3])
    with pytest.raises(OperandError, match=r"adding up to 4 rows"):
        communicator.exchange(x, [1, 1], receive)
    return returned


def over_gloo(rank: int) -> dict[str, Any]:
    communicator = of_group(None)
    returned = collectives(communicator)
    same = named(communicator.group_name) is communicator is of_group(dist.group.WORLD)
    returned["same object"] = same
    alone = [dist.new_group([one]) for one in range(2)]
    with pytest.raises(OperandError) as caught:
        of_group(alone[1 - rank])
    returned["not a member"] = str(caught.value)
    x = shard(rank)
    one = of_group(alone[rank])
    returned["group of one"] = one.gather(x).wait() is x and one.traffic.total.calls == 0
    with pytest.raises(OperandError, match="there is no process group 'gone'"):
        named("gone")
    graph = make_fx(_in_graph, tracing_mode="fake")(x)
    returned["in a graph"] = graph(x)
    returned["nodes"] = [str(node.target) for node in graph.graph.nodes]
    short = dist.new_group(timeout=datetime.timedelta(seconds=1))
    returned["missing"] = ""
    if rank == 0 and x.is_cpu:  # NCCL has its watchdog end the process
        with pytest.raises(CollectiveError) as missing:
            of_group(short).gather(x, "input").wait()
        returned["missing"] = str(missing.value)
    dist.barrier()
    return returned


def _in_graph(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    communicator = of_group(None)
    summed = communicator.sum(communicator.gather(x).wait()).wait()
    return (
        summed,
        communicator.scatter(summed).wait(),
        communicator.exchange(x, [2, 2], [2, 2]).wait(),
    )


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(over_gloo, tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module", params=["processes", "threads"])
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    if request.param == "threads":
        return run_in_threads(collectives, 2)
    results: list[dict[str, Any]] = request.getfixturevalue("processes")
    return results


def both() -> torch.Tensor:
    return torch.cat([shard(0), shard(1)])


def test_gather_concatenates_the_shards(ranks: list[dict[str, Any]]) -> None:
    for one in ranks:
        assert torch.equal(one["gather"], both())
        assert torch.equal(one["gather again"], both())


def test_gather_of_a_transposed_view_reads_its_values(ranks: list[dict[str, Any]]) -> None:
    turned = torch.cat([shard(0).t(), shard(1).t()])
    assert all(torch.equal(one["turned"], turned) for one in ranks)


def test_fp8_travels_and_keeps_its_dtype(ranks: list[dict[str, Any]]) -> None:
    assert all(torch.equal(one["fp8"], both().to(FP8).float()) for one in ranks)


def test_empty_shards_give_an_empty_whole(ranks: list[dict[str, Any]]) -> None:
    assert all(one["empty"].shape == (0, 6) for one in ranks)


def test_sum_and_max_are_over_all_ranks(ranks: list[dict[str, Any]]) -> None:
    for one in ranks:
        assert torch.equal(one["sum"], shard(0) + shard(1))
        assert torch.equal(one["max"], shard(1).float())


def test_results_that_are_waited_for_at_once_are_the_same(ranks: list[dict[str, Any]]) -> None:
    for one in ranks:
        for name, result in zip(("gather", "scatter", "sum", "max"), one["at once"], strict=True):
            assert torch.equal(result, one[name])


def test_inputs_are_not_written(ranks: list[dict[str, Any]]) -> None:
    assert not any(one["written"] for one in ranks)


def test_a_maximum_into_a_tensor_is_that_tensor(ranks: list[dict[str, Any]]) -> None:
    for one in ranks:
        total, is_same = one["in place"]
        assert is_same
        assert torch.equal(total, one["max"])


def test_scatter_gives_each_rank_its_rows_of_the_sum(ranks: list[dict[str, Any]]) -> None:
    total = shard(0) + shard(1)
    for rank, one in enumerate(ranks):
        assert torch.equal(one["scatter"], total.chunk(2)[rank])


def test_exchange_sends_rows_to_each_rank(ranks: list[dict[str, Any]]) -> None:
    first, second = shard(0), shard(1)
    assert torch.equal(ranks[0]["exchange"], torch.cat([first[:1], second[:2]]))
    assert torch.equal(ranks[1]["exchange"], torch.cat([first[1:], second[2:]]))


def test_calls_and_bytes_are_counted(ranks: list[dict[str, Any]]) -> None:
    size = 24 * 2  # bytes of a shard in bfloat16
    for rank, one in enumerate(ranks):
        assert one["counts"] == {
            "gather/x": [1, size],
            "gather/": [1, size],
            "gather/codes": [1, 24],
            "sum/": [1, size],
            "scatter/": [1, size // 2],
            "max/": [1, 2 * size],
            "exchange/": [1, [3, 2][rank] * 12],
        }


def test_differing_texts_are_an_error_on_every_rank(ranks: list[dict[str, Any]]) -> None:
    for one in ranks:
        assert "differ in their recipes. rank 0: recipe 0; rank 1: recipe 1." in one["differing"]


def test_texts_of_many_parts_are_shown_by_what_differs() -> None:
    texts = [
        f"recipe: input {a}; weight e4m3; {DIGEST}{a}. dtype: bfloat16" for a in ("e4m3", "e5m2")
    ]
    assert differing_parts(texts) == ["recipe: input e4m3", "recipe: input e5m2"]
    assert (
        differing_parts([*texts, texts[0].replace("; weight e4m3", "")])[2] == "recipe: input e4m3"
    )
    assert differing_parts(["a. b", "a"]) == ["b", "nothing of that"]
    hidden = [f"a; {DIGEST}{number}" for number in (1, 2)]
    assert differing_parts(hidden) == [f"{DIGEST}1", f"{DIGEST}2"]


def test_a_group_has_one_communicator(processes: list[dict[str, Any]]) -> None:
    assert all(one["same object"] for one in processes)


def test_a_group_of_one_moves_nothing(processes: list[dict[str, Any]]) -> None:
    assert all(one["group of one"] for one in processes)


def test_a_group_without_this_rank_is_refused(processes: list[dict[str, Any]]) -> None:
    for rank, one in enumerate(processes):
        assert f"rank {rank} is not in the given process group" in one["not a member"]


def test_a_graph_holds_functional_collectives(processes: list[dict[str, Any]]) -> None:
    whole = both() + both()
    for rank, one in enumerate(processes):
        summed, scattered, exchanged = one["in a graph"]
        assert torch.equal(summed, whole)
        assert torch.equal(scattered, (2 * whole).chunk(2)[rank])
        assert torch.equal(
            exchanged, torch.cat([part.chunk(2)[rank] for part in (shard(0), shard(1))])
        )
        assert "_c10d_functional.all_gather_into_tensor.default" in one["nodes"]


def test_a_missing_rank_is_named_after_the_timeout(processes: list[dict[str, Any]]) -> None:
    said = processes[0]["missing"]
    if device().type == "cuda":
        pytest.skip("NCCL has its watchdog end the process")
    assert "gather of torch.bfloat16 [4, 6] (input) by rank 0 of the 2 ranks of group" in said
    assert "before the timeout of the group" in said


def test_a_rank_that_raises_ends_the_others() -> None:
    def work(communicator: Communicator) -> None:
        if communicator.rank:
            raise ValueError("this rank fails")
        communicator.sum(torch.ones(2, device=device())).wait()

    with pytest.raises(ValueError, match="this rank fails"):
        run_in_threads(work, 2)


def test_threads_that_call_different_collectives_are_told() -> None:
    def work(communicator: Communicator) -> None:
        x = torch.ones(2, device=device())
        (communicator.sum(x) if communicator.rank else communicator.gather(x)).wait()

    with pytest.raises(CollectiveError, match="the ranks call different ones"):
        run_in_threads(work, 2)


def test_a_communicator_leaves_its_group_to_be_destroyed() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = ref(dist.group.WORLD)
    communicator: Any = of_group()
    dist.destroy_process_group()
    assert group() is None
    with pytest.raises(OperandError, match=r"a collective of a layer: .* was destroyed"):
        assert communicator.group


def test_without_torch_distributed_a_group_is_refused() -> None:
    with pytest.raises(OperandError, match="init_process_group first"):
        of_group(None)


class Calls:
    """A process group that notes how it is called, and has nothing to wait for."""

    def __init__(self) -> None:
        self.beside: list[bool] = []

    def _allgather_base(self, result: torch.Tensor, part: torch.Tensor, options: Any) -> None:
        self.beside.append(options.asyncOp)

    def _reduce_scatter_base(self, result: torch.Tensor, whole: torch.Tensor, options: Any) -> None:
        self.beside.append(options.asyncOp)

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> None:
        self.beside.append(options.asyncOp)


def test_a_collective_that_is_waited_for_at_once_takes_the_current_stream() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        communicator = of_group()
        calls = Calls()
        x = shard(0)
        with patch.object(type(communicator), "group", calls):
            for at_once in (True, False):
                communicator.gather(x, at_once=at_once).wait()
                communicator.scatter(x, at_once=at_once).wait()
                communicator.sum(x, at_once=at_once).wait()
                communicator.max(x, at_once=at_once).wait()
        assert calls.beside == [False] * 4 + [True] * 4
    finally:
        dist.destroy_process_group()


class Work:
    """A collective that ends after ``waits`` waits, by ``error`` if there is one."""

    def __init__(self, waits: int, error: str = "") -> None:
        self.waits, self.error = waits, error

    def is_completed(self) -> bool:
        return self.waits <= 0

    def wait(self, timeout: timedelta | None = None) -> None:
        self.waits -= 1
        if self.waits >= 0:
            assert timeout is not None
            time.sleep(timeout.total_seconds())
            raise RuntimeError("the time of this wait is over")
        if self.error:
            raise RuntimeError(self.error)


@pytest.fixture
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fp8core.collectives._PATIENCE", timedelta(seconds=0.01))


@pytest.mark.usefixtures("short_patience")
def test_it_looks_each_time_that_the_collective_has_not_ended() -> None:
    looks: list[int] = []
    wait_patiently(Work(3), lambda: looks.append(1))
    assert len(looks) == 2  # it has ended when the third wait is over


@pytest.mark.usefixtures("short_patience")
def test_what_a_look_raises_ends_the_wait() -> None:
    def look() -> None:
        raise ValueError("another rank compares")

    with pytest.raises(ValueError, match="another rank compares"):
        wait_patiently(Work(2), look)


@pytest.mark.usefixtures("short_patience")
def test_a_collective_that_failed_raises() -> None:
    for waits in [0, 2]:
        work = Work(waits, "connection closed")
        with pytest.raises(RuntimeError, match="connection closed"):
            wait_patiently(work, lambda: None)
