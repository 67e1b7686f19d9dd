"""Every check that a change must pass: ``python -m tests [--fast] [pytest arguments]``.

Stops at the first check that fails, with its exit status. ``--fast`` skips the packaging tests.
``--numprocesses 0`` runs the tests one after the other, for a debugger or their output.
``python -m tests --gpu [parts]`` runs what needs a GPU instead: :mod:`tests.on_gpu`.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tests import on_gpu

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {
    "fp8core": ROOT / "fp8core",
    "fp8core_backends": ROOT / "backends",
    "fp8core_pytest": ROOT / "fp8core_pytest",
}
# Files are spread over a few cores, each whole on one: its tests share what they prepare.
PARALLEL = ("--numprocesses", "logical", "--maxprocesses", "4", "--dist", "loadfile")


def run(*command: str, cwd: Path = ROOT) -> None:
    """Run a module of this interpreter in ``cwd``; exit with its status if it fails."""
    print("$ python -m", *command, flush=True)
    call(sys.executable, "-m", *command, cwd=cwd)


def call(*command: str, cwd: Path = ROOT) -> None:
    """Run a command in ``cwd``; exit with its status if it fails."""
    status = subprocess.run(command, cwd=cwd, check=False).returncode
    if status:
        sys.exit(status)


def check_native_format() -> None:
    """Run clang-format over the sources of ``csrc``: a file in another style is an error."""
    import clang_format  # here, as a GPU's owner may not have it

    options = ("--dry-run", "-Werror")
    print("$ clang-format", *options, "csrc/**", flush=True)
    kinds = {".cpp", ".cu", ".cuh", ".h"}
    files = sorted(str(file) for file in (ROOT / "csrc").rglob("*") if file.suffix in kinds)
    call(clang_format.get_executable("clang-format"), *options, *files)


def type_check() -> None:
    """Run mypy where ``backends/`` goes by its installed name, however fp8core is installed."""
    names = [argument for name in PACKAGES for argument in ("-p", name)]
    config = ["--config-file", str(ROOT / "pyproject.toml")]
    cache = ["--cache-dir", str(ROOT / ".mypy_cache")]
    with TemporaryDirectory() as folder:
        for name, source in PACKAGES.items():
            Path(folder, name).symlink_to(source, target_is_directory=True)
        run("mypy", "--strict", *config, *cache, *names, cwd=Path(folder))


def main(arguments: list[str]) -> None:
    """Run the checks in order; with ``--gpu``, the others."""
    if arguments[:1] == ["--gpu"]:
        sys.exit(on_gpu.main(arguments[1:]))
    fast = [argument for argument in arguments if argument == "--fast"]
    rest = [argument for argument in arguments if argument != "--fast"]
    run("ruff", "format", "--check", ".")
    run("ruff", "check", ".")
    check_native_format()
    type_check()
    run("pytest", *PARALLEL, *(["-m", "not packaging"] if fast else []), *rest)


if __name__ == "__main__":
    main(sys.argv[1:])
