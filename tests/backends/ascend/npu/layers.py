"""Layers and recipes that run once on the CPU, by the reference, and once on the device."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

import fp8core as te
from fp8core import recipe
from tests.pairs import turns

__all__ = ["EACH", "LAYERS", "RECIPES", "Run", "error", "run"]

ROWS, FEATURES = 160, 288  # multiples of 32 and of no larger power of two
RECIPES: Mapping[str, recipe.Recipe | None] = {
    "none": None,
    "current": recipe.Float8CurrentScaling(),
    "current-e4m3": recipe.Float8CurrentScaling(fp8_format="e4m3"),
    "delayed": recipe.DelayedScaling(),
    "rowwise": recipe.Float8RowwiseScaling(),
    "block": recipe.Float8BlockScaling(use_f32_scales=True, x_wgrad_block_scaling_dim=2),
    "mxfp8": recipe.MXFP8BlockScaling(),
    "mxfp8-hybrid": recipe.MXFP8BlockScaling(fp8_format="hybrid"),
    "hif8": recipe.by_name("hif8"),
    "hif8-delayed": recipe.DelayedScaling(fp8_format="hif8"),
}
SPLITS = [64, 0, 96]

LAYERS: Mapping[str, Callable[[str], torch.nn.Module]] = {
    "linear": lambda device: te.Linear(FEATURES, 416, params_dtype=torch.bfloat16, device=device),
    "layernorm_linear": lambda device: te.LayerNormLinear(
        FEATURES, 416, normalization="RMSNorm", params_dtype=torch.bfloat16, device=device
    ),
    "layernorm_linear_centered": lambda device: te.LayerNormLinear(
        FEATURES, 416, normalization="LayerNorm", params_dtype=torch.bfloat16, device=device
    ),
    "layernorm_mlp": lambda device: te.LayerNormMLP(
        FEATURES, 256, activation="swiglu", params_dtype=torch.bfloat16, device=device
    ),
    "transformer_layer": lambda device: te.TransformerLayer(
        FEATURES,
        512,
        4,
        num_gqa_groups=2,
        normalization="RMSNorm",
        activation="swiglu",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias=False,
        params_dtype=torch.bfloat16,
        device=device,
    ),
    "grouped_linear": lambda device: te.GroupedLinear(
        3, FEATURES, 416, params_dtype=torch.bfloat16, device=device
    ),
}

_OF_EVERY_RECIPE = ("linear", "transformer_layer", "grouped_linear")
EACH = (
    *itertools.product(_OF_EVERY_RECIPE, RECIPES),
    *turns([name for name in LAYERS if name not in _OF_EVERY_RECIPE], RECIPES),
)
"""Layers and recipes: the parts of a transformer's layer take turns, as it has them itself."""


class Run(NamedTuple):
    """The output of a layer and its gradients, on the CPU in float32, by name."""

    results: dict[str, torch.Tensor]


def run(layer: str, chosen: recipe.Recipe | None, device: str, steps: int = 2) -> Run:
    """Run forward and backward ``steps`` times, and return the results of the last."""
    torch.manual_seed(0)
    module = LAYERS[layer]("cpu").to(device)
    x = torch.randn(ROWS, FEATURES).bfloat16()
    if layer == "transformer_layer":
        x = x.reshape(ROWS // 4, 4, FEATURES)  # [s, b, h]
    arguments = (SPLITS,) if layer == "grouped_linear" else ()
    for _ in range(steps):  # delayed scales are 1 in the first
        module.zero_grad()
        inputs = x.clone().to(device).requires_grad_()
        with te.autocast(enabled=chosen is not None, recipe=chosen):
            output = module(inputs, *arguments)
        torch.manual_seed(1)
        output.backward(torch.randn(output.shape).bfloat16().to(device))
    assert inputs.grad is not None
    found = {"output": output.detach(), "input.grad": inputs.grad}
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            found[f"{name}.grad"] = parameter.grad
    return Run({name: value.cpu().float() for name, value in found.items()})


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the relative error in the Frobenius norm; that of zeros is absolute."""
    return float((found - expected).norm() / (expected.norm() or 1.0))
