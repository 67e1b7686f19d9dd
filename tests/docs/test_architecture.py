"""The page about the architecture names rooms, functions and words that the code has."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import FrameType

import pytest
import torch

import fp8core
from fp8core import recipe
from tests.docs.pages import DOCS, PAGES, README, ROOT, malformed_rows, tables
from tests.on_gpu import HEAD
from tests.test_layering import FLOORS

PAGE = DOCS / "architecture.md"
TEXT = PAGE.read_text(encoding="utf-8")
PACKAGE = Path(fp8core.__file__).parent


def section(title: str) -> str:
    """Return the text of the page below the heading ``title``."""
    _, _, rest = TEXT.partition(f"\n## {title}\n")
    return rest.partition("\n## ")[0]


def code_in(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", text)


def test_rooms_of_the_page_are_the_floors_of_the_library_in_their_order() -> None:
    (rooms,) = tables(section("Rooms"))
    named = [
        match[1]
        for row in rooms[2:]
        for code in code_in(row.cells[1])
        if (match := re.match(r"fp8core/(\w+)", code))
    ]
    floor_of = {
        name: floor
        for floor, names in enumerate(FLOORS)
        for name in names
        if not name.startswith("__")
    }
    assert sorted(named) == sorted(floor_of)
    assert [floor_of[name] for name in named] == sorted(floor_of.values())


def test_every_path_of_the_page_is_there() -> None:
    paths = re.findall(r"(?:fp8core|backends|csrc|tests|fp8core_pytest)/[\w/.]*", TEXT)
    assert len(paths) > 60
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_files_of_the_contract_that_the_vendors_guide_names_are_there() -> None:
    guide = (DOCS / "writing-a-backend.md").read_text(encoding="utf-8")
    names = set(re.findall(r"`(\w+\.py)`", guide))
    assert len(names) > 5
    assert [name for name in names if not (PACKAGE / "backend_api" / name).exists()] == []


def test_every_word_is_defined_where_the_page_says() -> None:
    (words,) = tables(section("Words"))
    missing = []
    for row in words[2:]:
        (place,) = code_in(row.cells[2])
        module, _, name = place.rpartition(".")
        if not hasattr(importlib.import_module(module), name):
            missing.append(place)
    assert missing == []


def test_one_step_of_a_linear_calls_the_functions_in_the_order_of_the_page() -> None:
    steps, _ = tables(section("One step of a Linear"))
    listed = [code_in(row.cells[0])[0] for row in steps[2:]]
    called: dict[str, None] = {}

    def note(frame: FrameType, event: str, argument: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            module = path.relative_to(PACKAGE.parent).with_suffix("")
            called.setdefault(".".join((*module.parts, frame.f_code.co_name)))

    layer = fp8core.Linear(64, 32, device="cpu")
    x = torch.randn(16, 64, device="cpu", requires_grad=True)
    with torch.autograd.set_multithreading_enabled(False):
        sys.setprofile(note)
        try:
            with fp8core.autocast(recipe=recipe.Float8CurrentScaling()):
                y = layer(x)
            y.sum().backward()
        finally:
            sys.setprofile(None)
    assert [name for name in called if name in listed] == listed


DECISIONS = DOCS / "decisions.md"
MEASURED = DOCS / "measured.md"
CHANGELOG = ROOT / "CHANGELOG.md"
MEASURED_LINES = 400
"""A current figure takes the place of the one before."""
CHANGELOG_BYTES = 10_240
"""What a user reads before an upgrade; changes by themselves are in git."""
ROW_LENGTH = 220
"""Characters of a row of decisions: two lines of the rendered page."""
_COMMIT = re.compile(r"\b(?=[0-9a-f]*[0-9])(?=[0-9a-f]*[a-f])[0-9a-f]{7,40}\b")


def commits(text: str) -> set[str]:
    """Return the names of commits in ``text``: hexadecimal words of letters and digits."""
    return set(_COMMIT.findall(text))


def git(*arguments: str, root: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def strangers(names: set[str], root: Path) -> set[str]:
    """Return the ``names`` that are no ancestor of the HEAD of the repository at ``root``."""
    tried = {name: git("merge-base", "--is-ancestor", name, "HEAD", root=root) for name in names}
    return {name for name, done in tried.items() if done.returncode}


@pytest.mark.parametrize(
    "page", [README, CHANGELOG, *PAGES], ids=lambda page: page.relative_to(ROOT)
)
def test_every_row_of_a_table_has_a_head(page: Path) -> None:
    assert malformed_rows(page.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("| a | b |\n|---|:-:|\n| 1 | 2 |", 0),
        ("| a |\n|---|\n| 1 \\| 2 |", 0),
        ("```text\n| 1 | 2 |\n```", 0),
        ("text\n| 1 | 2 |\n| 3 | 4 |", 2),
        ("| a |\n|---|\n| 1 |\n\n| 2 |", 1),
        ("| a | b |\n|---|---|\n| 1 | 2 | 3 |", 1),
        ("| a | b |\n|---|\n| 1 | 2 |", 1),
    ],
)
def test_rows_without_a_head_are_found(text: str, number: int) -> None:
    assert len(malformed_rows(text)) == number


def test_decisions_are_short_rows_under_subjects_that_stand_once() -> None:
    text = DECISIONS.read_text(encoding="utf-8")
    preface, *subjects = re.split(r"^## ", text, flags=re.MULTILINE)
    assert tables(preface) == []
    assert all(len(tables(subject)) == 1 for subject in subjects)
    lines = [*re.findall(r"^## .+$", text, flags=re.MULTILINE)]
    lines += [row.text for table in tables(text) for row in table[2:]]
    assert [line for line, count in Counter(lines).items() if count > 1] == []
    assert [line for line in lines if len(line) > ROW_LENGTH or line.startswith("| ...")] == []


def test_changelog_is_short_and_has_each_section_once() -> None:
    text = CHANGELOG.read_text(encoding="utf-8")
    assert len(text.encode()) <= CHANGELOG_BYTES
    for release in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        sections = re.findall(r"^### (.+)$", release, flags=re.MULTILINE)
        order = ["Incompatible changes", "Added", "Changed", "Fixed", "Removed"]
        assert sections == [section for section in order if section in sections]


def test_measurements_are_short_and_have_a_table_a_subject() -> None:
    text = MEASURED.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MEASURED_LINES
    subjects = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    assert [subject.splitlines()[0] for subject in subjects if len(tables(subject)) != 1] == []


def test_rows_that_a_run_on_a_gpu_prints_fit_below_the_head_of_measurements() -> None:
    head, _ = HEAD.splitlines()
    assert head in [table[0].text for table in tables(MEASURED.read_text(encoding="utf-8"))]


def test_commits_of_measurements_are_ancestors() -> None:
    if git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        pytest.skip("the history of the repository is not there")
    named = {page: commits(page.read_text(encoding="utf-8")) for page in (MEASURED, DECISIONS)}
    assert named[MEASURED]
    assert strangers(set().union(*named.values()), ROOT) == set()


def test_commit_of_another_branch_is_found(tmp_path: Path) -> None:
    author = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    commit = (*author, "commit", "-q", "--allow-empty", "-m")
    git("init", "-q", "-b", "main", root=tmp_path)
    git(*commit, "first", root=tmp_path)
    first = git("rev-parse", "HEAD", root=tmp_path).stdout.strip()
    git("checkout", "-q", "-b", "side", root=tmp_path)
    git(*commit, "second", root=tmp_path)
    second = git("rev-parse", "HEAD", root=tmp_path).stdout.strip()
    git("checkout", "-q", "main", root=tmp_path)
    assert len({first, second}) == 2
    assert strangers({first[:12], second[:12], "0a" * 5}, tmp_path) == {second[:12], "0a" * 5}


def test_commits_are_told_from_other_words() -> None:
    assert commits("of 44676e2, f62603a and 1234567 in the facades") == {"44676e2", "f62603a"}
