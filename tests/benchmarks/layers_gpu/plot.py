"""A picture of GPU times over Transformer Engine's, with the limits, and of the host's times."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from tests.benchmarks.measuring.intervals import Estimate

__all__ = ["Bar", "Panel", "Picture", "draw"]

GROUP_WIDTH = 0.8


class Bar(NamedTuple):
    """A ratio to the first peer, and what that takes over the limit; None if that is unknown."""

    size: str
    recipe: str
    ratio: Estimate
    peer_over_limit: Estimate | None


class Panel(NamedTuple):
    """The bars of one layer."""

    title: str
    bars: list[Bar]


class Picture(NamedTuple):
    """A panel for each layer, and host times in us by layer and contestant."""

    panels: list[Panel]
    host: dict[str, dict[str, float]]


def draw(picture: Picture, file: Path) -> None:
    """Write the picture as svg or png; the same file from the same numbers."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "fp8core"
    import matplotlib.pyplot as plt

    count = max(1, len(picture.panels) + len(picture.host))
    num_rows = -(-count // 2)
    figure, axes = plt.subplots(
        num_rows, 2, figsize=(11, 3.2 * num_rows), layout="constrained", squeeze=False
    )
    places = iter(axes.flat)
    for panel in picture.panels:
        _draw_panel(next(places), panel)
    for title, times in picture.host.items():
        _draw_host(next(places), title, times)
    for unused in places:
        unused.set_axis_off()
    is_vector = file.suffix == ".svg"
    figure.savefig(file, dpi=100, metadata={"Date": None} if is_vector else None)
    plt.close(figure)


def _draw_panel(axes: Any, panel: Panel) -> None:
    sizes = list(dict.fromkeys(bar.size for bar in panel.bars))
    recipes = list(dict.fromkeys(bar.recipe for bar in panel.bars))
    width = GROUP_WIDTH / len(recipes)
    for number, recipe in enumerate(recipes):
        bars = [bar for bar in panel.bars if bar.recipe == recipe]
        at = [sizes.index(bar.size) + (number - (len(recipes) - 1) / 2) * width for bar in bars]
        medians = [bar.ratio.median for bar in bars]
        errors = [
            [bar.ratio.median - bar.ratio.low for bar in bars],
            [bar.ratio.high - bar.ratio.median for bar in bars],
        ]
        drawn = axes.bar(at, medians, width * 0.92, yerr=errors, label=recipe)
        axes.bar_label(drawn, fmt="%.2f", fontsize=7, label_type="center", color="white")
        for place, bar in zip(at, bars, strict=True):
            if bar.peer_over_limit is not None:
                ends = (place - width * 0.46, place + width * 0.46)
                limit = 1 / bar.peer_over_limit.median
                axes.hlines(limit, *ends, color="black", linewidth=1.4)
    axes.axhline(1.0, color="black", linewidth=0.8, linestyle=":")
    axes.set_xticks(range(len(sizes)), sizes)
    axes.set_ylim(0, max(1.25, *(bar.ratio.high * 1.15 for bar in panel.bars)))
    axes.set_title(f"{panel.title}: GPU time over the first peer's; line: the limit", fontsize=8)
    axes.legend(fontsize=7, ncols=4, loc="upper center")


def _draw_host(axes: Any, title: str, times: dict[str, float]) -> None:
    names = list(reversed(times))
    colors = ["C3" if name.startswith("fp8core") else "C7" for name in names]
    bars = axes.barh(names, [times[name] for name in names], color=colors)
    axes.bar_label(bars, fmt="%.0f", fontsize=7, padding=2)
    axes.tick_params(axis="y", labelsize=6)
    axes.margins(x=0.12)
    axes.set_title(f"{title}, tiny: host time of a step, us", fontsize=8)
