"""Runs a layer over the golden steps of Transformer Engine and says how far off it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
import torch

from fp8core import autocast, recipe

RECIPES = {
    "bf16": None,
    "delayed": recipe.DelayedScaling(amax_history_len=4),
    "delayed_e4m3_recent_margin": recipe.DelayedScaling(
        fp8_format=recipe.Format.E4M3, amax_history_len=3, amax_compute_algo="most_recent", margin=1
    ),
    "current": recipe.Float8CurrentScaling(),
    "block": recipe.Float8BlockScaling(),
}
DELAYED = [name for name in RECIPES if name.startswith("delayed")]


class Step(NamedTuple):
    """One golden step: the relative errors by name, the arrays and what their names start with."""

    errors: dict[str, float]
    prefix: str
    index: int


def tensor(array: np.ndarray) -> torch.Tensor:
    """Return a golden array; uint16 arrays are the bits of bfloat16."""
    made = torch.from_numpy(array.copy())
    return made.view(torch.bfloat16) if array.dtype == np.uint16 else made


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Return the relative Frobenius error; 0 where both are zero."""
    got = got.to(want.device)
    difference = (got.float() - want.float()).norm()
    return 0.0 if difference == 0 else (difference / want.float().norm()).item()


def run(
    layer: torch.nn.Module, case: str, name: str, arrays: Mapping[str, np.ndarray], *more: object
) -> Iterator[Step]:
    """Yield each step of ``case`` under recipe ``name``, after its backward.

    ``more``: what the layer is called with besides its input.
    """
    chosen = RECIPES[name]
    names = [key for key, _ in layer.named_parameters()]
    device = next(layer.parameters()).device
    layer.load_state_dict({key: tensor(arrays[f"params/{case}/{key}"]) for key in names})
    index = 0
    while f"{name}/{case}/step{index}/y" in arrays:
        prefix = f"{name}/{case}/step{index}"
        x = tensor(arrays[f"inputs/{case}/step{index}/x"]).to(device).requires_grad_()
        layer.zero_grad()
        with autocast(enabled=chosen is not None, recipe=chosen):
            y = layer(x, *more)
        y.backward(tensor(arrays[f"inputs/{case}/step{index}/grad_output"]).to(device))
        found = {"y": y, "grad_input": x.grad}
        found |= {f"grad/{key}": own.grad for key, own in layer.named_parameters()}
        errors = {
            key: error(got, tensor(arrays[f"{prefix}/{key}"]))
            for key, got in found.items()
            if f"{prefix}/{key}" in arrays
        }
        yield Step(errors, prefix, index)
        index += 1
