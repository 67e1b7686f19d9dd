"""GPT-2: its sizes, and the names of its weights."""

from __future__ import annotations

from typing import Any

from fp8core.conversion.huggingface.family import MLP, QKV, Family, Rule, activation, refuse
from fp8core.modules.head_split import HeadSizes

_ACTIVATIONS = {
    "gelu_new": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}


def family(get: Any) -> Family:
    """Return the names and sizes of the GPT-2 whose config ``get`` reads."""
    heads, hidden = get("n_head"), get("n_embd")
    parts = tuple(f"{QKV}.{part}" for part in ("query", "key", "value"))
    rules = []
    for kind in ("weight", "bias"):
        rules += [
            Rule((f"{QKV}.layer_norm_{kind}",), (f"ln_1.{kind}",)),
            Rule((f"{MLP}.layer_norm_{kind}",), (f"ln_2.{kind}",)),
            # Conv1D of transformers multiplies by its weight, not by the transposed one.
            Rule(
                tuple(f"{part}_{kind}" for part in parts),
                (f"attn.c_attn.{kind}",),
                (hidden, hidden, hidden),
                transposed=True,
            ),
            *(
                Rule((f"{ours}{kind}",), (f"{theirs}.{kind}",), transposed=True)
                for ours, theirs in (
                    ("self_attention.proj.", "attn.c_proj"),
                    (f"{MLP}.fc1_", "mlp.c_fc"),
                    (f"{MLP}.fc2_", "mlp.c_proj"),
                )
            ),
        ]
    outer = (
        Rule(("embedding.weight",), ("wte.weight",)),
        Rule(("positions.weight",), ("wpe.weight",)),
        Rule(("norm.weight",), ("ln_f.weight",)),
        Rule(("norm.bias",), ("ln_f.bias",)),
        Rule(("head.weight",), ("lm_head.weight",)),
    )
    sizes = HeadSizes(heads, heads, hidden // heads, is_interleaved=False)
    arguments = _arguments(get)
    return Family(
        prefix="transformer.",
        layers="h.",
        layer=tuple(rules),
        outer=outer,
        head_sizes=sizes,
        arguments=arguments,
        fc1_rows=arguments["ffn_hidden_size"],
        ties_head=True,
    )


def _arguments(get: Any) -> dict[str, Any]:
    for name, expected in (
        ("scale_attn_weights", True),
        ("scale_attn_by_inverse_layer_idx", False),
        ("add_cross_attention", False),
    ):
        refuse(name, get(name, expected), expected)
    hidden = get("n_embd")
    return {
        "hidden_size": hidden,
        "ffn_hidden_size": get("n_inner", None) or 4 * hidden,
        "num_attention_heads": get("n_head"),
        "layernorm_epsilon": get("layer_norm_epsilon", 1e-5),
        "hidden_dropout": get("resid_pdrop", 0.1),
        "attention_dropout": get("attn_pdrop", 0.1),
        "self_attn_mask_type": "causal",
        "normalization": "LayerNorm",
        "activation": activation(get, "activation_function", "gelu_new", _ACTIVATIONS),
        "bias": True,
    }
