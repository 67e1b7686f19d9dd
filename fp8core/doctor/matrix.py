"""Which operations of which recipe a backend runs, generated from what the backend declares.

Nothing here is written by hand: a cell holds the backend's answers to the descriptors that the
recipe's plan needs.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from fp8core import recipe
from fp8core.backend_api import OPS, OPTIONAL_OPS, BackendSpec
from fp8core.commands.arguments import NO_RECIPE
from fp8core.dispatch import plugins, select
from fp8core.dispatch.isolation import Failure, attempt
from fp8core.inspect.descriptors import Need, op_needs
from fp8core.recipe import PerLayer, Recipe

__all__ = ["DTYPE", "Cell", "cells", "needs_of", "rows", "unanswered"]

DTYPE = torch.bfloat16
"""Activations and parameters that the matrix and the self-test are about."""


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


def cells(spec: BackendSpec, device: torch.device) -> list[Cell]:
    """Ask the backend of ``spec`` about every operation of every recipe on ``device``."""
    registry = plugins.load()
    found = []
    for name in (NO_RECIPE, *recipe.names()):
        for op in (*OPS, *OPTIONAL_OPS):
            needs = attempt(functools.partial(needs_of, op, name))
            if isinstance(needs, Failure):
                found.append(Cell(name, op, "no", (str(needs),)))
            else:
                found.append(_cell(name, op, needs, registry, spec, device))
    return found


def needs_of(op: str, name: str) -> list[Need]:
    """Return the uses of ``op`` under the recipe called ``name``; ``none`` is high precision."""
    made: Recipe = PerLayer({}) if name == NO_RECIPE else recipe.by_name(name)
    return op_needs(op, made, DTYPE)


def _cell(
    name: str,
    op: str,
    needs: Iterable[Need],
    registry: plugins.Registry,
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
    # A portable backend emulates low precision alone, so one cell may hold both.
    state = "partly" if len(states) > 1 and "no" in states else min(states)
    said = tuple(_reason(text, steps) for text, steps in reasons.items())
    return Cell(name, op, state, said)


def _reason(text: str, steps: Sequence[str]) -> str:
    named = ", ".join(dict.fromkeys(filter(None, steps)))
    return f"{named}: {text}" if named else text


def rows(found: Sequence[Cell]) -> list[list[str]]:
    """Arrange one backend's cells as a table: a heading, then a row of states for each operation.

    Optional operations that no recipe can use are left out.
    """
    recipes = list(dict.fromkeys(cell.recipe for cell in found))
    state = {(cell.op, cell.recipe): cell.state for cell in found}
    words = {"unused": "-", "no": "no", "partly": "partly"}
    table = [["", *recipes]]
    for op in dict.fromkeys(cell.op for cell in found):
        line = [words.get(state[op, name], state[op, name]) for name in recipes]
        if op in OPS or set(line) - {"no", "-"}:
            table.append([op, *line])
    return table


def unanswered(found: Iterable[Cell]) -> list[str]:
    """Return why needed operations are refused: one line a reason, with recipes and operations."""
    places: dict[str, dict[str, list[str]]] = {}
    for cell in found:
        if cell.op in OPS:
            for reason in cell.reasons:
                places.setdefault(reason, {}).setdefault(cell.op, []).append(cell.recipe)
    return [
        f"{op} of {', '.join(names)}: {reason}"
        for reason, ops in places.items()
        for op, names in ops.items()
    ]
