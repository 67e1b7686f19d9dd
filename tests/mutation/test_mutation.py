"""The mutation tool: its operators, its sample, and a run of it on a small checkout."""

from __future__ import annotations

import ast
import dataclasses
import os
import select
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutation import mutants, trial
from tests.mutation.__main__ import SAMPLE, main, read_sample, write_sample
from tests.mutation.checkout import WrongTreeError, in_a_fork
from tests.mutation.cover import FILE, Map
from tests.mutation.mutants import Mutant, Sources, changes, draw, spliced
from tests.mutation.trial import Result

ROOT = Path(__file__).resolve().parents[2]

FUNCTION = '''
def f(a, b, *, dim: int = 3) -> "0 < 1":
    """Return what 1 < 2 says."""
    if a < b and not a.done:
        raise ValueError(f"{a + 1} < {b}", a < b, 4)
    a.rows[0] = g(a, b, dim=-1,
                  keep=True)
    a.size += 2
    while (rest := a.left(
        b)) is not None: a.drop(rest)
    for x in range(a.count * 5):
        h(x)
    return a in b
'''
OPERATORS = {
    "and, or": "if (a < b or not a.done):",
    "arithmetic": "range((a.count // 5))",
    "comparison 0": "if (a <= b) and",
    "constant": "range(a.count * (6))",
    "dropped argument dim": "(g(a, b, keep=True))",
    "dropped assignment": "    pass\n    a.size += 2",
    "dropped call": "    pass\n    return a in b",
    "dropped not": "if a < b and (a.done):",
    "negation": "if (not (a < b and (not a.done))):",
    "return None": "    return None",
}


def mutated(source: str) -> dict[str, list[str]]:
    """Texts of a function's mutants by operator."""
    texts: dict[str, list[str]] = {}
    for _, function in mutants.functions(ast.parse(source)):
        for statement in mutants.statements(function):
            for change in changes(statement):
                texts.setdefault(change.operator, []).append(spliced(source, change))
    return texts


@pytest.mark.parametrize("operator", OPERATORS)
def test_operator_changes_the_function_as_its_name_says(operator: str) -> None:
    texts = mutated(FUNCTION)[operator]
    assert any(OPERATORS[operator] in text for text in texts), "\n".join(texts)


def test_every_change_makes_another_program() -> None:
    texts = [text for texts in mutated(FUNCTION).values() for text in texts]
    trees = {ast.dump(ast.parse(text)) for text in [FUNCTION, *texts]}
    assert len(trees) == len(texts) + 1


def test_annotations_docstrings_and_messages_stay() -> None:
    parts = ('dim: int = 3) -> "0 < 1":', "1 < 2 says", '(f"{a + 1} < {b}", a < b, 4)')
    texts = [text for texts in mutated(FUNCTION).values() for text in texts]
    assert [text for text in texts if not all(part in text for part in parts)] == []


def test_changes_are_by_bytes() -> None:
    source = "def f(a):\n    return 'ä', a < 1  # ä\n"
    assert mutated(source)["comparison 0"] == [source.replace("a < 1", "(a <= 1)")]


# --- finding and drawing ---


def toy(root: Path, **files: str) -> Sources:
    """Sources of a checkout whose files are in two rooms."""
    for name, text in files.items():
        path = root / "fp8core" / f"{name.replace('_', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Sources(root)


CLIP = "class Range:\n    def clip(self, x):\n        return x if x < self.top else self.top\n"
MUTANT = Mutant(
    "chain-000",
    "fp8core/chain/a.py",
    "Range.clip",
    "return x if x < self.top else self.top",
    nth=0,
    node=1,
    operator="comparison 0",
    before="x < self.top",
    after="(x <= self.top)",
)
FUNCTION_OF_THE_MODULE = CLIP[13:].replace("\n    ", "\n").replace("    def", "def")


@pytest.mark.parametrize(
    ("files", "path"),
    [
        ({"chain_a": CLIP}, "chain/a.py"),
        ({"chain_a": CLIP, "chain_b": CLIP}, "chain/a.py"),
        ({"tensors_b": f"import math\n\n\n{CLIP}"}, "tensors/b.py"),
        ({"chain_a": CLIP.replace("x if", "(\n            x if")[:-1] + ")\n"}, "chain/a.py"),
        ({"chain_a": CLIP.replace("Range", "Interval")}, "chain/a.py"),
        ({"chain_b": CLIP, "chain_c": CLIP}, None),
        ({"chain_a": CLIP.replace("x <", "x >")}, None),
        ({"chain_a": CLIP.replace("clip", "cut")}, None),
    ],
    ids=["same", "same_file_first", "moved", "formatted", "class", "two", "statement", "name"],
)
def test_mutant_is_found_by_its_text(
    files: dict[str, str], path: str | None, tmp_path: Path
) -> None:
    place = toy(tmp_path, **files).find(MUTANT, {})
    assert (place and place.path) == (path and f"fp8core/{path}")
    assert place is None or "(x <= self.top)" in place.text


def test_mutant_of_renamed_code_is_found_with_the_names(tmp_path: Path) -> None:
    sources = toy(tmp_path, chain_a=CLIP.replace("clip", "cut").replace("top", "end"))
    assert sources.find(MUTANT, {"clip": "cut"}) is None
    place = sources.find(MUTANT, {"clip": "cut", "top": "end"})
    assert place is not None
    assert "x if (x <= self.end) else" in place.text


def test_same_seed_draws_the_same_sample(tmp_path: Path) -> None:
    parts = [f"    if a > {i}:\n        b = {i}\n" for i in range(50)]
    texts = [f"def f(a):\n{''.join(parts[:count])}" for count in (50, 20)]
    sources = toy(tmp_path, chain_a=texts[0], tensors_b=texts[1])
    reached = {path: set(range(1, 101)) for path in sources.texts}
    reached["fp8core/chain/a.py"] -= {2, 3}
    first, again = (draw(sources, reached, 20, seed=5) for _ in range(2))
    assert first == again
    assert first != draw(sources, reached, 20, seed=6)
    rooms = [mutant.path.split("/")[1] for mutant in first]
    assert len(first) == 20
    assert rooms.count("chain") > rooms.count("tensors") > 0
    lines = [sources.find(mutant, {}).lines.start for mutant in first]  # type: ignore[union-attr]
    assert len(set(zip(rooms, lines, strict=True))) == 20
    assert not {("chain", 2), ("chain", 3)} & set(zip(rooms, lines, strict=True))


def test_sample_is_of_this_checkout() -> None:
    """Some mutants may be gone; a sample most of which is gone measures nothing."""
    sample, sources = read_sample(SAMPLE), Sources(ROOT)
    places = [sources.find(mutant, {}) for mutant in sample]
    assert len({mutant.id for mutant in sample}) == len(sample)
    assert sum(place is None for place in places) < len(sample) / 2
    for place in filter(None, places):
        before = ast.dump(ast.parse(sources.texts[place.path]))
        assert ast.dump(ast.parse(place.text)) != before


# --- comparing ---


def results(tmp_path: Path, name: str, **status: str) -> Path:
    file = tmp_path / f"{name}.json"
    made = [Result(dataclasses.replace(MUTANT, id=id), text) for id, text in status.items()]
    trial.write(made, file)
    return file


@pytest.mark.parametrize(
    ("before", "after", "status"),
    [
        ("killed", "killed", 0),
        ("killed", "killed by timeout", 0),
        ("killed", "survived", 1),
        ("killed by timeout", "unreached", 1),
        ("survived", "survived", 0),
        ("killed", "gone", 0),
    ],
)
def test_comparison_fails_if_a_killed_mutant_survives(
    before: str, after: str, status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [
        results(tmp_path, "before", a=before, b="killed"),
        results(tmp_path, "after", a=after, b="killed"),
    ]
    assert main(["compare", *map(str, files)]) == status
    listed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| a ")]
    assert len(listed) == (not after.startswith("killed"))


def test_comparison_fails_if_a_mutant_was_not_run(tmp_path: Path) -> None:
    files = [results(tmp_path, "before", a="killed"), results(tmp_path, "after")]
    assert main(["compare", *map(str, files)]) == 1


# --- a run ---

TOY = """
import subprocess, sys
def clip(x, low):
    if x < low:
        return low
    return x
def count(n):
    while n != 3:
        n += 1
    return n
def inner():
    return 7
def outer():
    code = "import sys; from fp8core.chain import toy; sys.exit(toy.inner())"
    return subprocess.run([sys.executable, "-c", code]).returncode
"""
TOY_TESTS = """
import os
from fp8core.chain import toy
def test_clip(): assert (toy.clip(-1, 0), toy.clip(2, 0)) == (0, 2)
def test_count(): assert toy.count(0) == 3
def test_outer(): assert toy.outer() == 7
def test_failing(): assert toy.clip(1, 0) == 0
def test_sound_while_recorded(): assert toy.clip(1, 0) == 1 and "FP8CORE_TEST_LINES" in os.environ
"""
TOY_CONFIGURATION = """
[tool.pytest]
addopts = ["--import-mode=importlib"]
"""
TOY_MUTANTS = {
    "survived": ("clip", "if x < low:", 0, "comparison 0"),
    "killed": ("clip", "return low", -1, "return None"),
    "killed by timeout": ("count", "n += 1", -1, "arithmetic"),
    "killed in a process": ("inner", "return 7", 0, "constant"),
    "gone": ("clip", "return high", -1, "return None"),
}


def tool(root: Path, *arguments: str) -> str:
    """What the tool prints."""
    done = ran(root, *arguments)
    assert done.returncode == 0, done
    return done.stdout


def ran(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A run of the tool, which takes a test to hang after five seconds."""
    code = "import sys; from tests.mutation import __main__, checkout; checkout.GRACE_S = 5\n"
    code += "sys.exit(__main__.main(sys.argv[1:]))"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small checkout with the tool in it, the map of its tests, and a sample."""
    root = tmp_path_factory.mktemp("toy")
    left_out = shutil.ignore_patterns("test_*", "sample.json", "__pycache__")
    shutil.copytree(Path(__file__).parent, root / "tests" / "mutation", ignore=left_out)
    for path, text in {
        "pyproject.toml": TOY_CONFIGURATION,
        "backends/__init__.py": "",
        "fp8core_pytest/__init__.py": "",
        "fp8core/__init__.py": "",
        "fp8core/chain/__init__.py": "",
        "fp8core/chain/toy.py": TOY,
        "tests/__init__.py": "",
        "tests/test_toy.py": TOY_TESTS,
    }.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    sample = [
        Mutant(id, "fp8core/chain/toy.py", function, text, 0, node, operator, "", "")
        for id, (function, text, node, operator) in TOY_MUTANTS.items()
    ]
    write_sample(sample, root / "sample.json")
    tool(root, "cover", "--out", "map", "--jobs", "1")
    return root


def test_map_has_the_lines_of_each_test_that_passes(checkout: Path) -> None:
    tests = Map.read(checkout / "map" / FILE)
    reaching = {
        line: [
            test.id.partition("::")[2] for test in tests.tests_of("fp8core/chain/toy.py", [line])
        ]
        for line in range(TOY.count("\n") + 1)
    }
    clipping = ["test_clip", "test_sound_while_recorded"]
    assert tests.left_out == ["tests/test_toy.py::test_failing"]
    assert [reaching[line] for line in (4, 5, 6)] == [clipping, ["test_clip"], clipping]
    assert reaching[9] == reaching[10] == ["test_count"]
    assert reaching[12] == reaching[15] == ["test_outer"]  # the first in a process of its own


@pytest.mark.slow
def test_run_judges_each_mutant_by_its_tests(checkout: Path) -> None:
    options = ("--map", "map", "--sample", "sample.json", "--out", "results.json", "--jobs", "2")
    printed = tool(checkout, "run", *options)
    by_id = trial.read(checkout / "results.json")
    assert {id: result.status for id, result in by_id.items()} == {
        **{id: id for id in TOY_MUTANTS},
        "killed in a process": "killed",
    }, printed
    assert by_id["killed"].test == "tests/test_toy.py::test_clip"
    assert by_id["killed by timeout"].test == "tests/test_toy.py::test_count"
    assert by_id["survived"].unsound == ("tests/test_toy.py::test_sound_while_recorded",)
    assert (checkout / "fp8core" / "chain" / "toy.py").read_text() == TOY


def test_fork_ends_at_its_limit_with_what_it_started() -> None:
    reading, writing = os.pipe()

    def work() -> None:
        os.write(writing, b"begun")
        subprocess.run(["sleep", "60"], pass_fds=[writing], check=True)

    assert in_a_fork(work, limit=-1.0) is None
    assert in_a_fork(work, limit=1.0) is None
    os.close(writing)
    assert os.read(reading, 99) == b"begun"
    assert select.select([reading], [], [], 30.0)[0], "a process still has the pipe"
    assert os.read(reading, 99) == b""
    os.close(reading)


def test_run_with_the_map_of_another_checkout_is_refused(checkout: Path, tmp_path: Path) -> None:
    tests = Map.read(checkout / "map" / FILE)
    mutant = dataclasses.replace(MUTANT, path="fp8core/chain/toy.py", function="clip", node=0)
    mutant = dataclasses.replace(mutant, statement="if x < low:")
    assert trial.plan([mutant], tests, Sources(checkout), {})[0]
    with pytest.raises(WrongTreeError, match=r"the map is of another fp8core/chain/toy\.py"):
        trial.plan([mutant], tests, toy(tmp_path, chain_toy=f"\n{TOY}"), {})


def test_run_with_a_map_of_other_tests_is_refused(checkout: Path, tmp_path: Path) -> None:
    tests = Map.read(checkout / "map" / FILE)
    renamed = [test._replace(id=test.id.replace("clip", "cut")) for test in tests.tests]
    dataclasses.replace(tests, tests=renamed).write(tmp_path / FILE)
    options = ("--map", str(tmp_path), "--sample", "sample.json", "--out", str(tmp_path / "r.json"))
    done = ran(checkout, "run", *options, "--jobs", "1")
    assert done.returncode == 1
    assert "the map has other tests: ['tests/test_toy.py::test_cut']" in done.stderr, done


@pytest.mark.parametrize("names", [["clip"], ["clip", "count"]])
def test_run_that_is_late_has_not_failed(names: list[str], checkout: Path) -> None:
    code = f"""
import pathlib
from tests.mutation import checkout
with checkout.copies(checkout.ROOT) as (folder, copy):
    tests = [checkout.Test(f"tests/test_toy.py::test_{{name}}", 0.1) for name in {names}]
    ending = checkout.run_tests(copy, tests, 0.0, folder / "log")
    print(ending.kind, len(ending.begun))
"""
    run = [sys.executable, "-c", code]
    done = subprocess.run(run, cwd=checkout, capture_output=True, text=True, check=False)
    assert done.stdout == "limit 1\n", done


def test_run_whose_modules_are_not_the_copys_is_an_error(checkout: Path) -> None:
    code = f"""
import pathlib, sys
from tests.mutation import checkout
copy = checkout.Copy(checkout.ROOT, pathlib.Path("copied"))
(copy.root / "fp8core" / "chain" / "toy.py").unlink()
(copy.root / "fp8core" / "chain" / "toy.py").symlink_to({str(checkout)!r} + "/fp8core/chain/toy.py")
test = checkout.Test("tests/test_toy.py::test_clip", 0.1)
try:
    print(checkout.run_tests(copy, [test], 9.0, pathlib.Path("copied.log")))
except checkout.WrongTreeError as error:
    print("refused", error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=checkout, capture_output=True, text=True
    )
    assert "refused" in done.stdout, done
    assert "fp8core.chain.toy" in done.stdout
