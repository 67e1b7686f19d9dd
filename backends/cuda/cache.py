"""The folder of built libraries and timed choices; what others could have written is refused.

A library that is loaded runs with the rights of the process. So the folder, its content and the
library belong to the user or to root, no other user may write to them, and no link leads away from
them. In a folder such as /tmp, where all may write but only owners delete, the content is checked
in the same way. A process of root trusts root alone.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from filelock import FileLock, Timeout  # torch depends on it

from fp8core.backend_api import UnsupportedError
from fp8core_backends.cuda import settings

try:  # Unix alone has them
    import grp
    import pwd
except ImportError:  # pragma: no cover
    pass

LEFTOVER = "build-"
"""How the name of a folder begins in which a build is under way, or was when it was killed."""

_MODE = 0o755  # of folders created here, whatever the umask


def refusal(path: Path) -> str | None:
    """Say why ``path``, in the cache folder or that folder itself, is not to be trusted.

    None if it is, and for a path that does not exist. Nothing is opened.
    """
    if not hasattr(os, "geteuid"):  # pragma: no cover  no owners to ask about
        return None
    root = settings.read().cache_dir
    try:
        for parent in root.resolve().parents:
            if _is_open_to_all(parent.stat()):
                return (
                    f"{parent}, above it, has mode {_mode(parent.stat())}: others can write to it"
                )
        for link in (root, root.resolve()):
            wrong = _fault(link.lstat(), is_folder=not link.is_symlink())
            if wrong:
                return f"{link} {wrong}"
        below = path.relative_to(root).parts
        for count in range(1, len(below) + 1):
            inner = root.joinpath(*below[:count])
            info = inner.lstat()
            if stat.S_ISLNK(info.st_mode):
                return f"{inner} is a symbolic link to {os.readlink(inner)}"
            wrong = _fault(info, is_folder=count < len(below) or stat.S_ISDIR(info.st_mode))
            if wrong:
                return f"{inner} {wrong}"
    except FileNotFoundError:
        return None
    except (OSError, RuntimeError) as error:  # the latter: Python before 3.13, of a link to itself
        return f"{path} cannot be looked at: {error}"
    return None


def check(path: Path) -> None:
    """Refuse the file at ``path`` unless it is a regular one that only the user could have written.

    Raises:
        UnsupportedError: it is not; names the path and the reason.
    """
    why = refusal(path)
    if why is None and path.exists() and not path.is_file():
        why = f"{path} is no regular file"
    if why is not None:
        _refuse(path, why)


def make(folder: Path) -> None:
    """Make ``folder``, a folder in the cache folder, if need be, writable by its owner alone.

    Raises:
        UnsupportedError: it cannot be made, or others could write to it.
    """
    root = settings.read().cache_dir
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
        _check_folder(root)
        for inner in (root, folder):
            inner.mkdir(mode=_MODE, exist_ok=True)
    except OSError as error:
        raise UnsupportedError(
            f"cuda: nothing can be kept in {folder}: {error}. {remedy()}"
        ) from None
    _check_folder(folder)


def _check_folder(folder: Path) -> None:
    why = refusal(folder)
    if why is not None:
        _refuse(folder, why)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of ``folder``, which the system releases if the process dies.

    Raises:
        UnsupportedError: it cannot be had, or it is no file of the user's.
    """
    path = folder / "lock"
    check(path)
    try:
        lock = FileLock(path)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            say(f"another process builds in {folder}; waiting for it")
            lock.acquire()
    except (OSError, NotImplementedError) as error:  # the latter: a file system without locks
        raise UnsupportedError(f"cuda: {path} cannot be locked: {error}. {remedy()}") from None
    try:
        yield
    finally:
        lock.release()


def clear(folder: Path) -> None:
    """Delete the folders that killed builds left in ``folder``, whose lock is held."""
    for left in folder.glob(f"{LEFTOVER}*"):
        shutil.rmtree(left, ignore_errors=True)


def remedy() -> str:
    """Name the ways out where the cache folder cannot be used."""
    return (
        "Name another folder in FP8CORE_CACHE_DIR, or use torch's own kernels by FP8CORE_BUILD=0."
    )


def _refuse(path: Path, why: str) -> NoReturn:
    raise UnsupportedError(
        f"cuda: {path} is refused, as others could have changed it: {why}. Delete what is named, "
        f"or have it belong to you and be writable by you alone (chown, chmod go-w); or name "
        f"another folder in FP8CORE_CACHE_DIR."
    )


def say(text: str) -> None:
    """Print a line for the user who waits."""
    print(f"fp8core: {text}", file=sys.stderr, flush=True)


def _fault(info: os.stat_result, *, is_folder: bool) -> str | None:
    """Say who else could have changed the file of ``info``, None if no other user could."""
    user = os.geteuid()
    if info.st_uid not in (user, 0):
        return f"belongs to {_user(info.st_uid)}, and this process runs as {_user(user)}"
    if stat.S_ISLNK(info.st_mode):  # its mode means nothing
        return None
    if not (stat.S_ISDIR(info.st_mode) if is_folder else stat.S_ISREG(info.st_mode)):
        return f"is no {'folder' if is_folder else 'regular file'}"
    if is_folder and info.st_mode & stat.S_ISVTX:
        return None
    if info.st_mode & stat.S_IWOTH:
        return f"has mode {_mode(info)}: others can write to it"
    if info.st_mode & stat.S_IWGRP and not _is_private(info.st_gid):
        return f"has mode {_mode(info)}: its group can write to it"
    return None


def _is_open_to_all(info: os.stat_result) -> bool:
    return bool(info.st_mode & stat.S_IWOTH) and not info.st_mode & stat.S_ISVTX


def _is_private(group: int) -> bool:
    """Whether a group has the user's name and no other member, as on many systems.

    Such systems have a umask that lets the group write. Root's group is not looked at: containers
    put any user there.
    """
    try:
        name, entry = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(group)
    except KeyError:
        return False
    return group != 0 and entry.gr_name == name and set(entry.gr_mem) <= {name}


def _user(number: int) -> str:
    try:
        return f"{pwd.getpwuid(number).pw_name} (uid {number})"
    except KeyError:
        return f"uid {number}"


def _mode(info: os.stat_result) -> str:
    return f"{stat.S_IMODE(info.st_mode):o}"
