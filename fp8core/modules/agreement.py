"""Properties that ranks of a parallel layer have in common, compared before its first collective.

Codes that one rank casts are read by all: where recipes, layers or delayed scales differ, results
would be wrong without a word, or ranks would wait for each other.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fp8core.chain.shape import LinkShape
from fp8core.collectives import Communicator, named
from fp8core.collectives.comparison import DIGEST
from fp8core.errors import Fp8CoreError
from fp8core.recipe import Recipe
from fp8core.recipe.base import plan_of
from fp8core.recipe.plan import LayerRole, Plan
from fp8core.tensors.quantizer_binding import Binding


def communicators_of(shapes: Sequence[LinkShape]) -> list[Communicator]:
    """Return the communicators of the groups whose ranks compute ``shapes`` together, each once."""
    names = dict.fromkeys(name for shape in shapes for name in shape.process_groups)
    return [named(name) for name in names]


_MOST_TIMES = 3


class Agreement:
    """Comparisons that a layer has made with the other ranks, by the keys of its bound links.

    Ranks compare again where a layer changes to other links, which it may have run before: the
    first three times of each change, so that a loop that alternates does not pay in each step.
    """

    __slots__ = ("_changes", "_texts")

    def __init__(self) -> None:
        self._texts: dict[object, tuple[str, list[Communicator]]] = {}
        self._changes: Counter[tuple[str, str]] = Counter()

    def covers(self, key: object) -> bool:
        """Say whether the layer has compared the links bound by ``key``."""
        return key in self._texts

    def add(self, key: object, text: str, shapes: Sequence[LinkShape]) -> None:
        """Note that the ranks have agreed on ``text`` for the links of ``shapes``."""
        self._texts[key] = text, communicators_of(shapes)

    def change(self, label: str, before: object, after: object) -> None:
        """Compare a change from the links bound by one key to those of another.

        Raises:
            OperandError: another rank has other links; raised on every rank.
        """
        (old, _), (new, communicators) = self._texts[before], self._texts[after]
        self._changes[old, new] += 1
        if old == new or self._changes[old, new] > _MOST_TIMES:
            return
        for communicator in communicators:
            communicator.agree(new, f"the layer {label}")


def agree(
    label: str,
    role: LayerRole,
    plan_type: type[Plan],
    recipe: Recipe | None,
    binding: Binding,
    shapes: Sequence[LinkShape],
    *,
    mode: str = "",
    scales: Sequence[torch.Tensor | None] = (),
    once: bool = False,
) -> str:
    """Compare a layer, about to be bound to ``recipe``, with that of the other ranks.

    ``mode`` says in words for which calls, ``scales`` are its delayed ones. With ``once`` equal
    layers are compared for the first of them alone: so are those of graphs, which torch may capture
    again on one rank and not on another. Returns what the ranks have in common, but for the scales.

    Raises:
        OperandError: they differ; raised on every rank.
    """
    try:
        plan = _plan_text(plan_of(plan_type, recipe, role, binding.activation_dtype))
    except Fp8CoreError as error:  # the other ranks wait for an answer
        plan = f"none, {type(error).__name__}: {error}"
    parts = {
        "links": ", ".join(map(_description, shapes)),
        "dtype": str(binding.activation_dtype),
        "recipe": plan,
        "calibrates": "yes" if binding.is_observing else "",
        "mode": mode,
    }
    common = _joined(parts)
    # Experts on other ranks have scales of their own.
    are_split = any(shape.splits_experts for shape in shapes)
    present = (
        () if are_split else (scale for scale in scales if scale is not None and not scale.is_meta)
    )
    shared = "; ".join(str(scale.tolist()) for scale in present)
    text = _joined({"": common, "delayed scales": shared}) if shared else common
    for communicator in communicators_of(shapes):
        if not once:
            communicator.agreed.discard(text)
        communicator.agree_once(text, f"the layer {label}")
    return common


def _joined(parts: Mapping[str, str]) -> str:
    named_parts = ((f"{name}: " if name else "") + value for name, value in parts.items() if value)
    return ". ".join(named_parts)


def _description(shape: LinkShape) -> str:
    """Return ``shape`` in words, without the names of groups, which ranks may call otherwise."""
    fields = {
        field.name: getattr(shape, field.name)
        for field in dataclasses.fields(shape)  # type: ignore[arg-type]  # each shape is one
    }
    values = ", ".join(
        f"{name}={_without(shape.process_groups, value)}"
        for name, value in fields.items()
        if value not in shape.process_groups
    )
    return f"{type(shape).__name__.removesuffix('Shape')}({values})"


def _without(names: Sequence[str], value: object) -> object:
    if not isinstance(value, tuple):
        return value
    return tuple(part for part in value if part not in names)


def _plan_text(plan: Plan) -> str:
    specs: dict[str, Any] = {
        name: [None if spec is None else str(spec) for spec in tensor]
        for name, tensor in plan.tensors.items()
    }
    low = {name: texts for name, texts in specs.items() if any(texts)}
    words = [f"{name} {' and '.join(map(str, texts))}" for name, texts in low.items()]
    # A function of the user's is shown with its address, which differs between processes.
    shown = re.sub(r" at 0x[0-9a-f]+", "", repr(plan))
    rest = hashlib.sha256(shown.encode()).hexdigest()[:8]
    return f"{'; '.join(words) or 'high precision'}; {DIGEST}{rest}"
