"""Llama: its sizes, its angles, and the names of its weights."""

from __future__ import annotations

from typing import Any

from fp8core.conversion.huggingface.family import MLP, QKV, Family, Rule, activation, refuse
from fp8core.errors import UnsupportedError
from fp8core.modules.head_split import HeadSizes

_ACTIVATIONS = {
    "silu": "swiglu",
    "swish": "swiglu",
    "relu": "reglu",
    "gelu_new": "geglu",
    "gelu_pytorch_tanh": "geglu",
}


def family(get: Any) -> Family:
    """Return the names and sizes of the Llama whose config ``get`` reads."""
    sizes, ffn = _sizes(get), get("intermediate_size")
    kinds = ("weight", "bias") if get("attention_bias", False) else ("weight",)
    rules = [
        Rule((f"{QKV}.layer_norm_weight",), ("input_layernorm.weight",)),
        Rule((f"{MLP}.layer_norm_weight",), ("post_attention_layernorm.weight",)),
    ]
    for kind in kinds:
        rules += [
            *(
                Rule((f"{QKV}.{ours}_{kind}",), (f"self_attn.{theirs}_proj.{kind}",))
                for ours, theirs in (("query", "q"), ("key", "k"), ("value", "v"))
            ),
            Rule((f"self_attention.proj.{kind}",), (f"self_attn.o_proj.{kind}",)),
            Rule(
                (f"{MLP}.fc1_{kind}",),
                (f"mlp.gate_proj.{kind}", f"mlp.up_proj.{kind}"),
                (ffn, ffn),
            ),
            Rule((f"{MLP}.fc2_{kind}",), (f"mlp.down_proj.{kind}",)),
        ]
    outer = (
        Rule(("embedding.weight",), ("embed_tokens.weight",)),
        Rule(("norm.weight",), ("norm.weight",)),
        Rule(("head.weight",), ("lm_head.weight",)),
    )
    return Family(
        prefix="model.",
        layers="layers.",
        layer=tuple(rules),
        outer=outer,
        head_sizes=sizes,
        arguments=_arguments(get),
        fc1_rows=2 * ffn,  # its activation is gated
        ties_head=False,
    )


def rotary_arguments(get: Any) -> dict[str, Any]:
    """Return the arguments of its RotaryPositionEmbedding for the Llama that ``get`` reads."""
    # Up to transformers 4 `rope_theta` and `rope_scaling`, from 5 on `rope_parameters`.
    rope = get("rope_parameters", None) or get("rope_scaling", None) or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "linear"):
        raise UnsupportedError(
            f"rotary_arguments: rope_type={kind!r} is not offered; RotaryPositionEmbedding has "
            f"'default' and 'linear'. Pass other angles as rotary_pos_emb, float32 "
            f"[positions, 1, 1, head size]."
        )
    arguments = {
        "dim": _sizes(get).head_dim,
        "rotary_base": rope.get("rope_theta", get("rope_theta", 10000.0)),
    }
    if kind == "linear":
        arguments["seq_len_interpolation_factor"] = rope["factor"]
        # Beyond this times the factor the module would stretch positions further.
        arguments["pretrained_max_position_embeddings"] = get("max_position_embeddings", 2048)
    return arguments


def _arguments(get: Any) -> dict[str, Any]:
    sizes, bias = _sizes(get), get("attention_bias", False)
    refuse("mlp_bias", get("mlp_bias", False), bias)
    return {
        "hidden_size": get("hidden_size"),
        "ffn_hidden_size": get("intermediate_size"),
        "num_attention_heads": sizes.num_heads,
        "num_gqa_groups": sizes.num_groups,
        "kv_channels": sizes.head_dim,
        "layernorm_epsilon": get("rms_norm_eps", 1e-6),
        "hidden_dropout": 0.0,
        "attention_dropout": get("attention_dropout", 0.0),
        "self_attn_mask_type": "causal",
        "normalization": "RMSNorm",
        "activation": activation(get, "hidden_act", "silu", _ACTIVATIONS),
        "bias": bias,
    }


def _sizes(get: Any) -> HeadSizes:
    heads = get("num_attention_heads")
    groups = get("num_key_value_heads", None) or heads
    head_dim = get("head_dim", None) or get("hidden_size") // heads
    return HeadSizes(heads, groups, head_dim, is_interleaved=False)
