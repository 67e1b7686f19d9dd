"""Which algorithm runs: timed once, remembered, and the first one where nothing may be timed; what
was remembered and is not sound is said and not used."""

from __future__ import annotations

import errno
import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fp8core_backends.cuda import autotune

ADDRESSES = (16, 32, 48, 64, 0, 80)
CPU = torch.device("cpu")


class FakeGemm:
    """Algorithms with known times; the bytes of algorithm ``i`` are ``ai``."""

    library_version = 130100
    is_of_few_rows = False

    def __init__(self, times: list[float], foreign: tuple[bytes, ...] = ()) -> None:
        self.times = times
        self.timed = 0
        self._names = [f"a{index}".encode() for index in range(len(times))]
        self._foreign = foreign

    @property
    def num_candidates(self) -> int:
        return len(self._names)

    def workspace_bytes(self, index: int) -> int:
        return 16 * index

    def algorithm(self, index: int) -> bytes:
        return self._names[index]

    def add_candidate(self, name: bytes) -> int:
        if name not in self._foreign:
            raise RuntimeError("not supported")
        self._names.append(name)
        return len(self._names) - 1

    def milliseconds(
        self, index: int, arguments: tuple[int, ...], repeats: int, stream: int
    ) -> float:
        assert arguments[: len(ADDRESSES)] == ADDRESSES
        self.timed += 1
        return self.times[index]


@pytest.fixture(autouse=True)
def without_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    class Stream:
        cuda_stream = 0

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A Chip/1")
    monkeypatch.setattr(autotune, "_tables", {})
    monkeypatch.setenv("FP8CORE_CACHE_DIR", str(tmp_path))
    return tmp_path / "A-Chip-1-cublaslt-130100.json"


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a new process does."""
    monkeypatch.setattr(autotune, "_tables", {})


def timed_anew(caplog: pytest.LogCaptureFixture) -> str:
    """Choose the second of two algorithms by their times; return what is said."""
    gemm = FakeGemm([2.0, 1.0])
    with caplog.at_level(logging.WARNING, "fp8core.cuda"):
        assert autotune.choose(gemm, "p", ADDRESSES, CPU) == 1
    assert gemm.timed > 0
    return caplog.text


def test_the_fastest_runs_and_is_remembered(
    without_a_device: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gemm = FakeGemm([3.0, 2.0, 1.0, 4.0])
    assert autotune.choose(gemm, "p", ADDRESSES, CPU) == 2
    assert json.loads(without_a_device.read_text()) == {"p": b"a2".hex()}
    forget(monkeypatch)
    again = FakeGemm([3.0, 2.0, 1.0, 4.0])
    assert autotune.choose(again, "p", ADDRESSES, CPU) == 2
    assert again.timed == 0
    assert [file.name for file in without_a_device.parent.iterdir()] == [without_a_device.name]


def test_few_rows_are_timed_with_a_workspace_that_fills_the_cache() -> None:
    sizes = []

    class OfFewRows(FakeGemm):
        is_of_few_rows = True

        def milliseconds(
            self, index: int, arguments: tuple[int, ...], repeats: int, stream: int
        ) -> float:
            sizes.append(arguments[-1])
            return super().milliseconds(index, arguments, repeats, stream)

    assert autotune.choose(OfFewRows([2.0, 1.0]), "p", ADDRESSES, CPU) == 1
    assert set(sizes) == {autotune._CACHE}


def test_another_problem_is_timed_and_added(without_a_device: Path) -> None:
    autotune.choose(FakeGemm([1.0]), "p", ADDRESSES, CPU)
    autotune.choose(FakeGemm([2.0, 1.0]), "q", ADDRESSES, CPU)
    assert json.loads(without_a_device.read_text()) == {"p": b"a0".hex(), "q": b"a1".hex()}


def test_one_that_is_hardly_faster_does_not_replace_the_first() -> None:
    assert autotune.choose(FakeGemm([1.0, 0.99]), "p", ADDRESSES, CPU) == 0


def test_a_remembered_algorithm_that_is_not_proposed_is_asked_for(without_a_device: Path) -> None:
    without_a_device.write_text(json.dumps({"p": b"other".hex()}))
    gemm = FakeGemm([1.0, 2.0], foreign=(b"other",))
    assert autotune.choose(gemm, "p", ADDRESSES, CPU) == 2
    assert gemm.timed == 0


@pytest.mark.parametrize("kept", [b"gone".hex(), "no hexadecimal"])
def test_a_remembered_algorithm_that_is_refused_is_timed_anew(
    kept: str, without_a_device: Path, caplog: pytest.LogCaptureFixture
) -> None:
    without_a_device.write_text(json.dumps({"p": kept}))
    assert "timed anew" in timed_anew(caplog)
    assert json.loads(without_a_device.read_text()) == {"p": b"a1".hex()}


def test_a_cache_that_cannot_be_written_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FP8CORE_CACHE_DIR", str(tmp_path / "file" / "below"))
    assert "cannot be written" in timed_anew(caplog)


def test_nothing_is_timed_when_it_is_switched_off(
    monkeypatch: pytest.MonkeyPatch, without_a_device: Path
) -> None:
    monkeypatch.setenv("FP8CORE_AUTOTUNE", "0")
    gemm = FakeGemm([2.0, 1.0])
    assert autotune.choose(gemm, "p", ADDRESSES, CPU) == 0
    assert gemm.timed == 0
    assert not without_a_device.exists()


def test_nothing_is_timed_where_results_must_not_depend_on_it() -> None:
    gemm = FakeGemm([2.0, 1.0])
    torch.use_deterministic_algorithms(True)
    try:
        assert autotune.choose(gemm, "p", ADDRESSES, CPU) == 0
    finally:
        torch.use_deterministic_algorithms(False)
    assert gemm.timed == 0


def test_nothing_is_timed_during_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    gemm = FakeGemm([2.0, 1.0])
    assert autotune.choose(gemm, "p", ADDRESSES, CPU) == 0
    assert gemm.timed == 0


@pytest.mark.parametrize("place", ["empty", "empty_like"])
def test_no_memory_to_time_in_leaves_the_first_and_remembers_nothing(
    place: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    without_a_device: Path,
) -> None:
    def refuse(*args: object, **kwargs: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("planted")

    total = torch.zeros(4)
    gemm = FakeGemm([2.0, 1.0])
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "fp8core.cuda"):
        patch.setattr(autotune.torch, place, refuse)
        assert autotune.choose(gemm, "p", ADDRESSES, CPU, total) == 0
    assert "no memory to time algorithms in" in caplog.text
    assert gemm.timed == 0
    assert not without_a_device.exists()
    assert autotune.choose(FakeGemm([2.0, 1.0]), "p", ADDRESSES, CPU) == 1


class Failing(FakeGemm):
    """Algorithms that cannot run have the time 0."""

    def milliseconds(
        self, index: int, arguments: tuple[int, ...], repeats: int, stream: int
    ) -> float:
        took = super().milliseconds(index, arguments, repeats, stream)
        if took == 0:
            raise RuntimeError("planted")
        return took


def test_an_algorithm_that_fails_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "fp8core.cuda"):
        assert autotune.choose(Failing([0.0, 3.0, 2.0]), "p", ADDRESSES, CPU) == 2
    assert "is left out: planted" in caplog.text


def test_nothing_is_remembered_where_every_algorithm_fails(without_a_device: Path) -> None:
    assert autotune.choose(Failing([0.0, 0.0]), "p", ADDRESSES, CPU) == 0
    assert not without_a_device.exists()


def test_a_cache_that_is_a_folder_is_said(
    without_a_device: Path, caplog: pytest.LogCaptureFixture
) -> None:
    without_a_device.mkdir()
    said = timed_anew(caplog)
    assert "is not used" in said
    assert "cannot be written" in said
    assert list(without_a_device.parent.iterdir()) == [without_a_device]


def test_what_another_process_wrote_meanwhile_is_kept(without_a_device: Path) -> None:
    autotune.choose(FakeGemm([1.0]), "p", ADDRESSES, CPU)
    known = json.loads(without_a_device.read_text())
    without_a_device.write_text(json.dumps({**known, "theirs": "00"}))
    autotune.choose(FakeGemm([1.0]), "q", ADDRESSES, CPU)
    assert set(json.loads(without_a_device.read_text())) == {"p", "q", "theirs"}


def test_the_caller_s_sum_is_not_timed_on() -> None:
    total = torch.zeros(4)

    class Watching(FakeGemm):
        def milliseconds(
            self, index: int, arguments: tuple[int, ...], repeats: int, stream: int
        ) -> float:
            assert arguments[5] != total.data_ptr()
            return self.times[index]

    addresses = (*ADDRESSES[:-1], total.data_ptr())
    assert autotune.choose(Watching([2.0, 1.0]), "p", addresses, CPU, total) == 1


def test_ragged_sizes_share_a_choice() -> None:
    assert {autotune.bucket(size) for size in range(8193, 10241)} == {10240}
    assert [autotune.bucket(1 << power) for power in range(20)] == [1 << p for p in range(20)]


# --- choices that are not sound, or not the user's own ---


@pytest.fixture
def choices(without_a_device: Path) -> Path:
    """The file of the algorithms that were timed, with one."""
    without_a_device.write_text(json.dumps({"p": b"a0".hex()}))
    without_a_device.chmod(0o644)
    return without_a_device


def test_sound_choices_are_used(choices: Path) -> None:
    gemm = FakeGemm([2.0, 1.0])
    assert autotune.choose(gemm, "p", ADDRESSES, CPU) == 0
    assert gemm.timed == 0


def test_choices_of_another_owner_are_not_used(
    choices: Path, give_away: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    give_away(choices)
    assert "belongs to" in timed_anew(caplog)


@pytest.mark.parametrize("which", ["file", "folder"])
def test_choices_that_others_can_write_are_not_used(
    choices: Path, which: str, caplog: pytest.LogCaptureFixture
) -> None:
    (choices if which == "file" else choices.parent).chmod(0o777)
    said = timed_anew(caplog)
    assert "mode 777" in said
    kept = choices.read_text()
    if which == "folder":  # nor is anything put there
        assert json.loads(kept) == {"p": b"a0".hex()}
        assert list(choices.parent.iterdir()) == [choices]


def test_choices_behind_a_link_are_not_used(
    choices: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = choices.rename(tmp_path / "precious")
    choices.symlink_to(target)
    assert "is a symbolic link" in timed_anew(caplog)
    assert json.loads(target.read_text()) == {"p": b"a0".hex()}


@pytest.mark.parametrize(
    "text",
    [
        *("{", "[]", '{"p": 3}', "\x00", '{"p": null}', "", "nul", "\ud800"),
        *("[" * 200_000, '{"a":' * 100_000, "9" * 10_000),
    ],
)
def test_hostile_choices_are_not_used(
    text: str, choices: Path, caplog: pytest.LogCaptureFixture
) -> None:
    choices.write_bytes(text.encode("utf-8", "surrogatepass"))
    assert "is not used" in timed_anew(caplog)
    assert json.loads(choices.read_text()) == {"p": b"a1".hex()}


def test_choices_too_large_to_be_ours_are_not_read(
    choices: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with choices.open("wb") as stream:
        stream.truncate(1 << 40)  # a hole
    assert "bytes" in timed_anew(caplog)


def test_a_pipe_in_the_place_of_choices_is_not_waited_for(
    choices: Path, caplog: pytest.LogCaptureFixture
) -> None:
    choices.unlink()
    os.mkfifo(choices)
    assert "is no regular file" in timed_anew(caplog)


def test_a_full_disk_leaves_no_temporary_file(
    choices: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    choices.unlink()
    monkeypatch.setattr(json, "dump", full)
    monkeypatch.setattr(json, "dumps", full)
    assert "cannot be written: [Errno 28]" in timed_anew(caplog)
    assert list(choices.parent.iterdir()) == []


def test_temporary_files_of_killed_processes_go(
    choices: Path, caplog: pytest.LogCaptureFixture
) -> None:
    choices.unlink()
    for age, name in ((7200, "old"), (0, "new")):
        file = choices.with_name(f".{choices.name}.{name}")
        file.touch()
        os.utime(file, (time.time() - age,) * 2)
    timed_anew(caplog)
    assert {file.name for file in choices.parent.iterdir()} == {
        choices.name,
        f".{choices.name}.new",
    }
