"""The values of each element format between -8 and 8: gaps that double by binade."""

from __future__ import annotations

import math

import matplotlib.pyplot as plt

from fp8core import formats

NAMES = ("e4m3", "e5m2", "e2m1")

figure, axes = plt.subplots(figsize=(8, 2.2), layout="constrained")
for height, name in zip((2, 1, 0), NAMES, strict=True):
    values = sorted({v for v in formats.by_name(name).values if math.isfinite(v) and abs(v) <= 8})
    axes.plot(values, [height] * len(values), "|", markersize=14, markeredgewidth=0.8)
axes.set_yticks((2, 1, 0), NAMES)
axes.set_ylim(-0.6, len(NAMES) - 0.4)
axes.set_xlabel("value")
axes.set_title("The same near zero, where e2m1 has 15 values in all")
