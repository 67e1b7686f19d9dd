"""One Linear, forward and backward, against its peers on one GPU.

    python -m tests.benchmarks.linear_gpu --size 8B --out results  # one run, one cell
    python -m tests.benchmarks.linear_gpu --merge results          # the tables of all cells
    python -m tests.benchmarks.linear_gpu --merge results --plot linear_gpu.svg

A run measures every contestant that is installed, in one process; a cell that is there already is
not measured again. All have bfloat16 parameters and gradients, no bias, and quantize the weight in
every step, as if an optimizer had changed it. Inputs are normal, gradients normal times 0.01.

Contestants take turns of some milliseconds, in an order that is shuffled anew for each turn:
timing.py says how. Figures are medians over turns; the file has quartiles and ranges too, and
the SM clock and power of the time. Nothing is flushed: a step finds in the caches what the step
before it left there.

host    enqueueing a step on an idle device without waiting, us (meant for the tiny size)
eager   a step among others, us: the larger of host and device time
graph   a step replayed from a CUDA graph, us; null where the contestant cannot be captured
kernels sum of the durations of a step's kernels (torch.profiler, 10 steps alone), us
memory  peak over what inputs and parameters take, MiB: the layer's own caches are in it, what a
        library keeps for the whole process is not, but stands in the file under "kept by libraries"
error   relative Frobenius error of y, grad_input and grad_weight against float32
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from tests.benchmarks.linear_gpu import cell, report
from tests.benchmarks.linear_gpu.contestants import SIZES

SECONDS = {"70B": 105.0}
"""Of a cell, where it is not 70."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure one cell, or print the tables of all and draw them."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.linear_gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--size", choices=SIZES)
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--seconds", type=float, help="of the cell; default: 70, for 70B 105")
    parser.add_argument("--merge", type=Path, metavar="DIR")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="with --merge: an svg or png")
    args = parser.parse_args(arguments)
    if args.merge is not None:
        cells = report.read(args.merge)
        print(report.table(cells), report.ratio_table(cells), sep="\n\n")
        if args.plot is not None:
            report.plot(cells, args.plot)
        return
    if args.size is None:
        parser.error("one of --size and --merge is needed")
    file = args.out / f"{args.size}.json"
    if file.is_file():
        print(f"{file} is there already")
        return
    args.out.mkdir(parents=True, exist_ok=True)
    found = cell.run_cell(args.size, args.seconds or SECONDS.get(args.size, 70.0))
    file.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
