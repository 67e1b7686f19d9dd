"""Classify handwritten digits in float32 and in low precision, and compare the accuracies.

``python docs/examples/classifier.py --recipe mxfp8``; needs scikit-learn, which ships the digits.
"""

from __future__ import annotations

import argparse
import contextlib

import torch
from sklearn.datasets import load_digits
from torch import nn

import fp8core
from fp8core.recipe import Recipe, by_name, names

BATCH = 128


def digits() -> tuple[torch.Tensor, ...]:
    """Return training images and labels, then those held out: [rows, 64] float32, [rows] int64."""
    images, labels = load_digits(return_X_y=True)
    generator = torch.Generator("cpu").manual_seed(0)
    order = torch.randperm(len(labels), generator=generator, device="cpu")
    x = torch.tensor(images, dtype=torch.float32)[order] / 16
    y = torch.tensor(labels, dtype=torch.int64)[order]
    return x[:1408], y[:1408], x[1408:], y[1408:]


def make_model(hidden: int) -> nn.Sequential:
    """Return the network; its last layer, of 10 classes, is torch's, and so in high precision."""
    return nn.Sequential(
        fp8core.LayerNormLinear(64, hidden),
        nn.GELU(),
        fp8core.LayerNormMLP(hidden, 2 * hidden),
        nn.Linear(hidden, 10),
    )


def train(recipe: Recipe | None, epochs: int, hidden: int) -> float:
    """Train in ``recipe``, None for float32, and return the accuracy on the images held out."""
    torch.manual_seed(0)
    x, y, held_out, answers = digits()
    model = make_model(hidden)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    precision = fp8core.autocast(recipe=recipe) if recipe else contextlib.nullcontext()
    for _ in range(epochs):
        for rows in torch.randperm(len(y)).split(BATCH):
            with precision:
                loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    with torch.no_grad(), precision:
        return (model(held_out).argmax(1) == answers).float().mean().item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", choices=names(), default="mxfp8")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=128, help="width of the network")
    args = parser.parse_args()
    torch.set_default_device(torch.accelerator.current_accelerator(check_available=True) or "cpu")
    for name, recipe in (("float32", None), (args.recipe, by_name(args.recipe))):
        accuracy = train(recipe, args.epochs, args.hidden)
        print(f"{name}: {accuracy:.1%} of the images held out are classified correctly")
