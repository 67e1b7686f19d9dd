"""Bytes each layer holds from forward to backward: ``python -m tests.benchmarks.held_bytes``.

Counts each storage once. Parameters are not counted; a weight's quantized copy is.
"""

from __future__ import annotations

import json

import torch

import fp8core as te
from fp8core import recipe

ROWS, HIDDEN, FFN = 4096, 256, 1024


def held(layer: torch.nn.Module, chosen: recipe.Recipe | None) -> int:
    """Return the bytes of the storages that autograd saves in one forward of ``layer``."""
    storages: dict[int, int] = {}
    own = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    x = torch.randn(ROWS, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with hooks, te.autocast(enabled=chosen is not None, recipe=chosen):
        y = layer(x)
    total = sum(storages.values())
    del y
    return total


def main() -> None:
    """Print one row a layer and recipe, and its share of bf16."""
    bf16 = torch.bfloat16
    layers = {
        "Linear": te.Linear(HIDDEN, FFN, params_dtype=bf16),
        "LayerNormLinear": te.LayerNormLinear(HIDDEN, 3 * HIDDEN, params_dtype=bf16),
        "LayerNormMLP gelu": te.LayerNormMLP(HIDDEN, FFN, params_dtype=bf16),
        "LayerNormMLP swiglu": te.LayerNormMLP(
            HIDDEN, FFN, activation="swiglu", normalization="RMSNorm", params_dtype=bf16
        ),
    }
    report: dict[str, dict[str, str]] = {}
    for name, layer in layers.items():
        base = held(layer, None)
        rows = {"bf16": f"{base}"}
        for each in recipe.names():
            count = held(layer, recipe.by_name(each))
            rows[each] = f"{count} ({count / base:.2f})"
        report[name] = rows
    print(
        json.dumps({"shape": [ROWS, HIDDEN, FFN], "torch": torch.__version__, **report}, indent=2)
    )


if __name__ == "__main__":
    main()
