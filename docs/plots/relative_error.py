"""The relative error of one cast over the magnitude of the value, without a scale."""

from __future__ import annotations

import matplotlib.pyplot as plt
import torch

from fp8core import formats

NAMES = ("e4m3", "e5m2", "e2m1")

x = torch.logspace(-18, 17, 20_000, base=2)
figure, axes = plt.subplots(figsize=(8, 3.2), layout="constrained")
for name in NAMES:
    spec = formats.by_name(name)
    error = (spec.decode(spec.encode(x)) - x).abs() / x
    # The envelope: the largest error in a window of a tenth of a binade, so that lines do not fill.
    peaks = error.reshape(-1, 50).amax(1)
    axes.plot(x.reshape(-1, 50)[:, 0], peaks, label=name)
axes.set_xscale("log", base=2)
axes.set_yscale("log", base=2)
axes.set_ylim(2**-6, 1.3)
axes.set_xlabel("magnitude of the value")
axes.set_ylabel("worst relative error")
axes.set_title("Small values vanish (error 1), large ones saturate: the scale moves the window")
axes.legend()
