"""Megatron-core's plug-in point: a provider of the modules of its layers, without an alias.

``get_gpt_layer_spec(config)`` returns the spec of a layer of a ``GPTModel`` whose linears, norms
and attention are fp8core's; :class:`Fp8CoreSpecProvider` serves Megatron's functions that take a
provider. The layers read their recipe from ``fp8``, ``fp8_recipe`` and the like of the config, as
Megatron's context of Transformer Engine is an empty one where that is not installed.
"""

from __future__ import annotations

from fp8core.integrations.megatron.linears import (
    Fp8CoreColumnParallelLinear,
    Fp8CoreDotProductAttention,
    Fp8CoreLayerNormColumnParallelLinear,
    Fp8CoreNorm,
    Fp8CoreRowParallelLinear,
    recipe_of,
)
from fp8core.integrations.megatron.provider import Fp8CoreSpecProvider, get_gpt_layer_spec

__all__ = [
    "Fp8CoreColumnParallelLinear",
    "Fp8CoreDotProductAttention",
    "Fp8CoreLayerNormColumnParallelLinear",
    "Fp8CoreNorm",
    "Fp8CoreRowParallelLinear",
    "Fp8CoreSpecProvider",
    "get_gpt_layer_spec",
    "recipe_of",
]
