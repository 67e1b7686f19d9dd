"""The text that the demo trains on, as bytes: read, split into training and held-out, batched."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fp8core.errors import OperandError

SKIPPED_FOLDERS = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages"})
MAX_STDLIB_BYTES = 4_000_000
HELDOUT_EVERY = 10
"""One file in this many is held out; of a single text, the last 1 / HELDOUT_EVERY."""
MIN_HELDOUT_WINDOWS = 8


@dataclass(frozen=True, slots=True)
class Corpus:
    """A text in two disjoint parts, ``train [bytes]`` and ``heldout [bytes]``, uint8 on the CPU.

    ``source`` describes its origin in words.
    """

    train: Tensor
    heldout: Tensor
    source: str

    @property
    def num_bytes(self) -> int:
        """Bytes of both parts."""
        return self.train.numel() + self.heldout.numel()


def stdlib_files(folder: Path) -> list[Path]:
    """List the Python files below ``folder``, as relative paths, sorted by name.

    Modules directly in the folder come before those of packages. Folders of tests and of installed
    packages are left out, and the list ends before the sizes add up to more than
    ``MAX_STDLIB_BYTES``.
    """
    files = [
        path.relative_to(folder)
        for path in folder.rglob("*.py")
        if not SKIPPED_FOLDERS.intersection(path.relative_to(folder).parts[:-1])
    ]
    files.sort(key=lambda path: (len(path.parts) > 1, path.as_posix()))
    kept: list[Path] = []
    total = 0
    for path in files:
        total += (folder / path).stat().st_size
        if total > MAX_STDLIB_BYTES:
            break
        kept.append(path)
    return kept


def split_files(paths: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """Return training and held-out files: every ``HELDOUT_EVERY``-th file is held out.

    >>> train, heldout = split_files([Path(f"{index}.py") for index in range(20)])
    >>> [str(path) for path in heldout]
    ['9.py', '19.py']
    """
    heldout = list(paths[HELDOUT_EVERY - 1 :: HELDOUT_EVERY])
    train = [path for index, path in enumerate(paths, start=1) if index % HELDOUT_EVERY]
    return train, heldout


def minimum_part(context: int) -> int:
    """Return the fewest bytes of a part: ``MIN_HELDOUT_WINDOWS`` windows and their targets.

    >>> minimum_part(64)
    513
    """
    return MIN_HELDOUT_WINDOWS * context + 1


def load_stdlib(context: int, folder: Path | None = None) -> Corpus:
    """Read the source files of this machine's Python standard library, split by file.

    Args:
        context: bytes in one window of training.
        folder: the folder of the library; None stands for the one that sysconfig names.

    Raises:
        OperandError: the folder has too little source; some distributions ship none.
    """
    folder = Path(sysconfig.get_path("stdlib")) if folder is None else folder
    train_files, heldout_files = split_files(stdlib_files(folder))
    train, heldout = (
        b"".join((folder / path).read_bytes() for path in paths)
        for paths in (train_files, heldout_files)
    )
    least = minimum_part(context)
    if min(len(train), len(heldout)) < least:
        raise OperandError(
            f"the Python standard library in {folder} has {len(train)} bytes of source to train on "
            f"and {len(heldout)} held out; each needs {least} at least.\n"
            f"  Train on another text: --text FILE."
        )
    num_files = len(train_files) + len(heldout_files)
    source = f"Python's standard library, {num_files} files, {len(heldout_files)} of them held out"
    return Corpus(_as_tensor(train), _as_tensor(heldout), source)


def load_text(path: Path, context: int) -> Corpus:
    """Read one file, of any kind; its last tenth is held out.

    Raises:
        OperandError: the file cannot be read, or is too small for windows of ``context`` bytes.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise OperandError(
            f"--text {path}: cannot read it: {error.strerror or error}.\n"
            f"  Give a file of text, or leave --text out to use Python's standard library."
        ) from None
    least = HELDOUT_EVERY * minimum_part(context)
    if len(data) < least:
        raise OperandError(
            f"--text {path}: it has {len(data)} bytes, and at least {least} are needed, "
            f"since its last tenth is held out."
        )
    cut = len(data) - len(data) // HELDOUT_EVERY
    return Corpus(
        _as_tensor(data[:cut]), _as_tensor(data[cut:]), f"{path}, its last tenth held out"
    )


def training_batches(
    text: Tensor, *, context: int, batch_size: int, steps: int, seed: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield ``steps`` batches of random windows of ``text [bytes]``; ``seed`` fixes them all.

    A batch is input and target, both ``[batch_size, context]`` int64 on the CPU.
    """
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        starts = torch.randint(text.numel() - context, (batch_size,), generator=generator)
        yield _windows(text, starts, context)


def heldout_windows(text: Tensor, *, context: int, num_windows: int) -> tuple[Tensor, Tensor]:
    """Return the fixed windows for the held-out loss, evenly spread over ``text [bytes]``.

    They do not overlap, so a short text has fewer than ``num_windows``. Returns input and target,
    both ``[windows, context]`` int64 on the CPU.
    """
    fitting = (text.numel() - 1) // context
    count = min(num_windows, fitting)
    starts = torch.arange(count) * fitting // count * context
    return _windows(text, starts, context)


def _as_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _windows(text: Tensor, starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """Return input and target ``[starts, context]``: the target is the input one byte further."""
    rows = text[starts[:, None] + torch.arange(context + 1)].long()
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
