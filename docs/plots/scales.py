"""The values of scale formats: e8m0 has powers of two, e4m3 (of NVFP4) more in a smaller range."""

from __future__ import annotations

import math

import matplotlib.pyplot as plt

from fp8core import formats

RANGE = (2**-10, 2**10)

figure, axes = plt.subplots(figsize=(8, 1.8), layout="constrained")
for height, name in ((1, "e4m3"), (0, "e8m0")):
    values = [v for v in formats.by_name(name).values if math.isfinite(v)]
    shown = sorted({v for v in values if RANGE[0] <= v <= RANGE[1]})
    axes.plot(shown, [height] * len(shown), "|", markersize=14, markeredgewidth=0.8)
axes.set_xscale("log", base=2)
axes.set_yticks((1, 0), ("e4m3", "e8m0"))
axes.set_ylim(-0.6, 1.6)
axes.set_xlabel("scale")
axes.set_title("Formats of block scales between 2^-10 and 2^10; e8m0 goes on to 2^-127 and 2^127")
