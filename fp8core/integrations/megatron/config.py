"""A layer's part of Megatron's ``TransformerConfig``: its recipe and device, and refusals."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.utils import get_pg_size

from fp8core.context.autocast import request
from fp8core.conversion.layers import delimit
from fp8core.errors import UnsupportedError
from fp8core.modules.base import LowPrecisionModule
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

ALIAS = "fp8core.integrations.transformer_engine runs Megatron's own spec, which has it"
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
                f"Fp8CoreSpecProvider; {ALIAS}."
            )
    is_fp4 = bool(getattr(config, "fp4", None))
    if not (is_fp4 or config.fp8):
        return None
    if config.recompute_granularity == "full":
        raise UnsupportedError(
            f"TransformerConfig(recompute_granularity='full') with low precision is not offered by "
            f"Fp8CoreSpecProvider, as Megatron then calls Transformer Engine; {ALIAS}."
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


def device_of(config: Any) -> torch.device:
    """Return the device of the parameters, as Megatron's linears choose it."""
    if config.init_model_with_meta_device:
        return torch.device("meta")
    if config.use_cpu_initialization:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def adopt(layer: LowPrecisionModule, config: Any) -> None:
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
        with torch.device(device_of(config)):  # attention has no parameters, whose device it takes
            layer.prepare_delayed_state(plan)
        delimit(layer)


def refuse(owner: str, tp_group: Any, **options: tuple[object, object]) -> None:
    """Refuse tensor parallelism, and each option whose value is not its neutral one."""
    size = 1 if tp_group is None else get_pg_size(tp_group)
    if size > 1:
        raise UnsupportedError(
            f"{owner}: tensor_model_parallel_size={size} is not offered by Fp8CoreSpecProvider; "
            f"{ALIAS}."
        )
    for name, (value, neutral) in options.items():
        if value != neutral:
            raise UnsupportedError(
                f"{owner}({name}={value!r}) is not offered by Fp8CoreSpecProvider."
            )
