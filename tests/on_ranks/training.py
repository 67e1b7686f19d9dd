"""The decoder of ``docs/examples/train_decoder.py`` on one device and on two.

In bf16 and in three recipes: held-out loss, time of a step and of its host, tokens a second and
peak of a rank. On two devices parameters are sharded and, but in bf16, gathered quantized; torchao
trains a decoder of torch's modules there, with FP8 all-gather. Short runs come first, each alone on
its devices: their times are those of the table. Whole runs go ``--together`` on the same devices,
and on as many sets of devices as there are. One that the limit of time stops has the losses that it
has printed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Any, NamedTuple

import torch

from tests.benchmarks.measuring import markdown
from tests.benchmarks.parallel_gpu.together import leave_multicast_off
from tests.ranks import visible_gpus

__all__ = ["CONTESTANTS", "RECIPES", "Run", "main"]

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "docs" / "examples" / "train_decoder.py"
RECIPES = ("bf16", "delayed", "current", "block")
TORCHAO = "torchao"
CONTESTANTS = (*RECIPES, TORCHAO)
STEPS, SHORT_STEPS = 150, 50
ENDING_S = 40
"""What torchrun takes at most to end its ranks."""
TINY = (
    *("--layers", "2", "--hidden", "64", "--ffn", "128", "--heads", "2", "--context", "32"),
    *("--batch", "8", "--rate", "5e-3", "--text", str(ROOT / "fp8core" / "recipe")),
)
"""The sizes of a trial run on CPUs."""
COLUMNS = (
    *("recipe", "devices", "seed", "steps", "held-out loss", "ms a step", "tokens/s", "host ms"),
    *("peak MiB of a rank", "against one device"),
)
TIMES = ("ms", "tokens_per_s", "host_ms", "peak_mib")
PRINTED = re.compile(
    r"^step (\d+): loss ([\d.]+|nan)(?:, held-out loss ([\d.]+|nan))?", re.MULTILINE
)


class Run(NamedTuple):
    """A run of a contestant."""

    recipe: str
    size: int
    seed: int
    steps: int

    def command(self) -> list[str]:
        """Return the arguments of Python."""
        script = ["-m", "tests.on_ranks.torchao_decoder"]
        if self.recipe != TORCHAO:
            script = [str(SCRIPT), "--recipe", self.recipe]
        several = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.size}"]
        given = ["--steps", str(self.steps), "--seed", str(self.seed)]
        return [*(several if self.size > 1 else ()), *script, *given]


def curves_of(text: str) -> dict[str, dict[str, float]]:
    """Return the losses that ``train_decoder.py`` has printed, by step."""
    lines = PRINTED.findall(text)
    return {
        "loss": {step: float(loss) for step, loss, _ in lines},
        "held_out_loss": {step: float(held_out) for step, _, held_out in lines if held_out},
    }


class Trainer(NamedTuple):
    """What all runs have in common; ``end`` is by the clock of :func:`time.monotonic`."""

    device: str
    options: tuple[str, ...]
    folder: Path
    end: float

    def environment(self, devices: Sequence[int]) -> dict[str, str]:
        """Return the variables of a run on ``devices``, counted among those of this process."""
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
        if self.device == "cuda":
            gpus = visible_gpus()
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[device] for device in devices)
        return environment

    def result(self, run: Run, devices: Sequence[int], name: str = "") -> dict[str, Any]:
        """Return the results of a run on ``devices``; with its ``error`` if it fails."""
        name = name or f"{run.recipe}-{run.size}-{run.seed}"
        log, results = (self.folder / f"{name}.{kind}" for kind in ("txt", "jsonl"))
        command = [sys.executable, *run.command(), *self.options]
        command += ["--device", self.device, "--results", str(results)]
        environment = self.environment(devices)
        with log.open("w") as stream:
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=stream, stderr=stream
            )
            try:
                process.wait(max(0.0, self.end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.terminate()  # torchrun then ends its ranks
                stream.write("stopped at the limit of time\n")
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(ENDING_S)
            finally:
                process.kill()
                process.wait()
        text = log.read_text("utf-8", "replace")
        found = {**run._asdict(), **curves_of(text)}
        if results.exists():
            return json.loads(results.read_text().splitlines()[-1]) | found
        print(f"{name}:\n{text[-3000:]}", file=sys.stderr, flush=True)
        return found | {"error": last_error(text)}


def last_error(text: str) -> str:
    """Return the last line of an output that names an error, or the last one."""
    lines = text.splitlines() or ["no output"]
    return next((line for line in reversed(lines) if "Error: " in line), lines[-1])[:200]


def row(result: dict[str, Any], alone: dict[str, Any] | None) -> str:
    """Return the line of the table; ``alone`` is the result of the recipe on one device."""
    curve = result["held_out_loss"]
    loss = list(curve.values())[-1] if curve else None
    reached = list(curve)[-1] if curve else ""
    if "error" in result:
        reached = f"{reached or 0} of {result['steps']}: {result['error']}"
    against = ""
    if alone and curve and reached in alone["held_out_loss"]:
        against = f"loss {loss - alone['held_out_loss'][reached]:+.4f}"
        if "ms" in result and "ms" in alone:
            against = f"{alone['ms'] / result['ms']:.2f} x as fast, {against}"
    cells = (f"{result[name]:,}" if result.get(name) is not None else "" for name in TIMES)
    return markdown.line(
        (
            *(str(result[name]) for name in ("recipe", "size", "seed")),
            *(str(reached), "" if loss is None else f"{loss:.4f}", *cells, against),
        )
    )


def places_of(size: int, device: str) -> list[tuple[int, ...]]:
    """Return the sets of ``size`` devices that runs can have for themselves."""
    count = torch.cuda.device_count() if device == "cuda" else size
    return [tuple(range(at, at + size)) for at in range(0, count - size + 1, size)]


def results_of(
    trainer: Trainer, runs: Sequence[Run], together: int, prefix: str = ""
) -> Iterator[dict[str, Any]]:
    """Yield the results of runs of one size in order, ``together`` of them on each devices."""
    places: Queue[tuple[int, ...]] = Queue()
    found = places_of(runs[0].size, trainer.device)
    for place in found * together:
        places.put(place)

    def start(run: Run) -> dict[str, Any]:
        place = places.get()
        try:
            name = f"{prefix}{run.recipe}-{run.size}-{run.seed}"
            return trainer.result(run, place, name)
        finally:
            places.put(place)

    with ThreadPoolExecutor(len(found) * together) as pool:
        yield from pool.map(start, runs)


def runs_of(args: argparse.Namespace, size: int) -> list[Run]:
    """Return the runs on ``size`` devices: bf16 of all seeds, others of the first."""
    runs = []
    for recipe in args.recipe:
        seeds = args.seed if recipe == "bf16" and size == 1 else args.seed[:1]
        if recipe != TORCHAO or size > 1:
            runs += [Run(recipe, size, seed, args.steps) for seed in seeds]
    return runs


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; return how many runs failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.on_ranks.training", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--short", type=int, default=SHORT_STEPS, help="of runs alone; 0: none")
    parser.add_argument("--batch", type=int, help="rows of a step, of all ranks")
    parser.add_argument("--evaluate", type=int, default=150, help="steps between held-out losses")
    parser.add_argument("--seed", nargs="+", type=int, default=[0], help="all of them for bf16")
    parser.add_argument("--recipe", nargs="+", choices=CONTESTANTS, default=RECIPES)
    parser.add_argument("--devices", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--together", type=int, default=1, help="whole runs on the same devices")
    parser.add_argument("--limit", type=float, default=230.0, help="seconds of all runs")
    parser.add_argument("--curves", type=Path, help="the file of JSON that gets all results")
    args = parser.parse_args(arguments)
    leave_multicast_off()
    options = TINY if args.device == "cpu" else ()
    options += ("--evaluate", str(args.evaluate))
    options += ("--batch", str(args.batch)) if args.batch else ()
    results: list[dict[str, Any]] = []
    print(*markdown.head(COLUMNS), sep="\n", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(args.device, options, Path(folder), time.monotonic() + args.limit)
        for size in args.devices:
            runs = runs_of(args, size)
            short = [run._replace(steps=args.short) for run in runs if run.seed == args.seed[0]]
            found = list(results_of(trainer, short, 1, "short-")) if args.short else []
            times = {
                one["recipe"]: {name: one[name] for name in TIMES if name in one} for one in found
            }
            for result in results_of(trainer, runs, args.together):
                if args.short:
                    result = {k: v for k, v in result.items() if k not in TIMES}
                    result |= times[result["recipe"]]
                results.append(result)
                first = [one for one in results if one["size"] == 1 < size]
                alone = [one for one in first if one["recipe"] == result["recipe"]]
                print(row(result, alone[0] if alone else None), flush=True)
                if args.curves:
                    args.curves.write_text(json.dumps(results))
    return sum("error" in result for result in results)


if __name__ == "__main__":
    sys.exit(main())
