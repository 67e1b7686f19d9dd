"""The file of timed choices: what is not sound, or not the user's own, is said and not used."""

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
from tests.backends.cuda.test_autotune import ADDRESSES, CPU, FakeGemm
from tests.backends.cuda.test_cache import give_away

__all__ = ["give_away"]


@pytest.fixture
def choices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of the algorithms that were timed; there is no device."""

    class Stream:
        cuda_stream = 0

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "chip")
    monkeypatch.setattr(autotune, "_tables", {})
    monkeypatch.setenv("FP8CORE_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir(mode=0o755)
    file = tmp_path / "cache" / "chip-cublaslt-130100.json"
    file.write_text(json.dumps({"p": b"a0".hex()}))
    file.chmod(0o644)
    return file


def timed_anew(caplog: pytest.LogCaptureFixture) -> str:
    gemm = FakeGemm([2.0, 1.0])
    with caplog.at_level(logging.WARNING, "fp8core.cuda"):
        assert autotune.choose(gemm, "p", ADDRESSES, CPU) == 1
    assert gemm.timed > 0
    return caplog.text


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
    "text", ["[" * 200_000, '{"a":' * 100_000, "9" * 10_000, '{"p": null}', "", "nul", "\ud800"]
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
