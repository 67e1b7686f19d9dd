"""NVIDIA's cuDNN frontend for Python, if it is installed: whether it can be used, and its handles.

It is the optional package ``nvidia-cudnn-frontend``; cuDNN itself comes with torch.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import threading
from typing import Any, NamedTuple

import torch

from fp8core.backend_api import UnsupportedError
from fp8core_backends.cuda.private import loaded_cudnn
from fp8core_backends.cuda.stream import raw_stream

PACKAGE = "nvidia-cudnn-frontend"
# 1.19 has no sink; backward of 1.24 asks for an attribute that cuDNN 9.19, torch 2.11's, lacks.
FIRST, AFTER_LAST = (1, 20), (1, 24)
CUDNN = 91900
"""The first release of cuDNN on which the graphs of this backend were checked."""


@functools.cache
def missing() -> str | None:
    """Say why the frontend cannot be used, or None."""
    versions = f"{FIRST[0]}.{FIRST[1]} up to, not including, {AFTER_LAST[0]}.{AFTER_LAST[1]}"
    install = f"pip install '{PACKAGE}>={FIRST[0]}.{FIRST[1]},<{AFTER_LAST[0]}.{AFTER_LAST[1]}'"
    if importlib.util.find_spec("cudnn") is None:
        return f"{PACKAGE} is not installed; {install}"
    try:
        installed = importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return f"a module named cudnn is installed that is not {PACKAGE}; {install}"
    version = tuple(int(part) for part in installed.split(".")[:2] if part.isdigit())
    if not FIRST <= version < AFTER_LAST:
        return f"{PACKAGE} is {installed}, expected {versions}; {install}"
    release = loaded_cudnn()
    if release is None:
        return f"torch {torch.__version__} is built without cuDNN"
    if release < CUDNN:
        major = str(torch.version.cuda).split(".")[0]
        return (
            f"cuDNN {release} is loaded in this process, expected at least {CUDNN}. A package such "
            f"as transformer_engine may have loaded it before torch could load its own: import "
            f"torch or fp8core before it. If the same one is loaded then, pip install "
            f"'nvidia-cudnn-cu{major}>={CUDNN // 10000}.{CUDNN // 100 % 100}'"
        )
    return None


@functools.cache
def load() -> Any:
    """Return the module ``cudnn``.

    Raises:
        UnsupportedError: it cannot be imported.
    """
    try:
        import cudnn
    except ImportError as error:
        raise UnsupportedError(f"cuda: {PACKAGE} cannot be imported: {error}") from None
    return cudnn


class Execution(NamedTuple):
    """The module and the handle of cuDNN that build and execute a graph, set to torch's stream."""

    cudnn: Any
    handle: int


class _Handles(threading.local):
    """A handle for each device, and the stream that it was set to; of one thread, as cuDNN asks."""

    def __init__(self) -> None:
        self.of_device: dict[int, tuple[Execution, int]] = {}


_handles = _Handles()


def execution(index: int) -> Execution:
    """Return this thread's handle for the current device, ``index``, set to its current stream."""
    stream = raw_stream(index)
    previous = _handles.of_device.get(index)
    if previous is not None and previous[1] == stream:
        return previous[0]
    cudnn = load()
    chosen = Execution(cudnn, cudnn.create_handle()) if previous is None else previous[0]
    cudnn.set_stream(chosen.handle, stream)
    _handles.of_device[index] = (chosen, stream)
    return chosen
