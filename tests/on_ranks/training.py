"""The decoder of ``docs/examples/train_decoder.py`` on one device and on two.

In bf16 and in three recipes: held-out loss, time of a step, tokens a second and peak of a rank. On
two devices parameters are sharded and, but in bf16, gathered quantized. Runs on one device go two
at a time, each on a device of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.benchmarks.measuring import markdown
from tests.benchmarks.parallel_gpu.together import leave_multicast_off

__all__ = ["RECIPES", "main"]

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "docs" / "examples" / "train_decoder.py"
RECIPES = ("bf16", "delayed", "current", "block")
LIMIT_S = 120
"""Of a run of 150 steps; longer ones have more in proportion."""
STEPS = 150
ENDING_S = 40
"""What torchrun takes at most to end its ranks."""
TINY = (
    *("--layers", "2", "--hidden", "64", "--ffn", "128", "--heads", "2", "--context", "32"),
    *("--batch", "8", "--rate", "5e-3", "--text", str(ROOT / "fp8core" / "recipe")),
)
"""The sizes of a trial run on CPUs."""
COLUMNS = (
    *("recipe", "devices", "steps", "held-out loss", "ms a step", "tokens/s", "peak MiB of a rank"),
    "against one device",
)


def run(recipe: str, size: int, device: str, steps: int, gpu: int, folder: Path) -> dict[str, Any]:
    """Return the line of results of a run on ``size`` devices; with its ``error`` if it fails."""
    results = folder / f"{recipe}{size}.jsonl"
    several = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}")
    command = [sys.executable, *(several if size > 1 else ()), str(SCRIPT)]
    command += ["--recipe", recipe, "--steps", str(steps), "--device", device]
    command += ["--results", str(results), *(TINY if device == "cpu" else ())]
    environment = dict(os.environ)
    if size == 1 and device == "cuda":
        environment["CUDA_VISIBLE_DEVICES"] = str(gpu)
    log = folder / f"{recipe}{size}.txt"
    limit = LIMIT_S * max(1.0, steps / STEPS)
    with log.open("w") as stream:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=stream, stderr=stream)
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun then ends its ranks
            process.wait(ENDING_S)
            stream.write(f"stopped after {limit:.0f} s\n")
        finally:
            process.kill()
            process.wait()
    if results.exists():
        found: dict[str, Any] = json.loads(results.read_text().splitlines()[-1])
        return found
    text = log.read_text("utf-8", "replace")
    print(text[-3000:], file=sys.stderr, flush=True)
    return {"error": (text.splitlines() or ["no output"])[-1][:200]}


def row(recipe: str, size: int, result: dict[str, Any], alone: dict[str, Any]) -> str:
    """Return the line of the table; ``alone`` is the result on one device."""
    if "error" in result:
        return markdown.line((recipe, str(size), "", result["error"], *[""] * 4))
    step, loss = list(result["held_out_loss"].items())[-1]
    against = ""
    if size > 1 and "error" not in alone:
        speedup = alone["ms"] / result["ms"]
        difference = loss - list(alone["held_out_loss"].values())[-1]
        against = f"{speedup:.2f} x as fast, loss {difference:+.4f}"
    cells = (f"{loss:.4f}", f"{result['ms']:.1f}", f"{result['tokens_per_s']:,}")
    peak = "" if result["peak_mib"] is None else f"{result['peak_mib']:,}"
    return markdown.line((recipe, str(size), step, *cells, peak, against))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; return how many runs failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.on_ranks.training", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--recipe", nargs="+", choices=RECIPES, default=RECIPES)
    parser.add_argument("--devices", nargs="+", type=int, default=[1, 2])
    args = parser.parse_args(arguments)
    leave_multicast_off()
    results: dict[tuple[str, int], dict[str, Any]] = {}
    print(*markdown.head(COLUMNS), sep="\n", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for size in args.devices:

            def start(at: int, size: int = size) -> dict[str, Any]:
                settings = (args.device, args.steps, at % 2, Path(folder))
                return run(args.recipe[at], size, *settings)

            with ThreadPoolExecutor(2 if size == 1 else 1) as pool:
                done = pool.map(start, range(len(args.recipe)))
                for recipe, result in zip(args.recipe, done, strict=True):
                    results[recipe, size] = result
                    alone = results.get((recipe, 1), {"error": ""})
                    print(row(recipe, size, result, alone), flush=True)
    return sum("error" in result for result in results.values())


if __name__ == "__main__":
    sys.exit(main())
