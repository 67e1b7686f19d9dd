"""fp8core and Transformer Engine, whose layers take the same arguments, under recipes by name."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import torch

import fp8core
from tests.benchmarks.measuring.command import HIGH

__all__ = [
    "EPS",
    "decoder_layer",
    "layers_of",
    "llama_config",
    "recipe_of",
    "swiglu_mlp",
    "under_recipe",
]

EPS = 1e-5


def layers_of(library: str) -> Any:
    """Return the module with the layers of ``fp8core`` or ``te``.

    Raises:
        ImportError: Transformer Engine is not installed.
    """
    if library == "fp8core":
        return fp8core
    import transformer_engine.pytorch as te

    return te


def recipe_of(library: str, name: str) -> Any:
    """Return the recipe ``name`` of a library; of fp8core the name of what it holds may follow, as
    in ``"delayed least"``."""
    if library == "fp8core":
        name, _, holding = name.partition(" ")
        chosen: Any = fp8core.recipe.by_name(name)
        return dataclasses.replace(chosen, holding=holding) if holding else chosen
    from transformer_engine.common import recipe

    kinds = {
        "delayed": recipe.DelayedScaling,
        "current": recipe.Float8CurrentScaling,
        "block": recipe.Float8BlockScaling,
    }
    return kinds[name]()


def under_recipe(
    library: str, name: str, forward: Callable[..., Any], group: Any = None
) -> Callable[..., Any]:
    """Return ``forward`` of a layer of ``library`` under :func:`recipe_of`, or :data:`HIGH`'s none.

    Amaxes of delayed scaling are reduced over ``group``.
    """
    if name == HIGH:
        context: Callable[[], Any] = contextlib.nullcontext
    else:
        chosen, autocast = recipe_of(library, name), layers_of(library).autocast
        context = lambda: autocast(  # noqa: E731  one of two functions
            enabled=True, recipe=chosen, amax_reduction_group=group
        )

    def run(x: Any) -> Any:
        with context():
            return forward(x)

    return run


def swiglu_mlp(library: str, hidden: int, ffn: int, device: torch.device, group: Any = None) -> Any:
    """Return a bfloat16 LayerNormMLP with RMSNorm, SwiGLU and no biases.

    With a ``group`` its columns are split over the ranks, and so are the sequences.
    """
    options: dict[str, Any] = {}
    if group is not None:
        options = {"set_parallel_mode": True, "sequence_parallel": True}
        options |= {"tp_group": group, "tp_size": group.size()}
    return layers_of(library).LayerNormMLP(
        hidden,
        ffn,
        eps=EPS,
        bias=False,
        normalization="RMSNorm",
        activation="swiglu",
        params_dtype=torch.bfloat16,
        device=device,
        **options,
    )


def decoder_layer(library: str, sizes: Any, **options: Any) -> Any:
    """Return a bfloat16 TransformerLayer of a decoder of ``sizes``: RMSNorm, SwiGLU, no biases, no
    dropout."""
    return layers_of(library).TransformerLayer(
        *(sizes.hidden, sizes.ffn, sizes.heads),
        num_gqa_groups=sizes.groups,
        layernorm_epsilon=EPS,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        normalization="RMSNorm",
        activation="swiglu",
        bias=False,
        fuse_qkv_params=True,
        qkv_weight_interleaved=False,
        params_dtype=torch.bfloat16,
        **options,
    )


def llama_config(sizes: Any, **options: Any) -> Any:
    """Return transformers' configuration of a Llama of ``sizes``, which attends by torch."""
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=sizes.hidden,
        intermediate_size=sizes.ffn,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.groups,
        attn_implementation="sdpa",
        **options,
    )
