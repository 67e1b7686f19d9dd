"""One rank: ``python -m tests.benchmarks.parallel_gpu.rank JSON RANK FOLDER``."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.layers_gpu.transformer import use_cudnn_of_torch
from tests.benchmarks.measuring import turns
from tests.benchmarks.measuring.command import DONE
from tests.benchmarks.measuring.contest import Contest
from tests.benchmarks.measuring.records import Run
from tests.benchmarks.parallel_gpu.cases import FILE, Job
from tests.benchmarks.parallel_gpu.contestants import ALONE, Entrant, contestants
from tests.benchmarks.parallel_gpu.together import Ranks, join, leave_multicast_off

__all__ = ["measure"]

WARM_UP_STEPS = 4


def measure(job: Job, ranks: Ranks) -> None:
    """Measure every contestant; rank 0 writes the records."""
    run = Run(Path(job.out), FILE, {"kind": job.kind, "size": job.size_name})
    contest = Contest(ranks.device)

    def write(name: str, **values: Any) -> None:
        if ranks.rank == 0:
            run.write(name, **values)

    entrants = {}
    for name, make in contestants(job, ranks).items():
        before = contest.allocated()
        entrant = _entered(name, make, ranks)
        if entrant is None:
            continue
        entrants[name] = entrant
        peak = ranks.agree(contest.peak_mib(entrant.step, before))
        calls, sent = (0, 0) if entrant.traffic is None else entrant.traffic()
        write("figures", contestant=name, peak_mib=peak, collectives=calls, bytes_sent=sent)
    steps: turns.Calls = {name: entrant.step for name, entrant in entrants.items()}
    for name in job.measures:
        write(name, us=ranks.slowest(contest.take(name, steps, _stop(job))))
    write(
        DONE,
        recipes=job.recipes,
        libraries=job.libraries,
        ranks=job.ranks,
        **contest.conditions("transformer_engine", "torchao"),
    )


def _entered(name: str, make: Any, ranks: Ranks) -> Entrant | None:
    """Make and warm up a contestant; None, on every rank, if it fails on one."""
    entrant, failure = None, ""
    try:
        entrant = make()
        for _ in range(WARM_UP_STEPS):
            entrant.step()
        ranks.device.clock.synchronize()
    except ImportError as error:
        failure = str(error)
    except Exception:  # noqa: BLE001  whatever stops one, the others take their turns
        failure = traceback.format_exc()
    if failure:
        print(f"  {name}: failed on rank {ranks.rank}: {failure}", flush=True)
        ranks.device.clock.synchronize()
    has_failed = ranks.agree(float(bool(failure)))
    return None if has_failed else entrant


def _stop(job: Job) -> turns.Stop:
    """Turns end when fp8core's ratios to its first peer, or to itself alone, are known."""
    pairs = []
    for name in job.recipes:
        own = f"fp8core {name}"
        peer = f"te {name}" if job.kind == "sequence_parallel" else "torchao tensorwise"
        pairs += [(own, peer), (own, f"{own} {ALONE}")]
    return turns.Stop(job.seconds, tuple(pairs), job.width)


def main() -> None:
    """Join the group, measure, and leave without Python's teardown."""
    job = Job.from_json(sys.argv[1])
    leave_multicast_off()
    use_cudnn_of_torch(os.environ)
    torch.set_num_threads(1)
    measure(job, join(int(sys.argv[2]), job.ranks, job.device, sys.argv[3]))
    sys.stdout.flush()
    os._exit(0)  # threads of collectives may outlive the interpreter


if __name__ == "__main__":
    main()
