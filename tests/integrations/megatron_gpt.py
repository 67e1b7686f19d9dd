"""Trains a small GPT of Megatron-core on a CPU with the layers of its Transformer Engine spec.

``python -m tests.integrations.megatron_gpt FOLDER RANK WORLD_SIZE NAME ...`` writes ``rankR.json``.

Megatron-core is unmodified. What it needs on a CPU: parameters initialized there, no fused kernels
of its own, no dropout (its random states are CUDA's), gloo, experts exchanged by an all-gather (its
all-to-all makes CUDA streams), and an answer to ``torch.cuda.current_device`` for its rotary
embedding.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from fp8core import mindspeed
from fp8core import transformer_engine as alias

BASE: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "ffn_hidden_size": 128,
    "use_cpu_initialization": True,
    "bf16": True,
    "params_dtype": torch.bfloat16,
    "pipeline_dtype": torch.bfloat16,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "bias_activation_fusion": False,
    "masked_softmax_fusion": False,
    "apply_rope_fusion": False,
    "bias_dropout_fusion": False,
    "gradient_accumulation_fusion": False,
}
DELAYED = {"fp8": "hybrid", "fp8_recipe": "delayed"}
TENSORWISE = {"fp8": "hybrid", "fp8_recipe": "tensorwise"}
BLOCKWISE = {"fp8": "e4m3", "fp8_recipe": "blockwise"}
MXFP8 = {"fp8": "e4m3", "fp8_recipe": "mxfp8"}
RECOMPUTE = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
MOE = {
    "num_moe_experts": 2,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 128,
    "add_bias_linear": False,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.01,
    "moe_token_dispatcher_type": "allgather",
}
LLAMA = {
    "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
}
FIRST_BF16 = {
    "first_last_layers_bf16": True,
    "num_layers_at_start_in_bf16": 1,
    "num_layers_at_end_in_bf16": 0,
}

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "delayed": DELAYED,
    "tensorwise": TENSORWISE,
    "blockwise": BLOCKWISE,
    "mxfp8": MXFP8,
    "hif8": {"fp8": "hif8", "fp8_recipe": "tensorwise"},
    "nvfp4": {"fp4": "e2m1", "fp4_recipe": "nvfp4"},
    "fp8_attention": {**DELAYED, "fp8_dot_product_attention": True},
    "qk_layernorm": {**DELAYED, "qk_layernorm": True},
    "swiglu_rmsnorm": {**TENSORWISE, **LLAMA},
    "fp8_param": {**TENSORWISE, "fp8_param": True},
    "fp8_wgrad_off": {**DELAYED, "fp8_wgrad": False},
    "recompute_delayed": {**DELAYED, **RECOMPUTE},
    "recompute_mxfp8": {**MXFP8, **RECOMPUTE},
    "moe_bf16": MOE,
    "moe_sequential": {**MXFP8, **MOE},
    "moe_sequential_delayed": {**DELAYED, **MOE},
    "moe_grouped": {**MXFP8, **MOE, "moe_grouped_gemm": True},
    "moe_grouped_delayed": {**DELAYED, **MOE, "moe_grouped_gemm": True},
    "first_last_bf16": {**MXFP8, **FIRST_BF16},
    "microbatches": DELAYED,
    "rope_fusion": {**MXFP8, "apply_rope_fusion": True},
    "cross_entropy_fusion": {
        "cross_entropy_loss_fusion": True,
        "cross_entropy_fusion_impl": "te",
    },
    "moe_fusions": {
        **{**MXFP8, **MOE, "moe_grouped_gemm": True},
        **{"moe_router_fusion": True, "moe_permute_fusion": True},
    },
    "activation": {**TENSORWISE, **LLAMA, "use_te_activation_func": True},
    "operations": {**MXFP8, "use_te_op_fuser": True},
    "window_and_groups": {**MXFP8, "window_size": (8, 0), "num_query_groups": 2},
    "sequence_parallel": {**MXFP8, "sequence_parallel": True},
}
STEPS = 4
RESUMED = ("delayed", "moe_sequential_delayed", "moe_grouped_delayed")


def _layers(model: torch.nn.Module) -> dict[str, Any]:
    import transformer_engine.pytorch as te

    kinds = (te.Linear, te.LayerNormLinear, te.GroupedLinear)
    return {name: module for name, module in model.named_modules() if isinstance(module, kinds)}


def _model(configuration: dict[str, Any], ranks: int) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt import gpt_layer_specs as specs
    from megatron.core.transformer.transformer_config import TransformerConfig

    torch.manual_seed(1)
    arguments = {**BASE, **configuration, "tensor_model_parallel_size": ranks}
    uses_operations = arguments.pop("use_te_op_fuser", False)
    config = TransformerConfig(**arguments)
    spec = specs.get_gpt_layer_with_transformer_engine_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=config.moe_grouped_gemm,
        qk_layernorm=config.qk_layernorm,
        use_te_op_fuser=uses_operations,
        use_te_activation_func=config.use_te_activation_func,
    )
    model = GPTModel(
        config, spec, vocab_size=128, max_sequence_length=32, position_embedding_type="rope"
    )
    return model if configuration.get("fp8_param") else model.bfloat16()


def train(name: str, ranks: int) -> dict[str, Any]:
    """Train STEPS steps on one batch; return the losses and what ran."""
    configuration = CONFIGURATIONS[name]
    model = _model(configuration, ranks)
    if configuration.get("fp8_param"):  # without masters, small steps would be lost
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(2)
    tokens = torch.randint(0, 128, (2, 33))
    positions = torch.arange(32).expand(2, 32)
    parts = tokens.chunk(2 if name == "microbatches" else 1)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        model.set_is_first_microbatch()
        total = 0.0
        for part in parts:
            at = positions[: len(part)]
            loss = model(part[:, :-1], at, None, labels=part[:, 1:]).mean() / len(parts)
            loss.backward()
            total += float(loss)
        optimizer.step()
        losses.append(total)

    def evaluated(one: Any) -> Any:
        return one(tokens[:, :-1], positions, None, labels=tokens[:, 1:]).mean()

    layers = _layers(model)
    return {
        "losses": losses,
        "ran": {
            key: layer.extra_repr().rpartition("last run: ")[2] for key, layer in layers.items()
        },
        "quantized": sum(_is_quantized(parameter) for parameter in model.parameters()),
        # An operation of Transformer Engine has no sharded_state_dict, which Megatron calls.
        "sharded": [] if name == "activation" else sorted(model.sharded_state_dict()),
        "resumed": _resumed(model, configuration, evaluated) if name in RESUMED else {},
    }


def _resumed(model: Any, configuration: dict[str, Any], loss: Any) -> dict[str, Any]:
    """A new model that takes what Megatron would save, as its files need a GPU: the buffers of
    delayed scaling that are equal, and both losses of a forward in evaluation."""
    fresh = _model(configuration, 1)
    saved = model.sharded_state_dict()
    data = {key: saved[key].data for key in fresh.sharded_state_dict()}  # what Megatron asks for
    unexpected = fresh.load_state_dict(data, strict=False).unexpected_keys
    assert not unexpected, unexpected
    buffers = dict(fresh.named_buffers())
    scales = {key: one for key, one in model.named_buffers() if "scale_" in key or "amax" in key}
    losses = []
    for one in (model, fresh):
        one.set_is_first_microbatch()
        with torch.no_grad():
            losses.append(float(loss(one.eval())))
    return {
        "scales": len(scales),
        "differ": [key for key, one in scales.items() if not torch.equal(buffers[key], one)],
        "losses": losses,
    }


def _is_quantized(parameter: torch.Tensor) -> bool:
    from megatron.core import fp8_utils

    return bool(fp8_utils.is_float8tensor(parameter))


def _mindspeed_s_recipes() -> Any:
    """A context of the patch that fp8core registers with MindSpeed's manager."""
    from megatron.core import fp8_utils

    decorated = mindspeed.get_fp8_recipe_wrapper(fp8_utils.get_fp8_recipe)
    return mock.patch.object(fp8_utils, "get_fp8_recipe", decorated)


def claims() -> dict[str, bool]:
    """What Megatron found: it replaces a failed import by a mock."""
    import transformer_engine.pytorch as te
    from megatron.core import fp8_utils
    from megatron.core.extensions import transformer_engine as extension
    from megatron.core.transformer import mlp

    layers = mindspeed.classes()
    grouped = layers["MindSpeedTEGroupedLinear"]
    fused = layers["MindSpeedTELayerNormColumnParallelLinear"]
    return {
        "MindSpeed's": issubclass(grouped, te.GroupedLinear)
        and issubclass(fused, te.LayerNormLinear)
        and issubclass(layers["TEColumnParallelLinear"], te.Linear)
        and issubclass(layers["TERowParallelLinear"], te.Linear),
        "HAVE_TE": extension.HAVE_TE and fp8_utils.HAVE_TE and mlp.HAVE_TE,
        "HAVE_TE_FP8_TENSOR_CLASS": fp8_utils.HAVE_TE_FP8_TENSOR_CLASS,
        "HAVE_TE_MXFP8TENSOR": fp8_utils.HAVE_TE_MXFP8TENSOR,
        "TELinear": issubclass(extension.TELinear, te.Linear),
        "TELayerNormColumnParallelLinear": issubclass(
            extension.TELayerNormColumnParallelLinear, te.LayerNormLinear
        ),
        "TEGroupedLinear": issubclass(extension.TEGroupedLinear, te.GroupedLinear),
        "TEDotProductAttention": issubclass(
            extension.TEDotProductAttention, te.DotProductAttention
        ),
    }


def main(folder: str, rank: str, world_size: str, *names: str) -> None:
    alias.install()
    torch.set_num_threads(1)
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]  # see above
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=int(rank),
        world_size=int(world_size),
        timeout=timedelta(seconds=120),
    )
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(int(world_size), 1)
    if int(world_size) > 1:  # Transformer Engine's tracker, as Megatron's own is CUDA's
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        model_parallel_cuda_manual_seed(1, te_rng_tracker=True)
    results: dict[str, Any] = {"claims": claims()}
    for name in names:
        with _mindspeed_s_recipes() if name == "hif8" else contextlib.nullcontext():
            results[name] = train(name, int(world_size))
    Path(folder, f"rank{rank}.json").write_text(json.dumps(results))
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may outlive the group


if __name__ == "__main__":
    main(*sys.argv[1:])
