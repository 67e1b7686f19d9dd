"""fp8core's linears with the arguments, the returns and the shards of Megatron's."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from fp8core.integrations.megatron.config import adopt, device_of, refuse
from fp8core.modules.layernorm_linear import LayerNormLinear
from fp8core.modules.linear import Linear

__all__ = [
    "Fp8CoreColumnParallelLinear",
    "Fp8CoreLayerNormColumnParallelLinear",
    "Fp8CoreRowParallelLinear",
]


def _arguments(config: Any, init_method: Any, bias: bool, skip_bias_add: bool) -> dict[str, Any]:
    """Return the arguments that every linear of fp8core gets from Megatron's."""
    return {
        "init_method": init_method if config.perform_initialization else _leave,
        "bias": bias,
        "return_bias": skip_bias_add and bias,
        "params_dtype": config.params_dtype,
        "fuse_wgrad_accumulation": bool(config.gradient_accumulation_fusion),
        "device": device_of(config),
    }


def _leave(weight: torch.Tensor) -> None:
    """Leave ``weight`` unfilled, as a checkpoint fills it."""


class _MegatronLinear:
    """What Megatron's linears have beside Transformer Engine's: arguments, returns, and shards."""

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
        refuse(
            type(self).__name__,
            tp_group,
            gather_output=(gather_output, False),
            skip_weight_param_allocation=(skip_weight_param_allocation, False),
        )
        given = _arguments(config, init_method, bias, skip_bias_add)
        given |= self.more_arguments(config, is_expert=is_expert)
        layer: Any = super()
        layer.__init__(input_size, output_size, **given)
        self._finish(config, is_expert=is_expert)

    def more_arguments(self, config: Any, *, is_expert: bool) -> dict[str, Any]:
        """Return what the layer takes beside a linear's arguments."""
        return {}

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the output, and the bias that the caller adds or None."""
        layer: Any = super()
        result = layer.forward(x)
        return result if isinstance(result, tuple) else (result, None)

    def _finish(self, config: Any, *, is_expert: bool) -> None:
        layer: Any = self
        layer.config = config
        adopt(layer, config)
        for name, parameter in layer.named_parameters():
            if name in self.split:
                parameter.tensor_model_parallel = True
                parameter.partition_dim = self.split[name]
                parameter.partition_stride = 1
            if name.startswith("layer_norm_"):
                parameter.sequence_parallel = bool(config.sequence_parallel)
            # Gradients of experts are reduced among the ranks that have the same experts.
            parameter.allreduce = not (is_expert and config.expert_model_parallel_size > 1)

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
        refuse(type(self).__name__, None, is_expert=(is_expert, False))
        return {
            "eps": config.layernorm_epsilon,
            "normalization": config.normalization,
            "zero_centered_gamma": config.layernorm_zero_centered_gamma,
        }
