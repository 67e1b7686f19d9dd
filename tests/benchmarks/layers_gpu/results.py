"""Measured times and figures by case, and the ratios that follow from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from tests.benchmarks.layers_gpu import limits
from tests.benchmarks.layers_gpu.cases import HIGH, LAYERS, RECIPES, SIZES, Case
from tests.benchmarks.layers_gpu.contestants import COMPILED_BF16, PEERS
from tests.benchmarks.layers_gpu.data import step_bytes
from tests.benchmarks.measuring.intervals import Estimate, median_interval, ratios
from tests.benchmarks.measuring.records import Record

__all__ = ["Results", "Row", "as_number", "rows"]


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

    def peers(self, case: Case, measure: str, recipe: str) -> dict[str, Estimate]:
        """Return fp8core's time over that of each peer that was measured."""
        own = f"fp8core {recipe}"
        found = {peer: self.ratio(case, measure, own, peer) for peer in PEERS[recipe]}
        return {peer: estimate for peer, estimate in found.items() if estimate is not None}

    def best_peer(self, case: Case, measure: str, recipe: str) -> tuple[str, Estimate] | None:
        """Return the peer that leaves fp8core the greatest ratio, and that ratio."""
        return _greatest(self.peers(case, measure, recipe))

    def over_high(self, case: Case, measure: str, recipe: str) -> tuple[str, Estimate] | None:
        """Return the contestant without a recipe, fp8core's among them, that leaves fp8core's
        time under ``recipe`` the greatest ratio, and that ratio."""
        own = f"fp8core {recipe}"
        found = {
            name: self.ratio(case, measure, own, name)
            for name in (*PEERS[HIGH], f"fp8core {HIGH}")
            if name != own
        }
        return _greatest({name: one for name, one in found.items() if one is not None})


def _greatest(known: dict[str, Estimate]) -> tuple[str, Estimate] | None:
    return max(known.items(), key=lambda pair: pair[1].median) if known else None


class Row(NamedTuple):
    """A line of the table of ratios: each is fp8core's figure over another, None if unknown."""

    case: Case
    recipe: str
    graph_first: Estimate | None
    graph_best: tuple[str, Estimate] | None
    graph_high: tuple[str, Estimate] | None
    graph_limit: Estimate | None
    peer_limit: Estimate | None
    eager_best: tuple[str, Estimate] | None
    eager_peers: dict[str, Estimate]
    host_first: Estimate | None
    host_torch: Estimate | None
    peak_first: float | None
    peak_compiled: float | None
    held_compiled: float | None
    error_first: float | None


def rows(results: Results) -> Iterator[Row]:
    """Yield a row for each case and recipe that anything was measured of."""
    for case in results.cases:
        for recipe in RECIPES:
            row = _row(results, case, recipe)
            if any(value is not None and value != {} for value in row[2:]):
                yield row


def _row(results: Results, case: Case, recipe: str) -> Row:
    own, first = f"fp8core {recipe}", PEERS[recipe][0]
    figures, of_first = results.figures(case, own), results.figures(case, first)
    compiled = results.figures(case, COMPILED_BF16)
    return Row(
        case,
        recipe,
        results.ratio(case, "graph", own, first),
        results.best_peer(case, "graph", recipe),
        results.over_high(case, "graph", recipe),
        results.over_limit(case, recipe, own),
        results.over_limit(case, recipe, first),
        results.best_peer(case, "eager", recipe),
        results.peers(case, "eager", recipe),
        results.ratio(case, "host", own, first),
        results.ratio(case, "host", own, "torch bf16"),
        _over(figures, of_first, lambda one: one["peak_mib"]),
        _over(figures, compiled, lambda one: one["peak_mib"]),
        _over(figures, compiled, held_without_copies),
        _worst_error(figures, of_first),
    )


def held_without_copies(figures: Record) -> float | None:
    """Return what forward leaves for backward, without copies of weights; None if unknown."""
    copies = figures["weight_copies_mib"]
    return None if copies is None else figures["held_mib"] - copies


def _over(
    own: Record | None, other: Record | None, value: Callable[[Record], float | None]
) -> float | None:
    if own is None or other is None:
        return None
    above, below = value(own), value(other)
    return above / below if above is not None and below else None


def _worst_error(own: Record | None, other: Record | None) -> float | None:
    if own is None or other is None:
        return None
    pairs = ((error, other["errors"][name]) for name, error in own["errors"].items())
    return max((error / of_other for error, of_other in pairs if of_other), default=None)


def as_number(value: Estimate | tuple[str, Estimate] | float) -> float:
    """Return the ratio itself, without its interval or its peer."""
    if isinstance(value, Estimate):
        return value.median
    return value[1].median if isinstance(value, tuple) else value
