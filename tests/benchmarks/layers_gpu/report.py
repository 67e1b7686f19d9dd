"""Tables of what was measured, in Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.benchmarks.layers_gpu import limits, plot
from tests.benchmarks.layers_gpu.cases import HIGH, LAYERS, RECIPES, SIZES, Case
from tests.benchmarks.layers_gpu.contestants import COMPILED_BF16, CONTESTANTS, PEERS
from tests.benchmarks.measuring.intervals import (
    Estimate,
    geometric_mean,
    median_interval,
    ratios,
)
from tests.benchmarks.measuring.markdown import head, line
from tests.benchmarks.measuring.records import Record

__all__ = ["Results", "bytes_table", "markdown", "write"]

LIMIT = "limit"
BAR = 1.0


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
        total = sum(one.bytes for one in case.ideal_bytes(recipe))

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

    def best_peer(self, case: Case, measure: str, recipe: str) -> tuple[str, Estimate] | None:
        """Return the peer that leaves fp8core the greatest ratio, and that ratio."""
        own = f"fp8core {recipe}"
        found = [(peer, self.ratio(case, measure, own, peer)) for peer in PEERS[recipe]]
        known = [(peer, estimate) for peer, estimate in found if estimate is not None]
        return max(known, key=lambda pair: pair[1].median) if known else None


class Row(NamedTuple):
    """A line of the table of ratios: each is fp8core's figure over another, None if unknown."""

    case: Case
    recipe: str
    graph_first: Estimate | None
    graph_best: tuple[str, Estimate] | None
    graph_limit: Estimate | None
    peer_limit: Estimate | None
    eager_best: tuple[str, Estimate] | None
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
            if any(value is not None for value in row[2:]):
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
        results.over_limit(case, recipe, own),
        results.over_limit(case, recipe, first),
        results.best_peer(case, "eager", recipe),
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


RATIO_COLUMNS = (
    *("GPU time / first peer", "GPU time / best peer", "GPU time / limit", "first peer / limit"),
    *("eager / best peer", "host / first peer", "host / torch bf16", "peak / first peer"),
    *("peak / torch.compile", "held / torch.compile", "error / first peer"),
)


def ratio_table(results: Results) -> str:
    """Return fp8core over its peers and over the limit; an interval above 1 is bold.

    The first peer is Transformer Engine; without a recipe torch.compile, and for rowwise torchao.
    """
    lines = head(("layer", "size", "recipe", *RATIO_COLUMNS))
    found = list(rows(results))
    for row in found:
        values = [_text(value) for value in row[2:]]
        lines.append(line((*row.case, row.recipe, *values)))
    if found:
        columns = zip(*(row[2:] for row in found), strict=True)
        lines.append(line(("geometric mean", "", "", *map(_mean, columns))))
    return "\n".join(lines)


def _text(value: Estimate | tuple[str, Estimate] | float | None) -> str:
    if value is None:
        return ""
    if isinstance(value, Estimate):
        text = f"{value.median:.3f} ({value.low:.3f}-{value.high:.3f})"
        return f"**{text}**" if value.low > BAR else text
    if isinstance(value, tuple):
        peer, estimate = value
        return f"{_text(estimate)} {peer}"
    return f"{value:.3f}"


def _mean(values: Iterable[Estimate | tuple[str, Estimate] | float | None]) -> str:
    medians = [_median(value) for value in values if value is not None]
    return f"{geometric_mean(medians):.3f}" if medians else ""


def _median(value: Estimate | tuple[str, Estimate] | float) -> float:
    if isinstance(value, Estimate):
        return value.median
    return value[1].median if isinstance(value, tuple) else value


def figures_table(results: Results) -> str:
    """Return the figures of every contestant: medians of turns, memory, and the worst error."""
    columns = ("graph us", "eager us", "host us", "peak MiB", "held MiB", "weights' copies MiB")
    lines = head(("layer", "size", "contestant", *columns, "launches", "error"))
    for case in results.cases:
        for name in CONTESTANTS:
            times = [results.times(case, measure, name) for measure in ("graph", "eager", "host")]
            figures, kernels = results.figures(case, name), results.kernels(case, name)
            if not any(times) and figures is None and not kernels:
                continue
            texts = [f"{statistics.median(own):.0f}" if own else "" for own in times]
            texts += _memory_texts(figures)
            texts.append(f"{sum(kernel[1] for kernel in kernels):.0f}" if kernels else "")
            texts.append("" if figures is None else f"{max(figures['errors'].values()):.4f}")
            lines.append(line((*case, name, *texts)))
    return "\n".join(lines)


def _memory_texts(figures: Record | None) -> list[str]:
    keys = ("peak_mib", "held_mib", "weight_copies_mib")
    values = [None if figures is None else figures[key] for key in keys]
    return ["" if value is None else f"{value:.0f}" for value in values]


def limit_table(results: Results) -> str:
    """Return what the limits consist of, from medians, next to fp8core's time."""
    columns = ("products us", "TFLOP/s", "ideal MB", "copy TB/s", "limit us", "fp8core us")
    lines = head(("layer", "size", "recipe", *columns))
    for case in results.cases:
        copies = results.times(case, "graph", limits.COPY)
        for recipe in RECIPES:
            products = results.times(case, "graph", limits.products_name(recipe))
            if not products or not copies:
                continue
            own = results.times(case, "graph", f"fp8core {recipe}")
            total = sum(one.bytes for one in case.ideal_bytes(recipe))
            us, copy = statistics.median(products), statistics.median(copies)
            (limit,) = limits.limit_us([us], [copy], total)
            flops = 6 * case.size.tokens * sum(k * n for k, n in case.linears)
            values = (
                *(f"{us:.0f}", f"{flops / us / 1e6:.0f}", f"{total / 1e6:.0f}"),
                *(f"{limits.COPY_BYTES / copy / 1e6:.2f}", f"{limit:.0f}"),
                f"{statistics.median(own):.0f}" if own else "",
            )
            lines.append(line((*case, recipe, *values)))
    return "\n".join(lines)


def bytes_table(cases: Sequence[Case], recipes: Sequence[str]) -> str:
    """Return the ideal bytes of every memory-bound operation of a step."""
    lines = head(("layer", "size", "recipe", "operation", "MB", "us at 4.25 TB/s"))
    for case in cases:
        for recipe in recipes:
            operations = case.ideal_bytes(recipe)
            total = sum(one.bytes for one in operations)
            for name, size in (*operations, ("all", total)):
                lines.append(
                    line((*case, recipe, name, f"{size / 1e6:.1f}", f"{size / 4.25e6:.1f}"))
                )
    return "\n".join(lines)


def cost_table(results: Results) -> str:
    """Return how many seconds of a machine each run took, by phase."""
    lines = head(("layer", "size", "recipes", "seconds", "of which"))
    for case in results.cases:
        for record in results.of(case, "run"):
            seconds = dict(record["seconds"])
            total = seconds.pop("all", sum(seconds.values()))
            phases = ", ".join(f"{name} {value:.1f}" for name, value in seconds.items())
            lines.append(line((*case, " ".join(record["recipes"]), f"{total:.0f}", phases)))
    return "\n".join(lines)


def markdown(results: Results) -> str:
    """Return all tables."""
    tables = (ratio_table, figures_table, limit_table, cost_table)
    return "\n\n".join(table(results) for table in tables)


def write(records: Sequence[Record], picture: Path | None = None) -> None:
    """Print the tables; draw the picture if a file is given."""
    results = Results(records)
    print(markdown(results))
    if picture is not None:
        plot.draw(_picture(results), picture)


def _picture(results: Results) -> plot.Picture:
    found = list(rows(results))
    panels = []
    for layer, kind in LAYERS.items():
        bars = [
            plot.Bar(row.case.size_name, row.recipe, *_bar(row.graph_first), _least(row))
            for row in found
            if row.case.layer_name == layer and row.graph_first is not None and row.recipe != HIGH
        ]
        if bars:
            panels.append(plot.Panel(kind.title, bars))
    host = {}
    for layer, kind in LAYERS.items():
        case = Case(layer, "tiny")
        times = {name: results.times(case, "host", name) for name in CONTESTANTS}
        medians = {name: statistics.median(own) for name, own in times.items() if own}
        if medians:
            host[kind.title] = medians
    return plot.Picture(panels, host)


def _bar(estimate: Estimate | None) -> tuple[float, float, float]:
    assert estimate is not None
    return estimate.median, estimate.low, estimate.high


def _least(row: Row) -> float | None:
    """Return the limit over the first peer's time."""
    return None if row.peer_limit is None else 1 / row.peer_limit.median
