"""A program that trains small GPTs of Megatron-core on fp8core's provider, and prints what it saw.

It runs in a process of its own, as Megatron decides at its import whether there is a Transformer
Engine, and keeps the answer.
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist

TOKENS, POSITIONS = torch.arange(64).reshape(2, 32) % 61, torch.arange(32).expand(2, 32)


def main() -> None:
    warnings.simplefilter("ignore")  # of Megatron, about packages that it would use
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    # Megatron asks for it to place its rotary embedding.
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    from megatron.core import parallel_state
    from megatron.core.extensions.transformer_engine import HAVE_TE

    parallel_state.initialize_model_parallel(1, 1)
    json.dump(
        {
            "HAVE_TE": HAVE_TE,
            "losses": {name: losses(**given) for name, given in CONFIGURATIONS.items()},
            "ran": ran(**CONFIGURATIONS["delayed"]),
            "scale": delayed_scale(),
            "attention": delayed_attention(),
            "logged": logged(),
            "layer": distance_from_torch(),
            "keys": list(model().sharded_state_dict()),
            "refused": {name: refusal(**given) for name, given in REFUSED.items()},
            "experts": [type(one.linear_fc1).__name__ for one in experts()],
        },
        sys.stdout,
    )


FP8 = {"fp8": "hybrid", "fp8_amax_history_len": 4, "fp8_amax_compute_algo": "max"}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "delayed": {**FP8, "fp8_recipe": "delayed"},
    "tensorwise": {**FP8, "fp8_recipe": "tensorwise"},
    "blockwise": {"fp8": "e4m3", "fp8_recipe": "blockwise"},
    "mxfp8": {"fp8": "e4m3", "fp8_recipe": "mxfp8"},
    "swiglu and rmsnorm": {
        "fp8": "e4m3",
        "fp8_recipe": "mxfp8",
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "layernorm_zero_centered_gamma": False,
    },
    "qk_layernorm": {"fp8": "e4m3", "fp8_recipe": "mxfp8", "qk_layernorm": True},
}
# Without Transformer Engine Megatron 0.16.1 refuses fp8 with experts, and its router ends in an
# error: such a model is built here, and not run.
EXPERTS: dict[str, Any] = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_token_dispatcher_type": "allgather",
    "add_bias_linear": False,
}
REFUSED: dict[str, dict[str, Any]] = {
    "fp8_wgrad": {**FP8, "fp8_recipe": "delayed", "fp8_wgrad": False},
    "fp8_param": {**FP8, "fp8_recipe": "delayed", "fp8_param": True},
    "first_last_layers_bf16": {**FP8, "fp8_recipe": "mxfp8", "first_last_layers_bf16": True},
    "recompute_granularity": {
        **FP8,
        "fp8_recipe": "tensorwise",
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
    "moe_grouped_gemm": {"num_moe_experts": 4, "moe_grouped_gemm": True, "add_bias_linear": False},
}


def configuration(**given: Any) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    fusions = ("bias_activation", "masked_softmax", "bias_dropout", "gradient_accumulation")
    settings: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "use_cpu_initialization": True,
        "params_dtype": torch.bfloat16,
        "pipeline_dtype": torch.bfloat16,
        "bf16": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "apply_rope_fusion": False,
        **{f"{name}_fusion": False for name in fusions},
    }
    return TransformerConfig(**{**settings, **given})


def model(**given: Any) -> Any:
    from megatron.core.models.gpt.gpt_model import GPTModel

    from fp8core.megatron import get_gpt_layer_spec

    config = configuration(**given)
    spec = get_gpt_layer_spec(
        config.num_moe_experts,
        moe_grouped_gemm=config.moe_grouped_gemm,
        qk_layernorm=config.qk_layernorm,
    )
    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "max_sequence_length": 32}
    return GPTModel(config, spec, **sizes, position_embedding_type="rope")


def step(own: Any, optimizer: torch.optim.Optimizer) -> float:
    loss = own(TOKENS, POSITIONS, None, labels=TOKENS).float().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.item())


def losses(**given: Any) -> list[float]:
    own = model(**given)
    optimizer = torch.optim.SGD(own.parameters(), lr=0.5)
    # Delayed scales are 1 in the first pass, where small gradients vanish.
    own(TOKENS, POSITIONS, None, labels=TOKENS).float().mean().backward()
    optimizer.zero_grad()
    return [step(own, optimizer) for _ in range(4)]


def ran(**given: Any) -> list[str]:
    own = model(**given)
    own(TOKENS, POSITIONS, None)
    return [repr(module) for module in own.modules() if "Linear" in type(module).__name__]


def experts() -> list[Any]:
    return list(model(**EXPERTS).decoder.layers[0].mlp.experts.local_experts)


def delayed_scale() -> tuple[float, float]:
    """The scale of a layer's input after two microbatches, the last one smaller, and 448 / amax."""
    own = model(**CONFIGURATIONS["delayed"])
    layer = own.decoder.layers[0].mlp.linear_fc2
    x = torch.randn(32, 256, dtype=torch.bfloat16)
    for rows in (8 * x, x):
        layer(rows)[0].sum().backward()
    return layer.scale_fwd[0].item(), 448 / (8 * x).abs().max().item()


def delayed_attention() -> dict[str, Any]:
    """Scales of attention after two steps, and the keys of a checkpoint before and after."""
    own = model(**CONFIGURATIONS["delayed"], fp8_dot_product_attention=True)
    before = sorted(own.sharded_state_dict())
    optimizer = torch.optim.SGD(own.parameters(), lr=0.5)
    for _ in range(2):
        step(own, optimizer)
    attention = own.decoder.layers[0].self_attention.core_attention
    after = own.sharded_state_dict()
    fresh = model(**CONFIGURATIONS["delayed"], fp8_dot_product_attention=True)
    fresh.load_state_dict(own.state_dict())
    with torch.no_grad():
        results = [one.eval()(TOKENS, POSITIONS, None) for one in (own, fresh)]
    return {
        "scales": attention.scale_fwd[:3].tolist(),
        "before": before,
        "after": sorted(after),
        "is_resumed": torch.equal(*results),
    }


def logged() -> list[str]:
    """The lines of a model whose scales follow the latest forward, which is Megatron's default."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fp8core").addHandler(handler)
    model(fp8="hybrid", fp8_recipe="delayed")
    logging.getLogger("fp8core").removeHandler(handler)
    return lines


def distance_from_torch() -> float:
    """The largest difference of a layer in float32 from the same one written in torch."""
    import torch.nn.functional as F

    own = model(params_dtype=torch.float32, bf16=False, pipeline_dtype=torch.float32)
    layer = own.decoder.layers[0]
    x = torch.randn(32, 2, 64)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.2)
        got, _ = layer(hidden_states=x, attention_mask=None)
        qkv, proj = layer.self_attention.linear_qkv, layer.self_attention.linear_proj
        normed = F.layer_norm(x, (64,), qkv.layer_norm_weight, qkv.layer_norm_bias)
        # Rows of query, key and value of each head follow each other.
        parts = F.linear(normed, qkv.weight, qkv.bias).view(32, 2, 4, 48).split(16, -1)
        query, key, value = (part.permute(1, 2, 0, 3) for part in parts)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        y = x + F.linear(mixed.permute(2, 0, 1, 3).reshape(32, 2, 64), proj.weight, proj.bias)
        fc1, fc2 = layer.mlp.linear_fc1, layer.mlp.linear_fc2
        normed = F.layer_norm(y, (64,), fc1.layer_norm_weight, fc1.layer_norm_bias)
        want = y + F.linear(F.gelu(F.linear(normed, fc1.weight, fc1.bias)), fc2.weight, fc2.bias)
    return float((got - want).abs().max() / want.abs().max())


def refusal(**given: Any) -> str:
    try:
        model(**given)
    except Exception as error:  # noqa: BLE001  the class is a result
        return f"{type(error).__name__}: {error}"
    return "accepted"


if __name__ == "__main__":
    main()
