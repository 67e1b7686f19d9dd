"""Layers over several ranks, forward and backward, against their peers on the GPUs of one host.

    python -m tests.benchmarks.parallel_gpu --ranks 2 --out results
    python -m tests.benchmarks.parallel_gpu --kind fsdp --size 8B
    python -m tests.benchmarks.parallel_gpu --merge results
    python -m tests.benchmarks.parallel_gpu --device cpu --size trial   # a trial run

sequence_parallel  LayerNormMLP (RMSNorm, SwiGLU, no bias), its columns split over the ranks, each
                   of which has a part of the tokens. ``alone`` is the same shards on all tokens
                   without communication, ``collectives`` the collectives without a layer
fsdp               such layers under fully_shard with a step of AdamW: bf16, torchao with FP8
                   all-gather, fp8core with a quantized gather
decoder            a decoder of bytes in the same ways, its layers compiled but fp8core's: 125M is
                   that of docs/examples/train_decoder.py

Each kind and size starts its ranks once; contestants take turns of some milliseconds, in one
shuffled order for all ranks, which begin each slice together. A turn's time is that of the slowest
rank. Ratios are medians of the turns' ratios with intervals of 95 %.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence

from tests.benchmarks.measuring import records
from tests.benchmarks.measuring.command import parser_of, run_ranks
from tests.benchmarks.parallel_gpu.cases import KINDS, RECIPES, SIZES, Job

__all__ = ["main"]

LIBRARIES = ("torch", "torchao", "te", "fp8core", "collectives")
TIMEOUT_S = 900


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, or print what was measured; return the number of cells that failed."""
    parser = parser_of(
        "parallel_gpu", __doc__, kind=KINDS, size=SIZES, recipe=RECIPES, library=LIBRARIES
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, default=12.0, help="most of a measure's turns")
    parser.add_argument("--width", type=float, default=0.01, help="of intervals, to end turns")
    args = parser.parse_args(arguments)
    if args.merge:
        from tests.benchmarks.parallel_gpu.report import tables  # which imports torch

        print(tables(records.read(*args.merge)))
        return 0
    failed = 0
    pairs = itertools.product(args.kind, args.size)
    for kind, size in pairs:
        if size not in KINDS[kind]:
            continue
        job = Job(
            kind=kind,
            size_name=size,
            recipes=tuple(args.recipe),
            libraries=tuple(args.library),
            ranks=args.ranks,
            device=args.device,
            out=str(args.out),
            seconds=args.seconds,
            width=args.width,
        )
        print(f"{kind} {size}", flush=True)
        failed += not _run(job)
    return failed


def _run(job: Job) -> bool:
    """Start the ranks; return whether all of them ended well."""
    statuses = run_ranks("parallel_gpu.rank", [job.to_json()], job.ranks, TIMEOUT_S)
    if any(statuses):
        print(f"{job.kind} {job.size_name}: ranks ended with {statuses}", flush=True)
    return not any(statuses)


if __name__ == "__main__":
    sys.exit(main())
