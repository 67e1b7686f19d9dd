"""Megatron-core's plug-in point: a provider of the modules of its layers, without an alias.

``get_gpt_layer_spec(config)`` returns the spec of a layer of a ``GPTModel`` whose linears, norms
and attention are fp8core's; :class:`Fp8CoreSpecProvider` serves Megatron's functions that take a
provider. The layers read their recipe from ``fp8``, ``fp8_recipe`` and the like of the config, as
Megatron's context of Transformer Engine is an empty one where that is not installed.
"""

from __future__ import annotations

from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec_for_backend
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from fp8core.errors import UnsupportedError
from fp8core.integrations.megatron.linears import (
    ALIAS,
    Fp8CoreColumnParallelLinear,
    Fp8CoreDotProductAttention,
    Fp8CoreLayerNormColumnParallelLinear,
    Fp8CoreNorm,
    Fp8CoreRowParallelLinear,
    recipe_of,
)

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


class Fp8CoreSpecProvider(BackendSpecProvider):
    """Which modules of fp8core the layers of a Megatron model are built of."""

    def linear(self) -> type:
        """Return the linear that no ranks share."""
        return Fp8CoreColumnParallelLinear

    def column_parallel_linear(self) -> type:
        """Return the linear whose outputs ranks share."""
        return Fp8CoreColumnParallelLinear

    def row_parallel_linear(self) -> type:
        """Return the linear whose inputs ranks share."""
        return Fp8CoreRowParallelLinear

    def fuse_layernorm_and_linear(self) -> bool:
        """Return True: a norm and the linear after it are one module."""
        return True

    def column_parallel_layer_norm_linear(self) -> type:
        """Return the module of a norm and a linear."""
        return Fp8CoreLayerNormColumnParallelLinear

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False) -> type:
        """Return the norm; the config names its kind."""
        return Fp8CoreNorm

    def core_attention(self) -> type:
        """Return the attention."""
        return Fp8CoreDotProductAttention

    def grouped_mlp_modules(
        self, moe_use_grouped_gemm: bool, moe_use_legacy_grouped_gemm: bool
    ) -> tuple[type, MLPSubmodules | None]:
        """Return the experts, one after the other.

        Raises:
            UnsupportedError: all experts in one GEMM are asked for.
        """
        if moe_use_grouped_gemm:
            raise UnsupportedError(
                f"moe_grouped_gemm=True is not offered by Fp8CoreSpecProvider: Megatron's grouped "
                f"experts pad by Transformer Engine's classes. Set it to False; {ALIAS}."
            )
        return SequentialMLP, MLPSubmodules(
            linear_fc1=Fp8CoreColumnParallelLinear, linear_fc2=Fp8CoreRowParallelLinear
        )

    def activation_func(self) -> type | None:
        """Return None: Megatron computes the activation."""
        return None


def get_gpt_layer_spec(
    num_experts: int | None = None, *, moe_grouped_gemm: bool = False, qk_layernorm: bool = False
) -> Any:
    """Return the spec of a ``TransformerLayer`` of fp8core's modules, for a ``GPTModel``.

    With ``num_experts`` its MLP is a mixture; ``qk_layernorm`` normalizes queries and keys.
    """
    provider = Fp8CoreSpecProvider()
    is_moe = num_experts is not None
    norm = provider.layer_norm(for_qk=True) if qk_layernorm else IdentityOp
    attention = SelfAttentionSubmodules(
        linear_qkv=provider.column_parallel_layer_norm_linear(),
        core_attention=provider.core_attention(),
        linear_proj=provider.row_parallel_linear(),
        q_layernorm=norm,
        k_layernorm=norm,
    )
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            self_attention=ModuleSpec(
                module=SelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=attention,
            ),
            self_attn_bda=get_bias_dropout_add,
            # A dense MLP begins with a norm of its own, a router does not.
            pre_mlp_layernorm=provider.layer_norm() if is_moe else IdentityOp,
            mlp=get_mlp_module_spec_for_backend(
                backend=provider, num_experts=num_experts, moe_grouped_gemm=moe_grouped_gemm
            ),
            mlp_bda=get_bias_dropout_add,
        ),
    )
