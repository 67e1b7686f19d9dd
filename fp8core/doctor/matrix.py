"""The matrix of recipes and operations that a backend supports, generated from its declarations.

A cell holds the backend's answers to the descriptors that layers need under the recipe.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fp8core import recipe
from fp8core.backend_api import OPS, OPTIONAL_OPS, BackendSpec
from fp8core.dispatch import plugins, select
from fp8core.dispatch.isolation import Failure, attempt
from fp8core.dispatch.registry import Registry
from fp8core.inspection.descriptors import Need, recipe_needs
from fp8core.inspection.explain import NO_RECIPE
from fp8core.recipe import PerLayer, Recipe

DTYPE = torch.bfloat16
"""The dtype of activations and parameters in the matrix and in the self-test."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A backend's answers about one operation under one recipe.

    Attributes:
        recipe: the recipe's name; ``none`` is high precision.
        op: the operation's name.
        state: ``native``; ``emulated`` (in high precision, on request); ``partly``, when some uses
            are refused; ``no``; or ``unused``, when the recipe has no use for the operation.
        reasons: why uses are refused, each with its steps.
    """

    recipe: str
    op: str
    state: str
    reasons: tuple[str, ...] = ()


def cell_from(entry: Mapping[str, Any]) -> Cell:
    """Return the cell that ``dataclasses.asdict`` turned into ``entry``, perhaps through JSON."""
    return Cell(entry["recipe"], entry["op"], entry["state"], tuple(entry["reasons"]))


def needs_by_recipe() -> dict[str, list[Need] | Failure]:
    """Return the uses of all operations under each recipe, or how the recipe fails; the recipe
    ``none`` is high precision."""
    names = (NO_RECIPE, *recipe.names())
    return {name: attempt(functools.partial(_needs, name)) for name in names}


def _needs(name: str) -> list[Need]:
    chosen: Recipe = PerLayer({}) if name == NO_RECIPE else recipe.by_name(name)
    return recipe_needs(chosen, DTYPE)


def cells(
    spec: BackendSpec, device: torch.device, needs: Mapping[str, list[Need] | Failure]
) -> list[Cell]:
    """Ask the backend of ``spec`` about every operation of every recipe on ``device``."""
    registry = plugins.load()
    answers = []
    for (name, uses), op in itertools.product(needs.items(), (*OPS, *OPTIONAL_OPS)):
        if isinstance(uses, Failure):
            answers.append(Cell(name, op, "no", (str(uses),)))
        else:
            of_op = [need for need in uses if need.desc.op == op]
            answers.append(_cell(name, op, of_op, registry, spec, device))
    return answers


def _cell(
    name: str,
    op: str,
    needs: Iterable[Need],
    registry: Registry,
    spec: BackendSpec,
    device: torch.device,
) -> Cell:
    reasons: dict[str, list[str]] = {}
    states = set()
    for step, desc in needs:
        verdict = select.verdict(registry, spec, desc, device)
        if verdict.reason is not None:
            reasons.setdefault(verdict.reason, []).append(step)
        states.add("no" if verdict.reason else "emulated" if verdict.emulated else "native")
    if not states:
        return Cell(name, op, "unused")
    # A portable backend emulates only low precision, so a cell may have native and emulated uses.
    state = "partly" if len(states) > 1 and "no" in states else min(states)
    return Cell(name, op, state, tuple(_reason(text, steps) for text, steps in reasons.items()))


def _reason(text: str, steps: Sequence[str]) -> str:
    named = ", ".join(dict.fromkeys(filter(None, steps)))
    return f"{named}: {text}" if named else text


def rows(answers: Sequence[Cell]) -> list[list[str]]:
    """Arrange one backend's cells as a table: a heading, then a row of states for each operation.

    Optional operations that no recipe can use are left out.
    """
    recipes = list(dict.fromkeys(cell.recipe for cell in answers))
    state = {(cell.op, cell.recipe): cell.state for cell in answers}
    words = {"unused": "-", "no": "no", "partly": "partly"}
    table = [["", *recipes]]
    for op in dict.fromkeys(cell.op for cell in answers):
        line = [words.get(state[op, name], state[op, name]) for name in recipes]
        if op in OPS or set(line) - {"no", "-"}:
            table.append([op, *line])
    return table


def unanswered(answers: Iterable[Cell]) -> list[str]:
    """Return why needed operations are refused: one line a reason, with recipes and operations."""
    uses: dict[str, dict[str, list[str]]] = {}
    for cell in answers:
        if cell.op in OPS:
            for reason in cell.reasons:
                uses.setdefault(reason, {}).setdefault(cell.op, []).append(cell.recipe)
    return [
        f"{op} of {', '.join(names)}: {reason}"
        for reason, ops in uses.items()
        for op, names in ops.items()
    ]
