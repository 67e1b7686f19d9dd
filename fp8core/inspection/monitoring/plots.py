"""Plots of a monitor's statistics as PNG files; matplotlib is optional."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from fp8core.errors import OperandError, UnsupportedError
from fp8core.inspection.monitoring.rows import Row
from fp8core.inspection.monitoring.statistics import EXPONENTS, Tally

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_exponents", "draw_scales", "draw_sqnr"]


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    if find_spec("matplotlib") is None:
        raise UnsupportedError(
            "a plot needs matplotlib, which is not installed.\n"
            '  Install with: pip install "fp8core[monitor]"; table() and to_csv() need nothing.'
        )
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots()


def draw_sqnr(path: str | Path, rows: Iterable[Row]) -> None:
    """Draw the least SQNR of each layer's operands over the steps; infinite ones are left out.

    Raises:
        UnsupportedError: matplotlib is not installed.
    """
    lines: dict[str, dict[int, float]] = {}
    for row in rows:
        if math.isfinite(row.sqnr_db):
            line = lines.setdefault(row.layer, {})
            line[row.step] = min(row.sqnr_db, line.get(row.step, math.inf))
    figure, axes = _figure(10, 5)
    for layer, line in lines.items():
        axes.plot(list(line), list(line.values()), marker="o", markersize=3, label=layer)
    axes.set(title="least SQNR of the layer's operands", xlabel="step", ylabel="dB")
    axes.grid(alpha=0.3)
    if lines:
        figure.legend(loc="outside right upper", frameon=False, fontsize="small")
    figure.savefig(path, dpi=120, format="png")


def draw_exponents(path: str | Path, title: str, tally: Tally) -> None:
    """Draw the count of values for each binary exponent, ``floor(log2 |x|)``.

    Raises:
        UnsupportedError: matplotlib is not installed.
    """
    counts: Sequence[int] = [] if tally.exponents is None else tally.exponents.tolist()
    bars = [(e, count) for e, count in zip(EXPONENTS, counts, strict=False) if count]
    figure, axes = _figure(8, 4)
    axes.bar([e for e, _ in bars], [count for _, count in bars], width=0.9)
    axes.set(title=title, xlabel="floor(log2 |x|)", ylabel="values")
    figure.savefig(path, dpi=120, format="png")


def draw_scales(path: str | Path, title: str, tally: Tally) -> None:
    """Draw ``log2 scale`` of each block as a heat map, zero blocks white.

    Raises:
        UnsupportedError: matplotlib is not installed.
        OperandError: the operand has no scales.
    """
    if tally.grid is None:
        raise OperandError(f"{title} has no scales to draw: it is in high precision, or empty.")
    figure, axes = _figure(8, 6)
    image = axes.imshow(tally.grid.numpy(), aspect="auto", interpolation="nearest")
    figure.colorbar(image, label="log2 scale")
    axes.set(title=title, xlabel="block along the contraction", ylabel="block of rows")
    figure.savefig(path, dpi=120, format="png")
