"""The positive values of each element format on one logarithmic axis."""

from __future__ import annotations

import math

import matplotlib.pyplot as plt

from fp8core import formats

NAMES = ("e4m3", "e5m2", "e2m1")

figure, axes = plt.subplots(figsize=(8, 2.2), layout="constrained")
for height, name in zip((2, 1, 0), NAMES, strict=True):
    spec = formats.by_name(name)
    values = sorted({v for v in spec.values if math.isfinite(v) and v > 0})
    axes.plot(values, [height] * len(values), "|", markersize=14, markeredgewidth=0.8)
    axes.annotate(f"{spec.max:g}", (spec.max, height), (6, -4), textcoords="offset points")
axes.set_xscale("log", base=2)
axes.set_xlim(2**-17, 2**18.5)
axes.set_yticks((2, 1, 0), NAMES)
axes.set_ylim(-0.6, len(NAMES) - 0.4)
axes.set_xlabel("value")
axes.set_title("Positive values of the element formats; the largest is named")
