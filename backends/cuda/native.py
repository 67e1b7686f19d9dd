"""Finds the native library: an installed one, one built earlier, or one built now.

In this order: a module ``fp8core_cuda`` that is installed beside these files, or by a distribution
of origin.py; the cache of earlier builds; a build with nvcc (``FP8CORE_BUILD=0`` forbids it). An
installed one that does not suit is passed over, for a reason that the doctor and the build name; it
is an error where no other is to be had. Where none is installed either, the backend computes with
torch's own kernels, and says so. A process loads one, for all of its devices.
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
from fp8core_backends.cuda import build, cache, origin, settings, tiers


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


def is_loaded() -> bool:
    """Return whether :func:`load` has returned, or raised, in this process."""
    return bool(_loaded)


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
    cuda, first = tiers.cuda_of_torch(), min(tiers.FIRST_CUDA.values())
    if cuda is not None and cuda < first:
        why = f"torch uses CUDA {tiers.text(cuda)}, the kernels {tiers.text(first)} or later"
        return _Source(None, "", why)
    problems = {path: _problem(path, architectures) for path in _installed()}
    installed = next((path for path, problem in problems.items() if problem is None), None)
    if installed is not None:
        return _Source(installed, f"installed: {installed}", None)
    unsuited = "; ".join(f"{path} is installed, but {why}" for path, why in problems.items())
    besides = f" ({unsuited})" if unsuited else ""
    try:
        built = build.find(architectures)
    except UnsupportedError as error:
        return _Source(None, f"refused: {error}", None, str(error))
    if built is not None:
        return _Source(built, f"built earlier: {built}{besides}", None)
    if not chosen.builds:
        return _Source(None, "", f"FP8CORE_BUILD=0 forbids building it{besides}")
    toolchain = build.find_toolchain()
    if not isinstance(toolchain, str):
        return _Source(None, f"built with {toolchain.nvcc} on first use{besides}", None)
    if not unsuited:
        return _Source(None, "", toolchain)
    refused = (
        f"cuda: {unsuited}. None can be built: {toolchain}. FP8CORE_BUILD=0 uses torch's kernels."
    )
    return _Source(None, f"refused: {refused}", None, refused)


def _installed() -> list[Path]:
    """Return where the installed libraries have the extension for this Python, or would have it.

    They are as trustworthy as these files themselves.
    """
    specs = [importlib.util.find_spec(origin.package(major)) for major in origin.DISTRIBUTIONS]
    folders = [Path(__file__).parent]
    folders += [Path(at) for spec in specs if spec for at in spec.submodule_search_locations or ()]
    name = f"{build.MODULE}{sysconfig.get_config_var('EXT_SUFFIX')}"
    return [at / name for at in folders if (at / name).is_file() or (at / build.KERNELS).is_file()]


def _problem(path: Path, architectures: Sequence[str]) -> str | None:
    """Say why the installed library at ``path`` is of no use here, None if it may be."""
    if not path.is_file():
        served = sorted(at.name.partition(".")[2] for at in path.parent.glob(f"{build.MODULE}.*"))
        suffix = path.name.partition(".")[2]
        return f"has no extension for this Python ({suffix}), only {', '.join(served) or 'none'}"
    try:
        source = origin.read(path.parent)
    except UnsupportedError as error:
        return str(error)
    needed = build.origin_of(torch.version.cuda, architectures)
    return None if source is None else source.problem(needed)


def _load(architectures: Sequence[str]) -> Any:
    source = _source(tuple(architectures), settings.read())
    if source.why_not is not None:
        raise UnsupportedError(f"cuda: no native library: {source.why_not}")
    if source.refused is not None:
        raise UnsupportedError(source.refused)
    if source.path is None:
        cache.say(f"the native library is {source.description}")
    path = build.build(architectures) if source.path is None else source.path
    if path not in _installed():
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
        brings = {origin.package(major): name for major, name in origin.DISTRIBUTIONS.items()}
        name = brings.get(path.parent.name)
        remedy = "Delete it to have it built anew."
        if name is not None:
            remedy = f"Install it anew: pip install --force-reinstall --no-deps {name}."
        remedy += (
            " From a file system that is mounted noexec nothing is loaded: have another folder, as "
            "FP8CORE_CACHE_DIR names one for what is built."
        )
        if str(error).startswith(("libcudart", "libcublasLt")):
            cuda = f"those of CUDA {torch.version.cuda}" if torch.version.cuda else "none"
            remedy = f"CUDA's libraries come with torch, and torch {torch.__version__} has {cuda}."
        raise UnsupportedError(
            f"cuda: the native library {path} cannot be loaded: {error}. {remedy}"
        ) from None
    return module
