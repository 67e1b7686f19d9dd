"""Mutants: one small change of one statement of a function, drawn by a seed and found by text.

A mutant names its function and the statement's source, not a line, so that it is found again
after the file was moved, merged into another one or formatted anew.
"""

from __future__ import annotations

import ast
import copy
import dataclasses
import functools
import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, TypeAlias, TypeVar

ROOMS = ("chain", "context", "dispatch", "modules", "recipe", "tensors")
UNCHANGED_FUNCTIONS = {"__repr__", "__str__"}
PACKAGE = "fp8core"

SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt},
    **{ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is},
    **{ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And},
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Div: ast.Mult},
    **{ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult},
}
NEGATED_BY_A_SWAP = (ast.Eq, ast.NotEq, ast.Is, ast.IsNot, ast.In, ast.NotIn)

N = TypeVar("N", bound=ast.AST)
Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A change of a statement.

    Attributes:
        id: the room and a number.
        path: the file that it was drawn from, relative to the root.
        function: qualified name of the function.
        statement: :func:`statement_text`.
        nth: which of the equal statements of the function, from 0.
        node: which of the statement's expressions, or -1 for the statement.
        operator: the kind of change.
        before: source of what is changed.
        after: source of what replaces it.
    """

    id: str
    path: str
    function: str
    statement: str
    nth: int
    node: int
    operator: str
    before: str
    after: str


class Change(NamedTuple):
    """What an operator does: ``text`` replaces the source of ``target``."""

    node: int
    operator: str
    target: ast.stmt | ast.expr
    text: str


class Place(NamedTuple):
    """Where a mutant is: the file, the lines of the statement's head, and the mutated file."""

    path: str
    lines: range
    text: str


# --- operators ---


def changes(statement: ast.stmt) -> Iterator[Change]:
    """Every change of a statement; none in messages of errors, in asserts, or in texts."""
    for operator, replacement in statement_alternatives(statement):
        yield Change(-1, operator, statement, ast.unparse(replacement))
    for index, (expression, is_condition) in enumerate(expressions(statement)):
        for operator, replaced in alternatives(expression, is_condition):
            yield Change(index, operator, expression, f"({ast.unparse(replaced)})")


def statement_alternatives(statement: ast.stmt) -> Iterator[tuple[str, ast.stmt]]:
    """What may stand for a whole statement, with the operator's name."""
    match statement:
        case ast.Return(value=ast.expr() as value) if not is_none(value):
            yield "return None", ast.Return(ast.Constant(None))
        case ast.Expr(value=ast.Call()):
            yield "dropped call", ast.Pass()
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield "dropped assignment", ast.Pass()
        case ast.AugAssign(op=op, target=target):
            if type(op) in SWAPS:
                yield "arithmetic", with_fields(statement, op=SWAPS[type(op)]())
            if isinstance(target, ast.Attribute | ast.Subscript):
                yield "dropped assignment", ast.Pass()


def alternatives(node: ast.expr, is_condition: bool) -> Iterator[tuple[str, ast.expr]]:
    """What may stand for an expression, with the operator's name."""
    match node:
        case ast.Compare(ops=ops):
            for i, op in enumerate(ops):
                swapped = [*ops[:i], SWAPS[type(op)](), *ops[i + 1 :]]
                yield f"comparison {i}", with_fields(node, ops=swapped)
        case ast.BinOp(op=op) | ast.BoolOp(op=op) if type(op) in SWAPS:
            name = "arithmetic" if isinstance(node, ast.BinOp) else "and, or"
            yield name, with_fields(node, op=SWAPS[type(op)]())
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield "dropped not", operand
        case ast.Constant(value=bool(value)):
            yield "constant", ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield "constant", ast.Constant(value + 1)
        case ast.Call(keywords=keywords):  # without another argument most calls fail anywhere
            for i, keyword in enumerate(keywords):
                if keyword.arg:
                    rest = [*keywords[:i], *keywords[i + 1 :]]
                    yield f"dropped argument {keyword.arg}", with_fields(node, keywords=rest)
    if is_condition and not has_own_negation(node):
        yield "negation", ast.UnaryOp(ast.Not(), node)


def has_own_negation(node: ast.expr) -> bool:
    """Return whether an operator of the expression alone is the negation of a condition."""
    match node:
        case ast.Compare(ops=[op]):
            return isinstance(op, NEGATED_BY_A_SWAP)
        case ast.Constant(value=bool()) | ast.UnaryOp(op=ast.Not()):
            return True
    return False


def is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def with_fields(node: N, **fields: object) -> N:
    return type(node)(**{**dict(ast.iter_fields(node)), **fields})


# --- statements ---


def head(statement: ast.stmt) -> list[ast.expr]:
    """The expressions of a statement that may change, without those of statements inside."""
    match statement:
        case (
            ast.If(test=part) | ast.While(test=part) | ast.For(iter=part) | ast.Match(subject=part)
        ):
            return [part]
        case ast.With(items=items):
            return [item.context_expr for item in items]
        case ast.Return(value=value) | ast.AnnAssign(value=value):
            return [value] if value else []
        case ast.Expr(value=value) | ast.Assign(value=value) | ast.AugAssign(value=value):
            return [value]
    return []


def head_lines(statement: ast.stmt) -> range:
    """The lines of a statement up to the first statement inside it."""
    parts = head(statement)
    is_compound = hasattr(statement, "body") and parts
    end = max(part.end_lineno or 0 for part in parts) if is_compound else statement.end_lineno
    return range(statement.lineno, (end or statement.lineno) + 1)


def expressions(statement: ast.stmt) -> list[tuple[ast.expr, bool]]:
    """The expressions of a head in the order of the source, and whether each is a condition."""
    found: list[tuple[ast.expr, bool]] = []

    def collect(node: ast.AST, is_condition: bool) -> None:
        if isinstance(node, ast.JoinedStr):
            return
        if isinstance(node, ast.expr):
            found.append((node, is_condition))
        conditions = [node.test] if isinstance(node, ast.IfExp) else getattr(node, "ifs", [])
        for child in ast.iter_child_nodes(node):
            collect(child, child in conditions)

    for part in head(statement):
        collect(part, isinstance(statement, ast.If | ast.While))
    return found


def statement_text(statement: ast.stmt) -> str:
    """The source of a statement, or of its head, whatever its format and Python's version."""
    if not hasattr(statement, "body"):
        return _source(statement)
    return f"{type(statement).__name__.lower()} {', '.join(map(_source, head(statement)))}:"


def _source(node: ast.AST) -> str:
    if any(isinstance(inner, ast.JoinedStr) for inner in ast.walk(node)):
        node = _WithoutTexts().visit(copy.deepcopy(node))
    return ast.unparse(node)


class _WithoutTexts(ast.NodeTransformer):
    """Replaces f-strings, which versions of Python write in different quotes."""

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.Constant:
        return ast.Constant("f")


def functions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function]]:
    """Every function below a node by qualified name."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function | ast.ClassDef):
            if isinstance(child, Function):
                yield prefix + child.name, child
            yield from functions(child, f"{prefix}{child.name}.")
        elif not isinstance(child, ast.expr):
            yield from functions(child, prefix)


def statements(node: ast.AST) -> Iterator[ast.stmt]:
    """The statements of a function, without those of functions and classes inside it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield child
        if not isinstance(child, Function | ast.ClassDef | ast.expr):
            yield from statements(child)


class Statement(NamedTuple):
    """A statement of a function, with what a mutant says of it."""

    function: str
    text: str
    nth: int
    node: ast.stmt


def statements_of(name: str, candidates: list[Function]) -> list[Statement]:
    """The statements of the functions of one name in one file, such as a property's two."""
    seen: Counter[str] = Counter()
    found = []
    for function in candidates:
        for node in statements(function):
            text = statement_text(node)
            found.append(Statement(name, text, seen[text], node))
            seen[text] += 1
    return found


# --- a checkout ---


class Sources:
    """The files of fp8core in a checkout, parsed."""

    def __init__(self, root: Path) -> None:
        self.texts = {
            path.relative_to(root).as_posix(): path.read_text(encoding="utf-8")
            for path in sorted((root / PACKAGE).rglob("*.py"))
        }
        self._functions: dict[str, dict[str, list[Function]]] = {}
        for path, text in self.texts.items():
            by_name = self._functions[path] = defaultdict(list)
            for name, function in functions(ast.parse(text)):
                by_name[name].append(function)

    @functools.cache  # noqa: B019  a few live as long as the process
    def statements(self, path: str, name: str) -> list[Statement]:
        """The statements of the functions of one qualified name in a file."""
        return statements_of(name, self._functions[path][name])

    def names(self, path: str) -> list[str]:
        """Qualified names of a file's functions."""
        return list(self._functions[path])

    def find(self, mutant: Mutant, renamed: Mapping[str, str]) -> Place | None:
        """Where a mutant is; None if its statement is gone or may be one of several.

        Searched for in its own file, then in functions of its qualified name, then of its name.

        Args:
            renamed: new identifiers by the old ones, in names of functions and in statements.
        """
        path, function, text = (
            _with_names(part, renamed) for part in (mutant.path, mutant.function, mutant.statement)
        )
        last = function.rpartition(".")[2]
        everywhere = [
            (file, name)
            for file in self.texts
            for name in self.names(file)
            if name.rpartition(".")[2] == last
        ]
        for candidates in (
            [(path, function)] if (path, function) in everywhere else [],
            [(file, name) for file, name in everywhere if name == function],
            everywhere,
        ):
            found = [
                (file, statement)
                for file, name in candidates
                for statement in self.statements(file, name)
                if (statement.text, statement.nth) == (text, mutant.nth)
            ]
            if len(found) == 1:
                return self._place(*found[0], mutant)
        return None

    def _place(self, path: str, statement: Statement, mutant: Mutant) -> Place | None:
        for change in changes(statement.node):
            if (change.node, change.operator) == (mutant.node, mutant.operator):
                text = spliced(self.texts[path], change)
                return Place(path, head_lines(statement.node), text)
        return None


def _with_names(text: str, renamed: Mapping[str, str]) -> str:
    return re.sub(r"\w+", lambda word: renamed.get(word[0], word[0]), text)


def spliced(text: str, change: Change) -> str:
    """The text of a file after a change."""
    lines = text.encode().splitlines(keepends=True)
    target = change.target
    assert target.end_lineno is not None
    before = b"".join(lines[: target.lineno - 1]) + lines[target.lineno - 1][: target.col_offset]
    rest = lines[target.end_lineno - 1][target.end_col_offset :]
    rest += b"".join(lines[target.end_lineno :])
    return (before + change.text.encode() + rest).decode()


# --- drawing ---


def draw(sources: Sources, reached: Mapping[str, set[int]], count: int, seed: int) -> list[Mutant]:
    """Draw mutants that tests reach, from each room by its number of lines that have some.

    Args:
        reached: lines that tests reach, by file.
    """
    generator = random.Random(seed)
    pools: dict[str, dict[tuple[str, int], list[Mutant]]] = {room: {} for room in ROOMS}
    for path in sorted(reached.keys() & sources.texts.keys()):
        room = path.split("/")[1]
        if room in ROOMS:
            pools[room].update(_candidates(sources, path, reached[path]))
    shares = _shares({room: len(pool) for room, pool in pools.items()}, count)
    drawn = []
    for room in ROOMS:
        lines = generator.sample(sorted(pools[room]), min(shares[room], len(pools[room])))
        for number, line in enumerate(sorted(lines)):
            mutant = generator.choice(pools[room][line])
            drawn.append(dataclasses.replace(mutant, id=f"{room}-{number:03}"))
    return drawn


def _candidates(
    sources: Sources, path: str, reached: set[int]
) -> dict[tuple[str, int], list[Mutant]]:
    pool = defaultdict(list)
    for name in sources.names(path):
        if name.rpartition(".")[2] in UNCHANGED_FUNCTIONS:
            continue
        for statement in sources.statements(path, name):
            if reached.isdisjoint(head_lines(statement.node)):
                continue
            for change in changes(statement.node):
                before = ast.unparse(change.target)
                where = (path, name, statement.text, statement.nth)
                mutant = Mutant("", *where, change.node, change.operator, before, change.text)
                pool[path, change.target.lineno].append(mutant)
    return pool


def _shares(weights: Mapping[str, int], count: int) -> dict[str, int]:
    """``count`` split by weights: whole parts first, then the largest remainders."""
    total = sum(weights.values()) or 1
    exact = {room: count * weight / total for room, weight in weights.items()}
    shares = {room: int(share) for room, share in exact.items()}
    by_remainder = sorted(exact, key=lambda room: shares[room] - exact[room])
    for room in by_remainder[: count - sum(shares.values())]:
        shares[room] += 1
    return shares
