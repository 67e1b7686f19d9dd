"""The statistics that other recipes would give for the tensors that a monitor has saved."""

from __future__ import annotations

import dataclasses
import glob
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from fp8core.backend_api import OperandSpec
from fp8core.chain.call import Call
from fp8core.chain.linear.program import LinearLink
from fp8core.chain.shape import BindContext, bind_chain
from fp8core.errors import Fp8CoreError, OperandError, RecipeError, did_you_mean
from fp8core.inspection.monitoring.observe import LayerWatch
from fp8core.inspection.monitoring.record import Recorder, SavedLinear, SavedTensors
from fp8core.inspection.monitoring.rows import Row, render, rows_of, table_of
from fp8core.modules.calls.base import LowPrecisionModule
from fp8core.recipe import PerLayer, Recipe, by_name
from fp8core.recipe.base import plan_of
from fp8core.recipe.named import names_of
from fp8core.recipe.plan import GemmPlan, LayerRole, LinearPlan


@dataclass(frozen=True, slots=True)
class Summary:
    """The statistics of one recipe over all operands; NaN if it quantizes none.

    ``sqnr_db`` is that of the mean noise-to-signal ratio, ``least_sqnr_db`` that of the worst
    operand, ``worst_row_sqnr_db`` that of the worst row. ``underflow_share`` and
    ``saturation_share`` are the largest of an operand.
    """

    recipe: str
    sqnr_db: float
    least_sqnr_db: float
    worst_row_sqnr_db: float
    underflow_share: float
    saturation_share: float


class WhatIf:
    """The statistics of the same tensors under each recipe.

    ``rows`` are the rows of each recipe by its label; their counts of GEMMs are 0, as none ran. A
    label is the name that was passed, or the class of the Recipe; methods also take another name of
    the recipe if it is unambiguous.
    """

    def __init__(
        self,
        recipes: Mapping[str, Recipe],
        rows: Mapping[str, Sequence[Row]],
        patterns: Mapping[str, str | LayerRole],
    ) -> None:
        self.rows = {label: list(of_recipe) for label, of_recipe in rows.items()}
        self._recipes = dict(recipes)
        self._patterns = dict(patterns)  # by the layer's name in the rows

    def summary(self) -> list[Summary]:
        """Return one line for each recipe, the one with the highest SQNR first."""
        summaries = [_summary(label, rows) for label, rows in self.rows.items()]
        return sorted(summaries, key=lambda entry: (math.isnan(entry.sqnr_db), -entry.sqnr_db))

    def worst(self, recipe: str) -> list[tuple[str, float]]:
        """Return the layers and the least SQNR of their operands, dB, the lowest first.

        Raises:
            RecipeError: no recipe that was tried has this name.
        """
        least: dict[str, float] = {}
        for row in self.rows[self._label_of(recipe)]:
            if not math.isnan(row.sqnr_db):
                least[row.layer] = min(row.sqnr_db, least.get(row.layer, math.inf))
        return sorted(least.items(), key=lambda item: item[1])

    def suggest(self, recipe: str, k: int = 1) -> PerLayer:
        """Return ``recipe``, but with the ``k`` layers of lowest SQNR in high precision.

        A layer with several linears counts with its worst. The rules name layers by name, or else
        by path in the model: call ``fp8core.prepare(model)`` before the result is used.

        Raises:
            RecipeError: no recipe that was tried has this name, or several are.
            OperandError: ``k`` is not from 1 to the number of layers.
        """
        label = self._label_of(recipe)
        ranked = list(dict.fromkeys(self._patterns[layer] for layer, _ in self.worst(label)))
        if not isinstance(k, int) or not 1 <= k <= len(ranked):
            raise OperandError(
                f"suggest(k={k!r}): {len(ranked)} layers were observed under {recipe!r}; expected "
                f"1 to {len(ranked)}."
            )
        return PerLayer(dict.fromkeys(ranked[:k]), default=self._recipes[label])

    def table(self) -> str:
        """Return the summaries as a table, then every operand under every recipe."""
        heading = [field.name for field in dataclasses.fields(Summary)]
        lines = [
            [entry.recipe, *(f"{value:.4g}" for value in dataclasses.astuple(entry)[1:])]
            for entry in self.summary()
        ]
        parts = [render("all operands", heading, lines)]
        for label, rows in self.rows.items():
            parts.append(render(label, *table_of(rows, leave_out=("GEMMs", "NaN/inf"))))
        return "\n".join(parts)

    def _label_of(self, text: str) -> str:
        """Return the label that ``text`` is, or the only label whose recipe has this name."""
        if text in self.rows:
            return text
        called = {label: names_of(recipe) for label, recipe in self._recipes.items()}
        labels = [label for label, names in called.items() if text in names]
        if len(labels) == 1:
            return labels[0]
        if labels:
            raise RecipeError(
                f"several of the recipes that were tried are {text!r}: {', '.join(labels)}; "
                f"give one of these labels."
            )
        candidates = (*self.rows, *(name for names in called.values() for name in names))
        raise RecipeError(
            f"no recipe {text!r} was tried; tried: {', '.join(self.rows)}."
            f"{did_you_mean(text, candidates)}"
        )


def _summary(label: str, rows: Sequence[Row]) -> Summary:
    compared = [row for row in rows if not math.isnan(row.sqnr_db)]
    if not compared:
        return Summary(label, *(math.nan,) * 5)
    ratios = [10 ** (-row.sqnr_db / 10) for row in compared]
    mean = sum(ratios) / len(ratios)
    return Summary(
        label,
        -10 * math.log10(mean) if mean else math.inf,
        min(row.sqnr_db for row in compared),
        min(r.worst_row_sqnr_db for r in compared),
        max(row.underflow_share for row in compared),
        max(row.saturation_share for row in compared),
    )


def replay(
    linears: Mapping[tuple[str, int], SavedLinear],
    layers: Mapping[str, LowPrecisionModule],
    recipes: str | Recipe | Sequence[str | Recipe],
) -> WhatIf:
    """Cast the saved tensors of ``linears`` as :meth:`Monitor.what_if` says; ``layers`` are those
    by path."""
    chosen = _label(recipes)
    if not linears:
        raise OperandError(
            "what_if() has no tensors to cast: no layer has run in an observed step, or the "
            "monitor was opened with keep_tensors=False."
        )
    patterns: dict[str, str | LayerRole] = {}
    for path, layer in layers.items():
        several = len(layer.linear_shapes()) > 1
        for index in range(len(layer.linear_shapes())):
            name = f"{path}[{index}]" if several else path
            patterns[name] = pattern_of(path, layer, is_only=len(layers) == 1)
    rows = {}
    for label, recipe in chosen.items():
        recorder = Recorder()
        for (path, index), linear in linears.items():
            try:
                _cast(recorder, path, layers[path], index, linear, recipe)
            except Fp8CoreError as error:
                raise type(error)(f"what_if({label!r}): {path!r}: {error}") from None
        rows[label] = rows_of(0, recorder.take())
    return WhatIf(chosen, rows, patterns)


def _label(recipes: str | Recipe | Sequence[str | Recipe]) -> dict[str, Recipe]:
    """Return the recipes by the labels of the tables: the passed name, or the class, with a number
    if it repeats."""
    if isinstance(recipes, str | Recipe):
        recipes = [recipes]
    labelled: dict[str, Recipe] = {}
    for entry in recipes:
        if not isinstance(entry, str | Recipe):
            raise RecipeError(f"what_if({entry!r}): expected recipes, or names of recipes.")
        recipe = by_name(entry) if isinstance(entry, str) else entry
        label = base = entry if isinstance(entry, str) else type(entry).__name__
        number = 1
        while label in labelled:
            number += 1
            label = f"{base} {number}"
        labelled[label] = recipe
    if not labelled:
        raise RecipeError("what_if([]): expected at least one recipe, or name of a recipe.")
    return labelled


def pattern_of(path: str, layer: LowPrecisionModule, *, is_only: bool) -> str | LayerRole:
    """Return the pattern of a PerLayer rule for this layer; its kind if it is the whole model."""
    if layer.name is None and is_only and path == type(layer).__name__:
        return LayerRole(layer.kind)
    return glob.escape(layer.name or path)


def _cast(
    recorder: Recorder,
    path: str,
    layer: LowPrecisionModule,
    index: int,
    linear: SavedLinear,
    recipe: Recipe,
) -> None:
    """Cast the kept tensors of one linear as ``recipe`` would, and record the casts."""
    binding = linear.binding._replace(is_observing=False)
    role = LayerRole(layer.kind, layer.name or path)
    plan = _undelayed(plan_of(LinearPlan, recipe, role, binding.activation_dtype))
    watch = LayerWatch(recorder, path, len(layer.linear_shapes()))
    context = BindContext(plan, binding, layer.label, None, watch)
    links = bind_chain(layer.link_shapes(), context)
    link = next(link for link in links if isinstance(link, LinearLink) and link.index == index)
    # Gradients of input and weights need both orientations; that of a bias needs no operand.
    needs = [True] * (1 + link.num_weights) + [False] * (link.num_params - link.num_weights)
    for name in ("input", "weight", "grad_output"):
        if name not in linear.tensors:
            continue
        tensors = linear.tensors[name]
        values = [value.to(binding.device) for value in tensors.values]
        call, rows = _call(tensors, binding.device), values[0].shape[0]
        if name == "weight":
            link.weight(values if link.shape.groups else values[0], columnwise=True)
            continue
        program = link.program(rows, needs, call)
        is_input = name == "input"
        request = program.input_request if is_input else program.request_grad(call)
        assert request is not None  # a linear's
        request(values[0].to(request.dtype))


def _call(tensors: SavedTensors, device: torch.device) -> Call:
    rng = torch.zeros(2, dtype=torch.int64, device="cpu")
    if not tensors.splits:
        return Call(rng=rng)
    offsets = torch.tensor((0, *tensors.splits), device=device).cumsum(0)
    return Call((offsets,), tensors.splits, rng)


def _undelayed(plan: LinearPlan) -> LinearPlan:
    """Return ``plan`` with every delayed scale replaced by that of the tensor's amax."""
    if plan.delayed is None:
        return plan
    factor = 2.0**-plan.delayed.margin

    def current(spec: OperandSpec | None) -> OperandSpec | None:
        if spec is None or not spec.delayed:
            return spec
        return dataclasses.replace(spec, delayed=False, target=spec.target * factor)

    def gemm(planned: GemmPlan) -> GemmPlan:
        return dataclasses.replace(planned, a=current(planned.a), b=current(planned.b))

    return LinearPlan(gemm(plan.fprop), gemm(plan.dgrad), gemm(plan.wgrad))
