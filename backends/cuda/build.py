"""Compiles ``csrc`` with nvcc, once for a set of sources and options: into a library of kernels,
which every Python shares, and into the thin extension module of this Python beside it.

Their folder's name carries a hash of everything that decides their content, so stale ones are never
loaded. A build happens in a temporary folder under a lock; the module appears last, by one rename:
another process sees all of it or nothing. The next build deletes the folder of one that was killed.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.resources
import importlib.util
import itertools
import os
import re
import shutil
import signal
import subprocess
import sysconfig
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from fp8core.backend_api import UnsupportedError
from fp8core.errors import did_you_mean
from fp8core_backends.cuda import cache, origin, settings
from fp8core_backends.cuda.tiers import TIERS

MODULE = "fp8core_cuda"
"""The extension's name, which its init function carries."""

KERNELS = "libfp8core_kernels.so"
"""The name of the library of kernels, which lies beside the extension."""

_BINDINGS = "bindings/"
"""The folder of the sources that the extension is compiled from; the others make the kernels."""

ARCHITECTURES: dict[tuple[int, int], str] = {
    capability: tier.architecture for capability, tier in TIERS.items() if tier.architecture
}
"""Compute capabilities that the sources are written for, and how nvcc spells them."""

_INPUTS = (
    ("-DFP8CORE_INPUT=kBFloat16",),
    ("-DFP8CORE_INPUT=kFloat16",),
    ("-DFP8CORE_INPUT=kFloat32",),
)

_VARIANTS: dict[str, tuple[tuple[str, ...], ...]] = {
    "cuda/activation/fused.cu": tuple(
        (f"-DFP8CORE_INPUT={data}", f"-DFP8CORE_FAMILY={family}", f"-DFP8CORE_BACKWARD={backward}")
        for backward in ("true", "false")
        for family in ("kGelu", "kSwish", "kOther")
        for data in ("kBFloat16", "kFloat16")
    ),
    "cuda/activation/from_input.cu": _INPUTS,
    "cuda/gemm/few_rows.cu": (
        ("-DFP8CORE_A=kE4M3",),
        ("-DFP8CORE_A=kBFloat16",),
        ("-DFP8CORE_A=kFloat16",),
    ),
    "cuda/gemm/few_rows_groups.cu": (
        ("-DFP8CORE_A=kBFloat16",),
        ("-DFP8CORE_A=kFloat16",),
    ),
    "cuda/gemm/sm90_grouped.cu": (
        ("-DFP8CORE_A=kE4M3", "-DFP8CORE_B=kE4M3"),
        ("-DFP8CORE_A=kE4M3", "-DFP8CORE_B=kE5M2"),
        ("-DFP8CORE_A=kE5M2", "-DFP8CORE_B=kE4M3"),
    ),
    "cuda/norm/from_input.cu": _INPUTS,
    "cuda/norm/panels.cu": _INPUTS[:2],
    "cuda/norm/two_passes.cu": _INPUTS[:2],
    "cuda/quantize/from_input.cu": _INPUTS,
}
"""Sources that are compiled several times, side by side, and with which macros each time."""

_FLAGS = ("-std=c++17", "-O3", "-Xcompiler=-fPIC,-Wall,-Wextra,-fvisibility=hidden")
_FOLDERS_OF_CUDA_12 = ("cublas", "cuda_runtime")
_NEWEST_SCALE = "CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F"
_DEFAULT_NVCC = Path("/usr/local/cuda/bin/nvcc")
_ANSWER_S = 60.0  # how long nvcc may take to say its version
_TAIL = 3000  # characters of a compiler's output that go into a message


@dataclass(frozen=True, slots=True)
class Toolchain:
    """The tools of a build: the compiler and its release, folders of headers, and cuBLASLt to link
    with."""

    nvcc: Path
    release: str
    includes: tuple[Path, ...]
    cublaslt: Path


def sources() -> Path:
    """Return the folder that holds the sources, in a checkout as in an installation."""
    return Path(str(importlib.resources.files("fp8core_backends.csrc")))


@functools.lru_cache(maxsize=1)
def find_toolchain() -> Toolchain | str:
    """Return the toolchain, or what is missing.

    nvcc is taken from ``CUDA_HOME``, then from the path, then from /usr/local/cuda, then from a
    package of NVIDIA's. Its major version must be that of torch's CUDA, whose libraries the
    extension uses at run time.
    """
    candidates = [folder / "bin" / "nvcc" for folder in settings.toolkits()]
    on_path = shutil.which("nvcc")
    candidates += [Path(on_path)] if on_path else []
    in_packages = [path for at in _packages() for path in sorted(at.glob("cu*/bin/nvcc"))]
    candidates += [_DEFAULT_NVCC, *in_packages]
    nvcc = next((path for path in candidates if os.path.lexists(path)), None)
    if nvcc is None:
        return "no nvcc in CUDA_HOME, on the path, in /usr/local/cuda or in a package of NVIDIA's"
    if not nvcc.is_file():
        return f"{nvcc} is no file"
    try:
        text = _version_text(nvcc)
    except UnsupportedError as error:
        return str(error)
    release = re.search(r"release (\d+)\.(\d+)", text)
    if release is None:
        return f"{nvcc} --version names no release"
    if torch.version.cuda and release[1] != torch.version.cuda.split(".")[0]:
        return f"{nvcc} is {release[1]}.{release[2]}, torch uses CUDA {torch.version.cuda}"
    return _libraries(nvcc, release[1], release[2])


def _packages() -> list[Path]:
    """Return the folders of NVIDIA's packages: beside torch, then where else Python finds them."""
    spec = importlib.util.find_spec("nvidia")
    beside = Path(torch.__file__).parent.parent / "nvidia"
    return [beside, *map(Path, (spec and spec.submodule_search_locations) or ())]


def _version_text(nvcc: Path) -> str:
    """Return the output of ``nvcc --version``.

    Raises:
        UnsupportedError: it cannot be run, fails or does not answer.
    """
    try:
        process = subprocess.Popen(
            [nvcc, "--version"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        raise UnsupportedError(f"{nvcc} cannot be run: {error.strerror}") from None
    with process:
        try:
            text, _ = process.communicate(timeout=_ANSWER_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with its children, which hold the pipe
            raise UnsupportedError(
                f"{nvcc} --version does not answer within {_ANSWER_S:g} s"
            ) from None
    if process.returncode != 0:
        status = process.returncode
        said = text.strip()[-_TAIL:]
        raise UnsupportedError(f"{nvcc} --version ended with exit status {status}: {said}")
    return text


def _libraries(nvcc: Path, major: str, minor: str) -> Toolchain | str:
    """Find headers and cuBLASLt: those of the packages that torch runs with, or the toolkit's."""
    torch_root = Path(torch.__file__).parent
    library = f"libcublasLt.so.{major}"
    # A script named nvcc may lie outside of the toolkit that it calls.
    toolkit, default = (at.resolve().parent.parent for at in (nvcc, _DEFAULT_NVCC))
    is_of_this_major = (default / "lib64" / library).is_file()
    toolkits = [toolkit, default] if is_of_this_major else [toolkit]
    # Of CUDA 12, each package has a folder of its own.
    names = _FOLDERS_OF_CUDA_12 if major == "12" else (f"cu{major}",)
    packages = [at / name for at in _packages() for name in names]
    places = {
        "cublasLt.h": [*(at / "include" for at in packages), *(at / "include" for at in toolkits)],
        "pybind11/pybind11.h": [torch_root / "include"],
        "Python.h": [Path(sysconfig.get_paths()["include"])],
        library: [*(at / "lib" for at in packages), *(at / "lib64" for at in toolkits)],
    }
    folders = {}
    for name, candidates in places.items():
        holders = [folder for folder in candidates if (folder / name).is_file()]
        if not holders:
            return f"no {name} in {', '.join(map(str, candidates))}"
        serving = [folder for folder in holders if _is_new_enough(folder / name)]
        if not serving:
            return (
                f"{holders[0] / name} is of a cuBLAS before 12.9, and the kernels take later ones"
            )
        folders[name] = serving[0]
    link = folders.pop(library) / library
    includes = [*folders.values()]
    if major == "12":
        includes += [at / "include" for at in packages if at.name == "cuda_runtime"]
        # Last, where nvcc itself would have it first: its cuBLAS may be older than the package's.
        includes.append(toolkits[0] / "include")
    return Toolchain(nvcc, f"{major}.{minor}", tuple(includes), link)


def _is_new_enough(file: Path) -> bool:
    """Whether a file is no header of a cuBLAS that lacks float32 scales of rows and blocks."""
    return file.name != "cublasLt.h" or _NEWEST_SCALE in file.read_text("utf-8", "replace")


def origin_of(cuda: str | None, architectures: Sequence[str]) -> origin.Origin:
    """Return the origin of a library of these sources."""
    version = importlib.metadata.version("fp8core")
    return origin.Origin(version, source_hash(), tuple(architectures), cuda or "")


@functools.lru_cache(maxsize=1)
def source_hash() -> str:
    """Return a hash of the sources, which a built module carries as ``SOURCE_HASH``."""
    digest = hashlib.sha256()
    root = sources()
    for file in _files(root):
        digest.update(f"{file.relative_to(root)}\0".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def target(architectures: Sequence[str]) -> Path:
    """Return where the extension for these architectures is kept, built or not."""
    options = (torch.version.cuda, sorted(architectures), _FLAGS, _VARIANTS)
    digest = hashlib.sha256(f"{source_hash()} {options}".encode()).hexdigest()[:16]
    suffix = sysconfig.get_config_var("EXT_SUFFIX")  # names the Python and the platform
    return settings.read().cache_dir / digest / f"{MODULE}{suffix}"


def find(architectures: Sequence[str]) -> Path | None:
    """Return a built extension for these architectures, if need be one for more; None if none is.

    Raises:
        UnsupportedError: another user could have written it.
    """
    supported = list(dict.fromkeys(ARCHITECTURES.values()))
    sizes = range(1, len(supported) + 1)
    sets = [names for size in sizes for names in itertools.combinations(supported, size)]
    targets = [target(names) for names in sets if set(architectures) <= set(names)]
    path = next((path for path in targets if os.path.lexists(path)), None)
    if path is not None:
        check(path)
    return path


def check(path: Path) -> None:
    """Refuse the extension at ``path`` unless only the user could have written it and its kernels.

    Raises:
        UnsupportedError: another user could have; names the path and the reason.
    """
    for library in _libraries_of(path):
        cache.check(library)


def build(architectures: Sequence[str] | None = None, *, output: Path | None = None) -> Path:
    """Compile for ``architectures``, such as ``("90a",)``, unless that was done; return the file.

    None means those of this machine's devices. Progress goes to stderr. With ``output``, a folder,
    the libraries are copied there, and beside them a file that says what they were made of.

    Raises:
        UnsupportedError: an architecture that the sources are not written for, no toolchain, the
            compiler's own errors, or a folder that is full or not the user's alone.
    """
    architectures = present() if architectures is None else architectures
    check_architectures(architectures)
    toolchain = find_toolchain()
    if isinstance(toolchain, str):
        raise UnsupportedError(f"cuda: cannot build the native library: {toolchain}.")
    path = target(architectures)
    cache.make(path.parent)
    check(path)
    if not _is_built(path):
        with cache.locked(path.parent):
            cache.clear(path.parent)
            if not _is_built(path):
                _keep(toolchain, architectures, path)
    if output is not None:
        try:
            output.mkdir(parents=True, exist_ok=True)
            for library in _libraries_of(path):
                shutil.copy2(library, output / library.name)
            text = origin_of(toolchain.release, architectures).text()
            (output / origin.NAME).write_text(text, "utf-8")
        except OSError as error:
            raise UnsupportedError(
                f"cuda: no copy in {output}, as --output asks: {error}"
            ) from None
    return path


def check_architectures(architectures: Sequence[str]) -> None:
    """Refuse architectures that the sources are not written for, and none at all.

    Raises:
        UnsupportedError: names the first of them, and those that the sources are written for.
    """
    supported = list(dict.fromkeys(ARCHITECTURES.values()))
    wrong = [name for name in architectures if name not in supported]
    if wrong or not architectures:
        problem = f"{wrong[0]!r} is not one of them" if wrong else "this machine has none of them"
        raise UnsupportedError(
            f"cuda: the sources are written for architectures {', '.join(supported)}; {problem}."
            f"{did_you_mean(wrong[0], supported) if wrong else ' Name one with --arch.'}"
        )


def present() -> list[str]:
    """Return the architectures of this machine's devices that the sources are written for."""
    count = torch.cuda.device_count()
    capabilities = {torch.cuda.get_device_capability(index) for index in range(count)}
    return sorted({ARCHITECTURES[each] for each in capabilities if each in ARCHITECTURES})


def _libraries_of(path: Path) -> tuple[Path, Path]:
    """Return the library of kernels of the extension at ``path``, and the extension."""
    return path.with_name(KERNELS), path


def _is_built(path: Path) -> bool:
    return all(library.is_file() for library in _libraries_of(path))


def _files(root: Path) -> list[Path]:
    kinds = {".cu", ".cuh", ".cpp", ".h"}
    return sorted(file for file in root.rglob("*") if file.suffix in kinds)


def _keep(toolchain: Toolchain, architectures: Sequence[str], path: Path) -> None:
    """Compile in a temporary folder beside ``path``, and move there what is missing: the kernels,
    which a build for another Python may have left, and then the extension."""
    kernels = path.with_name(KERNELS)
    try:
        with tempfile.TemporaryDirectory(prefix=cache.LEFTOVER, dir=path.parent) as folder:
            compiler = Compiler(toolchain, architectures, Path(folder))
            if not kernels.is_file():
                _settle(compiler.kernels(), kernels)
            _settle(compiler.extension(kernels), path)
    except OSError as error:
        raise UnsupportedError(
            f"cuda: the native library cannot be kept in {path.parent}: {error}. {cache.remedy()}"
        ) from None


def _settle(library: Path, path: Path) -> None:
    library.chmod(0o755)  # the linker follows the umask, which may let a group write
    with library.open("rb") as stream:
        os.fsync(stream.fileno())  # its content is on the disk before its name is
    os.replace(library, path)


class Compiler(NamedTuple):
    """Compiles the sources for ``architectures`` in ``folder``."""

    toolchain: Toolchain
    architectures: Sequence[str]
    folder: Path

    def kernels(self) -> Path:
        """Return the library of kernels."""
        units = [unit for unit in _units(sources()) if not unit[0].startswith(_BINDINGS)]
        names = ", sm_".join(self.architectures)
        cache.say(f"compiling {len(units)} files for sm_{names} with nvcc; once")
        objects = self._objects(units)
        # Both libraries are found by name at run time: torch has loaded them by then.
        libraries = ["-cudart=shared", "-Xlinker", self.toolchain.cublaslt]
        return self._linked(KERNELS, [*objects, *libraries, f"-Xlinker=-soname={KERNELS}"])

    def extension(self, kernels: Path) -> Path:
        """Return the extension for this Python, which finds ``kernels`` in its own folder."""
        units = [unit for unit in _units(sources()) if unit[0].startswith(_BINDINGS)]
        cache.say(f"compiling {len(units)} files of bindings")
        objects = self._objects(units)
        return self._linked(
            f"{MODULE}.so", [*objects, "-cudart=none", kernels, "-Xlinker=-rpath=$ORIGIN"]
        )

    def _objects(self, units: Sequence[tuple[str, tuple[str, ...]]]) -> list[Path]:
        root, toolchain = sources(), self.toolchain
        flags = [*_FLAGS, f"-I{root / 'include'}", *(f"-isystem={at}" for at in toolchain.includes)]
        flags.append(f'-DFP8CORE_SOURCE_HASH="{source_hash()}"')
        flags.append(f'-DFP8CORE_ARCHITECTURES="{" ".join(sorted(self.architectures))}"')
        flags += [f"-gencode=arch=compute_{name},code=sm_{name}" for name in self.architectures]
        jobs, objects = [], []
        for unit, macros in units:
            name = " ".join((unit, *macros))
            objects.append(self.folder / f"{hashlib.sha256(name.encode()).hexdigest()[:16]}.o")
            command = [toolchain.nvcc, *flags, *macros, "-c", root / unit, "-o", objects[-1]]
            jobs.append(_Job(name, command, self.folder))
        done = 0
        with ThreadPoolExecutor(min(len(jobs), os.cpu_count() or 1)) as pool:
            for name in pool.map(_run, jobs):
                done += 1
                cache.say(f"[{done}/{len(jobs)}] {name}")
        return objects

    def _linked(self, name: str, inputs: Sequence[object]) -> Path:
        library = self.folder / name
        # Stripped: the names of kernels are in the code of the device.
        command = [self.toolchain.nvcc, "-shared", "-Xlinker=-s", *inputs, "-o", library]
        _run(_Job(name, command, self.folder))
        return library


def _units(root: Path) -> list[tuple[str, tuple[str, ...]]]:
    """Return a source's path in ``root`` and its macros, for each object of a build."""
    names = (
        file.relative_to(root).as_posix() for file in _files(root) if file.suffix in (".cu", ".cpp")
    )
    return [(name, macros) for name in names for macros in _VARIANTS.get(name, ((),))]


class _Job(NamedTuple):
    """A command of the compiler, the name of its unit, and the folder for its temporary files."""

    unit: str
    command: list[object]
    folder: Path


def _run(job: _Job) -> str:
    try:
        ran = subprocess.run(
            list(map(str, job.command)),
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            env={**os.environ, "TMPDIR": str(job.folder)},  # so that nothing outlives a kill
        )
    except OSError as error:
        raise UnsupportedError(f"cuda: {job.command[0]} cannot be run: {error.strerror}.") from None
    if ran.returncode != 0:
        output = (ran.stdout + ran.stderr)[-_TAIL:]
        raise UnsupportedError(
            f"cuda: building the native library failed at {job.unit} with exit status "
            f"{ran.returncode}. FP8CORE_BUILD=0 uses torch's own kernels instead.\n{output}"
        )
    return job.unit
