"""Held-out loss of a decoder of 125M parameters, as the page says how it was measured."""

from __future__ import annotations

import matplotlib.pyplot as plt

LOSSES = {
    "bf16, seed 0": (
        1.6951,
        1.2361,
        0.9981,
        0.8828,
        0.8169,
        0.7711,
        0.7326,
        0.7081,
        0.6898,
        0.6776,
    ),
    "bf16, seed 1": (
        1.7303,
        1.2351,
        1.0189,
        0.8991,
        0.8272,
        0.7776,
        0.7395,
        0.7164,
        0.6938,
        0.6826,
    ),
    "bf16, seed 2": (
        1.7481,
        1.2263,
        1.0251,
        0.8963,
        0.8254,
        0.7771,
        0.7361,
        0.7107,
        0.6925,
        0.6805,
    ),
    "delayed": (1.6575, 1.2107, 0.9795, 0.8768, 0.8079, 0.7662, 0.7297, 0.7052, 0.6867, 0.6757),
    "current": (1.6867, 1.2454, 1.0243, 0.9012, 0.8273, 0.7796, 0.7374, 0.7102, 0.6898, 0.6774),
    "block": (1.6895, 1.2422, 1.0064, 0.8825, 0.8184, 0.7745, 0.735, 0.7081, 0.6884, 0.6773),
}

figure, axes = plt.subplots(figsize=(8, 3.2), layout="constrained")
for name, losses in LOSSES.items():
    steps = [150 * (at + 1) for at in range(len(losses))]
    is_wide = name.startswith("bf16")
    axes.plot(steps, losses, color="0.7" if is_wide else None, label=name, zorder=1 + (not is_wide))
axes.set_yscale("log")
axes.set_yticks((0.7, 0.8, 1.0, 1.3, 1.7), ("0.7", "0.8", "1.0", "1.3", "1.7"))
axes.minorticks_off()
axes.set_xlabel("step of 12,288 bytes")
axes.set_ylabel("held-out loss, nats a byte")
axes.set_title("Held-out loss of each recipe lies on that of bf16")
axes.legend()
