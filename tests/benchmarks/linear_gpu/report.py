"""Tables and a picture of measured cells."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.benchmarks.linear_gpu.contestants import SIZES

METRICS = ("host", "graph", "eager", "memory")
PEERS = {  # recipe: those that quantize alike, Transformer Engine's first
    "delayed": ("te delayed", "torchao tensorwise"),
    "current": ("te current", "torchao tensorwise"),
    "block": ("te block",),
    "rowwise": ("torchao rowwise",),
}
Cell = dict[str, dict[str, Any]]
"""Contestant: what was measured."""


class Ratio(NamedTuple):
    """A contestant's figures over those of Transformer Engine and of the best peer, by metric."""

    size: str
    recipe: str
    te: dict[str, float | None]
    best: dict[str, float | None]


def read(folder: Path) -> dict[str, Cell]:
    """Return the cells of ``folder`` by size, in the order of sizes."""
    files = {size: folder / f"{size}.json" for size in SIZES}
    return {
        size: json.loads(file.read_text())["contestants"]
        for size, file in files.items()
        if file.is_file()
    }


def table(cells: dict[str, Cell]) -> str:
    """Return all that was measured, in Markdown."""
    lines = [
        "| size | contestant | host us | eager us | graph us | kernels us | memory MiB | error |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for size, cell in cells.items():
        for name, own in cell.items():
            graph = "" if own["graph"] is None else f"{own['graph']:.0f}"
            worst = max(own["error"].values())
            lines.append(
                f"| {size} | {name} | {own['host']:.0f} | {own['eager']:.0f} | {graph} | "
                f"{own['kernels']:.0f} | {own['memory']:.0f} | {worst:.4f} |"
            )
    return "\n".join(lines)


def over(own: dict[str, Any], others: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """Return each metric over the least of the others, None where either side lacks it."""
    found: dict[str, float | None] = {}
    for metric in METRICS:
        least = min((one[metric] for one in others if one.get(metric)), default=None)
        mine = own.get(metric)
        found[metric] = None if least is None or mine is None else mine / least
    return found


def ratios(cells: dict[str, Cell]) -> Iterator[Ratio]:
    """Return fp8core's figures over its peers', cell by cell."""
    for size, cell in cells.items():
        for recipe, names in PEERS.items():
            own = cell.get(f"fp8core {recipe}")
            if own is None:
                continue
            peers = {name: cell[name] for name in names if name in cell}
            te = [peer for name, peer in peers.items() if name.startswith("te ")]
            yield Ratio(size, recipe, over(own, te), over(own, list(peers.values())))


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def ratio_table(cells: dict[str, Cell]) -> str:
    """Return fp8core over Transformer Engine and over the best peer, in Markdown, with means."""
    columns = [f"{metric}, {against}" for against in ("te", "best peer") for metric in METRICS]
    lines = [f"| size | recipe | {' | '.join(columns)} |", "|---" * (2 + len(columns)) + "|"]
    rows = []
    for one in ratios(cells):
        figures = [*one.te.values(), *one.best.values()]
        rows.append(figures)
        lines.append(f"| {one.size} | {one.recipe} | {' | '.join(map(_figure, figures))} |")
    if rows:
        present = [[value for value in column if value] for column in zip(*rows, strict=True)]
        means = [geometric_mean(column) if column else None for column in present]
        lines.append(f"| geometric mean | | {' | '.join(map(_figure, means))} |")
    return "\n".join(lines)


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def plot(cells: dict[str, Cell], file: Path) -> None:
    """Draw graph time over Transformer Engine's by size, and host time at the tiny size."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "fp8core"  # the same file from the same cells
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    found = {(one.size, one.recipe): one.te["graph"] for one in ratios(cells)}
    recipes = [name for name, peers in PEERS.items() if peers[0].startswith("te ")]
    sizes = list(cells)
    for number, recipe in enumerate(recipes):
        places = [place + (number - 1) * 0.27 for place in range(len(sizes))]
        heights = [found.get((size, recipe)) or math.nan for size in sizes]
        bars = left.bar(places, heights, 0.25, label=recipe)
        left.bar_label(bars, fmt="%.2f", fontsize=7, label_type="center", color="white")
    left.axhline(1.0, color="black", linewidth=0.8)
    left.set_xticks(range(len(sizes)), sizes)
    left.set_ylim(0, 1.25)
    left.set_title("step from a CUDA graph, over Transformer Engine's", fontsize=9)
    left.legend(fontsize=7, ncols=3, loc="upper center")
    tiny = cells.get("tiny", {})
    names = [name for name in reversed(tiny) if tiny[name]["host"]]
    colors = ["C3" if name.startswith("fp8core") else "C7" for name in names]
    bars = right.barh(names, [tiny[name]["host"] for name in names], color=colors)
    right.bar_label(bars, fmt="%.0f", fontsize=7, padding=2)
    right.tick_params(axis="y", labelsize=7)
    right.margins(x=0.12)
    right.set_title("host time of a step, tiny, us", fontsize=9)
    is_vector = file.suffix == ".svg"
    figure.savefig(file, dpi=100, metadata={"Date": None} if is_vector else None)
    plt.close(figure)
