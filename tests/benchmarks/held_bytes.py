"""Bytes each layer holds from forward to backward: ``python -m tests.benchmarks.held_bytes``.

Counts each storage once. Parameters are not counted; a weight's quantized copy is. ``explain`` says
which operation of a layer holds them.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from typing import Any

import torch

import fp8core as te
from fp8core import recipe
from fp8core.inspection.on_meta import autograd_bytes
from fp8core.recipe.plan import HOLDING
from tests.benchmarks.measuring.libraries import swiglu_mlp

ROWS, HIDDEN, FFN = 4096, 256, 1024
SEQUENCE, FFN_8B = 128, 896
BF16 = torch.bfloat16


def held(layer: torch.nn.Module, chosen: recipe.Recipe | None) -> int:
    """Return the bytes of the storages that autograd saves in one forward of ``layer``."""
    is_whole = isinstance(layer, te.TransformerLayer)
    shape = (ROWS // SEQUENCE, SEQUENCE) if is_whole else (ROWS,)
    x = torch.randn(*shape, HIDDEN, dtype=BF16, requires_grad=True)
    with te.autocast(enabled=chosen is not None, recipe=chosen):
        return autograd_bytes(lambda: layer(x), layer.parameters())


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
        fuse_qkv_params=True,
        attn_input_format="bshd",
        params_dtype=BF16,
    )


def main() -> None:
    """Print one row a layer, recipe and policy of what is held, and its share of bf16."""
    layers = {
        "Linear": te.Linear(HIDDEN, FFN, params_dtype=BF16),
        "LayerNormLinear": te.LayerNormLinear(HIDDEN, 3 * HIDDEN, params_dtype=BF16),
        "LayerNormMLP gelu": te.LayerNormMLP(HIDDEN, FFN, params_dtype=BF16),
        "LayerNormMLP swiglu": swiglu_mlp("fp8core", HIDDEN, FFN, torch.device("cpu")),
        "TransformerLayer": transformer_layer(),
    }
    report: dict[str, dict[str, str]] = {}
    for name, layer in layers.items():
        base = held(layer, None)
        rows = {"bf16": f"{base}"}
        for each, holding in itertools.product(recipe.names(), HOLDING):
            chosen: Any = recipe.by_name(each)
            count = held(layer, dataclasses.replace(chosen, holding=holding))
            rows[f"{each} {holding}"] = f"{count} ({count / base:.2f})"
        report[name] = rows
    print(
        json.dumps({"shape": [ROWS, HIDDEN, FFN], "torch": torch.__version__, **report}, indent=2)
    )


if __name__ == "__main__":
    main()
