"""Tables of the times, the memory and the losses of contestants."""

from __future__ import annotations

import statistics
from typing import NamedTuple

from tests.benchmarks.measuring import markdown
from tests.benchmarks.measuring.intervals import ratios
from tests.benchmarks.model_gpu.contestants import BASE, COMPILED

__all__ = ["Figures", "losses_table", "table"]

DENSE_TFLOPS = {
    "H100 PCIe": 756.5,
    "H100 NVL": 835.5,
    "H100": 989.4,
    "H200": 989.4,
    "H20": 148.0,
    "A100": 311.9,
    "L40S": 362.0,
    "B200": 2250.0,
}
"""Dense bfloat16 products a second by a part of the device's name. Source: NVIDIA's data sheets."""
COLUMNS = (
    *("contestant", "ms (least to most)", f"of {BASE}{COMPILED}", "tokens/s", "MFU", "peak MiB"),
    *("held MiB", "host ms"),
)


class Figures(NamedTuple):
    """What a contestant's row says: the times of its turns and of enqueueing, us, and MiB."""

    us: list[float]
    host_us: list[float]
    peak_mib: float
    held_mib: float

    def row(
        self, name: str, tokens: int, flops: float, rate: float | None, base: list[float] | None
    ) -> str:
        """Return the row; ``base`` are the times that these are compared with, or None."""
        step = statistics.median(self.us)
        ratio = "" if base is None else f"{statistics.median(ratios(self.us, base)):.3f}"
        cells = (
            name,
            f"{step / 1e3:.2f} ({min(self.us) / 1e3:.2f} to {max(self.us) / 1e3:.2f})",
            ratio,
            f"{tokens / step * 1e6:,.0f}",
            "" if rate is None else f"{flops / step * 1e6 / rate:.1%}",
            f"{self.peak_mib:,.0f}",
            f"{self.held_mib:,.0f}",
            f"{statistics.median(self.host_us) / 1e3:.2f}",
        )
        return markdown.line(cells)


def dense_flops(device: str) -> float | None:
    """Return the dense rate of a device by its name, FLOP/s in bfloat16; None if it is unknown."""
    return next((rate * 1e12 for part, rate in DENSE_TFLOPS.items() if part in device), None)


def table(
    figures: dict[str, Figures], refused: dict[str, str], tokens: int, flops: float, device: str
) -> list[str]:
    """Return the table of times and memory, contestants that do not run with their reason."""
    rate = dense_flops(device)
    base = figures[BASE + COMPILED].us if BASE + COMPILED in figures else None
    rows = [own.row(name, tokens, flops, rate, base) for name, own in figures.items()]
    blank = [""] * (len(COLUMNS) - 2)
    return [
        *markdown.head(COLUMNS),
        *rows,
        *(markdown.line((name, reason, *blank)) for name, reason in refused.items()),
    ]


def losses_table(losses: dict[str, list[float]]) -> list[str]:
    """Return some of the losses of each contestant, and how far they are from the first one's."""
    first, base = next(iter(losses.items()))
    steps = sorted({0, *range(9, len(base), 10), len(base) - 1})
    titles = [f"loss of step {at + 1}" for at in steps]
    rows = []
    for name, own in losses.items():
        gaps = [abs(loss - other) for loss, other in zip(own, base, strict=True)]
        distances = (f"{statistics.mean(gaps):.4f}", f"{max(gaps):.4f}")
        rows.append(markdown.line((name, *(f"{own[at]:.4f}" for at in steps), *distances)))
    return [*markdown.head(("contestant", *titles, f"mean distance from {first}", "most")), *rows]
