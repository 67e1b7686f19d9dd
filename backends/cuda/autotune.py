"""Which algorithm runs a problem: cuBLASLt's, or one of fp8core for few rows. Timed once on the
device, remembered in a file.

The first algorithm that cuBLASLt proposes is up to 27 % slower than its best one. With
``FP8CORE_AUTOTUNE=0`` and under ``torch.use_deterministic_algorithms`` the first one runs: the same
in every process. So it does while a CUDA graph is being captured, unless a choice is remembered.
"""

from __future__ import annotations

import functools
import glob
import json
import math
import os
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, TypeAlias

import torch

from fp8core.backend_api import UnsupportedError
from fp8core_backends.cuda import cache, settings
from fp8core_backends.cuda.reporting import logger

MAX_WORKSPACE = 32 << 20
"""Bytes of scratch memory that an algorithm may take; Transformer Engine gives as much."""

NUM_CANDIDATES = 8
_CACHE = 128 << 20
"""Bytes of which a device's cache holds none of what was there before; it has 50 MiB."""

_ROUNDS, _REPEATS = 5, 2
_WORTH_IT = 0.98  # an algorithm replaces the first one if it takes at most this share of its time
_MAX_BYTES = 16 << 20  # 60,000 choices
_STALE_S = 3600.0  # a temporary file this old was left by a process that was killed

_lock = threading.Lock()
_tables: dict[Path, dict[str, str]] = {}


Addresses: TypeAlias = "tuple[int, int, int, int, int, int]"
"""The fields of the native GemmArguments without a workspace: a, its scale_inv, b, its scale_inv,
bias (0 for none) and d."""


def bucket(size: int) -> int:
    """Return the size that stands for ``size``: rounded up to a quarter of its power of two.

    Ragged sizes, as the groups of a mixture of experts have them, are not all timed.

    >>> [bucket(size) for size in (8192, 14336, 11008, 100, 3)]
    [8192, 14336, 12288, 112, 3]
    """
    step = max(1, 1 << max(0, size.bit_length() - 3))
    return -(-size // step) * step


def takes_the_first() -> bool:
    """Say whether the first algorithm runs, the same in every process, and none is timed."""
    return not settings.autotunes() or torch.are_deterministic_algorithms_enabled()


def choose(
    gemm: Any,
    problem: str,
    addresses: Addresses,
    device: torch.device,
    accumulated: torch.Tensor | None = None,
) -> int:
    """Return the candidate of ``gemm`` to run ``problem`` with; time them if none is remembered.

    ``problem`` names sizes, types and scales; a choice holds for all that it names.
    The timed products overwrite d, or a tensor like ``accumulated``, which is d where the product
    adds to it. Without memory to time in, the first candidate runs, and nothing is remembered.
    """
    if takes_the_first():
        return 0
    chosen = settings.read()
    file = _file(chosen.cache_dir, gemm, device)
    with _lock:
        algorithms = _tables.get(file)
        if algorithms is None:
            algorithms = _tables[file] = _read(file)
    remembered = algorithms.get(problem)
    if remembered is not None:
        index = _recall(gemm, remembered, problem)
        if index is not None:
            return index
    if torch.cuda.is_current_stream_capturing():
        return 0
    best = _time(gemm, addresses, device, accumulated)
    if best is None:
        return 0
    with _lock:
        algorithms[problem] = gemm.algorithm(best).hex()
        _write(file, algorithms)
    return best


def _recall(gemm: Any, remembered: str, problem: str) -> int | None:
    """Return the index of a remembered algorithm, None if this cuBLASLt does not take it."""
    try:
        return _index_of(gemm, bytes.fromhex(remembered))
    except (ValueError, RuntimeError) as error:
        logger.warning("the remembered algorithm of %s is timed anew: %s", problem, error)
        return None


def same_algorithm(gemm: Any, larger: Any, problem: str) -> int:
    """Return the index by which ``gemm`` runs the first algorithm of ``larger``, a problem with
    more rows; 0, its own first algorithm, with a warning if it does not take that."""
    try:
        return _index_of(gemm, larger.algorithm(0))
    except (ValueError, RuntimeError) as error:
        warn_of_parts(problem, error)
        return 0


def warn_of_parts(problem: str, reason: object) -> None:
    """Warn, once, that parts of a product do not run the algorithm of the whole."""
    _warn(f"parts of {problem} may have other bits than the whole: {reason}")


def _index_of(gemm: Any, algorithm: bytes) -> int:
    for index in range(gemm.num_candidates):
        if gemm.algorithm(index) == algorithm:
            return index
    added: int = gemm.add_candidate(algorithm)
    return added


def _time(
    gemm: Any, addresses: Addresses, device: torch.device, accumulated: torch.Tensor | None
) -> int | None:
    """Return the candidate with the least median time, None where none could be timed.

    The candidates take turns in several rounds, because a chip slows down as it warms up.
    """
    stream = torch.cuda.current_stream(device).cuda_stream
    sizes = [gemm.workspace_bytes(index) for index in range(gemm.num_candidates)]
    if gemm.is_of_few_rows:  # the workspace is read before each run
        sizes = [max(size, _CACHE) for size in sizes]
    try:
        workspace = torch.empty(max(sizes), dtype=torch.uint8, device=device)
        scratch = None if accumulated is None else torch.empty_like(accumulated)
    except torch.OutOfMemoryError as error:
        logger.warning("no memory to time algorithms in, the first one runs: %s", error)
        return None
    if scratch is not None:
        addresses = (*addresses[:-1], scratch.data_ptr())
    times: list[list[float]] = [[] for _ in sizes]
    for _ in range(_ROUNDS):
        for index, size in enumerate(sizes):
            arguments = (*addresses, workspace.data_ptr(), size)
            try:
                took = gemm.milliseconds(index, arguments, _REPEATS, stream)
            except RuntimeError as error:
                logger.warning("an algorithm proposed by cuBLASLt is left out: %s", error)
                took = math.inf
            times[index].append(took)
    medians = list(map(statistics.median, times))
    best = min(range(len(medians)), key=medians.__getitem__)
    if medians[best] == math.inf:
        return None
    return best if medians[best] <= _WORTH_IT * medians[0] else 0


def _file(folder: Path, gemm: Any, device: torch.device) -> Path:
    """Return the file of this device model and cuBLASLt, which numbers algorithms by version."""
    words = (torch.cuda.get_device_name(device), "cublaslt", str(gemm.library_version))
    return folder / ("-".join(words).replace(" ", "-").replace("/", "-") + ".json")


def _read(file: Path) -> dict[str, str]:
    """Return the choices kept in ``file``; a file that cannot be trusted or read gives none."""
    why = cache.refusal(file)
    table: object = {}
    try:
        if why is None and file.exists():
            size = file.stat().st_size
            if not file.is_file():
                why = "it is no regular file"
            elif size > _MAX_BYTES:
                why = f"it has {size} bytes, and never needs more than {_MAX_BYTES}"
            else:
                table = json.loads(file.read_text())
    except FileNotFoundError:
        pass
    except (OSError, ValueError, RecursionError) as error:
        why = str(error)
    is_table = isinstance(table, dict) and all(isinstance(value, str) for value in table.values())
    if why is None and not is_table:
        why = "it is not a table of algorithms"
    if why is not None:
        _warn(f"the autotuning cache {file} is not used: {why}")
    return dict(table) if why is None and isinstance(table, dict) else {}


def _write(file: Path, algorithms: dict[str, str]) -> None:
    """Add ``algorithms`` to the file by one rename: a killed process leaves the old file or the new
    one."""
    merged = {**_read(file), **algorithms}
    prefix = f".{file.name}."
    try:
        cache.make(file.parent)
        for left in file.parent.glob(f"{glob.escape(prefix)}*"):  # by processes that were killed
            if time.time() - left.lstat().st_mtime > _STALE_S:
                left.unlink()
        handle, name = tempfile.mkstemp(prefix=prefix, dir=file.parent)
        try:
            with open(handle, "w") as stream:
                json.dump(merged, stream, indent=0, sort_keys=True)
            os.replace(name, file)
        except BaseException:
            os.unlink(name)
            raise
    except (OSError, UnsupportedError) as error:
        _warn(f"the autotuning cache {file} cannot be written: {error}")


@functools.lru_cache(maxsize=64)  # once, however many shapes are timed
def _warn(text: str) -> None:
    logger.warning("%s", text)
