"""Finds the native library: an installed one, one built earlier, or one built now.

In this order: a module ``fp8core_cuda`` that is installed beside these files, or by the package
``fp8core-cuda``; the cache of earlier builds; a build with nvcc (``FP8CORE_BUILD=0`` forbids it).
Where none is to be had, the backend computes with torch's own kernels, and says so. A process loads
one, for all of its devices.
"""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import sysconfig
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fp8core.backend_api import UnsupportedError
from fp8core_backends.cuda import build, settings


class _Source(NamedTuple):
    """The file to load, None to build it; its description; and why there is no library.

    ``refused``: why the file is there, and not to be trusted; loading says so.
    """

    path: Path | None
    description: str
    why_not: str | None
    refused: str | None = None


def missing(device: torch.device) -> str | None:
    """Say why the device has no native library, and will not get one; None if it has or will."""
    capability = torch.cuda.get_device_capability(device)
    if capability not in build.ARCHITECTURES:
        capabilities = ", ".join(f"{major}.{minor}" for major, minor in build.ARCHITECTURES)
        version = f"{capability[0]}.{capability[1]}"
        return f"the kernels are written for compute capability {capabilities}, this is {version}"
    return _source(tuple(build.present()), settings.read()).why_not


def load() -> Any:
    """Return the native library for this machine's devices, building it if need be.

    Raises:
        UnsupportedError: the build failed, or the library cannot be loaded. This process does
            not try again.
    """
    with _lock:
        if not _loaded:
            try:
                _loaded.append(_load(tuple(build.present())))
            except UnsupportedError as error:
                _loaded.append(error)
        library = _loaded[0]
    if isinstance(library, UnsupportedError):
        raise UnsupportedError(str(library))
    return library


_lock = threading.Lock()
_loaded: list[Any] = []


def status() -> str:
    """Say in a line which library each device uses, or would build, and why."""
    lines = []
    for index in range(torch.cuda.device_count()):
        why_not = missing(torch.device("cuda", index))
        description = f"none ({why_not}), torch's own kernels"
        if why_not is None:
            description = _source(tuple(build.present()), settings.read()).description
        lines.append(f"cuda:{index} {description}")
    return "; ".join(lines)


@functools.cache
def _source(architectures: Sequence[str], chosen: settings.Settings) -> _Source:
    """Return where the library for these architectures is, or will be."""
    if (installed := _installed()) is not None:
        return _Source(installed, f"installed: {installed}", None)
    try:
        built = build.find(architectures)
    except UnsupportedError as error:
        return _Source(None, f"refused: {error}", None, str(error))
    if built is not None:
        return _Source(built, f"built earlier: {built}", None)
    if not chosen.builds:
        return _Source(None, "", "FP8CORE_BUILD=0 forbids building it")
    toolchain = build.find_toolchain()
    if isinstance(toolchain, str):
        return _Source(None, "", toolchain)
    return _Source(None, f"built with {toolchain.nvcc} on first use", None)


def _installed() -> Path | None:
    """Return the installed library for this Python, which is as trustworthy as these files
    themselves; None if there is none."""
    package = importlib.util.find_spec(build.MODULE)
    folders = [Path(__file__).parent]
    if package is not None:
        folders += map(Path, package.submodule_search_locations or ())
    name = f"{build.MODULE}{sysconfig.get_config_var('EXT_SUFFIX')}"
    return next((at / name for at in folders if (at / name).is_file()), None)


def _load(architectures: Sequence[str]) -> Any:
    source = _source(tuple(architectures), settings.read())
    if source.why_not is not None:
        raise UnsupportedError(f"cuda: no native library: {source.why_not}")
    if source.refused is not None:
        raise UnsupportedError(source.refused)
    path = build.build(architectures) if source.path is None else source.path
    if path != _installed():
        build.check(path)  # again: another file may have taken its name since
    module = _import(path)
    built_from = getattr(module, "SOURCE_HASH", "unknown")
    if build.source_hash() != built_from:
        raise UnsupportedError(
            f"cuda: {path} was built from other sources ({built_from}, these are "
            f"{build.source_hash()}). Delete it, or build it anew."
        )
    if not set(architectures) <= set(module.ARCHITECTURES.split()):
        raise UnsupportedError(
            f"cuda: {path} was built for {module.ARCHITECTURES}, this machine takes "
            f"{' '.join(architectures)}. Delete it, or build it anew."
        )
    return module


def _import(path: Path) -> Any:
    loader = importlib.machinery.ExtensionFileLoader(build.MODULE, str(path))
    spec = importlib.util.spec_from_loader(build.MODULE, loader)
    assert spec is not None
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        raise UnsupportedError(
            f"cuda: the native library {path} cannot be loaded: {error}. "
            f"Delete it to have it built anew. From a file system that is mounted noexec nothing "
            f"is loaded: name another folder in FP8CORE_CACHE_DIR."
        ) from None
    return module
