"""Counts that tell how much there is to read may fall and not rise: a change that needs more of
one says so here, with its reason in docs/decisions.md."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SMALL = 100
LONG = 60
CORE = frozenset(
    {
        *("backend_api", "chain", "collectives", "context", "dispatch", "formats", "modules"),
        *("recipe", "tensors", "torch_ops"),
    }
)
VAGUE = frozenset(
    {
        *("alike", "arranged", "asked", "found", "given", "held", "kept", "known", "lasting"),
        *("made", "one", "other", "others", "own", "taken", "things", "wanted", "what"),
    }
)
PRONOUN = re.compile(r"(It|Its|They|This|That|These|Those|What|One)\b")
WORD = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])")
SUBJECTS: Mapping[str, str] = {
    "operation rotary": r"Rotary(Backward)?Desc|rotary(_backward)?",
    "format e2m1": r"e2m1",
    "recipe NVFP4BlockScaling": r"NVFP4BlockScaling|nvfp4",
    "plan of attention": r"AttentionPlan",
    "activation srelu": r"srelu|SReLU(Link)?",
}
MOST = {
    "lines of fp8core": 76_584,
    "files": 266,
    "files under 100 lines": 39,
    "modules that list names": 0,
    "protocols": 14,
    "classes of the core": 405,
    "functions over 60 lines": 10,
    "vague names": 37,
    "docstrings that begin with a pronoun": 0,
    "files that name the operation rotary": 7,
    "files that name the format e2m1": 6,
    "files that name the recipe NVFP4BlockScaling": 7,
    "files that name the plan of attention": 6,
    "files that name the activation srelu": 4,
}


def sources(root: Path) -> dict[Path, str]:
    """Return the shipped modules of a checkout, relative to it."""
    found = (path for top in ("fp8core", "backends") for path in sorted((root / top).rglob("*.py")))
    return {path.relative_to(root): path.read_text(encoding="utf-8") for path in found}


def figures(files: Mapping[Path, str]) -> dict[str, int]:
    """Return the counts of :data:`MOST`."""
    nodes_of = {path: [*ast.walk(ast.parse(text))] for path, text in files.items()}
    front = [path for path in files if path.parts[0] == "fp8core"]
    nodes = [node for found in nodes_of.values() for node in found]
    core = [node for path in front if CORE & set(path.parts[1:2]) for node in nodes_of[path]]
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    counts = {
        "lines of fp8core": sum(files[path].count("\n") for path in front),
        "files": len(front),
        "files under 100 lines": sum(files[path].count("\n") < SMALL for path in front),
        "modules that list names": sum(
            "__all__" in files[path] and path.stem != "__init__" for path in front
        ),
        "protocols": sum(any(map(is_protocol, node.bases)) for node in classes),
        "classes of the core": sum(isinstance(node, ast.ClassDef) for node in core),
        "functions over 60 lines": sum(
            (node.end_lineno or 0) - node.lineno >= LONG for node in functions
        ),
        "vague names": sum(vague_words(nodes).values()),
        "docstrings that begin with a pronoun": sum(
            bool(PRONOUN.match(ast.get_docstring(node) or ""))
            for node in nodes
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        ),
    }
    neutral = [path for path in files if not {"cuda", "ascend"} & set(path.parts)]
    names_of = [set(names_in(nodes_of[path])) for path in neutral]
    for subject, pattern in SUBJECTS.items():
        counts[f"files that name the {subject}"] = sum(
            any(re.fullmatch(pattern, name) for name in names) for names in names_of
        )
    return counts


def is_protocol(base: ast.expr) -> bool:
    return ast.unparse(base).partition("[")[0] == "Protocol"


def vague_words(nodes: list[ast.AST]) -> Counter[str]:
    """Count the words of defined names that say nothing of what they name."""
    words: Counter[str] = Counter()
    for node in nodes:
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.arg(arg=name):
                pass
            case ast.Name(id=name, ctx=ast.Store()):
                pass
            case _:
                continue
        words.update(word for word in map(str.lower, WORD.findall(name)) if word in VAGUE)
    return words


def names_in(nodes: list[ast.AST]) -> Iterator[str]:
    """Yield the names and short texts among the nodes of a module."""
    for node in nodes:
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.alias(name=name):
                yield name
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
                yield name
            case ast.Constant(value=str(text)) if len(text) < 40:
                yield text


@pytest.fixture(scope="module")
def counted() -> dict[str, int]:
    return figures(sources(ROOT))


@pytest.mark.parametrize("figure", MOST)
def test_no_count_rises(figure: str, counted: dict[str, int]) -> None:
    assert counted[figure] <= MOST[figure]


@pytest.mark.parametrize(
    ("figure", "source"),
    [
        ("modules that list names", "__all__ = []\n"),
        ("protocols", "class A(Protocol[T]): ...\n"),
        ("classes of the core", "class A: ...\n"),
        ("functions over 60 lines", "def f():\n" + "    x = 1\n" * 60),
        ("vague names", "def run(given, keptOther=None): ...\n"),
        ("docstrings that begin with a pronoun", '"""It runs."""\n'),
        ("files that name the operation rotary", "x = RotaryDesc\n"),
        ("files that name the activation srelu", 'x = "srelu"\n'),
    ],
)
def test_what_is_added_is_counted(figure: str, source: str) -> None:
    empty = {Path("fp8core/chain/norm.py"): ""}
    before, after = (figures({**empty, Path("fp8core/chain/link.py"): s}) for s in ("", source))
    assert after[figure] - before[figure] == (3 if figure == "vague names" else 1)


if __name__ == "__main__":
    print(*(f"{name}: {count}" for name, count in figures(sources(ROOT)).items()), sep="\n")
