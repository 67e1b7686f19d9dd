"""Bytes each layer holds from forward to backward: ``python -m tests.benchmarks.held_bytes``.

Counts each storage once. Parameters are not counted; a weight's quantized copy is. ``--list NAMES``
prints each tensor that a TransformerLayer of the proportions of an 8B model saves under recipes (or
``bf16``).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import NamedTuple

import torch

import fp8core as te
from fp8core import recipe

ROWS, HIDDEN, FFN = 4096, 256, 1024
SEQUENCE, FFN_8B = 128, 896


class Saved(NamedTuple):
    """A storage that autograd holds: a tensor in it, and its bytes."""

    tensor: torch.Tensor
    size: int


def saved_by(
    layer: torch.nn.Module, chosen: recipe.Recipe | None, shape: Sequence[int]
) -> list[Saved]:
    """Return the storages that autograd saves in one forward of ``layer``, without parameters."""
    storages: dict[int, Saved] = {}
    own = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages.setdefault(storage.data_ptr(), Saved(tensor, storage.nbytes()))
        return tensor

    x = torch.randn(*shape, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with hooks, te.autocast(enabled=chosen is not None, recipe=chosen):
        y = layer(x)
    found = list(storages.values())
    del y
    return found


def held(layer: torch.nn.Module, chosen: recipe.Recipe | None) -> int:
    """Return the bytes of the storages that autograd saves in one forward of ``layer``."""
    is_whole = isinstance(layer, te.TransformerLayer)
    shape = (ROWS // SEQUENCE, SEQUENCE) if is_whole else (ROWS,)
    return sum(one.size for one in saved_by(layer, chosen, shape))


def transformer_layer() -> te.TransformerLayer:
    """Return a layer with the proportions of an 8B model's."""
    return te.TransformerLayer(
        HIDDEN,
        FFN_8B,
        8,
        num_gqa_groups=2,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        normalization="RMSNorm",
        activation="swiglu",
        bias=False,
        attn_input_format="bshd",
        params_dtype=torch.bfloat16,
    )


def print_saved(name: str) -> None:
    """Print what a TransformerLayer saves under recipe ``name``, ``bf16`` for none."""
    chosen = None if name == "bf16" else recipe.by_name(name)
    shape = (ROWS // SEQUENCE, SEQUENCE)
    unit, total = ROWS * HIDDEN * 2, 0
    print("| tensor | dtype | bytes | of a bf16 tensor [rows, hidden] |")
    print("|---|---|---|---|")
    for tensor, size in saved_by(transformer_layer(), chosen, shape):
        total += size
        dtype = str(tensor.dtype).removeprefix("torch.")
        print(f"| {list(tensor.shape)} | {dtype} | {size} | {size / unit:.3f} |")
    print(f"| all | | {total} | {total / unit:.3f} |")


def main() -> None:
    """Print one row a layer and recipe, and its share of bf16; or what one layer saves."""
    if sys.argv[1:2] == ["--list"]:
        for name in sys.argv[2:]:
            print_saved(name)
        return
    bf16 = torch.bfloat16
    layers = {
        "Linear": te.Linear(HIDDEN, FFN, params_dtype=bf16),
        "LayerNormLinear": te.LayerNormLinear(HIDDEN, 3 * HIDDEN, params_dtype=bf16),
        "LayerNormMLP gelu": te.LayerNormMLP(HIDDEN, FFN, params_dtype=bf16),
        "LayerNormMLP swiglu": te.LayerNormMLP(
            HIDDEN, FFN, activation="swiglu", normalization="RMSNorm", params_dtype=bf16
        ),
        "TransformerLayer": transformer_layer(),
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
