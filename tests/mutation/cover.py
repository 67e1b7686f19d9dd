"""Which tests reach which lines of fp8core: a run of the tests, and the map that it leaves."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
import lzma
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from tests.mutation import recorder
from tests.mutation.checkout import (
    IMPORT_PATH,
    PYTEST,
    ROOT,
    Copy,
    Test,
    copies,
    enter,
    in_a_fork,
    processes,
)

FILE = "map.json.xz"
LOG = "cover.log"
STARTUP = "from tests.mutation import recorder\n\nrecorder.start()\n"
NOT_COVERED = ("tests/mutation", "tests/docs/test_site.py")
"""Tests that call no function of the core, as those of distributions: of this tool, of pages."""


@dataclasses.dataclass(frozen=True)
class Map:
    """Tests that pass, and the lines that they reach.

    Attributes:
        tests: with their usual time.
        left_out: ids of tests that do not pass, or were not run to their end.
        lines: by file and line, which of ``sets``.
        sets: numbers of tests, as bits.
        digests: of the files that the tests ran.
    """

    tests: list[Test]
    left_out: list[str]
    lines: dict[str, dict[int, int]]
    sets: list[int]
    digests: dict[str, str]

    def reached(self) -> dict[str, set[int]]:
        """The lines that tests reach, by file."""
        return {path: set(lines) for path, lines in self.lines.items()}

    def tests_of(self, path: str, lines: Iterable[int]) -> list[Test]:
        """The tests that reach a line of ``lines``."""
        bits = 0
        for line in lines:
            if (number := self.lines.get(path, {}).get(line)) is not None:
                bits |= self.sets[number]
        return [test for number, test in enumerate(self.tests) if bits >> number & 1]

    def write(self, file: Path) -> None:
        """Write the map to a file."""
        content = dataclasses.asdict(self) | {"sets": [f"{bits:x}" for bits in self.sets]}
        file.write_bytes(lzma.compress(json.dumps(content).encode(), preset=2))

    @classmethod
    def read(cls, file: Path) -> Map:
        """Read what :meth:`write` has written."""
        content = json.loads(lzma.decompress(file.read_bytes()))
        content["tests"] = [Test(*test) for test in content["tests"]]
        content["sets"] = [int(bits, 16) for bits in content["sets"]]
        content["lines"] = {
            path: {int(line): number for line, number in lines.items()}
            for path, lines in content["lines"].items()
        }
        return cls(**content)

    @classmethod
    def of(cls, records: Sequence[str], root: Path) -> Map:
        """The map of a recorder's lines, of the checkout at ``root``."""
        heads = [json.loads(record.partition("\t")[0]) for record in records]
        passed = [head for head in heads if head.get("passed")]
        tests = sorted(Test(head["test"], round(head["seconds"], 3)) for head in passed)
        numbers = {test.id: number for number, test in enumerate(tests)}
        size = len(tests) // 8 + 1
        reaching: dict[tuple[str, int], bytearray] = defaultdict(lambda: bytearray(size))
        for head, record in zip(heads, records, strict=True):
            if (number := numbers.get(head["test"])) is not None:
                for path, lines in json.loads(record.partition("\t")[2]).items():
                    for line in lines:
                        reaching[path, line][number >> 3] |= 1 << (number & 7)
        bits = {place: int.from_bytes(octets, "little") for place, octets in reaching.items()}
        sets = {members: number for number, members in enumerate(dict.fromkeys(bits.values()))}
        by_file: dict[str, dict[int, int]] = defaultdict(dict)
        for path, line in sorted(bits):
            by_file[path][line] = sets[bits[path, line]]
        left_out = {head["test"] for head in heads} - numbers.keys()
        digests = {path: digest((root / path).read_text(encoding="utf-8")) for path in by_file}
        return cls(tests, sorted(left_out), dict(by_file), list(sets), digests)


def digest(text: str) -> str:
    """What tells one text of a file from another."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def cover(folder: Path, jobs: int, limit: float, paths: Sequence[str]) -> Map:
    """Run the tests of ``paths`` for up to ``limit`` s; write their map and output to ``folder``.

    Each file runs in a process of its own: what is cached is computed by the file's first test,
    whatever ran before.
    """
    folder.mkdir(parents=True, exist_ok=True)
    end, log = time.monotonic() + limit, (folder / LOG).resolve()
    log.write_text("")
    files = sorted(_files(paths), key=lambda file: -file.stat().st_size)  # a long one first
    with copies(ROOT) as (temporary, copy), processes(jobs) as pool:
        (copy.root / IMPORT_PATH / "sitecustomize.py").write_text(STARTUP)
        records = temporary / "records"
        records.mkdir()
        copy.variables[recorder.FOLDER] = str(records)
        names = [file.relative_to(ROOT).as_posix() for file in files]
        runs = [pool.submit(_cover_file, copy, name, log, end) for name in names]
        late = [name for name, run in zip(names, runs, strict=True) if run.result() is None]
        if late:
            print(f"{len(late)} files did not end in {limit:.0f} s: {', '.join(sorted(late))}")
        texts = [file.read_text() for file in sorted(records.glob("*.jsonl"))]
        whole = [line for text in texts for line in text.splitlines() if line.endswith("}")]
        made = Map.of(whole, copy.root)
    made.write(folder / FILE)
    return made


def _files(paths: Sequence[str]) -> set[Path]:
    """Files of tests at or below ``paths``, without those of the tool and of distributions."""
    found = {file for path in paths for file in (ROOT / path).rglob("test_*.py")}
    found |= {ROOT / path for path in paths if path.endswith(".py")}
    return {
        file for file in found if not any(file.is_relative_to(ROOT / path) for path in NOT_COVERED)
    }


def _cover_file(copy: Copy, name: str, log: Path, end: float) -> int | None:
    def run() -> None:
        enter(copy, log)
        importlib.import_module(recorder.__name__).start()  # the copy's
        pytest.main([*PYTEST, "-m", "not slow", "-p", recorder.__name__, name])

    return in_a_fork(run, end - time.monotonic())
