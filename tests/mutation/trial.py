"""Whether the tests that reach a mutant's lines notice it, and how two suites compare."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from pathlib import Path

import pytest

from tests.mutation.checkout import (
    PYTEST,
    ROOT,
    Copy,
    Ending,
    Selection,
    Test,
    WrongTreeError,
    copies,
    enter,
    in_a_fork,
    processes,
    run_tests,
)
from tests.mutation.cover import Map, digest
from tests.mutation.mutants import Mutant, Place, Sources

FIRST_BATCH_S = 2.0
FILE_S = 0.5
"""What the collection of a file of tests is taken to cost."""
CONTROL_LIMIT_S = 600.0


@dataclasses.dataclass(frozen=True)
class Result:
    """What became of a mutant.

    Attributes:
        mutant: the mutant.
        status: "killed", "killed by timeout", "survived", "unreached" by any test, or "gone" from
            the sources.
        test: the test that killed it, or the file whose import did.
        ran: how many tests ran.
        reaching: how many tests reach its lines.
        seconds: of wall clock.
        unsound: tests that failed without the mutant too, and were passed over.
    """

    mutant: Mutant
    status: str
    test: str | None = None
    ran: int = 0
    reaching: int = 0
    seconds: float = 0.0
    unsound: tuple[str, ...] = ()

    @property
    def is_killed(self) -> bool:
        return self.status.startswith("killed")


@dataclasses.dataclass(frozen=True)
class Trial:
    """A mutant, where it is, and the tests that reach it."""

    mutant: Mutant
    place: Place
    tests: list[Test]


def batches(tests: Sequence[Test]) -> Iterator[list[Test]]:
    """Tests, fastest first, in batches that each take twice as long as the last."""
    batch: list[Test] = []
    files: set[str] = set()
    cost, size = 0.0, FIRST_BATCH_S
    for test in sorted(tests, key=lambda test: test.seconds):
        batch.append(test)
        cost += test.seconds + (0.0 if test.file in files else FILE_S)
        files.add(test.file)
        if cost > size:
            yield batch
            batch, files, cost, size = [], set(), 0.0, 2 * size
    if batch:
        yield batch


def judged(trial: Trial, control: Copy, limit: float, folder: Path) -> Result:
    """Run the tests on a copy with the mutant until one fails that passes in ``control``."""
    log = folder / f"{trial.mutant.id}.log"
    copy = Copy(control.root, folder / trial.mutant.id)
    copy.write(trial.place.path, trial.place.text)
    ran, seconds, unsound = 0, 0.0, list[str]()
    status, killer = "survived", None
    for batch in batches(trial.tests):
        while batch and seconds < limit and status == "survived":
            ending = run_tests(copy, batch, limit - seconds, log)
            ran, seconds = ran + len(ending.begun), seconds + ending.seconds
            if ending.kind in ("passed", "limit"):
                break
            begun = [test for test in batch if test.id in ending.begun] or batch
            sound = run_tests(control, begun, CONTROL_LIMIT_S, log)
            if sound.kind == "crashed" and not sound.begun:
                raise WrongTreeError(f"no test begins without a mutant:\n{log.read_text()[-2000:]}")
            if sound.kind == "passed":
                status, killer = _killed(ending), ending.test
            else:
                doubtful = {sound.test, ending.test}
                unsound += [test.id for test in batch if test.id in doubtful] or [batch[0].id]
                batch = [test for test in batch if test.id not in unsound]
    copy.remove()
    counts = (ran, len(trial.tests), round(seconds, 1))
    return Result(trial.mutant, status, killer, *counts, tuple(unsound))


def _killed(ending: Ending) -> str:
    return "killed by timeout" if ending.kind == "hung" else "killed"


def plan(
    sample: Sequence[Mutant], tests: Map, sources: Sources, renamed: Mapping[str, str]
) -> tuple[list[Trial], list[Result]]:
    """What is to be run, and the results of the mutants that need no run."""
    trials, results = [], []
    for mutant in sample:
        place = sources.find(mutant, renamed)
        if place is None:
            results.append(Result(mutant, "gone"))
            continue
        path = place.path
        if path in tests.digests and digest(sources.texts[path]) != tests.digests[path]:
            raise WrongTreeError(f"the map is of another {path}: run `cover` on this checkout")
        if reaching := tests.tests_of(path, place.lines):
            trials.append(Trial(mutant, place, reaching))
        else:
            results.append(Result(mutant, "unreached"))
    return trials, results


def run(trials: Sequence[Trial], jobs: int, limit: float) -> Iterator[Result]:
    """Judge mutants, ``jobs`` at a time; yield each result when it is there."""
    tests = sorted({test for trial in trials for test in trial.tests})
    files = sorted({test.file for test in tests})
    shares = [[test for test in tests if test.file in set(files[i::jobs])] for i in range(jobs)]
    with copies(ROOT) as (folder, control), processes(jobs) as pool:
        list(pool.map(_collect, [control] * jobs, filter(None, shares)))
        waiting = [pool.submit(judged, trial, control, limit, folder) for trial in trials]
        for future in as_completed(waiting):
            yield future.result()


def _collect(control: Copy, tests: list[Test]) -> None:
    """Leave compiled modules in the copy that the others are linked from; refuse unknown tests."""
    log = control.root / f"collection-{os.getpid()}.log"

    def collect() -> None:
        enter(control, log)
        selection = Selection(tests, 0.0, log)
        files = dict.fromkeys(test.file for test in tests)
        pytest.main([*PYTEST, "--collect-only", "-qq", *files], plugins=[selection])
        if selection.missing:
            raise WrongTreeError(f"the map has other tests: {selection.missing[:5]}")

    if in_a_fork(collect, CONTROL_LIMIT_S) != 0:
        raise WrongTreeError(f"the tests cannot be collected:\n{log.read_text()[-2000:]}")


# --- results ---


def write(results: Sequence[Result], file: Path) -> None:
    """Write results to a file."""
    by_id = sorted(results, key=lambda result: result.mutant.id)
    text = json.dumps([dataclasses.asdict(result) for result in by_id], indent=1)
    file.write_text(text + "\n", encoding="utf-8")


def read(path: Path) -> dict[str, Result]:
    """Results by the mutant's id: of a file, or of the files of a folder."""
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    results = [
        Result(**entry | {"mutant": Mutant(**entry["mutant"]), "unsound": tuple(entry["unsound"])})
        for file in files
        for entry in json.loads(file.read_text(encoding="utf-8"))
    ]
    return {result.mutant.id: result for result in results}


HEAD = """| mutant | function | change | tests that ran, of those that reach it |
|---|---|---|---|"""


def row(result: Result) -> str:
    """A mutant as a row of :data:`HEAD`."""
    mutant = result.mutant
    change = f"`{mutant.before}` to `{mutant.after}`"
    cells = (mutant.id, f"`{mutant.path}` `{mutant.function}`", change)
    text = " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells)
    return f"| {text} | {result.ran} of {result.reaching} |"


def compared(before: Mapping[str, Result], after: Mapping[str, Result]) -> tuple[str, bool]:
    """What two runs of a sample say, as text for docs/measured.md, and whether nothing is lost."""
    missing = sorted(before.keys() - after.keys())
    both = sorted(before.keys() & after.keys())
    gone = [name for name in both if after[name].status == "gone"]
    alive = [name for name in both if not after[name].is_killed and name not in gone]
    lost = [name for name in alive if before[name].is_killed]
    surviving = [name for name in alive if not before[name].is_killed]
    lines = [
        f"{len(both)} mutants: {sum(before[name].is_killed for name in both)} killed before, "
        f"{sum(after[name].is_killed for name in both)} after; {len(lost)} killed before survive "
        f"after, {len(surviving)} survive both, {len(gone)} are gone from the sources."
    ]
    for title, names in (
        ("Killed before, survive after", lost),
        ("Survive both", surviving),
        ("Gone", gone),
    ):
        if names:
            lines += ["", f"{title}:", "", HEAD, *(row(after[name]) for name in names)]
    if missing:
        lines += ["", f"Not run after: {', '.join(missing)}"]
    return "\n".join(lines), not lost and not missing
