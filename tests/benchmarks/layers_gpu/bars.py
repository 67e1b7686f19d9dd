"""What the results are held against: a bar and a goal for each figure, and the worst cell."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from tests.benchmarks.layers_gpu.cases import HIGH
from tests.benchmarks.layers_gpu.results import Row, as_number, estimate_of
from tests.benchmarks.measuring.intervals import Estimate, geometric_mean
from tests.benchmarks.measuring.markdown import head, line

__all__ = ["BARS", "Bar", "bars_table"]

LARGE = ("1.3B", "8B", "70B")
TRANSFORMER, PUBLISHED = ("transformer_layer",), ("transformer_layer_gelu",)
WITH_NORM = ("norm_linear", "mlp_swiglu", "mlp_gelu")
MLPS = ("mlp_swiglu", "mlp_gelu")
RECIPES = ("delayed", "current", "block")


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


_LOW, _HIGH = (WITH_NORM, LARGE, RECIPES), (WITH_NORM, LARGE, (HIGH,))
_MEMORY = (MLPS, LARGE, RECIPES)
_TINY_MLP, _TINY_LINEAR = (
    (MLPS[:1], ("tiny",), ("delayed",)),
    (("linear",), ("tiny",), ("delayed",)),
)

_LAYER = (TRANSFORMER, LARGE, RECIPES)
_TINY_LAYER = (TRANSFORMER, ("tiny",), ("delayed",))
_PUBLISHED = (PUBLISHED, ("b32_s1024",), ("delayed",))
_LAYER_GOALS = {"1.3B": 0.80, "8B": 0.90, "70B": 0.95}


def _of_layer(name: str, ratio: str) -> Iterator[Bar]:
    """Yield the bar of a time of the Transformer layer over the best FP8 peer's, and its goals."""
    yield Bar(f"{name} / best FP8 peer", *_LAYER, ratio, 1.0)
    for size, goal in _LAYER_GOALS.items():
        yield Bar(
            f"goal: {name} / best FP8 peer, {size}", TRANSFORMER, (size,), RECIPES, ratio, goal
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
