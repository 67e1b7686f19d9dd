"""What becomes of the other rank when one of two fails.

    python -m tests.on_ranks.faults [--device cpu] [--only "fsdp, killed"]

Rank 1 raises between forward and backward, has rows or weights of another shape, is killed there,
or is killed while it saves. Rank 0 goes on: it has to end with an error that names rank 1, within
the timeout of the group, and a checkpoint that rank 1 left half-written has to be refused. Prints
for each case how long that took and the last words of rank 0.
"""

from __future__ import annotations

import argparse
import datetime
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import fp8core
from fp8core.distributed import gather_quantized, watch_ranks
from tests.benchmarks.measuring import markdown
from tests.benchmarks.measuring.libraries import swiglu_mlp
from tests.benchmarks.parallel_gpu.together import Ranks, join, leave_multicast_off

__all__ = ["CASES", "Outcome", "outcome_of"]

TIMEOUT_S = 15
LATE_S = 20
"""Beyond the timeout: the watchdog of NCCL looks once in a while, and writes what it found."""
STARTING_S = 90
RECIPE = "current"
ROWS, HIDDEN, FFN = 64, 128, 256
WARM_UP, STEPS = 2, 4
RANK, OTHER = 1, 0
"""The rank that fails, and the one that goes on."""


def sequence_parallel(ranks: Ranks, ffn: int) -> nn.Module:
    """Return an MLP whose columns and rows are split, by collectives of the library."""
    mlp: nn.Module = swiglu_mlp("fp8core", HIDDEN, ffn, ranks.device.torch_device, ranks.group)
    return mlp


def fsdp(ranks: Ranks, ffn: int) -> nn.Module:
    """Return MLPs whose weights are sharded, by collectives of torch."""
    device = ranks.device.torch_device
    model = nn.Sequential(*(swiglu_mlp("fp8core", HIDDEN, ffn, device) for _ in range(2)))
    gather_quantized(model, RECIPE)
    mesh = DeviceMesh.from_group(ranks.group, device.type)
    for module in (*model, model):
        fully_shard(module, mesh=mesh)
    return model


def raises() -> None:
    """Fail as a data loader does."""
    raise RuntimeError("no more data")


def dies() -> None:
    """End at once."""
    os.kill(os.getpid(), signal.SIGKILL)


def wait(ranks: Ranks) -> None:
    """Wait for the device of this rank, not for the other one."""
    if ranks.device.torch_device.type == "cuda":
        torch.cuda.synchronize()


class Case(NamedTuple):
    """A model, what its rank does between forward and backward, and its sizes."""

    build: Callable[[Ranks, int], nn.Module]
    between: Callable[[], None] = lambda: None
    rows: int = ROWS
    ffn: int = FFN
    is_saving: bool = False

    def step(self, model: nn.Module, ranks: Ranks, *, fails: bool) -> None:
        """Run forward and backward of this rank's rows, and what happens in between."""
        rows = self.rows if fails else ROWS
        x = torch.randn(rows, HIDDEN, device=ranks.device.torch_device).bfloat16()
        with fp8core.autocast(recipe=RECIPE, amax_reduction_group=ranks.group):
            y = model(x.requires_grad_())
        if fails:
            wait(ranks)
            self.between()
        y.sum().backward()

    def save(self, model: nn.Module, ranks: Ranks, folder: str) -> None:
        """Save a checkpoint, in which rank 1 dies once it has written its part."""
        writer = dcp.FileSystemWriter(folder)
        write = writer.write_data

        def written(*arguments: Any) -> Any:
            done = write(*arguments)
            done.wait()
            dies()
            return done

        if ranks.rank == RANK:
            writer.write_data = written  # type: ignore[method-assign]
        dcp.save(get_model_state_dict(model), storage_writer=writer, process_group=ranks.group)

    def run(self, ranks: Ranks, folder: str) -> None:
        """Train as one of the ranks; rank 1 fails after some steps, or from the first."""
        is_other = ranks.rank == RANK
        model = self.build(ranks, self.ffn if is_other else FFN)
        for _ in range(WARM_UP):
            self.step(model, ranks, fails=False)
        if self.is_saving:
            self.save(model, ranks, folder)
        for _ in range(STEPS):
            self.step(model, ranks, fails=is_other)
            wait(ranks)


CASES = {
    "sequence parallel, raises": Case(sequence_parallel, raises),
    "sequence parallel, other rows": Case(sequence_parallel, rows=2 * ROWS),
    "sequence parallel, killed": Case(sequence_parallel, dies),
    "fsdp, raises": Case(fsdp, raises),
    "fsdp, other weights": Case(fsdp, ffn=2 * FFN),
    "fsdp, killed": Case(fsdp, dies),
    "fsdp, killed while it saves": Case(fsdp, is_saving=True),
}
COLUMNS = ("case", "other rank ended", "after, s", "names rank 1", "checkpoint", "its last words")


class Outcome(NamedTuple):
    """How a case went: the status of rank 0, None if it hung, the seconds that it went on without
    rank 1, what it said, and whether the half-written checkpoint was refused."""

    status: int | None
    seconds: float
    text: str
    is_refused: bool | None = None

    @property
    def is_success(self) -> bool:
        """Whether rank 0 ended in time with an error that names rank 1, and half a checkpoint is
        not taken for a whole one."""
        is_ended = self.status not in (None, 0) and self.seconds <= TIMEOUT_S + LATE_S
        return is_ended and self.is_named and self.is_refused is not False

    @property
    def is_named(self) -> bool:
        """Whether rank 0 said which rank failed."""
        return re.search(rf"\brank {RANK}\b|\branks \[{RANK}\]", self.text) is not None

    def row(self, name: str) -> str:
        """Return the line of the table."""
        errors = [line for line in self.text.splitlines() if re.search(r"Error\b.*:", line)]
        refused = {None: "", True: "refused", False: "TAKEN FOR WHOLE"}[self.is_refused]
        return markdown.line(
            (
                name,
                "HUNG" if self.status is None else f"with {self.status}",
                f"{self.seconds:.1f}",
                "yes" if self.is_named else "no",
                refused,
                (errors or self.text.splitlines() or [""])[-1].strip()[:240],
            )
        )


def outcome_of(name: str, device: str) -> Outcome:
    """Run a case."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tests.on_ranks.faults", "--device", device]
        logs = [Path(folder, f"rank{rank}.txt") for rank in (OTHER, RANK)]
        children = []
        for rank, log in enumerate(logs):
            with log.open("w") as stream:
                children.append(
                    subprocess.Popen([*command, name, str(rank), folder], stderr=stream)
                )
        try:
            return _watched(CASES[name], children, logs[OTHER], Path(folder, "checkpoint"))
        finally:
            for child in children:
                child.kill()
                child.wait()


def _watched(
    case: Case, children: Sequence[subprocess.Popen[bytes]], log: Path, checkpoint: Path
) -> Outcome:
    """Wait until both ranks have ended, or should have."""
    started = time.monotonic()
    ended: dict[int, float] = {}
    while len(ended) < len(children):
        for rank, child in enumerate(children):
            if rank not in ended and child.poll() is not None:
                ended[rank] = time.monotonic()
        limit = min(ended.values(), default=started + STARTING_S) + TIMEOUT_S + LATE_S
        if time.monotonic() > limit:
            break
        time.sleep(0.05)
    end, began = time.monotonic(), min(ended.values(), default=started)
    seconds = max(0.0, ended.get(OTHER, end) - began)
    text = log.read_text("utf-8", "replace")
    refused = _is_refused(checkpoint) if case.is_saving else None
    return Outcome(children[OTHER].poll(), seconds, text, refused)


def _is_refused(checkpoint: Path) -> bool:
    """Whether a checkpoint that was not finished does not load."""
    assert any(checkpoint.iterdir())
    logging.disable(logging.CRITICAL)  # it tells of each file that it looked for
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load({"0.fc1_weight": torch.zeros(1)}, checkpoint_id=checkpoint, no_dist=True)
    except (dcp.api.CheckpointException, FileNotFoundError):
        return True
    finally:
        logging.disable(logging.NOTSET)
    return False


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases, or be a rank of one; return how many failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument(
        "--at-once", type=int, default=len(CASES), help="cases that run beside each other"
    )
    parser.add_argument("of_rank", nargs="*", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.of_rank:
        name, rank, folder = args.of_rank
        torch.set_num_threads(1)
        timeout = datetime.timedelta(seconds=TIMEOUT_S)
        ranks = join(int(rank), 2, args.device, folder, timeout)
        watch_ranks(ranks.group)
        CASES[name].run(ranks, str(Path(folder, "checkpoint")))
        return 0
    leave_multicast_off()
    print(*markdown.head(COLUMNS), sep="\n", flush=True)
    failed = 0
    with ThreadPoolExecutor(args.at_once) as pool:
        cases = {pool.submit(outcome_of, name, args.device): name for name in args.only}
        for case in as_completed(cases):  # what is late hides no other row
            outcome = case.result()
            print(outcome.row(cases[case]), flush=True)
            failed += not outcome.is_success
    return failed


if __name__ == "__main__":
    sys.exit(main())
