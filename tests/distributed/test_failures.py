"""``watch_ranks``: which rank is named, and how soon; threads stand for processes."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from fp8core import OperandError
from fp8core.collectives import of_group
from fp8core.distributed import failures, watch_ranks
from tests.in_process import communicators

PERIOD_S, TIMEOUT_S, SIZE = 0.02, 3.0, 4
LATE_S = 60


class Rank:
    """What a watch needs of a communicator, and of a process group."""

    group_name, size = "all", SIZE

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.compared: list[tuple[int, str]] = []

    def waiting(self, store: Any) -> list[tuple[int, str]]:
        return self.compared


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Why processes would have been ended."""
    reasons: list[str] = []
    monkeypatch.setattr(failures, "_end", reasons.append)
    return reasons


@pytest.fixture
def ranks(ended: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    store, group = dist.HashStore(), Rank(0)
    monkeypatch.setattr(failures, "_PERIOD_S", PERIOD_S)
    monkeypatch.setattr(failures, "store_of", lambda group: store)
    monkeypatch.setattr(failures, "timeout_of", lambda group: timedelta(seconds=TIMEOUT_S))
    stand_in: Any = group
    watches = [failures._Watch(Rank(rank), stand_in) for rank in range(SIZE)]
    yield watches
    for watch in watches:
        if watch.is_alive():
            watch.end()


def soon(condition: Callable[[], bool]) -> bool:
    """Whether it comes true, on a machine that may be busy."""
    end = time.monotonic() + LATE_S
    while not condition() and time.monotonic() < end:
        time.sleep(PERIOD_S)
    return condition()


def stop(watch: Any) -> None:
    """Have a rank say nothing any more, as if it were killed."""
    watch._stopped.set()
    watch.join()


def test_ranks_that_fall_silent_are_named_by_all_others(
    ranks: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    for watch in ranks:
        watch.start()
    time.sleep(5 * PERIOD_S)
    assert not caplog.text
    stop(ranks[1])
    stop(ranks[2])  # the rank that watches rank 1
    for silent in (1, 2):
        line = f"rank {silent} of the 4 ranks of group 'all' has said nothing for "
        assert soon(lambda line=line: caplog.text.count(line) == 2), caplog.text


def test_a_rank_that_compares_while_another_is_in_a_collective_is_named(
    ranks: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    ranks[0]._communicator.compared = [(2, "a call of MLP")]
    ranks[0].start()
    said = "rank 2 of the 4 ranks of group 'all' compares a call of MLP, and this rank is"
    assert soon(lambda: said in caplog.text)
    time.sleep(4 * PERIOD_S)
    assert len(caplog.messages) == 1


def test_of_errors_that_follow_the_first_is_named(
    ranks: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    for rank in (1, 2):
        ranks[rank].fail(RuntimeError("closed by peer"), follows=True)
    ranks[0].start()
    said = (
        "rank 1 of the 4 ranks of group 'all' failed in a collective: RuntimeError: closed by peer"
    )
    assert soon(lambda: said in caplog.messages)
    time.sleep(4 * PERIOD_S)
    assert caplog.messages == [said]
    assert not ranks[0]._explained.is_set()  # the error from which they follow may come


def test_an_error_is_named_by_all_others_and_those_that_follow_are_not(
    ranks: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    for watch in ranks:
        watch.start()
    ranks[1].fail(ValueError("no more data\nmore"), follows=False)
    ranks[3].fail(RuntimeError("closed by peer\nmore"), follows=True)
    said = "rank 1 of the 4 ranks of group 'all' failed: ValueError: no more data"
    assert soon(lambda: caplog.messages.count(said) == 3)
    assert {*caplog.messages} == {said}
    assert ranks[3]._explained.is_set()  # so that it is not waited for


def test_a_process_that_does_not_end_by_itself_is_ended(ranks: list[Any], ended: list[str]) -> None:
    ranks[0].start()
    ranks[1].fail(ValueError("no more data"), follows=False)
    begin = time.monotonic()
    assert soon(lambda: bool(ended))
    assert time.monotonic() - begin > TIMEOUT_S
    assert ended[0] == "group 'all' has lost a rank, and this one did not end"


def test_a_rank_that_was_silent_and_is_back_ends_nothing(
    ranks: list[Any], ended: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    for watch in ranks[1:]:
        watch.start()
    assert soon(lambda: "rank 0 of the 4 ranks of group 'all' has said nothing" in caplog.text)
    ranks[0].start()
    assert soon(lambda: "the silent ranks of group 'all' are back" in caplog.text)
    time.sleep(4 * PERIOD_S)
    assert not ended


def test_a_rank_that_was_silent_and_is_so_again_is_named_again(
    ranks: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    for watch in ranks[1:]:
        watch.start()
    line = "rank 0 of the 4 ranks of group 'all' has said nothing for "
    assert soon(lambda: caplog.text.count(line) == 3)
    ranks[0].start()
    assert soon(lambda: caplog.text.count("the silent ranks of group 'all' are back") == 3)
    time.sleep(4 * PERIOD_S)
    stop(ranks[0])
    assert soon(lambda: caplog.text.count(line) == 6), caplog.text


def test_a_rank_whose_group_is_destroyed_is_not_silent(
    ranks: list[Any], ended: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    for watch in ranks:
        watch.start()
    ranks[2]._group = lambda: None
    ranks[2].join(LATE_S)
    time.sleep(TIMEOUT_S)
    assert not caplog.text
    assert not ended


def test_an_error_without_a_text_is_told(
    ranks: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    class UnprintableError(Exception):
        def __str__(self) -> str:
            raise ValueError

    ranks[0].start()
    ranks[1].fail(UnprintableError(), follows=False)
    assert soon(lambda: "group 'all' failed: UnprintableError: <" in caplog.text)


def test_a_rank_that_failed_did_not_end_without_an_error(
    ranks: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    for watch in ranks:
        watch.start()
    ranks[1].fail(RuntimeError("closed by peer"), follows=True)
    ranks[1].end()
    ranks[2].end()
    ranks[0].explain()
    assert "rank 2 of the 4 ranks of group 'all' ended, without an error" in caplog.messages
    assert "rank 1 of the 4 ranks of group 'all' ended, without an error" not in caplog.messages


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a process that can fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_child_of_a_rank_tells_nothing(
    ranks: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    for watch in ranks:
        watch.start()
    child = os.fork()
    if not child:
        os._exit(len(failures._watches_of_process()))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert {*failures._watches_of_process()} == {*ranks}


def test_an_error_is_told_once_though_hooks_are_nested(
    ranks: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    for watch in ranks[:2]:
        watch.start()
    hook = failures._Hook(failures._Hook(lambda *arguments: None))
    hook(ValueError, ValueError("no more data"), None)
    said = "failed: ValueError: no more data"
    assert soon(lambda: caplog.text.count(said) == 2)  # each of the two by the other
    time.sleep(4 * PERIOD_S)
    assert caplog.text.count(said) == 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a process that can fork")
def test_a_process_is_ended_with_a_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    child = os.fork()
    if not child:
        sys.stderr = sys.__stderr__
        failures._end("over")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    assert "test_a_process_is_ended_with_a_traceback" in capfd.readouterr().err


def test_a_rank_that_ended_without_an_error_is_named_where_another_fails(
    ranks: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    for watch in ranks:
        watch.start()
    ranks[2].end()
    time.sleep(TIMEOUT_S / 2)
    assert not caplog.text  # it is silent by right
    ranks[0].explain()
    assert caplog.messages == ["rank 2 of the 4 ranks of group 'all' ended, without an error"]


def test_a_store_that_is_gone_is_named(ranks: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    class Gone:
        def set(self, key: str, value: str) -> None:
            raise dist.DistNetworkError("connection reset")

        def add(self, key: str, amount: int) -> None:
            raise dist.DistNetworkError("connection reset")

    ranks[0]._store = Gone()
    ranks[0].start()
    assert soon(lambda: "its store does not answer" in caplog.text)
    ranks[0].join()
    # A second watch would be alone with its number, and call the other ranks silent.
    assert any(watch.is_of(ranks[0]._group()) for watch in failures._watches)
    ranks[0].fail(ValueError(""), follows=False)  # nothing else is raised in its stead
    ranks[0].end()


def test_uncaught_errors_are_told_and_those_of_collectives_wait(
    ranks: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[object] = []

    class Told:
        def is_alive(self) -> bool:
            return True

        def fail(self, error: BaseException, *, follows: bool) -> None:
            steps.append((str(error), follows))

        def explain(self) -> None:
            steps.append("explained")

    monkeypatch.setattr(failures, "_watches", {Told()})
    hook = failures._Hook(lambda *arguments: steps.append("printed"))

    def raised(call: Callable[[], object]) -> None:
        try:
            call()
        except Exception:  # noqa: BLE001  as the interpreter does
            kind, error, traceback = sys.exc_info()
            assert kind is not None
            assert error is not None
            hook(kind, error, traceback)

    raised(lambda: [][0])
    assert steps == [("list index out of range", False), "printed"]
    steps.clear()
    raised(lambda: of_group(True))  # type: ignore[arg-type]
    assert [*map(type, steps)] == [tuple, str]
    assert not steps[0][1]  # type: ignore[index]
    steps.clear()
    raised(lambda: dist.get_rank(object()))  # type: ignore[arg-type]
    assert [*map(type, steps)] == [tuple, str, str]
    assert steps[0][1]  # type: ignore[index]
    assert steps[1:] == ["printed", "explained"]


def test_a_group_without_others_is_not_watched() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    plain = sys.excepthook
    watch_ranks()
    assert sys.excepthook is plain
    dist.destroy_process_group()


def test_a_group_without_a_store_is_refused() -> None:
    with pytest.raises(OperandError, match="init_process_group first"):
        watch_ranks()
    threads: Any = communicators(2)[0]
    with pytest.raises(OperandError, match=r"watch_ranks: group '.*' is none of torch"):
        watch_ranks(threads)
