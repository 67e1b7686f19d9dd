"""Tables of what was measured, in Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.benchmarks.layers_gpu import limits, plot
from tests.benchmarks.layers_gpu.cases import HIGH, LAYERS, RECIPES, Case
from tests.benchmarks.layers_gpu.contestants import CONTESTANTS
from tests.benchmarks.layers_gpu.data import step_bytes
from tests.benchmarks.layers_gpu.results import (
    COMPARISONS,
    Against,
    Results,
    Value,
    as_number,
    bars_table,
    estimate_of,
    rows,
)
from tests.benchmarks.measuring.intervals import Estimate, geometric_mean
from tests.benchmarks.measuring.markdown import head, line
from tests.benchmarks.measuring.records import Record

__all__ = ["bytes_table", "markdown", "ratio_table", "write"]

BAR = 1.0


def ratio_table(results: Results) -> str:
    """Return fp8core over its peers and over the limit; an interval above 1 is bold.

    The first peer is Transformer Engine; without a recipe torch.compile, and for rowwise torchao.
    """
    lines = head(("layer", "size", "recipe", *COMPARISONS))
    compared = list(rows(results))
    for row in compared:
        values = [_text(value) for value in row.ratios.values()]
        lines.append(line((*row.case, row.recipe, *values)))
    if compared:
        columns = zip(*(row.ratios.values() for row in compared), strict=True)
        lines.append(line(("geometric mean", "", "", *map(_mean, columns))))
    return "\n".join(lines)


def _text(value: Value) -> str:
    if value is None:
        return ""
    if isinstance(value, Against):
        return f"{_text(value.ratio)} {value.name}"
    if isinstance(value, Estimate):
        return f"**{value.text()}**" if value.low > BAR else value.text()
    return f"{value:.3f}"


def _mean(values: Iterable[Value]) -> str:
    numbers = [as_number(own) for own in map(estimate_of, values) if own is not None]
    return f"{geometric_mean(numbers):.3f}" if numbers else ""


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
            total = sum(one.bytes for one in step_bytes(case, recipe))
            us, copy = statistics.median(products), statistics.median(copies)
            (limit,) = limits.limit_us([us], [copy], total)
            flops = 6 * case.size.tokens * sum(k * n for _, k, n in case.linears)
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
            operations = step_bytes(case, recipe)
            total = sum(one.bytes for one in operations)
            for name, size in (*operations, ("all", total)):
                lines.append(
                    line((*case, recipe, name, f"{size / 1e6:.1f}", f"{size / 4.25e6:.1f}"))
                )
    return "\n".join(lines)


def markdown(results: Results) -> str:
    """Return all tables."""
    tables = (ratio_table, figures_table, limit_table)
    return "\n\n".join((bars_table(list(rows(results))), *(table(results) for table in tables)))


def write(records: Sequence[Record], picture: Path | None = None) -> None:
    """Print the tables; draw the picture if a file is given."""
    results = Results(records)
    print(markdown(results))
    if picture is not None:
        plot.draw(_picture(results), picture)


def _picture(results: Results) -> plot.Picture:
    compared = list(rows(results))
    panels = []
    for layer, kind in LAYERS.items():
        bars = [
            plot.Bar(row.case.size_name, row.recipe, estimate, row.ratios["first peer / limit"])
            for row in compared
            if row.case.layer_name == layer
            and row.recipe != HIGH
            and isinstance(estimate := row.ratios["GPU time / first peer"], Estimate)
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
