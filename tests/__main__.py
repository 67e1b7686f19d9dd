"""Every check that a change must pass: ``python -m tests [pytest arguments]``.

Stops at the first check that fails, with its exit status; mypy runs beside the tests.
``python -m tests --all`` adds the tests marked ``slow``: distributions, and all of what other tests
sample. ``--numprocesses 0`` runs the tests one after the other, for a debugger or their output.
``python -m tests --gpu [parts]`` runs what needs a GPU instead: :mod:`tests.on_gpu`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import IO

from tests import on_gpu

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {
    "fp8core": ROOT / "fp8core",
    "fp8core_backends": ROOT / "backends",
    "fp8core_pytest": ROOT / "fp8core_pytest",
}
# Files are spread over a few cores, each whole on one: its tests share what they prepare. The long
# ones begin, in the order of conftest.py.
PARALLEL = ("--numprocesses", "logical", "--maxprocesses", "4", "--dist", "loadfile")
PARALLEL += ("--no-loadscope-reorder",)


def status_of(*command: str, cwd: Path = ROOT, output: IO[str] | None = None) -> int:
    """Run a module of this interpreter in ``cwd``; its exit status."""
    print("$ python -m", *command, flush=True)
    command = (sys.executable, "-m", *command)
    return subprocess.run(command, cwd=cwd, check=False, stdout=output, stderr=output).returncode


def exit_if_failed(status: int) -> None:
    """Exit with the status of a command that failed."""
    if status:
        sys.exit(status)


def check_native_format() -> None:
    """Run clang-format over the sources of ``csrc``: a file in another style is an error."""
    import clang_format  # here, as a GPU's owner may not have it

    options = ("--dry-run", "-Werror")
    print("$ clang-format", *options, "csrc/**", flush=True)
    kinds = {".cpp", ".cu", ".cuh", ".h"}
    files = sorted(str(file) for file in (ROOT / "csrc").rglob("*") if file.suffix in kinds)
    program = clang_format.get_executable("clang-format")
    exit_if_failed(subprocess.run((program, *options, *files), check=False).returncode)


def type_check(output: IO[str] | None = None) -> int:
    """Status of mypy, run where ``backends/`` has its installed name, however it is installed."""
    names = [argument for name in PACKAGES for argument in ("-p", name)]
    config = ["--config-file", str(ROOT / "pyproject.toml")]
    cache = ["--cache-dir", str(ROOT / ".mypy_cache")]
    with TemporaryDirectory() as folder:
        for name, source in PACKAGES.items():
            Path(folder, name).symlink_to(source, target_is_directory=True)
        command = ("mypy", "--strict", *config, *cache, *names)
        return status_of(*command, cwd=Path(folder), output=output)


def main(arguments: list[str]) -> None:
    """Run the checks in order; with ``--gpu``, the others."""
    if arguments[:1] == ["--gpu"]:
        sys.exit(on_gpu.main(arguments[1:]))
    parser = argparse.ArgumentParser(
        prog="python -m tests",
        usage="%(prog)s [--all] [pytest arguments] | %(prog)s --gpu [--help] [parts]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--all", action="store_true", help="run the tests marked `slow`, too")
    parser.add_argument("--gpu", action="store_true", help="run what needs a GPU, and only that")
    options, rest = parser.parse_known_args(arguments)
    if options.gpu:
        parser.error("--gpu comes first: `python -m tests --gpu [parts]`")
    exit_if_failed(status_of("ruff", "format", "--check", "."))
    exit_if_failed(status_of("ruff", "check", "."))
    check_native_format()
    chosen = () if options.all else ("-m", "not slow")
    with ThreadPoolExecutor(1) as beside, TemporaryFile("w+", encoding="utf-8") as output:
        types = beside.submit(type_check, output)
        tests = status_of("pytest", *PARALLEL, *chosen, *rest)
        type_status = types.result()
        output.seek(0)
        print("mypy:", output.read(), flush=True)
    exit_if_failed(tests)
    exit_if_failed(type_status)


if __name__ == "__main__":
    main(sys.argv[1:])
