"""What the owner of a machine with two GPUs runs: everything that goes over ranks, by NCCL.

    python -m tests.on_ranks [PART ...] [--logs DIR]     # all parts, less than ten minutes
    python -m tests.on_ranks --device cpu [PART ...]     # tiny sizes over gloo: a trial run
    python -m tests.on_ranks.training --steps 1500       # the whole training, half an hour

Each part is a process with a limit of time. Prints the tables of the parts, whether each passed,
and its row for docs/measured.md. The exit status is 0 if all did.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from tests.benchmarks.measuring import records
from tests.benchmarks.parallel_gpu import __main__ as parallel_gpu
from tests.benchmarks.parallel_gpu import report
from tests.benchmarks.parallel_gpu.together import leave_multicast_off
from tests.on_gpu import BUILD, HEAD, ROOT, Part, commit, failures, run
from tests.on_ranks import layers, state
from tests.ranks import DEVICE_TYPE

__all__ = ["PARTS", "main"]

RANKS, SHOWN_LINES = 2, 40
TOTAL_LIMIT_S = 590.0
TRIAL = 4.0
"""The times of a limit that a trial run has: its processes may share two cores."""
PEERS = {
    "cuda": ("--size", "125M", "--seconds", "15"),
    "cpu": ("--size", "trial", "--seconds", "0", "--library", "torch", "fp8core"),
}
PYTEST = ("-m", "pytest", "-q", "-p", "no:benchmark", "-p", "no:cacheprovider")
PYTEST += ("-n", str(max(10, 3 * (os.cpu_count() or 1) // 4)), "--dist", "loadfile")
TESTS = (
    *("tests/distributed", "tests/collectives", "tests/modules/test_amax_reduction.py"),
    *("tests/modules/test_overlap.py", "tests/modules/test_parallel.py"),
    *("tests/modules/test_parallel_graphs.py", "tests/modules/test_parallel_layers.py"),
    *("tests/modules/test_parted_ranks.py", "tests/modules/test_repeated_collectives.py"),
)


def peers() -> int:
    """Measure sharded decoders, and print the table; return how many cells failed."""
    with tempfile.TemporaryDirectory() as out:
        where = ("--device", DEVICE_TYPE, "--out", out)
        failed = parallel_gpu.main(["--kind", "decoder", *where, *PEERS[DEVICE_TYPE]])
        print(report.tables(records.read(Path(out))), flush=True)
    return failed


HERE = {"layers": layers.main, "peers": peers, "state": state.main}
"""Programs that start ranks on devices of the environment's TEST_DEVICE."""


class Limited(NamedTuple):
    """A command, its meaning, the most seconds that it takes, and what tells it the device: an
    option, or the environment."""

    meaning: str
    command: tuple[str, ...]
    limit_s: float
    has_option: bool = True
    trial: tuple[str, ...] = ()

    def part(self, device: str) -> Part:
        """Return the part on a device."""
        option = ("--device", device) if self.has_option else ()
        trial = self.trial if device == "cpu" else ()
        return Part(self.meaning, (*self.command, *option, *trial), device == "cuda")


_HERE = ("-m", "tests.on_ranks", "--here")
PARTS = {
    "state": Limited("a checkpoint of two ranks", (*_HERE, "state"), 90, has_option=False),
    "faults": Limited("one of two ranks fails", ("-m", "tests.on_ranks.faults"), 180),
    "layers": Limited("layers, and one process", (*_HERE, "layers"), 150, has_option=False),
    "training": Limited(
        "a decoder on one and two devices",
        ("-m", "tests.on_ranks.training"),
        240,
        trial=("--steps", "10", "--short", "0"),
    ),
    "peers": Limited(
        "a sharded decoder, torch's and torchao's", (*_HERE, "peers"), 150, has_option=False
    ),
    "tests": Limited("tests of ranks", (*PYTEST, *TESTS), 400, has_option=False),
}


def told(log: Path) -> tuple[list[str], list[str]]:
    """Return the lines of tables in a part's output, and the last of the others."""
    lines = log.read_text("utf-8", "replace").splitlines() if log.exists() else []
    texts = [line for line in lines if not line.startswith("|")]
    return [line for line in lines if line.startswith("|")], texts[-SHOWN_LINES:]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts that ``arguments`` name, or all; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.on_ranks",
        description=__doc__,
        epilog="\n".join(f"{name}: {own.meaning}" for name, own in PARTS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help="default: all")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--logs", type=Path, metavar="DIR", help="for output and JUnit files")
    parser.add_argument("--here", choices=list(HERE), help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if unknown := [name for name in args.parts if name not in PARTS]:
        parser.error(f"no part {unknown[0]!r}; the parts are {', '.join(PARTS)}")
    if args.here is not None:
        return HERE[args.here]()
    if args.device == "cuda" and torch.cuda.device_count() < RANKS:
        print(f"{torch.cuda.device_count()} GPUs; {RANKS} are needed, or --device cpu to try it")
        return 2
    leave_multicast_off()
    if args.device == "cuda":  # compiled before the clocks run
        subprocess.run([sys.executable, *BUILD], cwd=ROOT, check=True)
    folder = (args.logs or Path(tempfile.mkdtemp(prefix="fp8core-ranks-"))).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    more = TRIAL if args.device == "cpu" else 1.0
    outcomes, end = {}, time.monotonic() + TOTAL_LIMIT_S * more
    for name in args.parts or PARTS:
        limit = min(PARTS[name].limit_s * more, end - time.monotonic())
        outcomes[name] = run(PARTS[name].part(args.device), name, folder, limit)
        tables, texts = told(folder / f"{name}.log")
        print(f"\n{name}: {PARTS[name].meaning}", *tables, sep="\n")
        if (folder / f"{name}.xml").exists():
            print(*failures(folder / f"{name}.xml"), sep="\n")
        elif not outcomes[name].is_success:
            print(*texts, sep="\n")
        print(f"{name}: {'passed' if outcomes[name].is_success else 'FAILED'}", flush=True)
    device = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    where, at = f"{RANKS} x {device}, torch {torch.__version__}", commit()
    print(f"\n{HEAD}", *(own.row(name, where, at) for name, own in outcomes.items()), sep="\n")
    print(f"\noutput and JUnit files: {folder}")
    return int(not all(outcome.is_success for outcome in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())
