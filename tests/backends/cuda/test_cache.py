"""The cache folder: what others could have put there is refused by name and never loaded."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from fp8core import UnsupportedError
from fp8core_backends.cuda import build, cache, native, settings


@pytest.fixture
def built(compiler: Path, unloaded: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A library that was built earlier; loading a file fails the test."""

    def load(path: Path) -> None:
        raise AssertionError(f"{path} was loaded")

    monkeypatch.setattr(cache, "_is_private", lambda group: False)
    monkeypatch.setattr(native, "_import", load)
    return build.build(("90a",))


def refused(said: str, path: Path) -> None:
    """Loading and building refuse ``path`` by name; the doctor's line says so too."""
    for ask in (native.load, lambda: build.build(("90a",))):
        with pytest.raises(UnsupportedError, match=said) as caught:
            ask()
        assert str(path) in str(caught.value)
        assert "FP8CORE_CACHE_DIR" in str(caught.value)
    source = native._source.__wrapped__(("90a",), settings.read())
    assert source.why_not is None  # it is an error, not a reason to run other kernels
    assert "refused: " in source.description


# --- owners and modes ---


@pytest.mark.parametrize("mode", [0o777, 0o757, 0o775, 0o770])
@pytest.mark.parametrize("level", ["cache", "folder"])
def test_a_folder_that_others_can_write_to_is_refused(built: Path, level: str, mode: int) -> None:
    folder = built.parents[{"folder": 0, "cache": 1}[level]]
    folder.chmod(mode)
    refused(f"mode {mode:o}", folder)


@pytest.mark.parametrize("mode", [0o777, 0o664, 0o646])
def test_a_library_that_others_can_write_to_is_refused(built: Path, mode: int) -> None:
    built.chmod(mode)
    refused(f"mode {mode:o}", built)


@pytest.mark.parametrize("level", ["cache", "folder", "library"])
def test_another_owner_is_refused(
    built: Path, level: str, give_away: Callable[[Path], None]
) -> None:
    path = {"library": built, "folder": built.parent, "cache": built.parent.parent}[level]
    give_away(path)
    refused("belongs to", path if os.geteuid() == 0 else built.parent.parent)


@pytest.mark.parametrize(
    ("user", "owner", "is_trusted"),
    [(0, 0, True), (0, 1000, False), (1000, 1000, True), (1000, 0, True), (1000, 1001, False)],
)
def test_the_user_and_root_are_trusted_and_root_trusts_root_alone(
    user: int, owner: int, is_trusted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: user)
    info = os.stat_result((stat.S_IFREG | 0o644, 1, 1, 1, owner, owner, 1, 0, 0, 0))
    assert (cache._fault(info, is_folder=False) is None) == is_trusted


@pytest.mark.parametrize(
    ("group", "name", "members", "is_trusted"),
    [
        (1000, "ann", [], True),
        (1000, "ann", ["ann"], True),
        (1000, "ann", ["bob"], False),
        (1000, "staff", [], False),
        (0, "ann", [], False),
    ],
)
def test_a_group_of_the_user_alone_may_write(
    group: int, name: str, members: list[str], is_trusted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(cache.pwd, "getpwuid", lambda uid: SimpleNamespace(pw_name="ann"))
    found = SimpleNamespace(gr_name=name, gr_mem=members)
    monkeypatch.setattr(cache.grp, "getgrgid", lambda gid: found)
    info = os.stat_result((stat.S_IFREG | 0o664, 1, 1, 1, 1000, group, 1, 0, 0, 0))
    assert (cache._fault(info, is_folder=False) is None) == is_trusted


def test_what_is_refused_is_not_written_to(built: Path) -> None:
    shutil.rmtree(built.parent)
    folder = built.parent.parent
    folder.chmod(0o777)
    with pytest.raises(UnsupportedError, match="mode 777"):
        build.build(("90a",))
    assert list(folder.iterdir()) == []


def test_a_sticky_folder_is_used(built: Path) -> None:
    built.parent.parent.chmod(0o1777)  # as /tmp is: others cannot rename or delete
    assert build.build(("90a",)) == built


def test_a_parent_that_everybody_can_write_to_is_refused(
    compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = tmp_path / "open"
    parent.mkdir()
    parent.chmod(0o777)
    monkeypatch.setenv("FP8CORE_CACHE_DIR", str(parent / "cache"))
    with pytest.raises(UnsupportedError, match="mode 777") as caught:
        build.build(("90a",))
    assert str(parent) in str(caught.value)


@pytest.mark.parametrize("umask", [0, 0o002, 0o077])
def test_what_is_built_is_writable_by_its_owner_alone(compiler: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        path = build.build(("90a",))
    finally:
        os.umask(before)
    for made in (path, path.parent, path.parent.parent):
        assert made.stat().st_mode & 0o022 == 0, made
    assert build.find(("90a",)) == path


# --- links ---


def test_a_library_behind_a_link_is_refused(built: Path, tmp_path: Path) -> None:
    moved = built.rename(tmp_path / "elsewhere.so")
    built.symlink_to(moved)
    refused("is a symbolic link", built)


def test_a_folder_behind_a_link_is_refused(built: Path, tmp_path: Path) -> None:
    moved = built.parent.rename(tmp_path / "elsewhere")
    built.parent.symlink_to(moved)
    refused("is a symbolic link", built.parent)


def test_a_library_that_is_a_folder_is_refused(built: Path) -> None:
    built.unlink()
    built.mkdir()
    refused("is no regular file", built)


def test_the_cache_folder_may_be_a_link_of_its_user(built: Path, tmp_path: Path) -> None:
    folder = built.parent.parent
    moved = folder.rename(tmp_path / "scratch")
    folder.symlink_to(moved)
    assert build.find(("90a",)) == built


@pytest.mark.usefixtures("compiler")
def test_a_cache_folder_that_links_to_itself_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    monkeypatch.setenv("FP8CORE_CACHE_DIR", str(loop))
    with pytest.raises(UnsupportedError, match="FP8CORE_CACHE_DIR"):
        build.build(["90a"])
    assert "cannot be looked at" in str(cache.refusal(loop / "timed.json"))


def test_a_link_of_another_user_to_the_cache_is_refused(
    built: Path, tmp_path: Path, give_away: Callable[[Path], None]
) -> None:
    folder = built.parent.parent
    folder.symlink_to(folder.rename(tmp_path / "scratch"))
    give_away(folder)
    refused("belongs to", folder)


# --- the lock ---


def test_a_lock_that_is_a_link_is_refused_and_its_target_left_alone(
    built: Path, tmp_path: Path
) -> None:
    precious = tmp_path / "precious"
    precious.write_text("precious")
    lock = built.parent / "lock"
    lock.unlink(missing_ok=True)
    lock.symlink_to(precious)
    built.unlink()
    with pytest.raises(UnsupportedError, match="is a symbolic link") as caught:
        build.build(("90a",))
    assert str(lock) in str(caught.value)
    assert precious.read_text() == "precious"


def test_a_lock_that_is_a_folder_is_refused(built: Path) -> None:
    built.unlink()
    (built.parent / "lock").unlink(missing_ok=True)
    (built.parent / "lock").mkdir()
    with pytest.raises(UnsupportedError, match="is no regular file"):
        build.build(("90a",))


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.ENOSPC])
def test_a_lock_that_cannot_be_made_is_named(
    built: Path, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Lock:
        def __init__(self, path: Path) -> None:
            self.path = path

        def acquire(self, timeout: float = -1) -> None:
            raise OSError(code, os.strerror(code), str(self.path))

    built.unlink()
    monkeypatch.setattr(cache, "FileLock", Lock)
    with pytest.raises(UnsupportedError, match=os.strerror(code)) as caught:
        build.build(("90a",))
    assert "FP8CORE_CACHE_DIR" in str(caught.value)


def test_a_library_that_is_there_needs_no_lock(
    built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "FileLock", None)
    assert build.build(("90a",)) == built


def test_a_build_that_waits_for_another_says_so(
    built: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    built.unlink()
    code = (  # holds the lock until its input ends, or a minute if nobody ends it
        "import filelock, signal, sys\n"
        "with filelock.FileLock(sys.argv[1]):\n"
        "    print('held', flush=True)\n    signal.alarm(60)\n    sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(built.parent / "lock")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, text=True) as holder:
        say = cache.say

        def said(text: str) -> None:
            say(text)
            holder.stdin.close()

        monkeypatch.setattr(cache, "say", said)
        assert holder.stdout.readline() == "held\n"
        build.build(("90a",))
    assert "another process builds" in capsys.readouterr().err


# --- where the cache is ---


def test_no_home_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("FP8CORE_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(ValueError, match="FP8CORE_CACHE_DIR"):
        settings.read()


def test_a_home_is_expanded_and_a_relative_folder_made_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("FP8CORE_CACHE_DIR", "~/cache")
    assert settings.read().cache_dir == tmp_path / "cache"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FP8CORE_CACHE_DIR", "here")
    assert settings.read().cache_dir == tmp_path / "here"


def test_a_relative_xdg_folder_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("FP8CORE_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert settings.read().cache_dir == tmp_path / ".cache" / "fp8core"
