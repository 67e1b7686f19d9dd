"""Measured times and figures by case, the ratios that follow from them, and what these are held
against: a bar and a goal for each figure, and the worst cell."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tests.benchmarks.layers_gpu import limits
from tests.benchmarks.layers_gpu.cases import HIGH, LAYERS, RECIPES, SIZES, Case
from tests.benchmarks.layers_gpu.contestants import COMPILED_BF16, PEERS
from tests.benchmarks.layers_gpu.data import step_bytes
from tests.benchmarks.measuring.intervals import Estimate, geometric_mean, median_interval, ratios
from tests.benchmarks.measuring.markdown import head, line
from tests.benchmarks.measuring.records import Record


class Against(NamedTuple):
    """A contestant and the ratio to it."""

    name: str
    ratio: Estimate


Value = Estimate | Against | float | None
Compare = Callable[["Results", Case, str], Value]


class Results:
    """Records by case, with the ratios that follow from them."""

    def __init__(self, records: Sequence[Record]) -> None:
        self._records = list(records)

    @property
    def cases(self) -> list[Case]:
        """Those that anything was measured of, in the order of layers and sizes."""
        known = {Case(record["layer"], record["size"]) for record in self._records}
        every = [Case(layer, size) for layer in LAYERS for size in SIZES]
        return [case for case in every if case in known]

    def of(self, case: Case, measure: str) -> list[Record]:
        """Return the records of a measure of a case."""
        return [
            record
            for record in self._records
            if (record["layer"], record["size"], record["measure"]) == (*case, measure)
        ]

    def times(self, case: Case, measure: str, contestant: str) -> list[float]:
        """Return the times of all turns, us."""
        found = (record["us"].get(contestant, []) for record in self.of(case, measure))
        return [time for times in found for time in times]

    def figures(self, case: Case, contestant: str) -> Record | None:
        """Return the last figures of a contestant."""
        own = [one for one in self.of(case, "figures") if one["contestant"] == contestant]
        return own[-1] if own else None

    def kernels(self, case: Case, contestant: str) -> list[list[Any]]:
        """Return the last ``[name, launches, us]`` of a contestant's kernels."""
        own = [one for one in self.of(case, "kernels") if one["contestant"] == contestant]
        return own[-1]["kernels"] if own else []

    def ratio(self, case: Case, measure: str, own: str, other: str) -> Estimate | None:
        """Return the time of ``own`` over that of ``other``, turn by turn; None if no turn had
        both."""
        return self._estimate(case, measure, own, lambda us: us.get(other))

    def over_limit(self, case: Case, recipe: str, contestant: str) -> Estimate | None:
        """Return the graph time of a contestant over the limit of its recipe."""
        total = sum(one.bytes for one in step_bytes(case, recipe))

        def limit(us: dict[str, list[float]]) -> list[float] | None:
            products, copy = us.get(limits.products_name(recipe)), us.get(limits.COPY)
            if products is None or copy is None:
                return None
            return limits.limit_us(products, copy, total)

        return self._estimate(case, "graph", contestant, limit)

    def _estimate(
        self,
        case: Case,
        measure: str,
        own: str,
        other: Callable[[dict[str, list[float]]], list[float] | None],
    ) -> Estimate | None:
        found: list[float] = []
        for record in self.of(case, measure):
            values, others = record["us"].get(own), other(record["us"])
            if values and others:
                found += ratios(values, others)
        return median_interval(found) if found else None

    def best_peer(self, case: Case, measure: str, recipe: str) -> Against | None:
        """Return the peer that leaves fp8core the greatest ratio, and that ratio."""
        return self._greatest(case, measure, recipe, PEERS[recipe])

    def over_high(self, case: Case, measure: str, recipe: str) -> Against | None:
        """Return the contestant without a recipe, fp8core's among them, that leaves fp8core's
        time under ``recipe`` the greatest ratio, and that ratio."""
        names = (*PEERS[HIGH], f"fp8core {HIGH}")
        return self._greatest(case, measure, recipe, [n for n in names if n != _own(recipe)])

    def _greatest(
        self, case: Case, measure: str, recipe: str, names: Sequence[str]
    ) -> Against | None:
        ratios = ((name, self.ratio(case, measure, _own(recipe), name)) for name in names)
        measured = [Against(name, ratio) for name, ratio in ratios if ratio is not None]
        return max(measured, key=lambda pair: pair.ratio.median, default=None)


def _own(recipe: str) -> str:
    return f"fp8core {recipe}"


def _over_first(measure: str) -> Compare:
    return lambda results, case, recipe: results.ratio(
        case, measure, _own(recipe), PEERS[recipe][0]
    )


def _figure_over(peer: str | None, value: Callable[[Record], float | None]) -> Compare:
    """Return the ratio of fp8core's figure to that of ``peer``, of the first peer if it is None."""

    def compare(results: Results, case: Case, recipe: str) -> float | None:
        own = results.figures(case, _own(recipe))
        base = results.figures(case, PEERS[recipe][0] if peer is None else peer)
        if own is None or base is None:
            return None
        above, below = value(own), value(base)
        return above / below if above is not None and below else None

    return compare


def _held_without_copies(figures: Record) -> float | None:
    """Return what forward leaves for backward, without copies of weights; None if unknown."""
    copies = figures["weight_copies_mib"]
    return None if copies is None else figures["held_mib"] - copies


def _worst_error(results: Results, case: Case, recipe: str) -> float | None:
    own, first = (results.figures(case, name) for name in (_own(recipe), PEERS[recipe][0]))
    if own is None or first is None:
        return None
    pairs = ((error, first["errors"][name]) for name, error in own["errors"].items())
    return max((error / of_first for error, of_first in pairs if of_first), default=None)


COMPARISONS: dict[str, Compare] = {
    "GPU time / first peer": _over_first("graph"),
    "GPU time / best peer": lambda results, case, recipe: results.best_peer(case, "graph", recipe),
    "GPU time / best bf16": lambda results, case, recipe: results.over_high(case, "graph", recipe),
    "GPU time / limit": lambda results, *cell: results.over_limit(*cell, _own(cell[1])),
    "first peer / limit": lambda results, *cell: results.over_limit(*cell, PEERS[cell[1]][0]),
    "eager / first peer": _over_first("eager"),
    "eager / best peer": lambda results, case, recipe: results.best_peer(case, "eager", recipe),
    "host / first peer": _over_first("host"),
    "host / torch bf16": lambda results, case, recipe: results.ratio(
        case, "host", _own(recipe), "torch bf16"
    ),
    "peak / first peer": _figure_over(None, lambda figures: figures["peak_mib"]),
    "peak / torch.compile": _figure_over(COMPILED_BF16, lambda figures: figures["peak_mib"]),
    "held / torch.compile": _figure_over(COMPILED_BF16, _held_without_copies),
    "error / first peer": _worst_error,
}
"""What is compared, by the name that tables and bars have for it."""


class Row(NamedTuple):
    """A line of the table of ratios: each is fp8core's figure over another, None if unknown."""

    case: Case
    recipe: str
    ratios: dict[str, Value]


def rows(results: Results) -> Iterator[Row]:
    """Yield a row for each case and recipe that anything was measured of."""
    for case in results.cases:
        for recipe in RECIPES:
            own = {name: of(results, case, recipe) for name, of in COMPARISONS.items()}
            if any(value is not None for value in own.values()):
                yield Row(case, recipe, own)


def estimate_of(value: Value) -> Estimate | float | None:
    """Return the ratio itself, without its peer."""
    return value.ratio if isinstance(value, Against) else value


def as_number(value: Estimate | float) -> float:
    """Return the ratio without its interval."""
    return value.median if isinstance(value, Estimate) else value


LARGE = ("1.3B", "8B", "70B")
TRANSFORMER, PUBLISHED = ("transformer_layer",), ("transformer_layer_gelu",)
WITH_NORM = ("norm_linear", "mlp_swiglu", "mlp_gelu")
MLPS = ("mlp_swiglu", "mlp_gelu")
FP8_RECIPES = ("delayed", "current", "block")


@dataclass(frozen=True, slots=True)
class Bar:
    """The most that comparison ``ratio`` may be in each of the cells.

    An estimate is within a limit if its interval is not above it.
    """

    name: str
    layers: Sequence[str]
    sizes: Sequence[str]
    recipes: Sequence[str]
    ratio: str
    limit: float
    is_mean: bool = False
    """Whether the limit is of the geometric mean of the cells."""

    def values(self, rows: Iterable[Row]) -> dict[str, Estimate | float]:
        """Return the cells that were measured, by name."""
        cells = (
            (row, estimate_of(row.ratios[self.ratio]))
            for row in rows
            if row.case.layer_name in self.layers
            and row.case.size_name in self.sizes
            and row.recipe in self.recipes
        )
        return {
            f"{row.case.layer_name} {row.case.size_name} {row.recipe}": value
            for row, value in cells
            if value is not None
        }

    @property
    def count(self) -> int:
        """The number of cells, measured or not."""
        return len(self.layers) * len(self.sizes) * len(self.recipes)


_LOW, _HIGH = (WITH_NORM, LARGE, FP8_RECIPES), (WITH_NORM, LARGE, (HIGH,))
_MEMORY = (MLPS, LARGE, FP8_RECIPES)
_TINY_MLP, _TINY_LINEAR = (
    (MLPS[:1], ("tiny",), ("delayed",)),
    (("linear",), ("tiny",), ("delayed",)),
)

_LAYER = (TRANSFORMER, LARGE, FP8_RECIPES)
_TINY_LAYER = (TRANSFORMER, ("tiny",), ("delayed",))
_PUBLISHED = (PUBLISHED, ("b32_s1024",), ("delayed",))
_LAYER_GOALS = {"1.3B": 0.80, "8B": 0.90, "70B": 0.95}


def _of_layer(name: str, ratio: str) -> Iterator[Bar]:
    """Yield the bar of a time of the Transformer layer over the best FP8 peer's, and its goals."""
    yield Bar(f"{name} / best FP8 peer", *_LAYER, ratio, 1.0)
    for size, goal in _LAYER_GOALS.items():
        yield Bar(
            f"goal: {name} / best FP8 peer, {size}", TRANSFORMER, (size,), FP8_RECIPES, ratio, goal
        )


BARS = (
    Bar("GPU time / Transformer Engine", *_LOW, "GPU time / first peer", 1.0),
    Bar("goal: GPU time / limit", *_LOW, "GPU time / limit", 1.05),
    Bar("eager time / best FP8 peer", *_LOW, "eager / best peer", 1.0),
    Bar("goal: the same, mean", *_LOW, "eager / best peer", 0.85, is_mean=True),
    Bar("bf16: GPU time / torch.compile", *_HIGH, "GPU time / first peer", 1.0),
    Bar("bf16: eager time / torch.compile", *_HIGH, "eager / first peer", 1.0),
    Bar("goal: bf16: GPU time / torch.compile", *_HIGH, "GPU time / first peer", 0.95),
    Bar("peak memory / Transformer Engine", *_MEMORY, "peak / first peer", 0.75),
    Bar("goal: peak memory / torch.compile bf16", *_MEMORY, "peak / torch.compile", 1.0),
    Bar("held / torch.compile bf16", *_MEMORY, "held / torch.compile", 0.85),
    Bar("goal: held / torch.compile bf16", *_MEMORY, "held / torch.compile", 0.70),
    Bar("host / Transformer Engine", *_TINY_MLP, "host / first peer", 0.45),
    Bar("goal: host / torch bf16", *_TINY_MLP, "host / torch bf16", 1.0),
    Bar("host / Transformer Engine", *_TINY_LINEAR, "host / first peer", 0.30),
    Bar("goal: host / torch bf16", *_TINY_LINEAR, "host / torch bf16", 1.3),
    Bar("error / Transformer Engine", *_LOW, "error / first peer", 1.01),
    *_of_layer("layer: GPU time", "GPU time / best peer"),
    *_of_layer("layer: eager time", "eager / best peer"),
    Bar("layer: peak memory / Transformer Engine", *_LAYER, "peak / first peer", 0.75),
    Bar(
        "goal: layer: peak memory / torch.compile bf16",
        *_LAYER,
        "peak / torch.compile",
        1.0,
    ),
    Bar("layer: host / Transformer Engine", *_TINY_LAYER, "host / first peer", 0.45),
    Bar("goal: layer: host / torch bf16", *_TINY_LAYER, "host / torch bf16", 1.0),
    Bar("layer: error / Transformer Engine", *_LAYER, "error / first peer", 1.01),
    Bar("layer: FP8 / best bf16", *_PUBLISHED, "GPU time / best bf16", 0.64),
    Bar("goal: layer: FP8 / best bf16", *_PUBLISHED, "GPU time / best bf16", 0.60),
)


def bars_table(rows: Sequence[Row]) -> str:
    """Return a line for each bar: how many cells keep it, and the cell that is farthest off."""
    lines = head(("bar", "at most", "cells kept", "worst cell", "its value", "geometric mean"))
    for bar in BARS:
        values = bar.values(rows)
        if not values:
            lines.append(line((bar.name, f"{bar.limit:.2f}", f"not run ({bar.count})", "", "", "")))
            continue
        numbers = {name: as_number(value) for name, value in values.items()}
        kept = sum(_least(value) <= bar.limit for value in values.values())
        mean = geometric_mean(list(numbers.values()))
        worst = max(numbers, key=lambda name: numbers[name])
        cells = f"{kept} of {len(values)}"
        if bar.is_mean:
            cells = "kept" if mean <= bar.limit else "missed"
        if len(values) < bar.count:
            cells += f" ({bar.count - len(values)} not run)"
        texts = (f"{numbers[worst]:.3f}", f"{mean:.3f}")
        lines.append(line((bar.name, f"{bar.limit:.2f}", cells, worst, *texts)))
    return "\n".join(lines)


def _least(value: Estimate | float) -> float:
    return value.low if isinstance(value, Estimate) else value
