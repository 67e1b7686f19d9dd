"""Reads the public names of Transformer Engine, and writes the page of what fp8core has of them.

Names alone, read with ``ast`` from the wheel, which is neither imported nor installed::

    pip download --no-deps --only-binary :all: transformer_engine_cu13==2.20.2
    python -m tests.te_surface transformer_engine_cu13-2.20.2-*.whl

writes te_surface.json, and ``python -m tests.te_surface`` writes docs/te-surface.md from it.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import sys
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple
from zipfile import ZipFile

from fp8core.names import COMMUNICATION, NOT_OFFERED

TABLE = Path(__file__).with_suffix(".json")
CASES = Path(__file__).with_name("te_cases.txt")
"""What users and frameworks do with Transformer Engine beyond its names: ``case | test`` a line,
under a title in brackets for each subject."""
PAGE = Path(__file__).resolve().parent.parent / "docs" / "te-surface.md"

MODULES = {
    "pytorch": "pytorch/__init__.py",
    "pytorch.ops": "pytorch/ops/__init__.py",
    "pytorch.optimizers": "pytorch/optimizers/__init__.py",
    "pytorch.router": "pytorch/router.py",
    "common.recipe": "common/recipe/__init__.py",
}
"""The modules of Transformer Engine whose names are public, and the file of each."""

HOMES = {
    "pytorch": "fp8core",
    "pytorch.ops": "fp8core.ops",
    "pytorch.optimizers": "fp8core.optimizers",
    "pytorch.router": "fp8core.router",
    "common.recipe": "fp8core.recipe",
}
"""Where fp8core has the names of each module."""

# What a module of theirs imports for its own use; `fused` is a package of internals.
_FOREIGN = ("abc", "collections", "dataclasses", "functools", "math", "os", "pydantic", "torch")
_FOREIGN += ("typing", "enum", "__future__", "transformer_engine_torch", "warnings")
_INTERNAL = {
    *("fused", "constants", "load_framework_extension", "torch_version"),
    *("FusedTopkScoreFunction", "FusedTopkScoreFunctionQB", "FusedAuxLoss"),
    *("FusedComputeScoresForMoEAuxLoss", "is_op_fuser_grouped_tensor_path_supported"),
    "mark_qb_bin_bounds_validated",
}


class Name(NamedTuple):
    """One public name of Transformer Engine: its module, and what fp8core has."""

    module: str
    name: str

    @property
    def here(self) -> str:
        """What fp8core calls it, without the package's name in front."""
        home = HOMES[self.module].removeprefix("fp8core").removeprefix(".")
        return f"{home}.{self.name}" if home else self.name

    @property
    def is_offered(self) -> bool:
        """Whether fp8core has it."""
        home = HOMES[self.module]
        if importlib.util.find_spec(home) is None:
            return False
        return hasattr(importlib.import_module(home), self.name)

    @property
    def is_communication(self) -> bool:
        """Whether it belongs to several ranks that exchange tensors."""
        return self.here in COMMUNICATION

    @property
    def reason(self) -> str | None:
        """Why it is not offered, and what to use; None if nothing says so."""
        return NOT_OFFERED.get(self.here)


def public_names(tree: ast.Module, archive: ZipFile, file: str) -> Iterator[str]:
    """Yield the names that the module of ``tree`` defines or imports for its users."""
    for node in tree.body:
        match node:
            case ast.ImportFrom(names=[ast.alias(name="*")], module=str(module)):
                inner = f"{file.rsplit('/', 1)[0]}/{module}/__init__.py"
                yield from public_names(_parsed(archive, inner), archive, inner)
            case ast.ImportFrom(module=module, names=names):
                is_kernel = "optimizers" in file
                if is_kernel or (module or "").split(".")[0] not in _FOREIGN:
                    yield from (alias.asname or alias.name for alias in names)
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Assign(targets=[ast.Name(id=name)]):
                yield name


def _parsed(archive: ZipFile, file: str) -> ast.Module:
    return ast.parse(archive.read(f"transformer_engine/{file}"))


def read(wheel: Path) -> dict[str, object]:
    """Return the table of ``wheel``: its version, and the public names of each module."""
    table: dict[str, object] = {"version": wheel.name.split("-")[1]}
    with ZipFile(wheel) as archive:
        for module, file in MODULES.items():
            names = public_names(_parsed(archive, file), archive, file)
            table[module] = sorted(
                {name for name in names if not name.startswith("_")} - _INTERNAL, key=str.lower
            )
    return table


def stored() -> list[Name]:
    """Return the names in te_surface.json."""
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    return [Name(module, name) for module in MODULES for name in table[module]]


def cases() -> dict[str, list[tuple[str, str]]]:
    """Return the ``(case, test)`` of each title in te_cases.txt."""
    found: dict[str, list[tuple[str, str]]] = {}
    for text in filter(None, map(str.strip, CASES.read_text(encoding="utf-8").splitlines())):
        if text.startswith("["):
            rows = found.setdefault(text.strip("[]"), [])
        else:
            case, _, test = text.rpartition(" | ")
            rows.append((case, test))
    return found


def share(names: list[Name]) -> tuple[int, int]:
    """Return how many of ``names`` are offered, and how many there are, without communication."""
    counted = [name for name in names if not name.is_communication]
    return sum(name.is_offered for name in counted), len(counted)


def page(names: list[Name]) -> str:
    """Return docs/te-surface.md."""
    lines = [
        "# Transformer Engine's public names",
        "",
        "Every public name of Transformer Engine 2.20.2, and what fp8core has. This page is",
        "written by `python -m tests.te_surface` from the names in the wheel; a test compares.",
        "Offered names have the arguments of theirs, but for those in",
        "[Migrating from Transformer Engine](migrating-from-transformer-engine.md). A name that is",
        "not offered raises an error with the text given here.",
        "",
        "| module | offered | of | not counted: communication |",
        "|---|---|---|---|",
    ]
    for module in MODULES:
        here = [name for name in names if name.module == module]
        offered, counted = share(here)
        lines.append(f"| `{module}` | {offered} | {counted} | {len(here) - counted} |")
    for module, home in HOMES.items():
        here = [name for name in names if name.module == module]
        lines += ["", f"## `transformer_engine.{module}`: `{home}`", ""]
        lines += ["| name | here |", "|---|---|"]
        lines += [f"| `{name.name}` | {_state(name)} |" for name in here]
    lines += ["", "## What else is done with them", ""]
    lines += ["Calls, attributes and classes of users beyond the names; each has a test."]
    for title, rows in filter(itemgetter(1), cases().items()):
        lines += ["", f"### {title}", "", "| case | test |", "|---|---|"]
        lines += [f"| {case} | `{test}` |" for case, test in rows]
    return "\n".join(lines) + "\n"


def _state(name: Name) -> str:
    if name.is_offered:
        return "offered"
    return f"not offered: {name.reason}"


if __name__ == "__main__":
    if sys.argv[1:]:
        TABLE.write_text(json.dumps(read(Path(sys.argv[1])), indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(stored()), encoding="utf-8")
