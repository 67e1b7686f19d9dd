"""Directories of safetensors files with an index, written shard by shard and read tensor by tensor.

Files of pickles are never read. ``safetensors`` is imported when a file is read or written.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fp8core.errors import OperandError, UnsupportedError
from fp8core.reporting import some

if sys.platform != "win32":
    import fcntl

INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
_SHARD = re.compile(r"model(-\d+-of-\d+)?\.safetensors")
_MAX_JSON = 256 * 2**20


class Header(NamedTuple):
    """The header of a tensor in a file: safetensors' name of the dtype, and the shape."""

    file: str
    dtype: str
    shape: tuple[int, ...]


def _safetensors() -> Any:
    try:
        import safetensors
        import safetensors.torch
    except ImportError:
        raise UnsupportedError(
            "checkpoints in safetensors files need the package safetensors: pip install safetensors"
        ) from None
    return safetensors


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in the JSON file ``path``.

    Raises:
        OperandError: it is no such file, or holds something else, or a key twice, of which other
            readers may take the other value.
    """
    _check_regular(path)
    try:
        size = path.stat().st_size
        text = path.read_text(encoding="utf-8") if size <= _MAX_JSON else "null"
        content = json.loads(text, object_pairs_hook=_once_each)
    except (OSError, ValueError, RecursionError) as error:
        raise OperandError(f"{path} cannot be read: {error}.") from None
    if size > _MAX_JSON:
        raise OperandError(f"{path} has more than {_MAX_JSON} bytes.")
    if not isinstance(content, dict):
        raise OperandError(f"{path} holds a {type(content).__name__}, expected an object.")
    return content


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"it has {some([k for k in content if keys.count(k) > 1])} twice")
    return content


def _check_regular(path: Path) -> None:
    """Refuse what is no file, as reading a pipe may wait, and a device may never end."""
    if path.exists() and not path.is_file():
        raise OperandError(f"{path} is no regular file.")


class Checkpoint:
    """The tensors in a directory by name: headers first, values one by one.

    Raises:
        OperandError: there is no checkpoint, files of the index are missing or damaged, or they
            hold other tensors than the index says.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        if not self.directory.is_dir():
            raise OperandError(f"{self.directory}: no such directory.")
        self.headers: dict[str, Header] = {}
        index = self._index()
        for file in sorted(set(index.values())) if index is not None else [self._only_file()]:
            for name, header in self._headers(file):
                if index is not None and index.get(name) != file:
                    raise OperandError(
                        f"{self.directory}: {file} holds {name!r}, which {INDEX} does not place "
                        f"there. The files are of different checkpoints."
                    )
                self.headers[name] = header
        missing = [name for name in index or {} if name not in self.headers]
        if missing:
            raise OperandError(
                f"{self.directory}: {INDEX} lists {some(missing)}, which its files do not hold."
            )

    def _index(self) -> dict[str, str] | None:
        path = self.directory / INDEX
        if not os.path.lexists(path):
            return None
        places = read_json(path).get("weight_map")
        if not isinstance(places, dict) or not all(
            isinstance(file, str) and file and Path(file).name == file for file in places.values()
        ):
            raise OperandError(f"{path} has no weight_map of tensors to files beside it.")
        absent = sorted({f for f in places.values() if not os.path.isfile(self.directory / f)})
        if absent:
            raise OperandError(
                f"{self.directory}: missing {some(absent)}, which {INDEX} lists. Nothing was "
                f"loaded."
            )
        return places

    def _only_file(self) -> str:
        files = sorted(path.name for path in self.directory.glob("*.safetensors"))
        if len(files) == 1:
            return files[0]
        if files:
            raise OperandError(
                f"{self.directory}: {some(files)} without {INDEX}, which says what belongs "
                f"together."
            )
        pickles = [path for end in ("bin", "pt", "pth") for path in self.directory.glob(f"*.{end}")]
        pickle_note = f"; {pickles[0].name} is a pickle, which is not read" if pickles else ""
        raise OperandError(f"{self.directory}: no safetensors file{pickle_note}.")

    def _headers(self, file: str) -> Iterator[tuple[str, Header]]:
        with self.open(file) as opened:
            for name in opened.keys():  # noqa: SIM118  # a method, not a dict's
                part = opened.get_slice(name)
                yield name, Header(file, part.get_dtype(), tuple(part.get_shape()))

    def open(self, file: str) -> Any:
        """Return ``file`` opened by safetensors, as a context manager."""
        library = _safetensors()
        _check_regular(self.directory / file)
        try:
            return library.safe_open(self.directory / file, framework="pt", device="cpu")
        except (library.SafetensorError, OSError) as error:
            raise OperandError(
                f"{self.directory / file} is damaged or cut off: {error}. Nothing was loaded."
            ) from None

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors ``names`` with their names, file by file."""
        by_file: dict[str, list[str]] = {}
        for name in names:
            by_file.setdefault(self.headers[name].file, []).append(name)
        for file, names_in_file in by_file.items():
            with self.open(file) as opened:
                for name in names_in_file:
                    yield name, self._tensor(opened, file, name)

    def _tensor(self, opened: Any, file: str, name: str) -> torch.Tensor:
        try:
            return opened.get_tensor(name)  # type: ignore[no-any-return]  # safetensors is untyped
        except (_safetensors().SafetensorError, OSError, ValueError) as error:
            raise OperandError(
                f"{self.directory / file}: {name!r} cannot be read: {error}."
            ) from None

    def config(self) -> dict[str, Any]:
        """Return the content of the model's config; empty if there is none."""
        path = self.directory / CONFIG
        return read_json(path) if os.path.lexists(path) else {}


class ShardWriter:
    """Writes tensors to files of at most ``limit`` bytes each, unless one tensor is larger.

    At most one file's tensors are held. The files appear in ``directory`` when all of them are
    written, and the index after them. An error or an interruption leaves the directory as it was;
    a process that is killed while it renames them leaves the older checkpoint whole, in
    ``.saving-*/former`` and the directory. Files of other names are never touched. Of processes
    that save to one directory at a time the last one's files are there in the end.

    Raises:
        OperandError: the directory cannot be written to, or a folder has the name of a file.
    """

    def __init__(self, directory: str | os.PathLike[str], limit: int) -> None:
        self.directory = Path(directory)
        self.limit = limit
        self._pending: dict[str, torch.Tensor] = {}
        self._places: set[int] = set()
        self._size = self._total = 0
        self._shards: list[list[str]] = []

    def __enter__(self) -> ShardWriter:
        _safetensors()
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._folder = Path(tempfile.mkdtemp(prefix=".saving-", dir=self.directory))
        except OSError as error:
            raise OperandError(
                f"save_pretrained: cannot write to {str(self.directory)!r}: {error.strerror}. "
                f"Nothing was changed."
            ) from None
        return self

    def __exit__(self, *error: object) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def add(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write ``tensors`` next, all to one file."""
        size = sum(tensor.nbytes for tensor in tensors.values())
        if self._pending and self._size + size > self.limit:
            self._write()
        for name, tensor in tensors.items():
            whole = _owned(tensor)
            place = whole.untyped_storage().data_ptr()
            # safetensors refuses tensors of one file that share memory.
            self._pending[name] = whole.clone() if place in self._places else whole
            self._places.add(place)
        self._size += size
        self._total += size

    def _write(self) -> None:
        path = self._folder / f"{len(self._shards)}"
        _safetensors().torch.save_file(self._pending, path, metadata={"format": "pt"})
        self._shards.append(list(self._pending))
        self._pending, self._places = {}, set()
        self._size = 0

    def finish(self, config: Mapping[str, Any]) -> None:
        """Write what is left, and put files, index and ``config`` in their place."""
        if self._pending or not self._shards:
            self._write()
        count = len(self._shards)
        files = [f"model-{at:05}-of-{count:05}.safetensors" for at in range(1, count + 1)]
        places = {
            name: file for file, names in zip(files, self._shards, strict=True) for name in names
        }
        index = {"metadata": {"total_size": self._total}, "weight_map": places}
        texts = {INDEX: index, CONFIG: dict(config)}
        for name, content in texts.items():
            text = json.dumps(content, indent=2) + "\n"
            (self._folder / name).write_text(text, encoding="utf-8")
        news = {file: self._folder / str(at) for at, file in enumerate(files)}
        news.update({name: self._folder / name for name in texts})
        with _locked(self.directory):
            self._exchange(news)

    def _exchange(self, news: Mapping[str, Path]) -> None:
        """Put ``news``, files by their names, in the place of the older checkpoint's files."""
        former = self._folder / "former"
        former.mkdir()
        olds = [
            path
            for path in self.directory.iterdir()
            if path.name in news or _SHARD.fullmatch(path.name)
        ]
        folders = [path.name for path in olds if path.is_dir()]
        if folders:
            raise OperandError(
                f"save_pretrained: {self.directory} has folders named {some(folders)}. Nothing was "
                f"changed."
            )
        try:
            for path in olds:
                os.replace(path, former / path.name)
            for name, path in news.items():
                os.replace(path, self.directory / name)
        except BaseException:  # an interruption, too, may not leave parts of two checkpoints
            for name, path in news.items():
                if not path.exists():  # it was moved
                    (self.directory / name).unlink(missing_ok=True)
            for path in former.iterdir():
                os.replace(path, self.directory / path.name)
            raise


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Have other processes that exchange files of ``directory`` wait, where the system offers it:
    ranks that all save to one directory would else leave files of several checkpoints."""
    if sys.platform == "win32":
        yield
        return
    handle = os.open(directory, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _owned(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` on the CPU, contiguous, and with memory for itself alone."""
    whole = tensor.detach().cpu().contiguous()
    is_part = whole.untyped_storage().nbytes() != whole.nbytes
    return whole.clone() if is_part else whole
