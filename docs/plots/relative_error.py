"""The worst relative error of one cast in each binade of the value, without a scale."""

from __future__ import annotations

import matplotlib.pyplot as plt
import torch

from fp8core import formats

NAMES = ("e4m3", "e5m2", "e2m1")

exponents = torch.arange(-20, 18)
# 512 values of each binade, exact in float32: the midpoints between codes are among them.
x = (1 + torch.arange(512) / 512) * 2.0 ** exponents[:, None]
figure, axes = plt.subplots(figsize=(8, 3.2), layout="constrained")
for name in NAMES:
    spec = formats.by_name(name)
    error = ((spec.decode(spec.encode(x)) - x).abs() / x).amax(1)
    axes.step(2.0**exponents, error, where="post", label=name)
axes.set_xscale("log", base=2)
axes.set_yscale("log", base=2)
axes.set_ylim(2**-5, 1.3)
axes.set_xlabel("magnitude of the value")
axes.set_ylabel("worst relative error")
axes.set_title("Small values vanish (error 1), large ones saturate: the scale moves the window")
axes.legend()
