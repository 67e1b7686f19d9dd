"""Megatron-core's plug-in point: a provider of the modules of its layers, without an alias.

``get_gpt_layer_spec(config)`` returns the spec of a layer of a ``GPTModel`` whose linears, norms
and attention are fp8core's; :class:`Fp8CoreSpecProvider` serves Megatron's functions that take a
provider. The layers read their recipe from ``fp8``, ``fp8_recipe`` and the like of the config, as
Megatron's context of Transformer Engine is an empty one where that is not installed.
"""

from __future__ import annotations

from typing import Any

import torch
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
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from megatron.core.utils import get_pg_size

from fp8core.context.autocast import request
from fp8core.conversion.layers import delimit
from fp8core.errors import OperandError, UnsupportedError
from fp8core.modules.attention import DotProductAttention
from fp8core.modules.calls.base import LowPrecisionModule
from fp8core.modules.layers.layernorm_linear import LayerNormLinear
from fp8core.modules.layers.linear import Linear
from fp8core.modules.layers.norm import LayerNorm, RMSNorm
from fp8core.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)
from fp8core.recipe.base import plan_of
from fp8core.recipe.plan import LayerRole
from fp8core.reporting import log_once

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

_ALIAS = "fp8core.transformer_engine runs Megatron's own spec, which has it"
# Options of Megatron that other layers than these would have to know, with their neutral value.
_REFUSED = {
    "fp8_wgrad": True,
    "fp8_param": False,
    "fp4_param": False,
    "first_last_layers_bf16": False,
    "tp_comm_overlap": False,
    "delay_wgrad_compute": False,
    "context_parallel_size": 1,
}


def recipe_of(config: Any) -> Recipe | None:
    """Return the recipe that a ``TransformerConfig`` asks for; None for high precision.

    Raises:
        UnsupportedError: an option that would be without effect here; names it.
    """
    for name, neutral in _REFUSED.items():
        if getattr(config, name, neutral) not in (neutral, None):
            raise UnsupportedError(
                f"TransformerConfig({name}={getattr(config, name)!r}) is not offered by "
                f"Fp8CoreSpecProvider; {_ALIAS}."
            )
    is_fp4 = bool(getattr(config, "fp4", None))
    if not (is_fp4 or config.fp8):
        return None
    if config.recompute_granularity == "full":
        raise UnsupportedError(
            f"TransformerConfig(recompute_granularity='full') with low precision is not offered by "
            f"Fp8CoreSpecProvider, as Megatron then calls Transformer Engine; {_ALIAS}."
        )
    if is_fp4:
        return NVFP4BlockScaling()
    fp8_dpa = bool(config.fp8_dot_product_attention)
    name = str(getattr(config.fp8_recipe, "value", config.fp8_recipe))
    if name == "delayed":
        if config.fp8_amax_compute_algo == "most_recent":
            log_once(
                "TransformerConfig(fp8_amax_compute_algo='most_recent'): of a step of several "
                "microbatches the scales follow the last one alone, and values of the others may "
                "saturate; fp8_amax_compute_algo='max' follows the largest."
            )
        return DelayedScaling(
            margin=config.fp8_margin,
            fp8_format=config.fp8,
            amax_history_len=config.fp8_amax_history_len,
            amax_compute_algo=config.fp8_amax_compute_algo,
            fp8_dpa=fp8_dpa,
            fp8_mha=bool(config.fp8_multi_head_attention),
        )
    if name == "tensorwise":
        return Float8CurrentScaling(fp8_format=config.fp8, fp8_dpa=fp8_dpa)
    if name == "blockwise":
        return Float8BlockScaling(fp8_format=config.fp8)
    if name == "mxfp8":
        return MXFP8BlockScaling(fp8_format=config.fp8)
    raise UnsupportedError(
        f"TransformerConfig(fp8_recipe={name!r}) is not offered by Fp8CoreSpecProvider; recipes "
        f"are delayed, tensorwise, blockwise, mxfp8."
    )


def _device_of(config: Any) -> torch.device:
    """Return the device of the parameters, as Megatron's linears choose it."""
    if config.init_model_with_meta_device:
        return torch.device("meta")
    if config.use_cpu_initialization:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _adopt(layer: LowPrecisionModule, config: Any) -> None:
    """Give ``layer`` the recipe of ``config``; under delayed scaling each call is then a step.

    The layer's scales are there from the beginning, as a distributed checkpoint loads what the
    model has.
    """
    recipe = recipe_of(config)
    if recipe is None:
        return
    layer.outside_autocast = request(quantize=recipe)
    dtype = next((parameter.dtype for parameter in layer.parameters()), config.params_dtype)
    plan = plan_of(layer.plan_type, recipe, LayerRole(layer.kind, layer.name), dtype)
    if plan.delayed is not None:
        with torch.device(_device_of(config)):  # attention has no parameters, whose device it takes
            layer.prepare_delayed_state(plan)
        delimit(layer)


def _refuse(owner: str, tp_group: Any, **options: tuple[object, object]) -> None:
    """Refuse tensor parallelism, and each option whose value is not its neutral one."""
    size = 1 if tp_group is None else get_pg_size(tp_group)
    if size > 1:
        raise UnsupportedError(
            f"{owner}: tensor_model_parallel_size={size} is not offered by Fp8CoreSpecProvider; "
            f"{_ALIAS}."
        )
    for name, (value, neutral) in options.items():
        if value != neutral:
            raise UnsupportedError(
                f"{owner}({name}={value!r}) is not offered by Fp8CoreSpecProvider."
            )


class Fp8CoreDotProductAttention(DotProductAttention):
    """:class:`fp8core.DotProductAttention` with Megatron's arguments; ``[s, b, heads, size]``."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **options: Any,
    ) -> None:
        groups = getattr(options.get("pg_collection"), "tp", None)
        _refuse(type(self).__name__, groups)
        super().__init__(
            config.num_attention_heads,
            config.kv_channels,
            num_gqa_groups=config.num_query_groups,
            attention_dropout=(
                config.attention_dropout if attention_dropout is None else attention_dropout
            ),
            attn_mask_type=attn_mask_type.name,
            window_size=config.window_size,
            layer_number=layer_number,
            attention_type=attention_type,
            softmax_scale=softmax_scale,
            softmax_type=getattr(config, "softmax_type", "vanilla"),
        )
        self.config = config
        _adopt(self, config)

    def forward(  # type: ignore[override]  # Megatron's
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: Any = None,
        *,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
        **_: Any,
    ) -> torch.Tensor:
        """Return ``[s, b, heads * size]``.

        Raises:
            UnsupportedError: packed sequences.
            OperandError: a mask of one's own beside a causal one.
        """
        if packed_seq_params is not None:
            raise UnsupportedError(
                f"{type(self).__name__}: packed sequences are not offered; {_ALIAS}."
            )
        name = self.attn_mask_type if attn_mask_type is None else attn_mask_type.name
        if name in ("padding", "padding_causal") and attention_mask is None:
            raise OperandError(f"{type(self).__name__}: attn_mask_type={name!r} without a mask.")
        result = super().forward(
            query,
            key,
            value,
            attention_mask=attention_mask if name in ("padding", "arbitrary") else None,
            qkv_format="sbhd",
            attn_mask_type=name,
            core_attention_bias_type="no_bias" if attention_bias is None else "post_scale_bias",
            core_attention_bias=attention_bias,
        )
        assert isinstance(result, torch.Tensor)
        return result


class Fp8CoreNorm:
    """Constructs the norm that a config names; a class, as specs hold classes."""

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> Any:
        """Return fp8core's LayerNorm or RMSNorm."""
        kinds = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}
        if config.normalization not in kinds:
            raise UnsupportedError(
                f"normalization={config.normalization!r} is not offered by Fp8CoreSpecProvider; "
                f"norms are {', '.join(kinds)}."
            )
        norm = kinds[config.normalization](
            hidden_size,
            eps,
            params_dtype=config.params_dtype,
            zero_centered_gamma=config.layernorm_zero_centered_gamma,
            device=_device_of(config),
        )
        for parameter in norm.parameters():
            parameter.sequence_parallel = bool(config.sequence_parallel)  # type: ignore[attr-defined]  # Megatron reads it
        return norm


def _leave(weight: torch.Tensor) -> None:
    """Leave ``weight`` unfilled, as a checkpoint fills it."""


class _MegatronLinear:
    """Megatron's additions to Transformer Engine's linears: arguments, returns, and shards."""

    # Which dimension of the weight tensor parallelism would split, and that of the bias, if any.
    split: dict[str, int]

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Any,
        gather_output: bool = False,
        bias: bool = True,
        skip_bias_add: bool = False,
        is_expert: bool = False,
        skip_weight_param_allocation: bool = False,
        tp_comm_buffer_name: str | None = None,
        tp_group: Any = None,
        stride: int = 1,
    ) -> None:
        _refuse(
            type(self).__name__,
            tp_group,
            gather_output=(gather_output, False),
            skip_weight_param_allocation=(skip_weight_param_allocation, False),
        )
        base: Any = super()
        base.__init__(
            input_size,
            output_size,
            init_method=init_method if config.perform_initialization else _leave,
            bias=bias,
            return_bias=skip_bias_add and bias,
            params_dtype=config.params_dtype,
            fuse_wgrad_accumulation=bool(config.gradient_accumulation_fusion),
            device=_device_of(config),
            **self.more_arguments(config, is_expert=is_expert),
        )
        layer: Any = self
        layer.config = config
        _adopt(layer, config)
        for name, parameter in layer.named_parameters():
            if name in self.split:
                parameter.tensor_model_parallel = True
                parameter.partition_dim = self.split[name]
                parameter.partition_stride = 1
            if name.startswith("layer_norm_"):
                parameter.sequence_parallel = bool(config.sequence_parallel)
            # Gradients of experts are reduced among the ranks that have the same experts.
            parameter.allreduce = not (is_expert and config.expert_model_parallel_size > 1)

    def more_arguments(self, config: Any, *, is_expert: bool) -> dict[str, Any]:
        """Return the layer's arguments beside a linear's."""
        return {}

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the output, and the bias that the caller adds or None."""
        layer: Any = super()
        result = layer.forward(x)
        return result if isinstance(result, tuple) else (result, None)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> Any:
        """Return the parameters, and delayed scales, as shards of a distributed checkpoint."""
        layer: Any = self
        state = layer.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(state, prefix, self.split, sharded_offsets)

    def backward_dw(self) -> None:
        """Do nothing: weight gradients are computed in backward."""


class Fp8CoreColumnParallelLinear(_MegatronLinear, Linear):  # type: ignore[misc]  # Megatron's forward
    """:class:`fp8core.Linear` with the arguments of Megatron's ``ColumnParallelLinear``."""

    split = {"weight": 0, "bias": 0}  # noqa: RUF012  of the class


class Fp8CoreRowParallelLinear(Fp8CoreColumnParallelLinear):
    """:class:`fp8core.Linear` with the arguments of Megatron's ``RowParallelLinear``."""

    split = {"weight": 1}  # noqa: RUF012  of the class

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Any,
        bias: bool,
        input_is_parallel: bool,
        skip_bias_add: bool,
        is_expert: bool = False,
        tp_comm_buffer_name: str | None = None,
        tp_group: Any = None,
    ) -> None:
        super().__init__(
            input_size,
            output_size,
            config=config,
            init_method=init_method,
            bias=bias,
            skip_bias_add=skip_bias_add,
            is_expert=is_expert,
            tp_group=tp_group,
        )


class Fp8CoreLayerNormColumnParallelLinear(_MegatronLinear, LayerNormLinear):  # type: ignore[misc]  # Megatron's forward
    """:class:`fp8core.LayerNormLinear` with the arguments of a ``ColumnParallelLinear``."""

    split = {"weight": 0, "bias": 0}  # noqa: RUF012  of the class

    def more_arguments(self, config: Any, *, is_expert: bool) -> dict[str, Any]:
        """Return the arguments of the norm, which no expert has."""
        _refuse(type(self).__name__, None, is_expert=(is_expert, False))
        return {
            "eps": config.layernorm_epsilon,
            "normalization": config.normalization,
            "zero_centered_gamma": config.layernorm_zero_centered_gamma,
        }


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
                f"experts pad by Transformer Engine's classes. Set it to False; {_ALIAS}."
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
