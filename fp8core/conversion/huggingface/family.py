"""How GPT-2 and Llama name the parameters of TransformerLayers, and how large they are."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from fp8core.chain.packed_attention import HeadSizes
from fp8core.errors import OperandError, UnsupportedError


def reader(config: Any) -> Any:
    """Return a function that reads an entry of ``config``, with a default unless it must exist."""
    if not isinstance(config, Mapping) and not hasattr(config, "__dict__"):
        raise OperandError(
            f"config is {type(config).__name__}; expected the config of a model in transformers, "
            f"or the content of its config.json as a dict."
        )
    values: Mapping[str, Any] = config if isinstance(config, Mapping) else vars(config)

    def get(name: str, *default: Any) -> Any:
        if name in values:
            return values[name]
        value = getattr(config, name, None)  # an alias of transformers, such as n_embd's
        if value is not None:
            return value
        if default:
            return default[0]
        raise OperandError(f"the config of the model has no {name!r}.")

    return get


def refuse(name: str, value: object, expected: object) -> None:
    """Refuse a config whose entry ``name`` is not ``expected``."""
    if value != expected:
        raise UnsupportedError(
            f"a model with {name}={value!r} is not offered as TransformerLayers, which compute as "
            f"with {name}={expected!r}."
        )


class Activation(NamedTuple):
    """The name of an activation here, alone and multiplied with the second half of its input."""

    plain: str
    gated: str


_GELU, _SILU = Activation("gelu", "geglu"), Activation("silu", "swiglu")
_ACTIVATIONS = {
    "gelu_new": _GELU,
    "gelu_pytorch_tanh": _GELU,
    "relu": Activation("relu", "reglu"),
    "silu": _SILU,
    "swish": _SILU,
}


def activation(get: Any, entry: str, default: str) -> Activation:
    """Return the names here of the activation that ``entry`` names, or refuse it."""
    name = get(entry, default)
    if name not in _ACTIVATIONS:
        raise UnsupportedError(
            f"a model with {entry}={name!r} is not offered as TransformerLayers; activations are "
            f"{', '.join(_ACTIVATIONS)}."
        )
    return _ACTIVATIONS[name]


QKV = "self_attention.layernorm_qkv"
MLP = "layernorm_mlp"

Shape: TypeAlias = tuple[int | None, ...]


class Rule(NamedTuple):
    """Tensors that hold the same rows: ``ours`` after each other are ``theirs`` after each other,
    of which each is transposed if ``transposed``. ``sizes`` are the rows of the more numerous."""

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    sizes: tuple[int, ...] = ()
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class Family:
    """A model of one family: the names of its parameters and the kinds of its layers.

    ``prefix`` is what a model with a head puts before the names of the model without one;
    ``layers`` comes before a layer's number. ``arguments`` are those of its TransformerLayers, of
    whose MLP the first linear has ``fc1_rows``. ``ties_head``: whether the head is the embedding's
    weight where the config does not say.
    """

    prefix: str
    layers: str
    layer: tuple[Rule, ...]
    outer: tuple[Rule, ...]
    head_sizes: HeadSizes
    arguments: dict[str, Any]
    fc1_rows: int
    ties_head: bool


def rules_of(family: Family, get: Any) -> list[Rule]:
    """Return the rules of the whole model, each layer's with its number."""
    count = get("num_hidden_layers", None)
    rules = list(family.outer)
    for number in range(get("n_layer") if count is None else count):
        rules += [
            rule._replace(
                ours=tuple(f"layers.{number}.{name}" for name in rule.ours),
                theirs=tuple(f"{family.layers}{number}.{name}" for name in rule.theirs),
            )
            for rule in family.layer
        ]
    return rules


def shapes_of(family: Family, get: Any) -> dict[str, Shape]:
    """Return the shapes of our parameters by their names, those of a layer without its number.

    A size that the config leaves out is None.
    """
    arguments, sizes = family.arguments, family.head_sizes
    hidden, ffn = arguments["hidden_size"], arguments["ffn_hidden_size"]
    vocabulary = get("vocab_size", None)
    shapes: dict[str, Shape] = {
        "embedding.weight": (vocabulary, hidden),
        "head.weight": (vocabulary, hidden),
        "positions.weight": (get("n_positions", None), hidden),
    }
    for norm in ("norm.", f"{QKV}.layer_norm_", f"{MLP}.layer_norm_"):
        shapes |= {f"{norm}weight": (hidden,), f"{norm}bias": (hidden,)}
    for linear, rows, columns in (
        (f"{QKV}.query_", sizes.query_size, hidden),
        (f"{QKV}.key_", sizes.key_size, hidden),
        (f"{QKV}.value_", sizes.key_size, hidden),
        ("self_attention.proj.", hidden, sizes.query_size),
        (f"{MLP}.fc1_", family.fc1_rows, hidden),
        (f"{MLP}.fc2_", hidden, ffn),
    ):
        shapes |= {f"{linear}weight": (rows, columns), f"{linear}bias": (rows,)}
    return shapes


def in_layer(name: str) -> str:
    """Return the name of a parameter in its layer."""
    return re.sub(r"^layers\.\d+\.", "", name)


def gpt2(get: Any) -> Family:
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
    arguments = _gpt2_arguments(get)
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


def _gpt2_arguments(get: Any) -> dict[str, Any]:
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
        "activation": activation(get, "activation_function", "gelu_new").plain,
        "bias": True,
    }


def llama(get: Any) -> Family:
    """Return the names and sizes of the Llama whose config ``get`` reads."""
    sizes, ffn = _llama_sizes(get), get("intermediate_size")
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
        arguments=_llama_arguments(get),
        fc1_rows=2 * ffn,  # its activation is gated
        ties_head=False,
    )


def rotary_arguments_of(get: Any) -> dict[str, Any]:
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
        "dim": _llama_sizes(get).head_dim,
        "rotary_base": rope.get("rope_theta", get("rope_theta", 10000.0)),
    }
    if kind == "linear":
        arguments["seq_len_interpolation_factor"] = rope["factor"]
        # Beyond this times the factor the module would stretch positions further.
        arguments["pretrained_max_position_embeddings"] = get("max_position_embeddings", 2048)
    return arguments


def _llama_arguments(get: Any) -> dict[str, Any]:
    sizes, bias = _llama_sizes(get), get("attention_bias", False)
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
        "activation": activation(get, "hidden_act", "silu").gated,
        "bias": bias,
    }


def _llama_sizes(get: Any) -> HeadSizes:
    heads = get("num_attention_heads")
    groups = get("num_key_value_heads", None) or heads
    head_dim = get("head_dim", None) or get("hidden_size") // heads
    return HeadSizes(heads, groups, head_dim, is_interleaved=False)
