"""Every kernel of csrc under compute-sanitizer: ``python -m tests.backends.cuda.sanitize``.

memcheck watches every kernel, cuBLASLt's and torch's included. racecheck (shared memory) and
synccheck (barriers) watch fp8core's kernels alone; initcheck has to see all writers.
:mod:`groups` says which cases each of them runs.

The tools run at once, each over its cases in processes of its own, one or SHARES. The exit status
is 1 if one found an error, or if a group did not call the native entries that it is there for. Each
tensor is an allocation of its own, so that what lies behind its end is nobody's. ``--cases`` runs
the cases alone, as the tools do; ``--table`` prints which tool runs what.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from fp8core_backends.cuda import native
from tests.backends.cuda.sanitize.groups import GROUPS, TOOLS, counted, groups_of, table

OURS = ("--kernel-name", "kns=fp8core")
OPTIONS = {"memcheck": ("--padding", "64"), "racecheck": OURS, "synccheck": OURS, "initcheck": ()}
SHARES = {"memcheck": 3}  # cuBLASLt's and torch's kernels take it three times as long
FAILED = 9  # the status that a tool ends with when it found an error


def run_cases(names: list[str]) -> None:
    """Run the cases; the autotuner's cache is an empty folder, so that it times algorithms.

    Raises:
        RuntimeError: a group did not call an entry that it is there for.
    """
    calls = counted(native.load())
    with tempfile.TemporaryDirectory() as folder:
        os.environ["FP8CORE_CACHE_DIR"] = folder
        torch.manual_seed(0)
        for name in names:
            calls.clear()
            GROUPS[name].run()
            torch.cuda.synchronize()
            missed = [entry for entry in GROUPS[name].entries if not calls[entry]]
            if missed:
                raise RuntimeError(f"{name} called no {', '.join(missed)}")
            print(f"{name} ran", flush=True)


def start(sanitizer: str, tool: str, names: list[str], path: Path) -> subprocess.Popen[bytes]:
    """Run the cases under a tool, whose output goes to a file."""
    command = [sanitizer, "--tool", tool, *OPTIONS[tool], "--error-exitcode", str(FAILED)]
    command += [sys.executable, "-m", "tests.backends.cuda.sanitize", "--cases", *names]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    with path.open("wb") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)


def judge(tool: str, status: int, names: list[str], text: str) -> bool:
    """Print what a tool said of the groups; whether it ran all of them and found nothing."""
    summary = [line for line in text.splitlines() if "SUMMARY" in line]
    ran = [name for name in names if f"{name} ran\n" in text]
    print(f"{tool}: status {status}, {', '.join(ran)} ran; {' '.join(summary)}", flush=True)
    is_right = not status and ran == names
    if not is_right:
        print(text[-4000:], flush=True)
    return is_right


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="+", choices=GROUPS)
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=list(TOOLS))
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--logs", type=Path, help="folder for each tool's output")
    parser.add_argument("--table", action="store_true", help="print which tool runs which groups")
    args = parser.parse_args()
    if args.table:
        print("\n".join(table()))
        return 0
    if args.cases:
        run_cases(args.cases)
        return 0
    sanitizer = shutil.which("compute-sanitizer", path=os.environ.get("PATH", ""))
    sanitizer = sanitizer or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if sanitizer is None:
        print("needs compute-sanitizer, which comes with CUDA's toolkit, on the path")
        return 2
    native.load()  # built once, before four processes ask for it
    folder = args.logs or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    running = []
    for tool in args.tools:
        groups, shares = [one for one in groups_of(tool) if one in args.groups], SHARES.get(tool, 1)
        for share in range(min(shares, len(groups))):
            names, log = groups[share::shares], folder / f"{tool}{share}.log"
            running.append((tool, names, log, start(sanitizer, tool, names, log)))
    judged = []
    for tool, names, log, process in running:
        try:
            status = process.wait()
        except KeyboardInterrupt:  # what each of them has run and found by then is printed
            for *_, one in running:
                one.terminate()
            status = process.wait()
        judged.append(judge(tool, status, names, log.read_text(errors="replace")))
    return int(not all(judged))


if __name__ == "__main__":
    sys.exit(main())
