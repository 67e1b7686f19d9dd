"""Shows that a change of the tests loses nothing: mutants that were killed are killed afterwards.

    python -m tests.mutation cover --out DIR           which tests reach which lines
    python -m tests.mutation draw --map DIR            draw the sample, once
    python -m tests.mutation run --map DIR --out FILE  each mutant, against the tests that reach it
    python -m tests.mutation compare BEFORE AFTER      status 1 if one that was killed survives

A change of the tests is judged by ``cover`` and ``run`` before it and after it, with one sample.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.mutation import trial
from tests.mutation.checkout import ROOT
from tests.mutation.cover import FILE, Map, cover
from tests.mutation.mutants import Mutant, Sources, draw

SAMPLE = Path(__file__).with_name("sample.json")
SEED, COUNT = 20261126, 200


def read_sample(file: Path) -> list[Mutant]:
    """The mutants of a file that :func:`write_sample` has written."""
    return [Mutant(**entry) for entry in json.loads(file.read_text(encoding="utf-8"))]


def write_sample(sample: Sequence[Mutant], file: Path) -> None:
    """Write mutants to a file."""
    text = json.dumps([dataclasses.asdict(mutant) for mutant in sample], indent=1)
    file.write_text(text + "\n", encoding="utf-8")


def cover_command(options: argparse.Namespace) -> int:
    """Run the tests and print how many the map has."""
    made = cover(options.out, options.jobs, options.limit, options.paths)
    lines = sum(map(len, made.lines.values()))
    print(f"{len(made.tests)} tests reach {lines} lines; {len(made.left_out)} left out")
    return 0 if made.tests else 1


def draw_command(options: argparse.Namespace) -> int:
    """Draw the sample and print how many mutants each operator has."""
    sample = draw(
        Sources(ROOT), Map.read(options.map / FILE).reached(), options.count, options.seed
    )
    write_sample(sample, options.sample)
    print(f"{len(sample)} mutants:", Counter(mutant.operator for mutant in sample).most_common())
    return 0


def run_command(options: argparse.Namespace) -> int:
    """Run the mutants of the sample and print each result."""
    number, count = options.shard
    sample = read_sample(options.sample)[number - 1 :: count]
    if options.only:
        sample = [mutant for mutant in sample if mutant.id in options.only]
    tests, renamed = Map.read(options.map / FILE), dict(options.renamed)
    trials, results = trial.plan(sample, tests, Sources(ROOT), renamed)
    trial.write(results, options.out)
    for result in trial.run(trials, options.jobs, options.limit):
        results.append(result)
        trial.write(results, options.out)
        print(
            f"{result.mutant.id} {result.status} {result.seconds} s {result.test or ''}", flush=True
        )
        for test in result.unsound:
            print(f"  failed without the mutant too: {test}")
    print(Counter(result.status for result in results).most_common())
    return 0


def compare_command(options: argparse.Namespace) -> int:
    """Print what two runs say."""
    text, is_kept = trial.compared(trial.read(options.before), trial.read(options.after))
    print(text)
    return 0 if is_kept else 1


def shard(text: str) -> tuple[int, int]:
    """``2/3`` as the second of three."""
    number, count = map(int, text.split("/"))
    if not 1 <= number <= count:
        raise ValueError(text)
    return number, count


def renaming(text: str) -> tuple[str, str]:
    """``old=new`` as a pair."""
    old, new = text.split("=")
    return old, new


def parser() -> argparse.ArgumentParser:
    """The commands and their options."""
    top = argparse.ArgumentParser(
        prog="python -m tests.mutation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = top.add_subparsers(required=True)

    command = commands.add_parser("cover", help="run the tests, and map lines to tests")
    command.set_defaults(run=cover_command)
    command.add_argument("--out", type=Path, required=True, metavar="DIR")
    command.add_argument("--jobs", type=int, default=os.cpu_count())
    command.add_argument("--limit", type=float, default=3600.0, help="seconds for all tests")
    command.add_argument("paths", nargs="*", default=["tests"], help="default: tests")

    command = commands.add_parser("draw", help="draw the sample")
    command.set_defaults(run=draw_command)
    command.add_argument("--map", type=Path, required=True, metavar="DIR")
    command.add_argument("--sample", type=Path, default=SAMPLE)
    command.add_argument("--count", type=int, default=COUNT)
    command.add_argument("--seed", type=int, default=SEED)

    command = commands.add_parser("run", help="run the mutants")
    command.set_defaults(run=run_command)
    command.add_argument("--map", type=Path, required=True, metavar="DIR")
    command.add_argument("--out", type=Path, required=True, metavar="FILE")
    command.add_argument("--sample", type=Path, default=SAMPLE)
    command.add_argument("--jobs", type=int, default=os.cpu_count())
    command.add_argument("--limit", type=float, default=60.0, help="seconds for a mutant")
    command.add_argument("--only", nargs="+", metavar="ID")
    command.add_argument("--shard", type=shard, default=(1, 1), metavar="I/N")
    command.add_argument(
        "--renamed",
        type=renaming,
        nargs="+",
        default=[],
        metavar="OLD=NEW",
        help="identifiers that changed since the sample was drawn",
    )

    command = commands.add_parser("compare", help="compare two runs")
    command.set_defaults(run=compare_command)
    for name in ("before", "after"):
        command.add_argument(name, type=Path, help="results: a file, or a folder of shards")
    return top


def main(arguments: Sequence[str]) -> int:
    """Run a command; return the exit status."""
    options = parser().parse_args(arguments)
    status: int = options.run(options)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
